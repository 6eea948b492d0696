"""What a scope costs: a lookup inside a trace, tracing a whole block, and a compiled step.

Each for the four ways to tell the layers. A lookup is timed as it occurs, once in thousands of
other calls, when its code and data have left the processor's caches; and at once again, which is
what the code itself costs. Beside it stands the whole of Tokamax's config lookup with and without
a policy, as it occurs: a policy's answer takes the place of Tokamax's own search. Tags are part of
jax's trace key, so a kernel whose forward pass is traced again by ``jax.checkpoint`` or ``grad``,
outside of the tag, is traced twice: they have no limit here, the other ways cost nothing.

    JAX_PLATFORMS=cpu python benchmarks/apply.py [--repeat N]

Ratios are medians of pairs that run one after the other, in alternating order, so that a change
of the machine's load meets both sides. Needs the extra ``tokamax``; no TPU and no TPU compiler.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import tokamax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import tilepolicy
from tilepolicy import CallSites, LayerSizes
from tilepolicy.adapters import tokamax as tokamax_adapter
from tilepolicy.adapters import tokamax_overlay, tokamax_upstream
from tilepolicy.adapters.tokamax import ragged_dot_op
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


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to tell the layers.

    Attributes:
        name: what it is called in the output.
        tag: what stands around the calls of a layer.
        implementations: what ``tokamax.ragged_dot`` is given, by layer.
        told: arguments of ``apply``.
    """

    name: str
    tag: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext()
    implementations: Mapping[str, Any] = field(
        default_factory=lambda: dict.fromkeys(LAYERS, "mosaic_tpu")
    )
    told: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, chosen: Any) -> AbstractContextManager[object]:
        """A scope of the policy."""
        return tilepolicy.apply(chosen, adapters=["tokamax"], **self.told)


def moe(x: Any, gate: Any, up: Any, down: Any, sizes: Any, way: Way) -> Any:
    """Gate, two wi matmuls, wo."""
    with way.tag("wi"):
        hidden = jax.nn.silu(expert_in(x, gate, sizes, way)) * expert_in(x, up, sizes, way)
    with way.tag("wo"):
        return expert_out(hidden, down, sizes, way)


def expert_in(x: Any, weights: Any, sizes: Any, way: Way) -> Any:
    """One wi matmul."""
    return tokamax.ragged_dot(x, weights, sizes, implementation=way.implementations["wi"])


def expert_out(hidden: Any, weights: Any, sizes: Any, way: Way) -> Any:
    """The wo matmul."""
    return tokamax.ragged_dot(hidden, weights, sizes, implementation=way.implementations["wo"])


SITES = CallSites(wi=("expert_in",), wo=("expert_out",), file="apply.py")
TAGS = Way(name="tags", tag=tilepolicy.layer)
WAYS = (
    Way(name="declared sizes", told={"sizes": LayerSizes(embed_dim=512, mlp_dim=1024)}),
    Way(name="the ops", implementations={layer: [ragged_dot_op(layer)] for layer in LAYERS}),
    Way(name="the calling functions", told={"call_sites": [SITES]}),
    TAGS,
)


def gradient(way: Way, weights: Any, x: Any, sizes: Any) -> Any:
    """Two layers: scan, checkpoint and grad."""

    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, weights: Any) -> tuple[Any, None]:
            return jax.checkpoint(lambda x: x + moe(x, *weights, sizes, way))(x), None

        return (jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))(weights, x)


def trace(way: Way) -> None:
    """Trace the block as a new process would."""
    jax.clear_caches()
    jax.jit(partial(gradient, way)).trace(*ARGUMENTS)


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


def show(name: str, values: list[float], unit: str = "", limit: float | None = None) -> bool:
    """Print median and quartiles, against a limit if there is one."""
    low, median, high = statistics.quantiles(values, n=4)
    ok = limit is None or median <= limit
    verdict = "" if limit is None else f", limit {limit:g}{unit}: {'ok' if ok else 'MISSED'}"
    print(
        f"{name}: median {median:.4g}{unit} (quartiles {low:.4g} to {high:.4g}, "
        f"n={len(values)}){verdict}"
    )
    return ok


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


