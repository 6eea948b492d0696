"""What Tokamax is answered: layers, passes, precedence, partial tiles, misses, refusals."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fake_op import FakeOp
from moe import (
    SIX,
    array,
    document,
    gmm,
    gmm_arguments,
    load,
    overlays,
    plain_moe,
    step,
    step_arguments,
    tagged_moe,
    tiles_by_site,
    tpu,
)

import tilepolicy
from tilepolicy import CallSites, LayerSizes
from tilepolicy.adapters import tokamax_gmm, tokamax_ruling
from tilepolicy.adapters.tokamax import ragged_dot_op
from tilepolicy.errors import AdapterError, LayerError, PolicyError

# (tile_m, tile_k, tile_n) of the six tiles as v1 names them: forward names in every pass.
V1 = {
    "wi.fwd": {(128, 256, 128)},
    "wi.dlhs": {(256, 128, 128)},
    "wi.drhs": {(128, 256, 256)},
    "wo.fwd": {(512, 128, 256)},
    "wo.dlhs": {(512, 256, 128)},
    "wo.drhs": {(256, 512, 256)},
}
# v2 swaps k and n in dlhs.
V2 = V1 | {"wi.dlhs": {(256, 128, 128)}, "wo.dlhs": {(512, 128, 256)}}
BY_NAME = CallSites(wi=("_up",), wo=("_down",), file="tests/apply/moe.py")


def trace(function: Any, *arguments: Any, device: str = "v6e") -> Any:
    """Trace for a device, anew each time."""
    with tpu(device):
        return jax.jit(functools.partial(function)).trace(*arguments)


class TestLayers:
    @pytest.mark.parametrize("mlp", [1024, 512])
    @pytest.mark.parametrize(
        ("implementation", "expected"), [("mosaic_tpu", V1), ("mosaic_tpu_v2", V2)]
    )
    def test_tags_reach_every_pass(
        self, tmp_path: Path, mlp: int, implementation: str, expected: Any
    ) -> None:
        """Six tiles through scan, checkpoint and grad, also where wi and wo have equal shapes."""
        policy = load(tmp_path, document(SIX))
        with tilepolicy.apply(policy) as session:
            trace(step(tagged_moe, implementation), *step_arguments(mlp=mlp))
        assert tiles_by_site(session) == expected

    def test_declared_sizes_tell_the_layers(self, tmp_path: Path) -> None:
        """Shapes against declared sizes need no tag."""
        sizes = LayerSizes(embed_dim=512, mlp_dim=1024)
        with tilepolicy.apply(load(tmp_path, document(SIX)), sizes=sizes) as session:
            trace(step(plain_moe), *step_arguments())
        assert tiles_by_site(session) == V1
        assert {lookup.evidence for lookup in session.lookups} == {"declared sizes"}

    def test_prefused_and_chunked_sizes(self) -> None:
        """wi may have a doubled MLP and a part of the embedding; wo has neither."""
        from tilepolicy.axes import GmmShape

        sizes = LayerSizes(embed_dim=512, mlp_dim=1024, wi_embed_dim=256, wi_mlp_dim=2048)
        assert sizes.layer_of(GmmShape(64, 256, 2048, 4)) == "wi"
        assert sizes.layer_of(GmmShape(64, 1024, 512, 4)) == "wo"
        assert sizes.layer_of(GmmShape(64, 512, 1024, 4)) is None
        assert LayerSizes(512, 512).layer_of(GmmShape(64, 512, 512, 4)) is None

    @pytest.mark.parametrize("mlp", [1024, 512])
    def test_function_names_tell_the_layers(self, tmp_path: Path, mlp: int) -> None:
        """Known functions on the stack decide at first, jax's traceback and the op later."""
        policy = load(tmp_path, document(SIX))
        with tilepolicy.apply(policy, call_sites=[BY_NAME]) as session:
            trace(step(plain_moe), *step_arguments(mlp=mlp))
        assert tiles_by_site(session) == V1

    @pytest.mark.parametrize(
        "told", [{"sizes": LayerSizes(embed_dim=512, mlp_dim=1024)}, {"call_sites": [BY_NAME]}]
    )
    def test_a_known_call_asks_no_rule(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any
    ) -> None:
        """What was decided once is answered in the next trace without a look at the rules."""
        asked = []

        def asking(*call: Any) -> Any:
            asked.append(call)
            return tokamax_ruling.rule(*call)

        monkeypatch.setattr(tokamax_gmm, "rule", asking)
        scope = tilepolicy.apply(load(tmp_path, document(SIX)), **told)
        with scope:
            trace(step(plain_moe), *step_arguments())
        assert asked
        asked.clear()
        with scope as session:
            trace(step(plain_moe), *step_arguments())
        assert not asked
        assert tiles_by_site(session) == V1

    def test_a_checkpoint_inside_the_outer_function_is_no_evidence(self, tmp_path: Path) -> None:
        """A re-traced wi call is not taken for wo because the wo function wraps it in remat."""

        def outer(x: Any, gate: Any, up: Any, down: Any, sizes: Any, impl: Any) -> Any:
            hidden = jax.checkpoint(lambda x: inner(x, gate, up, sizes, impl))(x)
            return gmm(hidden, down, sizes, impl)

        def inner(x: Any, gate: Any, up: Any, sizes: Any, impl: Any) -> Any:
            return jax.nn.silu(gmm(x, gate, sizes, impl)) * gmm(x, up, sizes, impl)

        sites = CallSites(wi=("inner",), wo=("outer",))
        with tilepolicy.apply(load(tmp_path, document(SIX)), call_sites=[sites]) as session:
            trace(step(outer), *step_arguments(mlp=512))
        assert tiles_by_site(session) == V1

    def test_nothing_to_decide_where_both_tables_agree(self, tmp_path: Path) -> None:
        """Equal kernel tiles for both layers need no layer."""
        tile = {"batch_seq": 256, "embed_dim": 256, "mlp_dim": 256}
        tiles = {(layer, "fwd"): tile for layer in ("wi", "wo")}
        with tilepolicy.apply(load(tmp_path, document(tiles))) as session:
            trace(gmm, *gmm_arguments())
        assert tiles_by_site(session) == {"wi|wo.fwd": {(256, 256, 256)}}

    def test_without_evidence_it_fails_and_says_what_to_do(self, tmp_path: Path) -> None:
        """Never a guess: the error names the call, both tables, the line, and the remedy."""
        with (
            tilepolicy.apply(load(tmp_path, document(SIX))),
            pytest.raises(LayerError) as raised,
        ):
            trace(gmm, *gmm_arguments())
        text = str(raised.value)
        assert (
            "pallas_mosaic_tpu_ragged_dot fwd m=512 k=512 n=1024 groups=4 bfloat16 on v6e: nothing "
            "tells whether it is wi or wo, and their tiles differ (wi: tile_m=128, tile_k=256, "
            "tile_n=128; wo: tile_m=512, tile_n=256, tile_k=128); called from:" in text
        )
        assert "moe.py" in text
        assert "in gmm" in text
        assert 'wrap the call in `with tilepolicy.layer("wi")`' in text

    def test_one_line_for_both_layers_fails_in_the_backward_pass(self, tmp_path: Path) -> None:
        """With equal shapes a loop over tags is told, not guessed; the forward pass works."""

        def loop(x: Any, w: Any, sizes: Any) -> Any:
            for name in ("wi", "wo"):
                with tilepolicy.layer(name):
                    x = gmm(x, w, sizes)
            return x.sum()

        with tilepolicy.apply(load(tmp_path, document(SIX))) as session:
            trace(loop, *gmm_arguments(n=512))
            assert tiles_by_site(session) == {k: V1[k] for k in ("wi.fwd", "wo.fwd")}
            with pytest.raises(LayerError, match="serves both layers") as raised:
                trace(jax.grad(loop, argnums=(0, 1)), *gmm_arguments(n=512))
        assert "implementation=[tilepolicy.adapters.tokamax.ragged_dot_op(layer)]" in str(
            raised.value
        )

    @pytest.mark.parametrize(("kernel", "expected"), [("tokamax_v1", V1), ("tokamax_v2", V2)])
    def test_an_op_that_carries_its_layer_works_in_a_loop(
        self, tmp_path: Path, kernel: Any, expected: Any
    ) -> None:
        """The op's backward calls keep layer and pass, whatever the line."""

        def loop(x: Any, w: Any, sizes: Any) -> Any:
            for name in ("wi", "wo"):
                x = gmm(x, w, sizes, [ragged_dot_op(name, kernel)])
            return x.astype(jnp.float32).sum()

        with tilepolicy.apply(load(tmp_path, document(SIX))) as session:
            trace(jax.grad(loop, argnums=(0, 1)), *gmm_arguments(n=512))
        assert tiles_by_site(session) == expected

    def test_a_loop_with_different_shapes_needs_no_op(self, tmp_path: Path) -> None:
        """The forward sizes are remembered with the line, and tell the layers of one line."""

        def loop(x: Any, weights: Any, sizes: Any) -> Any:
            for name, w in zip(("wi", "wo"), weights, strict=True):
                with tilepolicy.layer(name):
                    x = gmm(x, w, sizes)
            return x.astype(jnp.float32).sum()

        weights = (array(4, 512, 1024), array(4, 1024, 512))
        with tilepolicy.apply(load(tmp_path, document(SIX))) as session:
            trace(jax.grad(loop, argnums=(0, 1)), array(512, 512), weights, array(4, dtype="int32"))
        assert tiles_by_site(session) == V1

    def test_a_helper_is_told_apart_by_its_callers(self, tmp_path: Path) -> None:
        """One tagged line in a helper serves both layers if the calls of the helper differ."""

        def helper(x: Any, w: Any, sizes: Any, name: str) -> Any:
            with tilepolicy.layer(name):
                return gmm(x, w, sizes)

        def model(x: Any, w: Any, sizes: Any) -> Any:
            hidden = helper(x, w, sizes, "wi")
            return helper(hidden, w, sizes, "wo").astype(jnp.float32).sum()

        with tilepolicy.apply(load(tmp_path, document(SIX))) as session:
            trace(jax.grad(model, argnums=(0, 1)), *gmm_arguments(n=512))
        assert tiles_by_site(session) == V1

    def test_a_jitted_function_is_traced_for_each_layer(self, tmp_path: Path) -> None:
        """The tag is part of the trace key: one jitted matmul serves both layers."""
        inner = jax.jit(gmm)

        def model(x: Any, w: Any, sizes: Any) -> Any:
            with tilepolicy.layer("wi"):
                x = inner(x, w, sizes)
            with tilepolicy.layer("wo"):
                return inner(x, w, sizes)

        with tilepolicy.apply(load(tmp_path, document(SIX))) as session:
            trace(model, *gmm_arguments(n=512))
        assert tiles_by_site(session) == {k: V1[k] for k in ("wi.fwd", "wo.fwd")}

    def test_ops_are_not_kept_alive(self, tmp_path: Path) -> None:
        """What is remembered of an op goes with the op."""
        from tilepolicy.adapters import tokamax_layer

        gc.collect()
        with tilepolicy.apply(load(tmp_path, document(SIX))):
            trace(tagged_moe, *_moe_arguments(), None)
        jax.clear_caches()
        gc.collect()
        assert len(tokamax_layer._MEMORY._ops) <= 1


