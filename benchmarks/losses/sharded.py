"""Losses over eight chips of v6e: gathers and reductions of the head, temporaries of each chip."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.losses.measure import MIB, step
from tilepolicy.losses import (
    LossSharding,
    chunked_sparse_cross_entropy,
    online_sparse_cross_entropy,
)

__all__ = ["CASES", "Case", "collectives_and_memory"]

VOCAB, CHIPS, TILES = 131072, 8, 8


@dataclass(frozen=True)
class Case:
    """One loss over ``fsdp=8`` with V = 131072, 8 chunks or tiles of 2048, bfloat16.

    Attributes:
        loss: ``chunked`` or ``online``.
        depth: D.
        length: tokens on each chip.
        ag_once: gather the head once.
    """

    loss: str
    depth: int
    length: int
    ag_once: bool


CASES = [
    Case("chunked", 1024, 128, True),
    Case("chunked", 2048, 2048, True),
    Case("chunked", 2048, 2048, False),
    Case("online", 2048, 2048, True),
]


def collectives_and_memory(case: Case) -> tuple[int, int, int, float]:
    """Gathers and reductions of the head in a step, those inside of loops, temporary MiB."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4").devices
    mesh = Mesh(np.array(devices), ("fsdp",))
    sharding = LossSharding(mesh, P("fsdp"), P("fsdp", None))

    def loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        if case.loss == "online":
            return online_sparse_cross_entropy(
                hidden, head, labels, vocab_tile=2048, sharding=sharding, ag_once=case.ag_once
            )[0].mean()
        weights = jnp.full(labels.shape, 1 / labels.size)
        return chunked_sparse_cross_entropy(
            hidden,
            head,
            labels,
            weights,
            num_tiles=TILES,
            sharding=sharding,
            ag_once=case.ag_once,
        )[0]

    place = NamedSharding(mesh, P("fsdp"))
    shapes = [
        jax.ShapeDtypeStruct((CHIPS, case.length, case.depth), jnp.bfloat16, sharding=place),
        jax.ShapeDtypeStruct((case.depth, VOCAB), jnp.bfloat16, sharding=place),
        jax.ShapeDtypeStruct((CHIPS, case.length), jnp.int32, sharding=place),
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(step(loss)).trace(*shapes).lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()
    text = compiled.as_text()
    gathers = rf"\[{case.depth},{VOCAB}\]\S* all-gather(?:-start)?\("
    # One fusion sums over the chips and keeps a share: the whole gradient, or one tile of it.
    reductions = r" fusion\([^\n]*calls=%all-reduce-scatter"
    counts = [len(re.findall(pattern, text)) for pattern in (gathers, reductions)]
    entry = text[text.index("\nENTRY ") :]
    outside = sum(len(re.findall(pattern, entry)) for pattern in (gathers, reductions))
    temp = compiled.memory_analysis().temp_size_in_bytes / MIB
    return counts[0], counts[1], sum(counts) - outside, temp