def deeper[T](frames: int, call: Callable[[], T]) -> T:
    """``call`` so many frames further down.

    CPython keeps frames in chunks of 16 KiB. Where a chunk ends, each call takes a new one from the
    system and gives it back: some microseconds for every function of a lookup that lies there.
    """
    return deeper(frames - 1, call) if frames else call()


def lookups(way: Way, chosen: Any, repeat: int) -> tuple[list[float], list[float], list[float]]:
    """Microseconds of every lookup while the block is traced.

    In a new scope, again in it, and there at once again. Each scope at another depth of the stack.
    """
    timed = Timed(tokamax_overlay.PolicyOverlay(tokamax_upstream.load()))
    tokamax_adapter._overlay.cache_clear()
    original, tokamax_adapter._overlay = tokamax_adapter._overlay, lambda: timed
    first: list[float] = []
    again: list[float] = []
    at_once: list[float] = []
    try:
        for number in range(repeat):
            scope = way.apply(chosen)
            for kept in (first, again):
                timed.times.clear()
                timed.at_once.clear()
                with scope:
                    deeper(15 * number, partial(trace, way))
                kept.extend(timed.times)
            at_once.extend(timed.at_once)
    finally:
        tokamax_adapter._overlay = original
    return first, again, at_once


@contextmanager
def whole_lookups() -> Iterator[list[float]]:
    """Microseconds of each of Tokamax's config lookups, whoever answers it."""
    bound = tokamax_upstream.load().op_module.BoundArguments
    original = bound.cached_autotuning_data
    times: list[float] = []

    def timed(self: Any) -> Any:
        start = time.perf_counter()
        try:
            return original.fget(self)
        finally:
            times.append(1e6 * (time.perf_counter() - start))

    bound.cached_autotuning_data = property(timed)
    try:
        yield times
    finally:
        bound.cached_autotuning_data = original


def tracing(way: Way, chosen: Any, repeat: int) -> tuple[list[float], list[float]]:
    """Ratios with / without a policy: of tracing the block, and of its config lookups' median.

    In a scope that has answered these calls before; :func:`lookups` times the first answers.
    """
    scope = way.apply(chosen)
    within: list[float] = []
    without: list[float] = []

    def inside() -> float:
        with whole_lookups() as times, scope:
            taken = seconds(lambda: trace(way))
        within.append(statistics.median(times))
        return taken

    def outside() -> float:
        with whole_lookups() as times:
            taken = seconds(lambda: trace(way))
        without.append(statistics.median(times))
        return taken

    inside(), outside()
    within.clear()
    without.clear()
    ratios = paired(inside, outside, repeat)
    return ratios, [one / other for one, other in zip(within, without, strict=True)]


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


def measure(way: Way, chosen: Any, repeat: int) -> bool:
    """Measure lookups and tracing where the layers are told in one way."""
    first, again, at_once = lookups(way, chosen, max(repeat // 2, 2))
    traced, looked_up = tracing(way, chosen, repeat)
    print(f"layers told by {way.name}, {RULES} rules:")
    show("  a call's first lookup in a scope", first, " us")
    show("  lookup inside a trace, known call, as it occurs", again, " us")
    show("  Tokamax's whole lookup, as it occurs, with / without a policy", looked_up)
    quick = show("  lookup inside a trace, known call, at once again", at_once, " us", 50.0)
    limit = None if way is TAGS else 1.05
    return show("  tracing the block, with / without a policy", traced, "", limit) and quick


def main() -> int:
    """Measure all; exit status 1 if something misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=30, help="pairs of traces")
    repeat = parser.parse_args().repeat
    logging.getLogger("absl").setLevel(logging.ERROR)  # Tokamax warns of each call that it misses.
    chosen = policy()
    with jax.sharding.use_abstract_mesh(tpu()), tokamax.config.cross_compile(True):
        fine = [measure(way, chosen, repeat) for way in WAYS]
    stepped = steps(chosen, max(2 * repeat, 100))
    assert active.policies() == ()
    assert carrier.key() == ()
    fine.append(show("compiled step, inside / outside", stepped, "", 1.01))
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
