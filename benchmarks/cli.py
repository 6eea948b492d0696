"""Whole-process time of the command line, side by side with importing what it depends on.

``python benchmarks/cli.py [--rounds N] [--python PYTHON]`` runs each command in turn, round after
round, so that a busy machine disturbs all of them alike, and prints the median and the smallest
time of each with its ratio to the first line (target: at most 1.5 for ``resolve``).

Byte code is written beforehand, as it is in an installed environment: pip compiles what it
installs, and an editable checkout compiles on its first run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = "examples/deepseek3-671b.yml"
COMMANDS: dict[str, tuple[str, ...]] = {
    "import pydantic, yaml, jsonschema, typer": (
        "-c",
        "import pydantic, yaml, jsonschema, typer",
    ),
    f"resolve {EXAMPLE}": ("-m", "tilepolicy", "resolve", EXAMPLE),
    f"resolve {EXAMPLE} --format json": (
        "-m",
        "tilepolicy",
        "resolve",
        EXAMPLE,
        "--format",
        "json",
    ),
    f"validate {EXAMPLE}": ("-m", "tilepolicy", "validate", EXAMPLE),
    "schema policy": ("-m", "tilepolicy", "schema", "policy"),
    "--version": ("-m", "tilepolicy", "--version"),
    "--help": ("-m", "tilepolicy", "--help"),
}


def measure(python: str, rounds: int) -> dict[str, list[float]]:
    """Wall seconds of each command, one number a round."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for at in range(rounds + 1):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(
                [python, *arguments],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=True,
            )
            if at:  # the first round warms the byte code and the file cache
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    times = measure(options.python, options.rounds)
    base = next(iter(times.values()))
    print(
        f"| command | median s | least s | ratio of medians | of least |  ({options.rounds} rounds)"
    )
    print("|---|---|---|---|---|")
    for name, seconds in times.items():
        median, least = statistics.median(seconds), min(seconds)
        ratios = f"{median / statistics.median(base):.2f} | {least / min(base):.2f}"
        print(f"| {name} | {median:.3f} | {least:.3f} | {ratios} |")


if __name__ == "__main__":
    main()
