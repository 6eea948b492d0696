"""The loss over tiles of the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from losses_cases import (
    Sums,
    arrays,
    assert_solves,
    close,
    examples,
    gradients,
    matmuls,
    of_inputs,
    problems,
)
from losses_reference import Problem, random_problem, solve

from tilepolicy.losses import online_sparse_cross_entropy


def online(problem: Problem, vocab_tile: int, token_tile: int | None = None) -> Any:
    """The weighted sums as a function of hidden states, head and bias."""

    def loss_sums(hidden: jax.Array, head: jax.Array, bias: jax.Array | None) -> Sums:
        losses = online_sparse_cross_entropy(
            hidden,
            head,
            problem.labels,
            vocab_tile=vocab_tile,
            token_tile=token_tile,
            z_loss=problem.z_loss,
            bias=bias,
            tied=problem.tied,
            soft_cap=problem.soft_cap,
        )
        return (losses[0] * problem.weights).sum(), (losses[1] * problem.weights).sum()

    return loss_sums


@examples(max_examples=20)
@given(problem=problems, data=st.data(), of_z=st.sampled_from([0.0, -3.0]))
def test_losses_and_gradients_are_those_of_the_definition(
    problem: Problem, data: st.DataObject, of_z: float
) -> None:
    """Any shape, head and tile, dividing the vocabulary or not, gives the reference's answer."""
    total = math.prod(problem.labels.shape)
    vocab_tile = data.draw(st.integers(1, 70))
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    token_tile = data.draw(st.sampled_from([None, *divisors]))
    assert_solves(online(problem, vocab_tile, token_tile), problem, of_z=of_z)


@pytest.mark.parametrize("label", [0, 7, 8, 15, 16, 30])
def test_a_label_on_a_tile_border_is_found_once(label: int) -> None:
    """First and last entries of full tiles and of the smaller last one are targets."""
    problem = random_problem(1, (4,), 8, 31)
    problem.labels[:] = label
    assert_solves(online(problem, 8), problem)


@pytest.mark.parametrize("large", [1e4, -1e4])
def test_extreme_logits_lose_no_precision(large: float) -> None:
    """A common offset of every logit changes neither loss nor gradient."""
    problem = random_problem(2, (6,), 8, 31, bias=True)
    problem.bias = np.round(problem.bias) + np.float32(large)
    problem.hidden[:] = 0
    assert_solves(online(problem, 8), problem, rtol=1e-5)


def test_masked_columns_take_no_part() -> None:
    """A bias of -inf removes vocabulary entries, whole tiles of them too, without a NaN."""
    problem = random_problem(3, (6,), 8, 31, z_loss=1e-3)
    problem.bias = np.where(np.arange(31) < 17, -np.inf, 0).astype(np.float32)
    problem.labels = 17 + np.abs(problem.labels) % 14
    expected = solve(problem)
    sums, grads = gradients(online(problem, 8), arrays(problem), 1.0, 0.0)
    close(sums[0], expected.loss_sum)
    for gradient, reference in zip(grads, of_inputs(expected), strict=True):
        close(gradient, np.nan_to_num(reference))


def test_every_token_has_its_own_cotangents() -> None:
    """Both outputs can be weighted token by token."""
    problem = random_problem(4, (3, 4), 8, 31, z_loss=1e-2)
    rng = np.random.default_rng(0)
    of_loss = rng.normal(size=(3, 4)).astype(np.float32)
    problem.weights = of_loss
    assert_solves(online(problem, 8), problem, of_loss=2.0, of_z=-0.7)


def test_logits_are_evaluated_twice_and_never_whole() -> None:
    """Four matmuls, none of which gives more than a tile of logits."""
    problem = random_problem(5, (12,), 8, 64)

    def loss(inputs: tuple[Any, ...]) -> jax.Array:
        return online(problem, 16)(*inputs)[0]

    assert matmuls(jax.value_and_grad(loss), arrays(problem)) == 4
    text = str(jax.make_jaxpr(jax.value_and_grad(loss))(arrays(problem)))
    assert "f32[12,64]" not in text
    assert "f32[12,16]" in text


@pytest.mark.parametrize("argnum", [0, 1])
def test_a_gradient_that_nobody_asks_for_is_not_formed(argnum: int) -> None:
    """A frozen head, or frozen hidden states, saves its matmul."""
    problem = random_problem(6, (12,), 8, 64)
    inputs = arrays(problem)

    def loss(*inputs: Any) -> jax.Array:
        return online(problem, 16)(*inputs)[0]

    assert matmuls(jax.grad(loss, argnum), *inputs) == 3
    close(jax.grad(loss, argnum)(*inputs), of_inputs(solve(problem))[argnum])


@pytest.mark.parametrize("token_tile", [None, 4])
def test_bfloat16_accumulates_in_float32(token_tile: int | None) -> None:
    """Gradients over many tiles are as exact as one bfloat16 rounding of each."""
    problem = random_problem(7, (32,), 16, 256)
    inputs = arrays(problem, jnp.bfloat16)
    problem.hidden, problem.head = (np.asarray(x, np.float32) for x in inputs[:2])
    answer = solve(problem)
    sums, grads = gradients(online(problem, 16, token_tile), inputs, 1.0, 0.0)
    close(sums[0], answer.loss_sum, 1e-6)
    assert [gradient.dtype for gradient in grads[:2]] == [jnp.bfloat16] * 2
    close(grads[0], answer.of_hidden, 2**-8)
    close(grads[1], answer.of_head, 2**-8)


def test_a_cotangent_of_zero_gives_zeros() -> None:
    """Differentiating the z-loss alone, with a coefficient of zero, gives zero gradients."""
    problem = random_problem(8, (6,), 8, 31)
    for gradient in gradients(online(problem, 8), arrays(problem), 0.0, 1.0)[1][:2]:
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))
