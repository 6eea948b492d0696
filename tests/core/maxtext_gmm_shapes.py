"""Trace MaxText forward passes and print the shapes of every grouped matmul; run as a script.

The argument is a JSON list of ``[phase, [CONFIG, "KEY=VALUE", …]]``, with ``compile_topology`` in
each. Nothing is compiled: each model is traced for the mesh of its topology. An exception of
MaxText is printed in the place of the shapes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp


def shapes_of(phase: str, arguments: list[str]) -> list[list[int]]:
    """Shapes ``[m, k, g, n]`` of the grouped matmuls of one forward pass, in their order."""
    from flax import nnx
    from flax.linen import logical_axis_rules as axis_rules
    from maxtext.configs import pyconfig
    from maxtext.layers import moe
    from maxtext.trainers.pre_train import train_compile
    from maxtext.utils import model_creation_utils

    config = pyconfig.initialize(["", *arguments])
    mesh = train_compile.get_topology_mesh(config)
    shapes: list[list[int]] = []

    def spy(lhs: Any, rhs: Any, **_: Any) -> Any:
        shapes.append([lhs.shape[0], rhs.shape[1], rhs.shape[0], rhs.shape[2]])
        return jnp.zeros((lhs.shape[0], rhs.shape[2]), lhs.dtype)

    moe.mblx.gmm = spy
    moe.tokamax.ragged_dot = spy
    moe.jax.lax.ragged_dot = spy
    is_eval = phase == "eval"
    batch = config.micro_batch_size_to_eval_on if is_eval else config.micro_batch_size_to_train_on
    rules = config.logical_axis_rules_for_eval if is_eval else config.logical_axis_rules
    tokens = jax.ShapeDtypeStruct((batch, config.max_target_length), jnp.int32)
    with axis_rules(config.logical_axis_rules):
        _, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
    graph, state = nnx.split(model)

    def forward(weights: Any, inputs: Any) -> Any:
        return nnx.merge(graph, weights)(
            decoder_input_tokens=inputs,
            decoder_positions=inputs,
            decoder_segment_ids=inputs,
            enable_dropout=False,
        )

    with jax.set_mesh(mesh), axis_rules(rules):
        shapes.clear()
        jax.eval_shape(forward, state, tokens)
    return shapes


def main() -> None:
    """Print one line for each case: ``SHAPES`` and JSON."""
    sys.modules["pytest"] = sys  # otherwise MaxText ends the process on a bad config
    for phase, arguments in json.loads(sys.argv[1]):
        try:
            result: list[list[int]] | str = shapes_of(phase, arguments)
        except Exception as error:  # noqa: BLE001 - reported to the test as it is
            result = f"{type(error).__name__}: {error}"
        sys.stdout.write(f"SHAPES {json.dumps(result)}\n")


if __name__ == "__main__":
    main()
