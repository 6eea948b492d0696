"""The loss over chunks of tokens."""

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

from tilepolicy.losses import chunked_sparse_cross_entropy, chunked_sparse_cross_entropy_fn
from tilepolicy.losses.layout import merge_tokens, split_factors, split_tokens, write_chunk


def chunked(problem: Problem, num_tiles: int) -> Any:
    """The loss as a function of hidden states, head and bias."""

    def loss_sums(hidden: jax.Array, head: jax.Array, bias: jax.Array | None) -> Sums:
        return chunked_sparse_cross_entropy(
            hidden,
            head,
            problem.labels,
            problem.weights,
            num_tiles=num_tiles,
            z_loss=problem.z_loss,
            bias=bias,
            tied=problem.tied,
            soft_cap=problem.soft_cap,
        )

    return loss_sums


@examples(max_examples=20)
@given(problem=problems, data=st.data(), of_z=st.sampled_from([0.0, 0.0, -3.0]))
def test_sums_and_gradients_are_those_of_the_definition(
    problem: Problem, data: st.DataObject, of_z: float
) -> None:
    """Any shape, head, mask and divisor of the tokens gives the float64 reference's answer."""
    total = math.prod(problem.labels.shape)
    num_tiles = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    assert_solves(chunked(problem, num_tiles), problem, of_z=of_z)


@pytest.mark.parametrize(("of_loss", "of_z"), [(0.0, 1.0), (1.0, 1.0), (2.0, -0.5)])
def test_the_z_loss_sum_has_its_own_gradient(of_loss: float, of_z: float) -> None:
    """A cotangent of the second output is not dropped, as MaxText's losses drop it."""
    problem = random_problem(4, (12,), 8, 31, z_loss=1e-2)
    assert_solves(chunked(problem, 3), problem, of_loss=of_loss, of_z=of_z)


def test_a_logged_z_loss_costs_no_second_pass() -> None:
    """With z-loss as an auxiliary output the program has the three matmuls of the loss alone."""
    problem = random_problem(5, (12,), 8, 31, z_loss=1e-2)

    def loss(inputs: tuple[Any, ...]) -> Sums:
        return chunked(problem, 3)(*inputs)

    assert matmuls(jax.value_and_grad(loss, has_aux=True), arrays(problem)) == 3


def test_logits_are_evaluated_once() -> None:
    """Value and gradient take three matmuls; the value alone takes one."""
    problem = random_problem(6, (12,), 8, 31)

    def loss(inputs: tuple[Any, ...]) -> jax.Array:
        return chunked(problem, 3)(*inputs)[0]

    assert matmuls(jax.value_and_grad(loss), arrays(problem)) == 3
    assert matmuls(loss, arrays(problem)) == 1


@pytest.mark.parametrize("argnum", [0, 1])
def test_a_gradient_that_nobody_asks_for_is_not_formed(argnum: int) -> None:
    """A frozen head, or frozen hidden states, saves its matmul."""
    problem = random_problem(7, (12,), 8, 31)
    inputs = arrays(problem)

    def loss(*inputs: Any) -> jax.Array:
        return chunked(problem, 3)(*inputs)[0]

    assert matmuls(jax.grad(loss, argnum), *inputs) == 2
    close(jax.grad(loss, argnum)(*inputs), of_inputs(solve(problem))[argnum])


