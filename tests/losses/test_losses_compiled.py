"""What the TPU compiler makes of the losses: memory, and collectives on eight chips of v6e."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tilepolicy.losses import (
    LossSharding,
    chunked_sparse_cross_entropy,
    online_sparse_cross_entropy,
)

pytestmark = [pytest.mark.compiled, pytest.mark.slow]
MIB = 2**20


def compile_step(
    loss: Callable[..., jax.Array], mesh: Mesh, sharding: LossSharding, sizes: tuple[int, ...]
) -> Any:
    """Value and gradients for ``(*tokens, V, D)`` in bfloat16, compiled for the mesh's chips."""
    *tokens, vocab, depth = sizes

    def shape(dims: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    hidden = shape((*tokens, depth), jnp.bfloat16, sharding.tokens)
    head = shape((depth, vocab), jnp.bfloat16, sharding.head)
    labels = shape(tuple(tokens), jnp.int32, sharding.tokens)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(hidden, head, labels)
        return traced.lower(lowering_platforms=("tpu",)).compile()


def one_chip(loss: Callable[..., jax.Array], *sizes: int) -> Any:
    """Memory of a loss on one chip of v6e."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    return compile_step(loss, mesh, LossSharding(mesh, P(), P()), sizes).memory_analysis()


def eight_chips(ag_once: bool, loss: str) -> tuple[float, str]:
    """Temporary MiB and program text of a loss over fsdp=8, 8 chunks, V = 131072, D = 2048."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4").devices
    mesh = Mesh(np.array(devices), ("fsdp",))
    sharding = LossSharding(mesh, P("fsdp"), P("fsdp", None))

    def chunked(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        options = {"num_tiles": 8, "sharding": sharding, "ag_once": ag_once}
        return chunked_sparse_cross_entropy(hidden, head, labels, **options)[0] / labels.size

    def online(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        options = {"vocab_tile": 2048, "sharding": sharding, "ag_once": ag_once}
        return online_sparse_cross_entropy(hidden, head, labels, **options)[0].mean()

    step = chunked if loss == "chunked" else online
    compiled = compile_step(step, mesh, sharding, (8, 2048, 131072, 2048))
    return compiled.memory_analysis().temp_size_in_bytes / MIB, compiled.as_text()


def in_entry(text: str, pattern: str) -> int:
    """How often a pattern stands in the entry computation, outside of every loop."""
    entry = text[text.index("\nENTRY ") :]
    return len(re.findall(pattern, entry))


GATHER = r"\[2048,131072\]\S* all-gather(?:-start)?\("
REDUCE_SCATTER = r"\[256,131072\]\S* fusion\([^\n]*calls=%all-reduce-scatter"


def test_the_online_loss_holds_one_gradient_of_the_hidden_states() -> None:
    """N = 4096, V = 262144, D = 2048: 32 MiB of float32 gradient, and under 1 MiB besides."""

    def loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        return online_sparse_cross_entropy(hidden, head, labels, vocab_tile=1024)[0].mean()

    memory = one_chip(loss, 4096, 262144, 2048)
    assert 32 < memory.temp_size_in_bytes / MIB <= 33
    # Hidden states' and head's gradients in bfloat16, and the scalar loss.
    assert memory.output_size_in_bytes <= (4096 + 262144) * 2048 * 2 + 4096


def test_the_chunked_loss_holds_one_chunk_and_the_gradient_of_the_head() -> None:
    """N = 8192, V = 262144, D = 2048, 64 chunks: 128 MiB of logits, 2 GiB of head gradient.

    Besides them less than 2 MiB: a chunk's hidden states on their way through the compiler's
    prefetches. A cotangent other than one adds the 32 MiB of the hidden states' gradient, once.
    """

    def loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        return chunked_sparse_cross_entropy(hidden, head, labels, num_tiles=64)[0]

    logits, of_head = 128 * 262144 * 4, 2048 * 262144 * 4
    rest = one_chip(loss, 8192, 262144, 2048).temp_size_in_bytes - logits - of_head
    assert 0 <= rest < 2 * MIB
    scaled = one_chip(lambda *args: 0.3 * loss(*args), 8192, 262144, 2048)
    assert scaled.temp_size_in_bytes - logits - of_head < 34 * MIB


def test_chunks_gather_the_head_once_and_reduce_its_gradient_once() -> None:
    """Eight chunks over fsdp=8: one all-gather and one reduce-scatter, both outside of the loop."""
    temp, text = eight_chips(True, "chunked")
    assert len(re.findall(GATHER, text)) == in_entry(text, GATHER) == 1
    assert len(re.findall(REDUCE_SCATTER, text)) == in_entry(text, REDUCE_SCATTER) == 1
    assert not re.findall(r"all-to-all(?:-start)?\(", text)
    # 512 MiB of gathered head, 1 GiB of float32 gradient, 128 MiB of logits of one chunk.
    assert temp < 512 + 1024 + 128 + 16


def test_without_ag_once_every_chunk_gathers_the_head() -> None:
    """The gather and the reduction stand inside the loop, and no whole gradient is summed."""
    _, text = eight_chips(False, "chunked")
    assert len(re.findall(GATHER, text)) == 1
    assert in_entry(text, GATHER) == in_entry(text, REDUCE_SCATTER) == 0


def test_the_online_loss_holds_the_gathered_head_only() -> None:
    """Over fsdp=8: one gather, kept for the backward pass, and the hidden states' gradient."""
    temp, text = eight_chips(True, "online")
    assert len(re.findall(GATHER, text)) == in_entry(text, GATHER) == 1
    # 512 MiB of gathered head, 16 MiB of float32 gradient of the device's 2048 tokens.
    assert temp < 512 + 16 + 16
