"""The policy's tiles compute the same: kernels in interpret mode against ``jax.lax.ragged_dot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from moe import document, gmm, load, tiles_by_site, tpu

import tilepolicy
from tilepolicy.adapters.tokamax import ragged_dot_op

# Larger than 128 in places, so that a tile covers several groups, and different in each pass.
TILES = {
    ("wi", "fwd"): {"batch_seq": 128, "embed_dim": 256, "mlp_dim": 128},
    ("wi", "dlhs"): {"batch_seq": 256, "embed_dim": 128, "mlp_dim": 256},
    ("wi", "drhs"): {"batch_seq": 128, "embed_dim": 128, "mlp_dim": 256},
}
# Relative to the largest value: f32 products on the CPU differ by the order of sums only; bf16
# operands give results that are rounded to 8 bits.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}
GROUPS = {"ragged": (200, 0, 56), "empty at both ends": (0, 256, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", GROUPS)
def test_value_and_gradients_agree(tmp_path: Path, dtype: str, groups: str) -> None:
    """Value and both gradients, with ragged group sizes and empty groups."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (256, 256), dtype)
    w = jax.random.normal(keys[1], (3, 256, 256), dtype)
    weight = jax.random.normal(keys[2], (256, 256), jnp.float32)
    sizes = jnp.array(GROUPS[groups], jnp.int32)

    def loss(product: Any, x: Any, w: Any) -> tuple[Any, Any]:
        out = product(x, w)
        return (out.astype(jnp.float32) * weight).sum(), out

    def with_policy(x: Any, w: Any) -> Any:
        return gmm(x, w, sizes, [ragged_dot_op("wi", interpret=True)])

    def reference(x: Any, w: Any) -> Any:
        return jax.lax.ragged_dot(x, w, sizes)

    def run(product: Any) -> Any:
        step = jax.value_and_grad(lambda x, w: loss(product, x, w), argnums=(0, 1), has_aux=True)
        (_, out), gradients = jax.jit(step)(x, w)
        return (out, *gradients)

    with tilepolicy.apply(load(tmp_path, document(TILES)), adapters=["tokamax"]) as session:
        with tpu():
            ours = run(with_policy)
        theirs = run(reference)
    assert set(tiles_by_site(session)) == {"wi.fwd", "wi.dlhs", "wi.drhs"}
    assert not session.misses
    for got, wanted in zip(ours, theirs, strict=True):
        assert got.dtype == wanted.dtype == dtype
        exact = np.asarray(wanted, np.float32)
        error = np.abs(np.asarray(got, np.float32) - exact).max() / np.abs(exact).max()
        assert error <= TOLERANCE[dtype]


def test_v2_does_not_run_in_interpret_mode() -> None:
    """v2 has no ``interpret`` field, and jax's TPU interpreter refuses its operands in SMEM.

    Seen with jax 0.10.2, 0.11.0, 0.11.2 and 0.12.0. Past that check jax 0.12.0 stops at the
    reshaped reference that the kernel copies from (``ReshapeTransform``). So v2's numbers cannot
    be compared without a TPU; its tiles are read back from the compiled program. When this fails,
    the interpreter has become able to: then run the comparison above for v2, too.
    """
    op = ragged_dot_op("wi", "tokamax_v2", config=_v2_config())
    x, w, sizes = jnp.ones((256, 256)), jnp.ones((3, 256, 256)), jnp.array([200, 0, 56])
    assert not hasattr(op, "interpret")
    with (
        tpu(),
        pltpu.force_tpu_interpret_mode(),
        pytest.raises(NotImplementedError, match="Unsupported memory space: smem"),
    ):
        jax.jit(lambda x, w: gmm(x, w, sizes, [op]))(x, w)


def _v2_config() -> Any:
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_v2 import Config

    return Config(tile_m=128, tile_k=128, tile_n=128)