def _moe_arguments() -> tuple[Any, ...]:
    weights, x, sizes = step_arguments()
    return (x, *(array(*w.shape[1:]) for w in weights), sizes)


class TestPrecedence:
    def test_the_shipped_cache_loses_inside_and_is_back_outside(self, tmp_path: Path) -> None:
        """A key that Tokamax ships gets the policy's tile, also after an exception inside."""
        op, key = _shipped_call()
        cached = op.config_cls(**_config(op, key))
        tile = {"batch_seq": 128, "embed_dim": 128, "mlp_dim": 128}
        policy = load(tmp_path, document({(x, "fwd"): tile for x in ("wi", "wo")}))
        with tpu("v7x"):
            assert _asked(op, key) == cached
            with tilepolicy.apply(policy):
                assert _asked(op, key) != cached
                assert _asked(op, key).tile_m == 128
            assert _asked(op, key) == cached
            with pytest.raises(KeyError), tilepolicy.apply(policy):
                raise KeyError
            assert _asked(op, key) == cached

    def test_an_explicit_config_wins(self, tmp_path: Path) -> None:
        """``op.config`` is the only thing that a policy loses to."""
        config = tokamax_v1_config(tile_m=256, tile_k=512, tile_n=256)
        op = ragged_dot_op("wi", config=config)
        with tilepolicy.apply(load(tmp_path, document(SIX))) as session:
            traced = trace(lambda *a: gmm(*a, [op]), *gmm_arguments())
        assert not session.lookups
        assert "256" in str(traced.jaxpr)

    def test_the_policy_wins_over_an_autotuning_result(self, tmp_path: Path) -> None:
        """Also over one that was entered inside of the scope; and it is left intact."""
        other = tokamax_v1_config(tile_m=384, tile_k=384, tile_n=384)
        with tpu():
            op, key = _bound("wi")
            overlay = _EveryCall(other)
            stack = _stack()
            with tilepolicy.apply(load(tmp_path, document(SIX))):
                token = stack_now().set((*stack_now().get(), overlay))
                try:
                    assert _asked(op, key).tile_m == 128
                finally:
                    stack_now().reset(token)
            token = stack.set((overlay,))
            try:
                assert _asked(op, key) == other
            finally:
                stack.reset(token)

    def test_undecided_fields_are_those_of_tokamax(self, tmp_path: Path) -> None:
        """Only batch_seq is decided: the other fields are the heuristic's for that call."""
        policy = load(tmp_path, document({("wi", "fwd"): {"batch_seq": 256}}))
        with tpu("v7x"):
            op, key = _bound("wi")
            alone = _asked(op, key)
            with tilepolicy.apply(policy):
                config = _asked(op, key)
        assert alone.tile_m != 256
        assert config.tile_m == 256
        assert (config.tile_k, config.tile_n) == (alone.tile_k, alone.tile_n)

    def test_undecided_fields_come_from_the_shipped_entry(self, tmp_path: Path) -> None:
        """Where the shipped cache has the call, its entry fills the rest."""
        op, key = _shipped_call()
        cached = _config(op, key)
        tiles = {(layer, "fwd"): {"batch_seq": 128} for layer in ("wi", "wo")}
        with tpu("v7x"), tilepolicy.apply(load(tmp_path, document(tiles))):
            config = _asked(op, key)
        assert config == op.config_cls(**(cached | {"tile_m": 128}))

    def test_an_undecided_call_is_left_to_tokamax(self, tmp_path: Path) -> None:
        """A default is not a decision: the lookup falls through and is reported."""
        policy = load(tmp_path, document({("wo", "drhs"): {"batch_seq": 256}}))
        with tpu(), tilepolicy.apply(policy) as session:
            op, key = _bound("wi")
            config = _asked(op, key)
        assert (config.tile_m, config.tile_k, config.tile_n) == (128, 128, 128)
        (lookup,) = session.misses
        assert lookup.miss.startswith(
            "no rule decides; tokamax's heuristic is used (tile_m=128, tile_k=128, tile_n=128, "
            "input_buffer_count=2, combine_scopes=False); nearest: rule 'wo drhs'"
        )

    def test_on_miss_error_fails_at_the_lookup(self, tmp_path: Path) -> None:
        """``on_miss: error`` stops the trace and names the call."""
        content = document({("wo", "drhs"): {"batch_seq": 256}})
        content["gmm"]["on_miss"] = "error"
        with (
            tpu(),
            tilepolicy.apply(load(tmp_path, content)),
            pytest.raises(PolicyError, match=r"no rule decides pallas_mosaic_tpu_ragged_dot fwd"),
        ):
            op, key = _bound("wi")
            _asked(op, key)

    def test_a_partial_tile_on_v2_is_a_miss(self, tmp_path: Path) -> None:
        """v2 ignores a tile unless all three axes are set: said, not pretended."""
        policy = load(tmp_path, document({("wi", "fwd"): {"batch_seq": 256}}))
        with tpu(), tilepolicy.apply(policy) as session:
            op, key = _bound("wi", "tokamax_v2")
            assert _asked(op, key).tile_m is None
        (lookup,) = session.misses
        assert lookup.miss == (
            "batch_seq=256 is decided alone, and this kernel reads a tile only when all three "
            "axes are set; the kernel calculates its own"
        )

    def test_inner_scopes_win_and_fall_through(self, tmp_path: Path) -> None:
        """Field by field: the inner policy first, then the outer one."""
        outer = load(tmp_path, document(SIX), "outer.yml")
        inner = load(tmp_path, document({("wi", "fwd"): {"batch_seq": 512}}, "inner"), "inner.yml")
        with tpu(), tilepolicy.apply(outer) as outside:
            with tilepolicy.apply(inner) as inside:
                config = _asked(*_bound("wi"))
                assert _asked(*_bound("wo")).tile_m == 512
            assert _asked(*_bound("wi")).tile_m == 128
        assert (config.tile_m, config.tile_k, config.tile_n) == (512, 256, 128)
        assert {r.name for r in outside.rules_never_hit} == {
            "wi dlhs", "wi drhs", "wo dlhs", "wo drhs"
        }  # fmt: skip
        assert inside.rules_never_hit == ()


