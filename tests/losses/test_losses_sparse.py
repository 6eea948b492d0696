"""The loss of given logits."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from losses_cases import close, examples
from losses_reference import solve_logits

from tilepolicy.losses import sparse_cross_entropy_with_logits
from tilepolicy.losses.arithmetic import LogSumExp

LOGITS = ["normal", "huge", "masked columns", "constant"]


def make_logits(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Logits of one kind; masked columns are -inf, never all of a row."""
    logits = rng.normal(size=shape)
    if kind == "huge":
        logits = rng.choice([-1e4, 1e4], shape) + logits
    if kind == "constant":
        logits = np.full(shape, 3.0)
    if kind == "masked columns":
        logits = np.where(rng.random(shape) < 0.4, -np.inf, logits)
        logits[..., 0] = 1.0
    return logits.astype(np.float32)


@functools.partial(jax.jit, static_argnums=4)
def losses_and_gradient(
    logits: jax.Array, labels: jax.Array, of_loss: jax.Array, of_z: jax.Array, z_loss: float
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Both outputs, and the cotangent of the logits for cotangents of each token."""
    outputs, transpose = jax.vjp(
        lambda x: sparse_cross_entropy_with_logits(x, labels, z_loss=z_loss), logits
    )
    return outputs, transpose((of_loss, of_z))[0]


@examples(max_examples=30)
@given(
    seed=st.integers(0, 2**16),
    tokens=st.sampled_from([(1,), (2, 3)]),
    vocab=st.sampled_from([1, 2, 31]),
    kind=st.sampled_from(LOGITS),
    z_loss=st.sampled_from([0.0, 1e-4]),
    of_z=st.sampled_from([0.0, -2.0]),
)
def test_losses_and_gradients_are_those_of_the_definition(
    seed: int, tokens: tuple[int, ...], vocab: int, kind: str, z_loss: float, of_z: float
) -> None:
    """Both outputs and the gradient through both match float64, for any logits and labels."""
    rng = np.random.default_rng(seed)
    logits = make_logits(kind, rng, (*tokens, vocab))
    labels = rng.integers(-2, vocab + 2, tokens).astype(np.int32)
    of_loss = rng.normal(size=tokens).astype(np.float32)
    expected = solve_logits(logits, labels, z_loss, of_loss, of_z * of_loss)

    outputs, gradient = losses_and_gradient(logits, labels, of_loss, of_z * of_loss, z_loss)
    finite = np.isfinite(expected[0])
    assert (np.isposinf(outputs[0]) == ~finite).all()
    close(np.where(finite, outputs[0], 0), np.where(finite, expected[0], 0))
    close(outputs[1], expected[1])
    close(gradient, expected[2])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_arithmetic_is_in_float32_whatever_the_logits(dtype: jnp.dtype) -> None:
    """Losses are float32 and as exact as the rounded logits allow; gradients have their dtype."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(64, 300)), dtype)
    labels = rng.integers(0, 300, 64).astype(np.int32)
    exact = solve_logits(np.asarray(logits, np.float64), labels, 0.0, np.ones(64), np.zeros(64))
    loss, _ = sparse_cross_entropy_with_logits(logits, labels)
    assert loss.dtype == jnp.float32
    close(loss, exact[0], 1e-6)
    gradient = jax.grad(lambda x: sparse_cross_entropy_with_logits(x, labels)[0].sum())(logits)
    assert gradient.dtype == dtype
    close(gradient, exact[2], float(jnp.finfo(dtype).eps))


def test_a_row_without_any_finite_logit_has_no_nan_gradient() -> None:
    """A row of -inf gives an infinite loss and a gradient of finite numbers."""
    logits = jnp.full((1, 4), -jnp.inf)
    labels = jnp.array([-100])
    loss, gradient = jax.value_and_grad(
        lambda x: sparse_cross_entropy_with_logits(x, labels)[0].sum()
    )(logits)
    assert float(loss) == 0.0
    assert np.isfinite(gradient).all()


def test_a_label_out_of_range_leaves_the_z_loss_only() -> None:
    """Padding labels have no target; the loss is its z-loss term, and so is the gradient."""
    logits = jnp.array([[1.0, 2.0, 3.0]] * 3)
    labels = jnp.array([-100, 3, 2])
    loss, z_term = sparse_cross_entropy_with_logits(logits, labels, z_loss=0.1)
    np.testing.assert_array_equal(loss[:2], z_term[:2])
    assert float(loss[2]) > float(z_term[2])
    without = jax.grad(lambda x: sparse_cross_entropy_with_logits(x, labels)[0].sum())(logits)
    np.testing.assert_array_equal(without[:2], np.zeros((2, 3)))


def test_the_backward_pass_keeps_one_array_of_the_logits_size() -> None:
    """The logits, or their exponentials in place of them; no one-hot."""
    logits, labels = jnp.zeros((8, 128)), jnp.zeros(8, jnp.int32)
    _, transpose = jax.vjp(lambda x: sparse_cross_entropy_with_logits(x, labels), logits)
    large = [leaf for leaf in jax.tree.leaves(transpose) if leaf.size >= logits.size]
    assert len(large) == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_cpu_computes_each_exponential_once_and_a_tpu_keeps_the_logits(dtype: type) -> None:
    """Float32 exponentials of bfloat16 logits would be twice as large, and are not kept."""
    size = (64, 4096)

    def gradient(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return jax.grad(lambda x: sparse_cross_entropy_with_logits(x, labels)[0].sum())(logits)

    arguments = jax.ShapeDtypeStruct(size, dtype), jax.ShapeDtypeStruct(size[:1], jnp.int32)
    traced = jax.jit(gradient).trace(*arguments)
    compiled = traced.lower(lowering_platforms=("cpu",)).compile()
    exponentials = re.findall(r"= f32\[64,4096\]\S* exponential\(", compiled.as_text())
    assert len(exponentials) == (1 if dtype == jnp.float32 else 2)
    assert compiled.memory_analysis().temp_size_in_bytes < 1.01 * 4 * math.prod(size)
    for_tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert len(re.findall(r"stablehlo.exponential .*64x4096", for_tpu)) == 2


def test_on_a_cpu_the_exponentials_take_the_place_of_the_logits() -> None:
    """Projection, loss and both gradients hold one array of the logits' size, not two."""
    tokens, depth, vocab = 64, 8, 4096

    def loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        return sparse_cross_entropy_with_logits(hidden @ head, labels)[0].mean()

    shapes = [((tokens, depth), jnp.float32), ((depth, vocab), jnp.float32), ((tokens,), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*arguments).lower()
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.01 * 4 * tokens * vocab


@pytest.mark.parametrize("kind", LOGITS)
def test_the_softmax_of_what_is_kept_is_the_softmax(kind: str) -> None:
    """Whatever the platform keeps."""
    logits = jnp.asarray(make_logits(kind, np.random.default_rng(0), (5, 33)))
    logits = logits.at[4].set(-jnp.inf)
    lse = LogSumExp.of(logits)
    np.testing.assert_allclose(lse.softmax_of_kept(lse.kept(logits)), lse.softmax(logits), 3e-6)