@pytest.mark.parametrize("tied", [False, True])
def test_head_gradients_are_summed_by_slabs_on_a_cpu(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over chunks are right where the vocabulary has several slabs and a smaller last one."""
    monkeypatch.setattr("tilepolicy.losses.head._SLAB_ENTRIES", 8 * 9)
    problem = random_problem(15, (4, 6), 8, 31, tied=tied, bias=True)
    inputs = arrays(problem)
    assert matmuls(jax.grad(lambda *inputs: chunked(problem, 4)(*inputs)[0], 1), *inputs) == 3
    assert_solves(chunked(problem, 4), problem)


def test_weights_have_their_gradient() -> None:
    """The cotangent of a float weight is the loss of its token; an integer mask has none."""
    problem = random_problem(8, (3, 4), 8, 31, z_loss=1e-2)
    hidden, head, _ = arrays(problem)

    def combined(weights: jax.Array) -> jax.Array:
        loss, z_term = chunked_sparse_cross_entropy(
            hidden, head, problem.labels, weights, num_tiles=4, z_loss=problem.z_loss
        )
        return 2 * loss + 3 * z_term

    answer = solve(problem)
    close(
        jax.grad(combined)(jnp.asarray(problem.weights)), 2 * answer.loss + 3 * answer.z_term, 1e-5
    )
    mask = (problem.weights != 0).astype(np.int32)
    close(combined(mask), combined(mask.astype(np.float32)))


def test_without_weights_every_token_counts_once() -> None:
    """None stands for weights of one."""
    problem = random_problem(9, (8,), 4, 16)
    problem.weights[:] = 1
    hidden, head, _ = arrays(problem)
    loss, _ = chunked_sparse_cross_entropy(hidden, head, problem.labels, num_tiles=2)
    close(loss, solve(problem).loss_sum)


def test_an_all_masked_batch_gives_zeros() -> None:
    """Weights of zero give a loss and gradients of exactly zero, even at infinite losses."""
    problem = random_problem(10, (8,), 4, 16)
    problem.weights[:] = 0
    problem.bias = np.where(np.arange(16) < 8, -np.inf, 0).astype(np.float32)
    problem.labels[:] = 3
    sums, grads = gradients(chunked(problem, 4), arrays(problem), 1.0, 0.0)
    assert float(sums[0]) == 0.0
    for gradient in grads:
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_accumulates_in_float32(tied: bool) -> None:
    """The head's gradient over many chunks is as exact as one bfloat16 rounding."""
    problem = random_problem(11, (512,), 16, 64, tied=tied)
    rounded = Problem(
        **{
            **vars(problem),
            "hidden": round_to_bfloat16(problem.hidden),
            "head": round_to_bfloat16(problem.head),
        }
    )
    answer = solve(rounded)
    hidden, head, _ = arrays(problem, jnp.bfloat16)
    sums, grads = gradients(lambda h, w: chunked(problem, 64)(h, w, None), (hidden, head), 1.0, 0.0)
    close(sums[0], answer.loss_sum, 1e-6)
    assert [gradient.dtype for gradient in grads] == [jnp.bfloat16] * 2
    # One rounding of the logits' cotangent and one of the result, each of 2^-9.
    close(grads[0], answer.of_hidden, 2**-8)
    close(grads[1], answer.of_head, 2**-8)


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers, as float32."""
    return np.asarray(jnp.asarray(values, jnp.bfloat16), np.float32)


def test_a_float32_head_under_bfloat16_hidden_states_gets_float32_gradients() -> None:
    """Matmuls run in the hidden states' dtype; the head's gradient is not rounded to it."""
    problem = random_problem(12, (12,), 8, 31)
    hidden, head, _ = arrays(problem)
    _, grads = gradients(
        lambda h, w: chunked(problem, 3)(h, w, None), (hidden.astype(jnp.bfloat16), head), 1.0, 0.0
    )
    assert [gradient.dtype for gradient in grads] == [jnp.bfloat16, jnp.float32]
    assert not (grads[1] == grads[1].astype(jnp.bfloat16)).all()


def test_logits_can_be_rounded_as_maxtext_rounds_them() -> None:
    """``logits_dtype`` rounds the logits before the float32 arithmetic."""
    problem = random_problem(13, (12,), 8, 31)
    hidden, head, _ = arrays(problem, jnp.bfloat16)
    rounded = jnp.asarray(hidden @ head, jnp.float32)
    expected = jax.nn.logsumexp(rounded, -1).sum()
    loss, _ = chunked_sparse_cross_entropy(
        hidden,
        head,
        jnp.full(12, -1),
        num_tiles=3,
        z_loss=0.0,
        logits_dtype=jnp.bfloat16,
    )
    assert float(loss) == 0.0
    labels = jnp.zeros(12, jnp.int32)
    loss, _ = chunked_sparse_cross_entropy(
        hidden, head, labels, num_tiles=3, logits_dtype=jnp.bfloat16
    )
    close(loss, expected - rounded[:, 0].sum(), 1e-6)


def function_sums(problem: Problem, num_tiles: int, **options: Any) -> Any:
    """The loss with an arbitrary head: a norm, two parameters, a mask as constant."""

    def logits_fn(params: dict[str, jax.Array], hidden: jax.Array, mask: jax.Array) -> jax.Array:
        scaled = hidden * params["scale"]
        return scaled @ params["head"] + mask

    def loss_sums(hidden: jax.Array, params: dict[str, jax.Array], mask: jax.Array) -> Sums:
        return chunked_sparse_cross_entropy_fn(
            logits_fn,
            params,
            hidden,
            problem.labels,
            problem.weights,
            num_tiles=num_tiles,
            z_loss=problem.z_loss,
            constants=mask,
            **options,
        )

    return loss_sums


@pytest.mark.parametrize("of_z", [0.0, 2.0])
def test_any_function_can_be_the_head(of_z: float) -> None:
    """Gradients of a pytree of parameters are those of automatic differentiation."""
    problem = random_problem(14, (2, 6), 8, 31, z_loss=1e-2)
    hidden, head, _ = arrays(problem)
    params = {"head": head, "scale": jnp.linspace(0.5, 2.0, 8)}
    mask = jnp.where(jnp.arange(31) == 5, -1e9, 0.0)
    problem.labels[problem.labels == 5] = 6

    def through_one_matrix(
        hidden: jax.Array, params: dict[str, jax.Array], mask: jax.Array
    ) -> Sums:
        return chunked_sparse_cross_entropy(
            hidden * params["scale"],
            params["head"],
            problem.labels,
            problem.weights,
            num_tiles=1,
            z_loss=problem.z_loss,
            bias=mask,
        )

    inputs = (hidden, params, mask)
    sums, grads = gradients(function_sums(problem, 4), inputs, 1.5, of_z)
    expected_sums, expected = gradients(through_one_matrix, inputs, 1.5, of_z)
    close(sums[0], expected_sums[0])
    close(grads[0], expected[0])
    jax.tree.map(close, grads[1], expected[1])
    # The mask is a constant: its gradient is zero, although one matrix would have one.
    np.testing.assert_array_equal(grads[2], np.zeros(31))


def test_a_function_gets_chunks_with_the_axes_of_hidden() -> None:
    """A chunk takes a share of every sequence, with batch and length as separate axes."""
    seen = []

    def logits_fn(params: jax.Array, hidden: jax.Array) -> jax.Array:
        seen.append(hidden.shape)
        return hidden @ params

    chunked_sparse_cross_entropy_fn(
        logits_fn, jnp.ones((3, 5)), jnp.ones((4, 8, 3)), jnp.zeros((4, 8), jnp.int32), num_tiles=16
    )
    assert set(seen) == {(2, 1, 3)}


def test_on_a_cpu_one_array_of_a_chunks_logits_is_held() -> None:
    """Beside it there is the head's gradient, nothing else of their size."""
    tokens, depth, vocab, num_tiles = 128, 8, 8192, 4

    def loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        return chunked_sparse_cross_entropy(hidden, head, labels, num_tiles=num_tiles)[0]

    shapes = [((tokens, depth), jnp.float32), ((depth, vocab), jnp.float32), ((tokens,), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*arguments).lower()
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.01 * 4 * vocab * (tokens // num_tiles + depth)


@given(
    tokens=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    data=st.data(),
)
@examples(max_examples=20)
def test_cutting_loses_no_token(tokens: tuple[int, ...], data: st.DataObject) -> None:
    """Cut and merged, or cut and written back chunk by chunk, every token is where it was."""
    total = math.prod(tokens)
    num_tiles = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    factors = split_factors(tokens, num_tiles)
    values = np.arange(total * 2).reshape(*tokens, 2)

    @jax.jit
    def cut_and_joined(values: jax.Array) -> tuple[jax.Array, ...]:
        chunks = split_tokens(values, factors)
        written = jax.lax.fori_loop(
            0,
            num_tiles,
            lambda index, written: write_chunk(written, chunks[index], index, factors),
            jnp.zeros_like(values),
        )
        return chunks, merge_tokens(chunks, factors), written

    chunks, merged, written = cut_and_joined(values)
    assert chunks.shape[0] == num_tiles
    np.testing.assert_array_equal(merged, values)
    np.testing.assert_array_equal(written, values)


def test_a_chunk_takes_tokens_from_every_contiguous_share() -> None:
    """Two devices with half of the tokens each both own half of every chunk."""
    chunks = split_tokens(jnp.arange(16), split_factors((16,), 4))
    assert [sum(int(token) < 8 for token in chunk) for chunk in chunks] == [2, 2, 2, 2]