class TestRefusals:
    def test_an_illegal_tile_fails_at_the_lookup(self, tmp_path: Path) -> None:
        """The message names call, rule, axis and what would be legal."""
        tile = {"batch_seq": 384, "embed_dim": 200, "mlp_dim": 128}
        policy = load(tmp_path, document({("wi", "fwd"): tile}))
        with tpu(), tilepolicy.apply(policy), pytest.raises(AdapterError) as raised:
            _asked(*_bound("wi"))
        assert [p.code for p in raised.value.problems] == ["illegal-tile"] * 2
        assert "by wi fwd: tokamax_v1 needs a batch_seq tile that divides" in str(raised.value)

    def test_a_field_of_the_other_kernel_fails(self, tmp_path: Path) -> None:
        """A v1 field on a v2 call names the kernel and the remedy."""
        tile = {"batch_seq": 128, "embed_dim": 128, "mlp_dim": 128, "input_buffer_count": 3}
        policy = load(tmp_path, document({("wi", "fwd"): tile}))
        with (
            tpu(),
            tilepolicy.apply(policy),
            pytest.raises(AdapterError, match="tokamax_v2 has no field input_buffer_count") as got,
        ):
            _asked(*_bound("wi", "tokamax_v2"))
        assert "restrict the rule with `backend`; this call's is tokamax_v2" in str(got.value)

    def test_kernel_fields_are_passed_on(self, tmp_path: Path) -> None:
        """``input_buffer_count`` and ``combine_scopes`` reach a v1 config."""
        tile = {"batch_seq": 128, "input_buffer_count": 3, "combine_scopes": True}
        with tpu(), tilepolicy.apply(load(tmp_path, document({("wi", "fwd"): tile}))):
            config = _asked(*_bound("wi"))
        assert (config.tile_m, config.input_buffer_count, config.combine_scopes) == (128, 3, True)

    def test_not_implemented_never_escapes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tokamax would take it as 'try the next implementation' and run XLA."""
        from tilepolicy.resolve.tiles import TileResolver

        def fail(*_: Any, **__: Any) -> Any:
            raise NotImplementedError("not here")

        monkeypatch.setattr(TileResolver, "tile", fail)
        with (
            tilepolicy.apply(load(tmp_path, document(SIX))),
            pytest.raises(AdapterError, match="is not implemented: not here"),
            tpu(),
        ):
            jax.jit(lambda *a: gmm(*a, ["mosaic_tpu", "xla"])).trace(*gmm_arguments())

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"tile_mm": 128}, "has no field tile_mm"),
            ({"tile_m": True}, "turned tile_m=True into 1"),
            ({"tile_m": "512"}, "turned tile_m='512' into 512"),
            ({"tile_m": 0}, "refuses"),
        ],
    )
    def test_a_config_says_exactly_what_was_asked(self, fields: Any, message: str) -> None:
        """Tokamax's own conversions are refused."""
        from tilepolicy.adapters.tokamax_config import build_config

        op, _ = _bound("wi")
        with pytest.raises(AdapterError, match=message):
            build_config(op, None, fields, "here")

    def test_a_cache_that_is_ignored_is_refused(self, tmp_path: Path) -> None:
        """Tokamax would skip the policy together with its cache."""
        from tokamax._src import config as private_config  # Public from 0.0.16 on.

        with (
            private_config.ignore_autotuning_cache(True),
            pytest.raises(AdapterError, match="tokamax_ignore_autotuning_cache is set"),
            tilepolicy.apply(load(tmp_path, document(SIX))),
        ):
            pass

    def test_nothing_is_left_after_exit(self, tmp_path: Path) -> None:
        """The overlay variable is Tokamax's own again, and empty."""
        before = overlays()
        with tilepolicy.apply(load(tmp_path, document(SIX))):
            assert overlays()[0] == "_Door"
        assert overlays() == before == ("ContextVar",)

    def test_a_replaced_stack_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another patch of the same variable is named instead of being overwritten."""
        from tokamax._src.ops import op

        monkeypatch.setattr(op, "AUTOTUNING_CACHE_OVERLAY_STACK", object())
        with (
            pytest.raises(AdapterError, match="overlay stack is a object, not a ContextVar"),
            tilepolicy.apply(load(tmp_path, document(SIX))),
        ):
            pass


class TestOtherOps:
    def test_an_op_is_answered_by_the_name_of_its_class(self, tmp_path: Path) -> None:
        """Rules under ``ops`` reach any other op, by its arguments; the rest is Tokamax's."""
        content = document({}) | {
            "gmm": {},
            "ops": [
                {
                    "op": "fake_op",
                    "rules": [
                        {
                            "name": "wide",
                            "when": {"arg.x.dim1": ">=256", "arg.x.dtype": "bfloat16"},
                            "config": {"block": 64, "fused": True},
                        }
                    ],
                }
            ],
        }
        op = FakeOp()
        with tpu(), tilepolicy.apply(load(tmp_path, content)) as session:
            wide = op.bind(array(8, 256)).default_config
            narrow = op.bind(array(8, 128)).default_config
        assert (wide.block, wide.fused, wide.stages) == (64, True, 3)
        assert (narrow.block, narrow.fused, narrow.stages) == (16, False, 3)
        assert [lookup.site for lookup in session.lookups] == ["fake_op", "fake_op"]
        assert "nearest: rule 'wide'" in next(iter(session.misses)).miss

    def test_an_unknown_field_of_an_op_is_refused(self, tmp_path: Path) -> None:
        """Fields are checked against the op's config class."""
        rules = [{"name": "wrong", "config": {"blocks": 64}}]
        content = document({}) | {"gmm": {}, "ops": [{"op": "fake_op", "rules": rules}]}
        with (
            tpu(),
            tilepolicy.apply(load(tmp_path, content)),
            pytest.raises(AdapterError, match="FakeOp's config has no field blocks"),
        ):
            FakeOp().bind(array(8, 256)).default_config  # noqa: B018 - a property that looks up


