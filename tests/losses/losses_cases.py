"""Strategies and comparisons shared by the tests of the losses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from losses_reference import Answer, Problem, random_problem, solve

SHAPES = [(1,), (6,), (12,), (2, 6), (3, 4), (2, 3, 4)]
VOCABS = [1, 2, 7, 16, 31, 64]

problems = st.builds(
    random_problem,
    seed=st.integers(0, 2**16),
    tokens=st.sampled_from(SHAPES),
    depth=st.sampled_from([1, 5, 8]),
    vocab=st.sampled_from(VOCABS),
    scale=st.sampled_from([0.0, 1.0, 10.0]),
    tied=st.booleans(),
    bias=st.booleans(),
    soft_cap=st.sampled_from([None, 0.0, 5.0]),
    z_loss=st.sampled_from([0.0, 1e-3]),
)

# Compiling is the cost of an example; shrinking a failure would compile hundreds of times.
examples = functools.partial(
    settings, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate)
)

type Sums = tuple[jax.Array, jax.Array]


def arrays(problem: Problem, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """``(hidden, head, bias)`` in a dtype."""
    parts = (problem.hidden, problem.head, problem.bias)
    return tuple(None if part is None else jnp.asarray(part, dtype) for part in parts)


def gradients(
    loss_sums: Callable[..., Sums], inputs: tuple[Any, ...], of_loss: float, of_z: float
) -> tuple[Sums, tuple[Any, ...]]:
    """The two sums, and the gradients of their combination with respect to every input."""

    def combined(inputs: tuple[Any, ...]) -> tuple[jax.Array, Sums]:
        sums = loss_sums(*inputs)
        return of_loss * sums[0] + of_z * sums[1], sums

    (_, sums), grads = jax.jit(jax.value_and_grad(combined, has_aux=True))(inputs)
    return sums, grads


def matmuls(function: Callable[..., Any], *inputs: Any) -> int:
    """How many matmuls a program has, each loop body counted once."""
    return jax.jit(function).lower(*inputs).as_text().count("stablehlo.dot_general")


def assert_solves(
    loss_sums: Callable[..., Sums],
    problem: Problem,
    *,
    of_loss: float = 1.0,
    of_z: float = 0.0,
    rtol: float = 2e-5,
) -> None:
    """A loss has the reference's sums and gradients, within float32 rounding of their scale.

    A logit of size x is known to 1e-7 · x, a softmax as well, and its product with hidden states
    to as much times their size: the tolerance grows with the hidden states.
    """
    rtol *= max(1.0, float(np.abs(problem.hidden).max()))
    answer = solve(problem, of_loss, of_z)
    sums, grads = gradients(loss_sums, arrays(problem), of_loss, of_z)
    close(sums[0], answer.loss_sum, rtol)
    close(sums[1], answer.z_sum, rtol)
    for gradient, expected in zip(grads, of_inputs(answer), strict=True):
        if gradient is not None:
            close(gradient, expected, rtol)


def of_inputs(answer: Answer) -> tuple[np.ndarray, ...]:
    """Gradients in the order of ``arrays``."""
    return answer.of_hidden, answer.of_head, answer.of_bias


def close(actual: Any, expected: Any, rtol: float = 2e-5) -> None:
    """Equal up to ``rtol`` of the largest entry (at least 1)."""
    expected = np.asarray(expected)
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=rtol * scale)
