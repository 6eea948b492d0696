"""Ask MaxText itself; run as a script by ``test_maxtext_configs``.

The argument is a JSON list of cases, ``{"kind", "arguments", "env"}``; the answers are printed one
a line, ``ANSWER`` and JSON. Kinds:

``values``
    every value of the config that MaxText builds from the arguments.
``train``, ``eval``
    shapes ``[m, k, g, n]`` of the grouped matmuls of one forward pass. Nothing is compiled: the
    model is traced for the mesh of its ``compile_topology``.

An exception of MaxText is printed in the place of an answer, as text.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp


def values_of(arguments: list[str]) -> dict[str, Any]:
    """The values of MaxText's config model."""
    from maxtext.configs import pyconfig

    model = pyconfig.initialize_pydantic(["", *arguments])
    dumped: dict[str, Any] = json.loads(model.model_dump_json())
    return dumped | {"__fields_set__": sorted(model.model_fields_set)}


def shapes_of(phase: str, arguments: list[str]) -> list[list[int]]:
    """Shapes of the grouped matmuls of one forward pass, in their order."""
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
    """Answer every case."""
    sys.modules["pytest"] = sys  # otherwise MaxText ends the process on a bad config
    for case in json.loads(sys.argv[1]):
        os.environ.update(case["env"])
        answer: object
        try:
            if case["kind"] == "values":
                answer = values_of(case["arguments"])
            else:
                answer = shapes_of(case["kind"], case["arguments"])
        except Exception as error:  # noqa: BLE001 - the test looks at it
            answer = f"{type(error).__name__}: {error}"
        for name in case["env"]:
            del os.environ[name]
        sys.stdout.write(f"\nANSWER {json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
