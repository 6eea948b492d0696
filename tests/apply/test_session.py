"""What a session tells: report, JSON, operative policy, strict checks, log lines."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax
import pytest
from moe import SIX, document, load, step, step_arguments, tagged_moe, tiles_by_site, tpu

import tilepolicy
from tilepolicy.adapters.tokamax import ragged_dot_op
from tilepolicy.errors import ScopeError, StrictError
from tilepolicy.resolution import Origin
from tilepolicy.session import Note, Session


def ask(layer: str, m: int = 512, device: str = "v6e", kernel: Any = "tokamax_v1") -> Any:
    """One forward lookup."""
    op = ragged_dot_op(layer, kernel)
    x = jax.ShapeDtypeStruct((m, 512), "bfloat16")
    w = jax.ShapeDtypeStruct((4, 512, 512), "bfloat16")
    with tpu(device):
        return op.bind(x, w, group_sizes=jax.ShapeDtypeStruct((4,), "int32")).default_config


def apply(policy: Any, **arguments: Any) -> Any:
    return tilepolicy.apply(policy, adapters=["tokamax"], **arguments)


class TestReport:
    def test_the_text(self, tmp_path: Path) -> None:
        """One line per distinct lookup with tile, count and origin; misses; rules never hit."""
        policy = load(tmp_path, document({k: SIX[k] for k in (("wi", "fwd"), ("wi", "drhs"))}))
        with apply(policy) as session:
            ask("wi")
            ask("wi")
            ask("wo")
        session.note(Note("losses", "loss", "sparse", "V is small", Origin("auto")))
        text = session.report().replace(str(tmp_path), "DIR")
        from importlib.metadata import version

        assert text.splitlines() == [
            f"policy six ({policy.digest[:12]}) from DIR/policy.yml",
            f"adapters: tokamax (tokamax {version('tokamax')})",
            "lookups: 3, of which 1 found no rule",
            "  wi.fwd  batch_seq=512 embed_dim=512 mlp_dim=512 groups=4 bfloat16 v6e tokamax_v1  "
            "batch_seq=128 embed_dim=256 mlp_dim=128  x2  rule wi fwd (DIR/policy.yml:5) [the op]",
            "misses:",
            "  wo.fwd batch_seq=512 embed_dim=512 mlp_dim=512 groups=4 bfloat16 v6e tokamax_v1: no "
            "rule decides; tokamax's heuristic is used (tile_m=128, tile_k=128, tile_n=128, "
            "input_buffer_count=2, combine_scopes=False); nearest: rule 'wi fwd' "
            "(DIR/policy.yml:5): layer wo is not wi (x1)",
            "notes:",
            "  losses: loss = sparse (V is small) (x1)",
            "rules never hit:",
            "  wi drhs (DIR/policy.yml:13)",
        ]

    def test_the_json(self, tmp_path: Path) -> None:
        """The same as data."""
        with apply(load(tmp_path, document(SIX))) as session:
            ask("wi")
        data = json.loads(session.report("json"))
        (lookup,) = data["lookups"]
        assert (lookup["layer"], lookup["pass"], lookup["count"]) == ("wi", "fwd", 1)
        assert lookup["tile"]["batch_seq"]["value"] == 128
        assert lookup["tile"]["batch_seq"]["origin"]["name"] == "wi fwd"
        assert lookup["config"]["tile_k"] == 256
        assert [rule["name"] for rule in data["rules_never_hit"]] == [
            "wi dlhs", "wi drhs", "wo fwd", "wo dlhs", "wo drhs"
        ]  # fmt: skip
        assert data["adapters"] == ["tokamax"]

    def test_rules_that_need_a_config_are_named(self, tmp_path: Path) -> None:
        """Without a config a rule on a config key is undecidable, not unmatched."""
        rules = [
            {"name": "deepseek", "when": {"model_name": "deepseek3*"}, "tile": {"batch_seq": 256}}
        ]
        content = {"version": 1, "name": "p", "gmm": {"rules": rules}}
        with apply(load(tmp_path, content)) as session:
            ask("wi")
        assert "deepseek (needs model_name)" in session.report()

    def test_rules_for_another_device_are_not_never_hit(self, tmp_path: Path) -> None:
        """A policy for several devices and kernels is not blamed for those that are not here."""
        here = {"device": "v6e", "layer": "wi", "pass": "fwd"}
        rules = [
            {"name": "here", "when": here, "tile": {"batch_seq": 256}},
            {"name": "other device", "when": here | {"device": "v5p"}, "tile": {"batch_seq": 256}},
            {
                "name": "other kernel",
                "when": here | {"backend": "tokamax_v2"},
                "tile": {"embed_dim": 256},
            },
            {"name": "unused", "when": here | {"batch_seq": 64}, "tile": {"mlp_dim": 256}},
        ]
        with apply(load(tmp_path, {"version": 1, "name": "p", "gmm": {"rules": rules}})) as session:
            ask("wi")
        assert [rule.name for rule in session.rules_never_hit] == ["unused"]


class TestLog:
    def test_one_line_per_distinct_event(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Hits and notes at INFO, misses at WARNING, each once."""
        caplog.set_level(logging.INFO, "tilepolicy")
        policy = load(tmp_path, document({("wi", "fwd"): SIX["wi", "fwd"]}))
        with apply(policy) as session:
            for _ in range(3):
                ask("wi")
                ask("wo")
                session.note(Note("losses", "loss", "online", "why"))
        lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "tilepolicy"]
        assert [level for level, _ in lines] == ["INFO", "WARNING", "INFO"]
        assert lines[0][1] == (
            "tokamax wi.fwd: tile_m=128, tile_k=256, tile_n=128, input_buffer_count=2, "
            "combine_scopes=False from wi fwd"
        )
        assert lines[2][1] == "losses: loss = online (why)"