def tokamax_v1_config(**fields: int) -> Any:
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import Config

    return Config(**fields)


def _bound(layer: str, kernel: Any = "tokamax_v1") -> tuple[Any, Any]:
    op = ragged_dot_op(layer, kernel)
    x, w, sizes = gmm_arguments()
    return op, op.bind(x, w, group_sizes=sizes)


def _asked(op: Any, bound: Any) -> Any:
    del op
    return bound.default_config


def _shipped_call() -> tuple[Any, Any]:
    """A call that Tokamax ships a tuned forward config for, on TPU7x."""
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import PallasMosaicTpuRaggedDot

    op = PallasMosaicTpuRaggedDot()
    for key, data in op.get_autotuning_cache("TPU7x").items():
        contracted = key["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]
        if data and tuple(map(tuple, contracted)) == ((1,), (1,)):
            return op, op.bind(**dict(key))
    raise AssertionError("tokamax ships no forward entry for TPU7x")


def _config(op: Any, bound: Any) -> dict[str, Any]:
    import dataclasses

    cached = op.get_autotuning_cache("TPU7x")[bound.autotuning_cache_key].fastest_config
    return {f.name: getattr(cached, f.name) for f in dataclasses.fields(cached)}


def _stack() -> Any:
    from tokamax._src.ops import op

    return op.AUTOTUNING_CACHE_OVERLAY_STACK


stack_now = _stack


class _EveryCall:
    """An overlay that answers every call."""

    def __init__(self, config: Any) -> None:
        self.fastest_config = config

    def get(self, *_: Any) -> Any:
        return self

    def items(self) -> list[Any]:
        return [self.fastest_config]
