"""What a scope costs: a lookup inside a trace, tracing a whole block, and a compiled step.

A lookup is timed as it occurs, once in thousands of other calls, when its code and data have left
the processor's caches; and at once again, which is what the code itself costs. Tracing is timed
with the layers told by declared sizes, by the calling functions, and by tags. Tags are part of
jax's trace key: jax traces its own small functions once for each.

    JAX_PLATFORMS=cpu python benchmarks/apply.py [--repeat N]

Ratios are medians of pairs that run one after the other, in alternating order, so that a change
of the machine's load meets both sides. Needs the extra ``tokamax``; no TPU and no TPU compiler.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tokamax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import tilepolicy
from tilepolicy import CallSites, LayerSizes
from tilepolicy.adapters import tokamax as tokamax_adapter
from tilepolicy.adapters import tokamax_overlay, tokamax_upstream
from tilepolicy.context import active, carrier

RULES = 100
LAYERS = ("wi", "wo")
PASSES = ("fwd", "dlhs", "drhs")


def policy() -> Any:
    """A policy of 100 rules; the last six are for this block, one per layer and pass."""
    rules = [
        f"    - name: other {i}\n"
        f"      when: {{layer: {LAYERS[i % 2]}, pass: {PASSES[i % 3]}, device: v6e, "
        f'dtype: bfloat16, batch_seq: "{4096 + i}..{8192 + i}", embed_dim: {1024 + 128 * i}}}\n'
        f"      tile: {{batch_seq: 128, embed_dim: 256, mlp_dim: 256}}\n"
        for i in range(RULES - 6)
    ]
    rules += [
        f"    - name: {layer} {pass_}\n"
        f"      when: {{layer: {layer}, pass: {pass_}}}\n"
        f"      tile: {{batch_seq: 128, embed_dim: 256, mlp_dim: 128}}\n"
        for layer in LAYERS
        for pass_ in PASSES
    ]
    text = "version: 1\nname: benchmark\ngmm:\n  rules:\n" + "".join(rules)
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        file.write(text)
        file.flush()
        loaded = tilepolicy.load(file.name)
    assert len(loaded.gmm) == RULES
    return loaded


def tpu() -> AbstractMesh:
    """A TPU that is not there."""
    device = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


type Tag = Callable[[Literal["wi", "wo"]], AbstractContextManager[object]]


def no_tag(_: str) -> AbstractContextManager[object]:
    """In place of :func:`tilepolicy.layer`."""
    return nullcontext()


def moe(x: Any, gate: Any, up: Any, down: Any, sizes: Any, tag: Tag) -> Any:
    """Gate, two wi matmuls, wo."""
    with tag("wi"):
        hidden = jax.nn.silu(expert_in(x, gate, sizes)) * expert_in(x, up, sizes)
    with tag("wo"):
        return expert_out(hidden, down, sizes)


def expert_in(x: Any, weights: Any, sizes: Any) -> Any:
    """One wi matmul."""
    return tokamax.ragged_dot(x, weights, sizes, implementation="mosaic_tpu")


def expert_out(hidden: Any, weights: Any, sizes: Any) -> Any:
    """The wo matmul."""
    return tokamax.ragged_dot(hidden, weights, sizes, implementation="mosaic_tpu")


SITES = CallSites(wi=("expert_in",), wo=("expert_out",), file="apply.py")


def gradient(tag: Tag, weights: Any, x: Any, sizes: Any) -> Any:
    """Two layers: scan, checkpoint and grad."""

    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, weights: Any) -> tuple[Any, None]:
            return jax.checkpoint(lambda x: x + moe(x, *weights, sizes, tag))(x), None

        return (jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))(weights, x)


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def paired(inside: Callable[[], float], outside: Callable[[], float], repeat: int) -> list[float]:
    """Ratios inside / outside of pairs in alternating order."""
    ratios = []
    for i in range(repeat):
        if i % 2:
            one, other = inside(), outside()
        else:
            other, one = outside(), inside()
        ratios.append(one / other)
    return ratios


def show(name: str, values: list[float], unit: str, limit: float) -> bool:
    """Print median and quartiles against a limit."""
    low, median, high = statistics.quantiles(values, n=4)
    verdict = "ok" if median <= limit else "MISSED"
    print(
        f"{name}: median {median:.4g}{unit} (quartiles {low:.4g} to {high:.4g}, "
        f"n={len(values)}), limit {limit:g}{unit}: {verdict}"
    )
    return median <= limit


ARGUMENTS = (
    (array(2, 4, 512, 1024), array(2, 4, 512, 1024), array(2, 4, 1024, 512)),
    array(1024, 512),
    array(4, dtype="int32"),
)
AT_ONCE = 20
"""How often a lookup is repeated at once."""


class Timed:
    """An overlay that times each lookup of another."""

    def __init__(self, overlay: Any) -> None:
        self.overlay = overlay
        self.times: list[float] = []
        self.at_once: list[float] = []

    def get(self, op: Any, _default: Any = None) -> Any:
        """Time the whole chain of one lookup."""
        answer: list[Any] = []

        class Chain:
            def get(inner, device: Any, _default: Any = None) -> Any:  # noqa: N805
                class Last:
                    def get(last, key: Any) -> Any:  # noqa: N805
                        def call() -> None:
                            answer.append(self.overlay.get(op).get(device).get(key))

                        self.times.append(1e6 * seconds(call))
                        self.at_once += [1e6 * seconds(call) for _ in range(AT_ONCE)]
                        return answer[0]

                return Last()

        return Chain()


def lookups(chosen: Any, repeat: int) -> tuple[list[float], list[float], list[float]]:
    """Microseconds of every lookup while the block is traced.

    In a new scope, again in it, and there at once again.
    """
    timed = Timed(tokamax_overlay.PolicyOverlay(tokamax_upstream.load()))
    tokamax_adapter._overlay.cache_clear()
    original, tokamax_adapter._overlay = tokamax_adapter._overlay, lambda: timed
    try:
        first: list[float] = []
        again: list[float] = []
        at_once: list[float] = []
        for _ in range(repeat):
            scope = tilepolicy.apply(chosen, adapters=["tokamax"])
            for kept in (first, again):
                jax.clear_caches()
                timed.times.clear()
                timed.at_once.clear()
                with scope:
                    jax.jit(partial(gradient, tilepolicy.layer)).trace(*ARGUMENTS)
                kept.extend(timed.times)
            at_once.extend(timed.at_once)
    finally:
        tokamax_adapter._overlay = original
    return first, again, at_once


def tracing(chosen: Any, repeat: int, tag: Tag, **told: Any) -> list[float]:
    """Ratio of the time to trace the block with and without a policy.

    Args:
        chosen: the policy.
        repeat: number of pairs.
        tag: what stands around the calls.
        told: arguments of ``apply`` that tell the layers.
    """

    def trace() -> float:
        jax.clear_caches()
        return seconds(lambda: jax.jit(partial(gradient, tag)).trace(*ARGUMENTS))

    def inside() -> float:
        with tilepolicy.apply(chosen, adapters=["tokamax"], **told):
            return trace()

    inside(), trace()
    return paired(inside, trace, repeat)


def steps(chosen: Any, repeat: int, calls: int = 2000) -> list[float]:
    """Ratio of the time of a compiled jitted step inside and outside of a scope."""
    step = jax.jit(lambda x: x @ x + 1.0)
    x = jnp.ones((64, 64))

    def run() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            out = step(x)
        out.block_until_ready()
        return time.perf_counter() - start

    def inside() -> float:
        with tilepolicy.apply(chosen, adapters=["tokamax"]):
            step(x)
            return run()

    def outside() -> float:
        step(x)
        return run()

    inside(), outside()
    return paired(inside, outside, repeat)


def main() -> int:
    """Measure all three; exit status 1 if one misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=30, help="pairs of traces")
    repeat = parser.parse_args().repeat
    chosen = policy()
    with jax.sharding.use_abstract_mesh(tpu()), tokamax.config.cross_compile(True):
        first, again, at_once = lookups(chosen, max(repeat // 6, 2))
        sized = tracing(chosen, repeat, no_tag, sizes=LayerSizes(embed_dim=512, mlp_dim=1024))
        sited = tracing(chosen, repeat, no_tag, call_sites=[SITES])
        tagged = tracing(chosen, repeat, tilepolicy.layer)
    stepped = steps(chosen, max(2 * repeat, 100))
    assert active.policies() == ()
    assert carrier.key() == ()
    print(f"lookup of a call for the first time: median {statistics.median(first):.4g} us")
    fine = [
        show("lookup inside a trace, 100 rules, known call, as it occurs", again, " us", 50.0),
        show("the same at once again", at_once, " us", 50.0),
        show("tracing the block, with / without, layers by sizes", sized, "", 1.05),
        show("tracing the block, with / without, layers by functions", sited, "", 1.05),
        show("tracing the block, with / without, layers by tags", tagged, "", 1.05),
        show("compiled step, inside / outside", stepped, "", 1.01),
    ]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
