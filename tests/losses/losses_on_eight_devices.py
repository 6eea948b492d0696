"""Runs sharded losses on eight devices of the CPU and prints a JSON report.

Started by ``test_losses_sharded.py`` in a process of its own: the number of CPU devices has to be
set before jax is initialised.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from losses_reference import Problem, random_problem, solve

from tilepolicy.losses import (
    LossSharding,
    chunked_sparse_cross_entropy,
    make_adaptive_sparse_cross_entropy,
    online_sparse_cross_entropy,
)
from tilepolicy.vocab import Thresholds

TOKENS, DEPTH, VOCAB = (8, 16), 16, 96


def main() -> None:
    """Prints one report for each case named on the command line as JSON."""
    assert jax.device_count() == 8, "XLA_FLAGS must ask for eight devices"
    cases = json.loads(sys.argv[1])
    print(json.dumps({name: run(**case) for name, case in cases.items()}))  # noqa: T201


def run(
    loss: str,
    mesh: dict[str, int],
    tokens: list[Any],
    head: list[Any],
    once: list[bool] | None = None,
    tied: bool = False,
    bias: bool = False,
) -> dict[str, Any]:
    """Largest error of value and gradients against float64, and the collectives of the program."""
    devices = np.array(jax.devices()).reshape(tuple(mesh.values()))
    specs = [P(*(tuple(e) if isinstance(e, list) else e for e in spec)) for spec in (tokens, head)]
    sharding = LossSharding(Mesh(devices, tuple(mesh)), *specs)
    problem = random_problem(0, TOKENS, DEPTH, VOCAB, tied=tied, bias=bias, z_loss=1e-3)
    step = jax.jit(
        jax.value_and_grad(
            lambda inputs, *rest: value(loss, sharding, once, tied, inputs, *rest), has_aux=True
        )
    )
    arguments = placed(sharding, problem)
    compiled = step.lower(*arguments).compile()
    (_, sums), gradients = compiled(*arguments)
    answer = solve(problem)
    pairs = [(sums[0], answer.loss_sum), (sums[1], answer.z_sum)]
    expected = (answer.of_hidden, answer.of_head, answer.of_bias)
    pairs += [(g, e) for g, e in zip(gradients, expected, strict=True) if g is not None]
    return {
        "error": max(difference(*pair) for pair in pairs),
        "collectives": collectives(compiled.as_text()),
        "hidden_spec": str(gradients[0].sharding.spec),
        "head_spec": str(gradients[1].sharding.spec),
    }


def value(
    loss: str,
    sharding: LossSharding,
    once: list[bool] | None,
    tied: bool,
    inputs: Any,
    labels: Any,
    weights: Any,
) -> tuple[jax.Array, Any]:
    """The loss sum, and both sums beside it."""
    hidden, head, bias = inputs
    options = {"z_loss": 1e-3, "bias": bias, "tied": tied, "sharding": sharding}
    ag_once, reduce_once = once or (True, None)
    if loss == "chunked":
        sums = chunked_sparse_cross_entropy(
            hidden,
            head,
            labels,
            weights,
            num_tiles=8,
            ag_once=ag_once,
            reduce_once=reduce_once,
            **options,
        )
    elif loss == "online":
        losses = online_sparse_cross_entropy(
            hidden, head, labels, vocab_tile=20, ag_once=ag_once, **options
        )
        sums = ((losses[0] * weights).sum(), (losses[1] * weights).sum())
    else:
        adaptive = make_adaptive_sparse_cross_entropy(
            Thresholds(2048, 1, 1, 1), z_loss=1e-3, tied=tied, sharding=sharding
        )
        assert adaptive.decision(hidden.shape, head.shape).loss == "chunked"
        sums = adaptive(hidden, head, labels, weights, bias=bias)
    return sums[0], sums


def placed(sharding: LossSharding, problem: Problem) -> tuple[Any, ...]:
    """The inputs on their devices."""

    def put(values: np.ndarray, spec: P) -> jax.Array:
        return jax.device_put(jnp.asarray(values), NamedSharding(sharding.mesh, spec))

    bias = None if problem.bias is None else put(problem.bias, P())
    inputs = (put(problem.hidden, sharding.tokens), put(problem.head, sharding.head), bias)
    return inputs, put(problem.labels, sharding.tokens), put(problem.weights, sharding.tokens)


def difference(actual: Any, expected: Any) -> float:
    """Largest difference, relative to the largest entry."""
    expected = np.asarray(expected)
    return float(np.abs(np.asarray(actual) - expected).max() / max(1.0, np.abs(expected).max()))


def collectives(text: str) -> list[str]:
    """``op shape`` of every collective in the program."""
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    pattern = rf"= (.*?) ({names})(?:-start)?\("
    return [f"{op} {shape}" for shape, op in re.findall(pattern, text)]


if __name__ == "__main__":
    main()
