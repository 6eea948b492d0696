"""Record and replay: what a scope recorded as missed is tuned, and then found."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
import tokamax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from small_moe import run, write_rules

import tilepolicy
from tilepolicy.tuning.missed import read_missed

pytestmark = [pytest.mark.compiled, pytest.mark.slow]

ROWS, EMBED, MLP, GROUPS = 1024, 1024, 512, 4


def lowered() -> jax.stages.Lowered:
    """A grouped matmul of wi with its gradients, for a v6e that is not there."""
    device = topologies.get_topology_desc("v6e:2x2", platform="tpu").devices[0]
    mesh = Mesh([device], ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        with tilepolicy.layer("wi"):
            out = tokamax.ragged_dot(x, w, sizes, implementation="mosaic_tpu")
        return (out.astype("float32") ** 2).sum()

    arguments = (array(ROWS, EMBED), array(GROUPS, EMBED, MLP), array(GROUPS, dtype="int32"))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), tokamax.config.cross_compile(True):
        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments)


def test_what_missed_is_tuned_and_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three passes miss under a policy about another layer; under the tuned one none does."""
    other = write_rules(tmp_path, "layer: wo => batch_seq: 128, embed_dim: 128, mlp_dim: 128")
    recorded, tuned = tmp_path / "missed.yml", tmp_path / "tuned.yml"
    with tilepolicy.apply(other, device="v6e") as session:
        lowered()
    session.write_missed(recorded)
    sites = read_missed(recorded)
    assert {(site.layer, site.pass_) for site in sites} == {
        ("wi", "fwd"),
        ("wi", "dlhs"),
        ("wi", "drhs"),
    }
    code, out, err = run(
        capsys,
        ["tune", "--missed", recorded, "-d", "v6e", "-o", tuned, "--at-a-time", 1, "--jobs", 2],
    )
    assert code == 0, out + err
    with tilepolicy.apply(tuned, device="v6e") as session:
        program = lowered()
    assert session.misses == {}
    assert {lookup.site for lookup in session.lookups} == {"wi.fwd", "wi.dlhs", "wi.drhs"}
    session.verify(program)
