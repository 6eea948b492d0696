"""Accuracy, compiled memory and time of one loss at one point."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.losses.rivals import Loss, Point

MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes of the compiled value and gradient: temporaries and outputs."""

    temp: int
    output: int


@dataclass(frozen=True)
class Result:
    """The loss and its gradients, in float64 whatever they were computed in."""

    loss: float
    of_hidden: np.ndarray
    of_head: np.ndarray

    def differences(self, other: Result) -> dict[str, float]:
        """Largest absolute difference of each part."""
        return {
            "loss": abs(self.loss - other.loss),
            "of_hidden": float(np.abs(self.of_hidden - other.of_hidden).max()),
            "of_head": float(np.abs(self.of_head - other.of_head).max()),
        }


def step(loss: Loss) -> Callable[..., Any]:
    """Value and gradients with respect to hidden states and head."""
    return jax.value_and_grad(loss, (0, 1))


def inputs(point: Point, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Standard normal hidden states, a head of scale 0.02 (MaxText's initial one), labels."""
    keys = jax.random.split(jax.random.key(seed), 3)
    hidden = jax.random.normal(keys[0], (point.tokens, point.depth), point.dtype)
    head = 0.02 * jax.random.normal(keys[1], (point.depth, point.vocab), point.dtype)
    return hidden, head, jax.random.randint(keys[2], (point.tokens,), 0, point.vocab)


def result(loss: Loss, point: Point) -> Result:
    """Value and gradients of a loss, computed on the CPU."""
    value, (of_hidden, of_head) = jax.jit(step(loss))(*inputs(point))
    return Result(float(value), np.asarray(of_hidden, np.float64), np.asarray(of_head, np.float64))


def exact(point: Point) -> Result:
    """The definition in float64, of the same float32 inputs."""
    arrays = inputs(point)
    hidden, head = (np.asarray(array, np.float64) for array in arrays[:2])
    rows, labels = np.arange(point.tokens), np.asarray(arrays[2])
    logits = hidden @ head
    largest = logits.max(-1, keepdims=True)
    target = logits[rows, labels]
    logits -= largest
    np.exp(logits, out=logits)
    total = logits.sum(-1, keepdims=True)
    loss = float((np.log(total)[:, 0] + largest[:, 0] - target).mean())
    logits /= total
    logits[rows, labels] -= 1
    logits /= point.tokens
    return Result(loss, logits @ head.T, hidden.T @ logits)


def memory_on_cpu(loss: Loss, point: Point) -> Memory:
    """Compiled for the CPU of this machine."""
    return _memory(jax.jit(step(loss)).lower(*_shapes(point)).compile())


def memory_on_tpu(loss: Loss, point: Point, topology: str = "v6e:2x2") -> Memory:
    """Compiled for one chip of a TPU that need not be there (extra ``verify``)."""
    import tokamax
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("fsdp",))
    shapes = _shapes(point, NamedSharding(mesh, PartitionSpec()))
    cross_compile = tokamax.config.cross_compile(True)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), cross_compile:
        lowered = jax.jit(step(loss)).trace(*shapes).lower(lowering_platforms=("tpu",))
    return _memory(lowered.compile())


def _shapes(point: Point, sharding: NamedSharding | None = None) -> list[jax.ShapeDtypeStruct]:
    shapes = [(point.tokens, point.depth), (point.depth, point.vocab), (point.tokens,)]
    dtypes = [point.dtype, point.dtype, jnp.int32]
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def _memory(compiled: jax.stages.Compiled) -> Memory:
    analysis = compiled.memory_analysis()
    return Memory(analysis.temp_size_in_bytes, analysis.output_size_in_bytes)


@dataclass
class Times:
    """Seconds of each round.

    Attributes:
        whole: until the result is there.
        launch: until the call returned.
        cpu: of all processors together, which other work on the machine changes less.
    """

    whole: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def times(losses: dict[str, Loss], point: Point, rounds: int) -> dict[str, Times]:
    """Runs all losses in turn, ``rounds`` times, after round 0, which is not counted.

    Taking turns lets a slow moment of the machine fall on all of them alike; ratios are formed
    within a round.
    """
    arrays = inputs(point)
    compiled = {name: jax.jit(step(loss)).lower(*arrays).compile() for name, loss in losses.items()}
    seen = {name: Times() for name in losses}
    for number in range(rounds + 1):
        for name, function in compiled.items():
            start, busy = time.perf_counter(), time.process_time()
            result = function(*arrays)
            launched = time.perf_counter()
            jax.block_until_ready(result)
            whole, cpu = time.perf_counter() - start, time.process_time() - busy
            del result
            line = f"{point} round {number} {name}: {whole:.2f} s, processors {cpu:.2f} s"
            print(line, file=sys.stderr, flush=True)
            if number:
                seen[name].whole.append(whole)
                seen[name].launch.append(launched - start)
                seen[name].cpu.append(cpu)
    return seen


def paired_ratio(times: list[float], base: list[float]) -> float:
    """Median over the rounds of this time over that one."""
    return float(np.median(np.array(times) / np.array(base)))