class TestStrict:
    def test_a_clean_scope_passes(self, tmp_path: Path) -> None:
        """Every rule hit, no miss."""
        with apply(load(tmp_path, document(SIX)), strict=True), tpu():
            jax.jit(step(tagged_moe)).trace(*step_arguments())

    def test_misses_and_unused_rules_fail_on_exit(self, tmp_path: Path) -> None:
        """All of them in one error, with the place of the rule."""
        policy = load(tmp_path, document({k: SIX[k] for k in (("wi", "fwd"), ("wi", "drhs"))}))
        with pytest.raises(StrictError) as raised, apply(policy, strict=True):
            ask("wi")
            ask("wo")
        assert [p.code for p in raised.value.problems] == ["miss", "never-hit"]
        assert "wo.fwd fell through 1 times: no rule decides" in str(raised.value)
        assert "the rule 'wi drhs' was never hit" in str(raised.value)
        assert str(raised.value.problems[1].place).endswith("policy.yml:13")

    def test_an_exception_inside_is_not_replaced(self, tmp_path: Path) -> None:
        """The strict checks are for a regular exit."""
        with pytest.raises(KeyError), apply(load(tmp_path, document(SIX)), strict=True):
            raise KeyError

    def test_a_tile_that_differs_from_the_resolution(self, tmp_path: Path) -> None:
        """The call's rows are not those that the config predicts, so another rule matched."""
        config = {
            "model_name": "default", "num_experts": 4, "num_experts_per_tok": 1,
            "base_emb_dim": 512, "base_moe_mlp_dim": 512, "base_mlp_dim": 512,
            "per_device_batch_size": 1, "max_target_length": 512,
            "use_tokamax_gmm": True, "megablox": False, "sparse_matmul": True,
            "dtype": "bfloat16",
        }  # fmt: skip
        common = {"layer": "wi", "pass": "fwd"}
        rules = [
            {"name": "short", "when": common | {"batch_seq": "<=256"}, "tile": {"batch_seq": 128}},
            {"name": "long", "when": common, "tile": {"batch_seq": 256}},
        ]
        policy = load(tmp_path, {"version": 1, "name": "p", "gmm": {"rules": rules}})
        made = apply(policy, config=config, device="v6e", strict=True)
        assert made.inputs.resolution is not None
        assert made.inputs.resolution.settings["wi_tile_fwd_batch_seq"].value == 256
        with pytest.raises(StrictError) as raised, made:
            ask("wi", m=256)
            ask("wi", m=512)
        (problem,) = raised.value.problems
        assert problem.message == (
            "wi.fwd runs with batch_seq = 128, but wi_tile_fwd_batch_seq was resolved to 256"
        )


class TestOperativePolicy:
    def test_its_replay_gives_the_same_tiles(self, tmp_path: Path) -> None:
        """Also where the original left fields to Tokamax, and where both layers had one tile."""
        tiles = dict(SIX) | {("wi", "dlhs"): {"batch_seq": 256}}
        with apply(load(tmp_path, document(tiles))) as first, tpu("v7x"):
            jax.jit(step(tagged_moe)).trace(*step_arguments())
        path = tmp_path / "operative.yml"
        path.write_text(first.to_policy())
        with apply(tilepolicy.load(path), strict=True) as replay, tpu("v7x"):
            jax.jit(step(tagged_moe)).trace(*step_arguments())
        assert tiles_by_site(replay) == tiles_by_site(first)
        assert {lookup.config for lookup in replay.lookups} == {
            lookup.config for lookup in first.lookups
        }

    def test_a_tile_of_both_layers_is_written_for_both(self, tmp_path: Path) -> None:
        """Where nothing told the layer, the operative policy has a rule for each."""
        tile = {"batch_seq": 256, "embed_dim": 256, "mlp_dim": 256}
        policy = load(tmp_path, document({(x, "fwd"): tile for x in ("wi", "wo")}))
        from moe import gmm, gmm_arguments

        with apply(policy) as session, tpu():
            jax.jit(gmm).trace(*gmm_arguments())
        path = tmp_path / "operative.yml"
        path.write_text(session.to_policy())
        operative = tilepolicy.load(path)
        assert [(rule.when.items[4][0]) for rule in operative.gmm.rules] == ["embed_dim"] * 2
        jax.clear_caches()
        with apply(operative) as replay, tpu():
            jax.jit(gmm).trace(*gmm_arguments())
        assert tiles_by_site(replay) == tiles_by_site(session)

    def test_an_empty_session_has_none(self) -> None:
        """Nothing was decided: there is nothing to write."""
        with pytest.raises(ScopeError, match="no lookup of this session was decided"):
            Session().to_policy()
