"""What a program carries: tiles read back from lowered modules, and from the TPU compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokamax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from moe import (
    SIX,
    TOPOLOGIES,
    document,
    gmm_arguments,
    load,
    step,
    step_arguments,
    tagged_moe,
    tpu,
)

import tilepolicy
from tilepolicy.adapters.tokamax import ragged_dot_op
from tilepolicy.axes import GmmShape
from tilepolicy.errors import ScopeError, VerifyError
from tilepolicy.tuning.readback import read_kernels

# The six tiles by forward axes (m, k, n), as the compiler's metadata is read.
FORWARD = {
    ("wi", "fwd"): (128, 256, 128),
    ("wi", "dlhs"): (256, 128, 128),
    ("wi", "drhs"): (128, 256, 256),
    ("wo", "fwd"): (512, 128, 256),
    ("wo", "dlhs"): (512, 256, 128),
    ("wo", "drhs"): (256, 512, 256),
}


def apply(policy: Any, **arguments: Any) -> Any:
    return tilepolicy.apply(policy, adapters=["tokamax"], **arguments)


def lower(function: Any, *arguments: Any) -> Any:
    """Lower for a TPU that is not there."""
    with tpu():
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))


def compile_step(device: str, implementation: str, mlp: int) -> Any:
    """The two-layer block's gradient, compiled by the TPU compiler on this machine."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[device])
    mesh = Mesh(np.array(topology.devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())

    def make(*shape: int, dtype: Any = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    arguments = step_arguments(mlp=mlp, make=make)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), tokamax.config.cross_compile(True):
        traced = jax.jit(step(tagged_moe, implementation)).trace(*arguments)
        return traced.lower(lowering_platforms=("tpu",))


class TestLowered:
    @pytest.mark.parametrize("implementation", ["mosaic_tpu", "mosaic_tpu_v2"])
    def test_every_kernel_is_confirmed(self, tmp_path: Path, implementation: str) -> None:
        """The lowered module carries exactly the tiles that were decided."""
        with apply(load(tmp_path, document(SIX))) as session:
            lowered = lower(step(tagged_moe, implementation), *step_arguments())
        found = session.verify(lowered, complete=True)
        assert {(k.pass_, k.tile) for k in found.confirmed}
        assert len({(k.pass_, k.sizes) for k in found.confirmed}) == 6
        assert (found.unseen, found.left, found.absent) == ((), (), ())

    def test_another_scopes_program_is_refused(self, tmp_path: Path) -> None:
        """The message names the kernel, what it carries, and what was decided."""
        other = dict(SIX) | {("wi", "fwd"): {"batch_seq": 256, "embed_dim": 128, "mlp_dim": 128}}
        with apply(load(tmp_path, document(other), "other.yml")):
            program = lower(step(tagged_moe), *step_arguments())
        with apply(load(tmp_path, document(SIX))) as session:
            lower(step(tagged_moe), *step_arguments())
        with pytest.raises(VerifyError) as raised:
            session.verify(program)
        assert (
            "the program has tokamax_v1 fwd m=1024 k=512 n=1024 tile (256, 128, 128), decided was "
            "wi.fwd: (128, 256, 128)" in str(raised.value)
        )

    def test_what_was_not_decided_is_told_apart(self, tmp_path: Path) -> None:
        """Kernels left to Tokamax, kernels never looked up, and lookups without a kernel."""
        config = _explicit()
        with apply(load(tmp_path, document({("wi", "fwd"): SIX["wi", "fwd"]}))) as session:
            program = lower(lambda *a: _call("wo", *a), *gmm_arguments())
            lower(lambda *a: _call("wi", *a), *gmm_arguments(k=1024))
            explicit = lower(lambda *a: _call("wi", *a, config=config), *gmm_arguments(n=512))
        found = session.verify(program)
        assert len(found.left) == 1
        assert [lookup.site for lookup in found.absent] == ["wi.fwd"]
        assert len(session.verify(explicit).unseen) == 1
        with pytest.raises(VerifyError, match="was not looked up here"):
            session.verify(explicit, complete=True)

    def test_only_programs_are_taken(self, tmp_path: Path) -> None:
        """A function has not been traced yet."""
        with apply(load(tmp_path, document(SIX))) as session:
            pass
        with pytest.raises(ScopeError, match="verify takes a lowered or compiled program"):
            session.verify(lambda: None)

    def test_an_op_that_carries_its_layer_says_so_in_the_module(self, tmp_path: Path) -> None:
        """Tokamax writes the op into the module; ours can be read back from it."""
        with apply(load(tmp_path, document(SIX))) as session:
            lowered = lower(lambda *a: _call("wi", *a), *gmm_arguments())
        from tokamax._src import hlo_utils

        (spec,) = hlo_utils.get_opspecs(lowered, include_xla_kernels=False)
        assert spec.op.tilepolicy_layer == "wi"
        assert len(session.verify(lowered, complete=True).confirmed) == 1


def _call(layer: str, x: Any, w: Any, sizes: Any, **fields: Any) -> Any:
    op = ragged_dot_op(layer, **fields)
    return tokamax.ragged_dot(x, w, sizes, implementation=[op])


def _explicit() -> Any:
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import Config

    return Config(tile_m=256, tile_k=256, tile_n=256)


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("mlp", [1024, 512])
@pytest.mark.parametrize("device", ["v6e", "v5p", "v7x"])
def test_the_compiler_got_the_six_tiles(tmp_path: Path, device: str, mlp: int) -> None:
    """scan, checkpoint and grad of a two-layer MoE block, with embed ≠ mlp and embed = mlp.

    The optimized HLO has eleven kernels: forward (gate, up, down) and its re-computation without
    the last, and both gradients of each: six different tiles, each on its own pass and layer.
    """
    with apply(load(tmp_path, document(SIX))) as session:
        compiled = compile_step(device, "mosaic_tpu", mlp).compile()
    kernels = [
        (k.pass_, tuple(k.tile), k.shape)
        for k in read_kernels(compiled.as_text())
        if k.kernel == "v1"
    ]
    wi, wo = GmmShape(1024, 512, mlp, 4), GmmShape(1024, mlp, 512, 4)
    expected = {
        (pass_, tile, wi if layer == "wi" else wo) for (layer, pass_), tile in FORWARD.items()
    }
    assert set(kernels) == expected
    of_wi = [k for k in kernels if k[:2] == ("drhs", FORWARD["wi", "drhs"])]
    assert len(of_wi) == 2
    assert len(session.verify(compiled, complete=True).confirmed) == len(kernels)


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("mlp", [1024, 512])
@pytest.mark.parametrize("device", ["v6e", "v5p", "v7x"])
def test_the_compiler_got_the_six_tiles_of_v2(tmp_path: Path, device: str, mlp: int) -> None:
    """v2's metadata has tile and sizes as called; dlhs is a forward call on turned weights."""
    with apply(load(tmp_path, document(SIX))) as session:
        compiled = compile_step(device, "mosaic_tpu_v2", mlp).compile()
    found = session.verify(compiled, complete=True)
    called = {(k.pass_, k.sizes, k.tile) for k in found.confirmed}
    wi, wo = (1024, 512, mlp), (1024, mlp, 512)
    assert called == {
        (None, wi, (128, 256, 128)),  # wi fwd
        (None, wo, (256, 128, 128)),  # wi dlhs: contracts mlp
        ("drhs", wi, (128, 256, 256)),  # wi
        (None, wo, (512, 128, 256)),  # wo fwd
        (None, wi, (512, 128, 256)),  # wo dlhs: contracts embed
        ("drhs", wo, (256, 512, 256)),  # wo
    }


@pytest.mark.compiled
@pytest.mark.slow
def test_a_compiled_program_of_another_scope_is_refused(tmp_path: Path) -> None:
    """The compiler's own metadata is compared, not what Tokamax wrote into the module."""
    tile = {"batch_seq": 256, "embed_dim": 256, "mlp_dim": 256}
    one = load(tmp_path, document({("wi", "fwd"): tile}), "one.yml")
    two = load(tmp_path, document({("wi", "fwd"): tile | {"batch_seq": 128}}), "two.yml")
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2")
    mesh = Mesh(np.array(topology.devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in gmm_arguments()]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), tokamax.config.cross_compile(True):
        function = jax.jit(lambda *a: _call("wi", *a))
        with apply(one):
            program = function.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
        with apply(two) as session:
            function.trace(*arguments)
    with pytest.raises(VerifyError, match=r"tile \(256, 256, 256\), decided was wi.fwd: \(128"):
        session.verify(program)
