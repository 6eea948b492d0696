"""Time to load a policy and to look up a tile, for 10 to 10,000 rules.

    python benchmarks/policy_lookup.py

Each rule names layer, pass, device, a range of rows and an embed and MLP size, and decides three
axes. ``fresh`` looks up rows that the index has not seen before, ``seen`` ones that it has, as
every call of a training step after the first. A lookup gives values with origins and losers.
Times are CPU times of this one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from tilepolicy import policy

SIZES = (10, 100, 1_000, 10_000)
MAX_LOAD_SECONDS = 2.0
MAX_LOOKUP_SECONDS = 50e-6
FACTS_PER_SIZE = 300
LOADS = 5


def rules(count: int) -> Iterator[str]:
    """The lines of a policy with so many rules, no two alike."""
    yield "version: 1\nname: large\ngmm:\n  rules:"
    for i in range(count):
        layer, step = ("wi", "wo")[i % 2], ("fwd", "dlhs", "drhs")[i // 2 % 3]
        rows = 128 + 64 * (i // 6)
        yield (
            f"    - name: rule {i}\n"
            f"      when: {{layer: {layer}, pass: {step}, device: [v5p, v6e], "
            f'batch_seq: "{rows}..{rows + 63}", embed_dim: {2048 + 128 * (i % 5)}, '
            f"mlp_dim: {1024 + 128 * (i % 7)}}}\n"
            f"      tile: {{batch_seq: {128 * (1 + i % 4)}, embed_dim: 1024, mlp_dim: 512}}"
        )


def facts(rng: random.Random, count: int) -> dict[str, str | int]:
    """The facts of a call that one of so many rules matches."""
    i = rng.randrange(count)
    return {
        "layer": ("wi", "wo")[i % 2],
        "pass": ("fwd", "dlhs", "drhs")[i // 2 % 3],
        "phase": "train",
        "device": "TPU v6 lite",
        "dtype": "bfloat16",
        "batch_seq": 128 + 64 * (i // 6) + rng.randrange(64),
        "embed_dim": 2048 + 128 * (i % 5),
        "mlp_dim": 1024 + 128 * (i % 7),
        "num_groups": 64,
    }


def measure(count: int, folder: Path) -> tuple[float, float, float]:
    """Seconds to load a policy of so many rules, and of one fresh and one repeated lookup."""
    path = folder / f"{count}.yml"
    path.write_text("\n".join(rules(count)), "utf-8")
    loaded = policy.load(path)
    loads = []
    for _ in range(LOADS):
        del loaded  # freed before the clock starts
        start = time.process_time()
        loaded = policy.load(path)
        loads.append(time.process_time() - start)
    index = loaded.gmm
    rng = random.Random(count)  # noqa: S311  # it picks facts, no secrets
    calls = [facts(rng, count) for _ in range(FACTS_PER_SIZE)]
    medians = []
    for _ in ("fresh", "seen"):
        times = []
        for call in calls:
            start = time.process_time()
            verdict = index.lookup(call)
            times.append(time.process_time() - start)
            if len(verdict.fields) != 3:
                raise RuntimeError(f"no rule matched {call}")
        medians.append(statistics.median(times))
    return min(loads), medians[0], medians[1]


def main() -> int:
    """Print the curve; exit 1 if a limit is broken or the growth is not sub-linear."""
    argparse.ArgumentParser(description=__doc__, allow_abbrev=False).parse_args()
    libyaml = "yes" if yaml.__with_libyaml__ else "no"
    print(f"libyaml: {libyaml}; best of {LOADS} loads, median lookups")
    print(f"{'rules':>7} {'load s':>8} {'fresh us':>9} {'seen us':>8}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for count in SIZES:
            load, fresh, seen = measure(count, Path(folder))
            results.append((load, fresh, seen))
            print(f"{count:7d} {load:8.3f} {fresh * 1e6:9.1f} {seen * 1e6:8.1f}")
    load, fresh, seen = results[-1]
    growth = fresh / results[0][1], seen / results[0][2]
    print(f"1000x the rules cost {growth[0]:.1f}x (fresh) and {growth[1]:.1f}x (seen) the time")
    broken = load > MAX_LOAD_SECONDS or max(fresh, seen) > MAX_LOOKUP_SECONDS or max(growth) > 100
    print(f"load <= {MAX_LOAD_SECONDS:g} s and lookups <= 50 us: {'broken' if broken else 'kept'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
