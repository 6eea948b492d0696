"""The losses under jax's transformations, and their gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from losses_cases import close
from losses_reference import random_problem

from tilepolicy.losses import (
    chunked_sparse_cross_entropy,
    online_sparse_cross_entropy,
    sparse_cross_entropy_with_logits,
)

PROBLEM = random_problem(0, (6,), 5, 13, scale=0.5)
LABELS, WEIGHTS = jnp.asarray(PROBLEM.labels), jnp.asarray(PROBLEM.weights)
OPTIONS: dict[str, Any] = {"z_loss": 1e-2, "soft_cap": 5.0}

type Loss = Callable[[jax.Array, jax.Array], jax.Array]


def sparse(hidden: jax.Array, head: jax.Array, labels: jax.Array = LABELS) -> jax.Array:
    """The weighted loss from whole logits."""
    logits = jnp.tanh(hidden @ head / 5.0) * 5.0
    return (sparse_cross_entropy_with_logits(logits, labels, z_loss=1e-2)[0] * WEIGHTS).sum()


def chunked(hidden: jax.Array, head: jax.Array, labels: jax.Array = LABELS) -> jax.Array:
    """The weighted loss in three chunks of tokens."""
    return chunked_sparse_cross_entropy(hidden, head, labels, WEIGHTS, num_tiles=3, **OPTIONS)[0]


def online(hidden: jax.Array, head: jax.Array, labels: jax.Array = LABELS) -> jax.Array:
    """The weighted loss in four tiles of the vocabulary."""
    losses = online_sparse_cross_entropy(hidden, head, labels, vocab_tile=4, **OPTIONS)
    return (losses[0] * WEIGHTS).sum()


every_loss = pytest.mark.parametrize("loss", [sparse, chunked, online])


def inputs(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Hidden states and head."""
    return jnp.asarray(PROBLEM.hidden, dtype), jnp.asarray(PROBLEM.head, dtype)


@every_loss
def test_gradients_agree_with_finite_differences_in_float64(loss: Loss) -> None:
    """Reverse-mode derivatives are the limits of differences, to float64 accuracy."""
    with jax.enable_x64(True):
        check_grads(loss, inputs(jnp.float64), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)


@every_loss
def test_float64_inputs_are_computed_in_float64(loss: Loss) -> None:
    """Nothing is narrowed to float32 on the way."""
    with jax.enable_x64(True):
        value = loss(*inputs(jnp.float64))
        expected = sparse(*inputs(jnp.float64))
        assert value.dtype == jnp.float64
        np.testing.assert_allclose(value, expected, rtol=1e-13)


@every_loss
def test_gradients_scale_with_the_cotangent(loss: Loss) -> None:
    """The gradient of loss · c is c times that of the loss, for hidden states and head alike.

    The tiled loss of MaxText 0.2.0 to 0.2.4 leaves the hidden states' gradient unscaled.
    """
    scaled = jax.jit(jax.grad(lambda inputs, factor: loss(*inputs) * factor))
    once = scaled(inputs(), 1.0)
    for factor in (0.0, -2.5, 1e-6):
        for gradient, reference in zip(scaled(inputs(), factor), once, strict=True):
            np.testing.assert_allclose(gradient, factor * reference, rtol=1e-5, atol=0)
            assert factor == 0.0 or np.abs(gradient).max() > 0


@every_loss
def test_rematerialization_gives_the_same_gradients(loss: Loss) -> None:
    """``jax.checkpoint`` around a loss changes no number."""
    plain = jax.jit(jax.value_and_grad(loss, (0, 1)))(*inputs())
    again = jax.jit(jax.value_and_grad(jax.checkpoint(loss), (0, 1)))(*inputs())
    jax.tree.map(lambda a, b: close(a, b, 1e-6), plain, again)


@every_loss
def test_a_scan_over_microbatches_adds_their_gradients(loss: Loss) -> None:
    """Differentiated from outside, a scan over two batches gives the sum of both gradients."""
    hidden, head = inputs()
    batches = jnp.stack([hidden, 2 * hidden])

    def total(head: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda s, h: (s + loss(h, head), None), jnp.zeros(()), batches)[0]

    separate = [jax.grad(loss, 1)(batch, head) for batch in batches]
    close(jax.jit(jax.grad(total))(head), sum(separate))


@every_loss
def test_a_batch_axis_can_be_mapped(loss: Loss) -> None:
    """``vmap`` over hidden states, labels and heads equals the losses one by one."""
    hidden, head = inputs()
    hiddens, heads = jnp.stack([hidden, -hidden]), jnp.stack([head, 2 * head])
    labels = jnp.stack([LABELS, LABELS[::-1]])
    grad = jax.value_and_grad(loss, (0, 1))
    mapped = jax.jit(jax.vmap(grad))(hiddens, heads, labels)
    for index in range(2):
        single = grad(hiddens[index], heads[index], labels[index])
        jax.tree.map(lambda a, b, i=index: close(a[i], b), mapped, single)


@every_loss
def test_eager_and_compiled_calls_agree(loss: Loss) -> None:
    """Without ``jit`` the same numbers come out."""
    eager = jax.value_and_grad(loss, (0, 1))(*inputs())
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1)))(*inputs())
    jax.tree.map(lambda a, b: close(a, b, 1e-6), eager, compiled)


def test_a_scanned_z_loss_total_has_the_right_gradient() -> None:
    """A z-loss carried through a scan, whose cotangent is a traced zero, costs no exactness."""
    hidden, head = inputs()

    def step(carry: tuple[jax.Array, jax.Array], hidden: jax.Array) -> Any:
        loss, z_term = chunked_sparse_cross_entropy(
            hidden, head_argument[0], LABELS, WEIGHTS, num_tiles=3, **OPTIONS
        )
        return (carry[0] + loss, carry[1] + z_term), None

    head_argument = [head]

    def total(head: jax.Array) -> tuple[jax.Array, jax.Array]:
        head_argument[0] = head
        zero = jnp.zeros(())
        return jax.lax.scan(step, (zero, zero), jnp.stack([hidden, 2 * hidden]))[0]

    gradient, _ = jax.jit(jax.grad(total, has_aux=True))(head)
    close(gradient, sum(jax.grad(sparse, 1)(scale * hidden, head) for scale in (1, 2)))
