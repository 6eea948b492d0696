"""The losses mean what MaxText's mean: sums, masks, z-loss, gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses_cases import close
from losses_reference import random_problem

from tilepolicy.losses import (
    chunked_sparse_cross_entropy_fn,
    sparse_cross_entropy_with_logits,
)

pytestmark = pytest.mark.maxtext


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sparse_equals_maxtext_with_one_hot_targets(z_loss: float, dtype: Any) -> None:
    """Loss, z-loss and gradient of valid labels agree, and the mask is applied alike."""
    from maxtext.utils import max_utils

    problem = random_problem(0, (4, 6), 8, 31)
    labels = jnp.clip(problem.labels, 0, 30)
    logits = jnp.asarray(problem.hidden @ problem.head, dtype).astype(jnp.float32)

    def total(function: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
        def masked(logits: jax.Array) -> Any:
            loss, z_term = function(logits)
            return jnp.sum(loss * problem.weights), jnp.sum(z_term * problem.weights)

        return jax.value_and_grad(masked, has_aux=True)

    def dense(logits: jax.Array) -> Any:
        one_hot = jax.nn.one_hot(labels, 31)
        return max_utils.cross_entropy_with_logits(logits, one_hot, z_loss=z_loss)

    def sparse(logits: jax.Array) -> Any:
        return sparse_cross_entropy_with_logits(logits, labels, z_loss=z_loss)

    jax.tree.map(lambda a, b: close(a, b, 2e-6), total(sparse)(logits), total(dense)(logits))


def test_maxtext_drops_the_cotangent_of_the_z_loss_and_keeps_a_missing_target() -> None:
    """The two differences that the losses' documentation names are still there upstream."""
    from maxtext.utils import max_utils

    logits = jnp.array([[1.0, 2.0, 3.0]])

    def dense(logits: jax.Array, label: int) -> tuple[jax.Array, jax.Array]:
        targets = jax.nn.one_hot(jnp.array([label]), 3)
        return max_utils.cross_entropy_with_logits(logits, targets, z_loss=0.1)

    of_z = jax.grad(lambda x: dense(x, 0)[1].sum())(logits)
    np.testing.assert_array_equal(of_z, np.zeros((1, 3)))
    without_target = jax.grad(lambda x: dense(x, -100)[0].sum())(logits)
    assert float(without_target.sum()) > 0.9


@pytest.mark.parametrize("num_tiles", [2, 8])
def test_chunked_equals_maxtext_vocab_tiling(num_tiles: int) -> None:
    """Sums and gradients of the head's parameters and hidden states agree, scaled by a factor."""
    from flax import nnx
    from maxtext.utils import vocabulary_tiling

    problem = random_problem(1, (4, 8), 8, 31)
    labels = jnp.clip(problem.labels, 0, 30)
    segmentation = jnp.asarray(problem.weights != 0, jnp.int32)
    model = make_model(nnx, jnp.asarray(problem.head))
    config = loss_config(num_tiles)
    data = {"targets": labels, "targets_segmentation": segmentation}
    graph, params = nnx.split(model)

    def upstream(params: Any, hidden: jax.Array) -> Any:
        merged = nnx.merge(graph, params)
        loss, z_loss = vocabulary_tiling.vocab_tiling_nnx_loss(merged, hidden, data, config, True)
        return 0.3 * loss, (loss, z_loss)

    def logits_fn(params: Any, hidden: jax.Array) -> jax.Array:
        merged = nnx.merge(graph, params)
        return merged.logits_from_hidden_states_for_vocab_tiling(hidden, True, "train")

    def ours(params: Any, hidden: jax.Array) -> Any:
        loss, z_loss = chunked_sparse_cross_entropy_fn(
            logits_fn,
            params,
            hidden,
            labels,
            segmentation != 0,
            num_tiles=num_tiles,
            z_loss=config.z_loss_multiplier,
        )
        return 0.3 * loss, (loss, z_loss)

    hidden = jnp.asarray(problem.hidden)
    both = [jax.value_and_grad(f, (0, 1), has_aux=True)(params, hidden) for f in (ours, upstream)]
    jax.tree.map(close, *both)


def make_model(nnx: Any, kernel: jax.Array) -> Any:
    """What MaxText's tiled loss needs of a model: a mesh, and logits of hidden states."""

    class Dense(nnx.Module):  # type: ignore[misc,name-defined]
        def __init__(self, kernel: jax.Array) -> None:
            self.kernel = nnx.Param(kernel)

    class Model(nnx.Module):  # type: ignore[misc,name-defined]
        def __init__(self, kernel: jax.Array) -> None:
            self.logits_dense = Dense(kernel)
            self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))

        def logits_from_hidden_states_for_vocab_tiling(
            self, hidden: jax.Array, deterministic: bool, model_mode: str
        ) -> jax.Array:
            del deterministic, model_mode
            return hidden @ self.logits_dense.kernel[...]

    return Model(kernel)


def loss_config(num_tiles: int) -> SimpleNamespace:
    """The settings that MaxText's tiled loss reads."""
    from maxtext.common.common_types import ShardMode

    return SimpleNamespace(
        enable_dropout=False,
        shard_mode=ShardMode.AUTO,
        debug_sharding=False,
        num_vocab_tiling=num_tiles,
        vocab_tiling_ag_once=False,
        vocab_size=31,
        z_loss_multiplier=1e-3,
    )
