"""Prints the figures of the losses as Markdown tables, and writes them as JSON.

``python -m benchmarks.losses accuracy memory-cpu memory-tpu sharded time --json losses.json``
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

# The TPU compiler stays offline and quiet, and jax runs on the CPU.
for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "DECOUPLE_GCLOUD": "TRUE",
}.items():
    os.environ.setdefault(_name, _value)

from benchmarks.losses import measure, sharded  # noqa: E402  (after the environment)
from benchmarks.losses.rivals import LARGE, NINE, NINE_ON_TPU, TIMED, Point, losses  # noqa: E402

type Row = dict[str, Any]

DENSE = "MaxText dense"
OWN = ["sparse", "chunked", "online"]
ON_CPU = ["optax integer labels", DENSE, "MaxText tiled", "tokamax chunked_xla", *OWN]
TIMED_TOO = [*ON_CPU, "plain scan", "three matmuls", "four matmuls"]
ON_TPU = [*ON_CPU[:4], "tokamax mosaic_tpu", *OWN]


def main() -> None:
    """Runs the figures that are asked for."""
    figures: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
        "accuracy": _accuracy,
        "memory-cpu": _memory_on_cpu,
        "memory-tpu": _memory_on_tpu,
        "sharded": _sharded,
        "time": _time,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="+", choices=figures)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each loss")
    parser.add_argument("--losses", help="comma-separated names; default: all")
    parser.add_argument("--points", help="comma-separated numbers of points; default: all")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    found = {}
    for figure in arguments.figures:
        found[figure] = figures[figure](arguments)
        print(f"\n### {figure}\n\n{_table(found[figure])}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def _names(arguments: argparse.Namespace, default: list[str]) -> list[str]:
    return arguments.losses.split(",") if arguments.losses else default


def _points[T](arguments: argparse.Namespace, default: list[T]) -> list[T]:
    if not arguments.points:
        return default
    return [default[int(number)] for number in arguments.points.split(",")]


def _accuracy(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    names = _names(arguments, [DENSE, *OWN])
    for point, chosen in _once_a_size(_points(arguments, NINE), names):
        if chosen != ["online"]:
            references = {"float64": measure.exact(point)}
            references["dense"] = measure.result(losses(point, [DENSE])[DENSE], point)
        for name, loss in losses(point, chosen).items():
            found = references["dense"] if name == DENSE else measure.result(loss, point)
            row: Row = {"point": str(point), "chunks or tile": _cut(point, name), "loss": name}
            for base, reference in references.items():
                for part, value in found.differences(reference).items():
                    row[f"Δ {part} to {base}"] = f"{value:.1e}"
            rows.append(row)
    return rows


def _once_a_size(points: list[Point], names: list[str]) -> Iterator[tuple[Point, list[str]]]:
    """Every point with the losses to look at there, the dense one first at each new size.

    Only the online loss depends on the tile: the others are looked at once for each size.
    """
    seen: set[str] = set()
    for point in points:
        if str(point) not in seen:
            yield point, [DENSE, *(name for name in names if name != DENSE)]
        elif "online" in names:
            yield point, ["online"]
        seen.add(str(point))


def _memory_on_cpu(arguments: argparse.Namespace) -> list[Row]:
    return _memory(measure.memory_on_cpu, _points(arguments, NINE), _names(arguments, ON_CPU))


def _memory_on_tpu(arguments: argparse.Namespace) -> list[Row]:
    points = _points(arguments, [*NINE_ON_TPU, *LARGE])
    return _memory(measure.memory_on_tpu, points, _names(arguments, ON_TPU))


def _memory(
    compiled: Callable[..., measure.Memory], points: list[Point], names: list[str]
) -> list[Row]:
    """One row for each loss; the factor is how many of its temporaries make the dense ones."""
    rows: list[Row] = []
    dense = 0
    for point, chosen in _once_a_size(points, names):
        for name, loss in losses(point, chosen).items():
            found = compiled(loss, point)
            dense = found.temp if name == DENSE else dense
            rows.append(
                {
                    "point": str(point),
                    "chunks or tile": _cut(point, name),
                    "loss": name,
                    "temp MiB": f"{found.temp / measure.MIB:.2f}",
                    "output MiB": f"{found.output / measure.MIB:.1f}",
                    "factor": f"{dense / found.temp:.1f}" if found.temp else "",
                }
            )
    return rows


def _cut(point: Point, name: str) -> int | None:
    """Number of chunks, or entries of a tile."""
    if name == "online":
        return point.vocab_tile
    return point.num_tiles if name in ("chunked", "MaxText tiled") else None


def _sharded(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for case in _points(arguments, sharded.CASES):
        gathers, reductions, in_loops, temp = sharded.collectives_and_memory(case)
        rows.append(
            {
                **asdict(case),
                "head gathers": gathers,
                "head reductions": reductions,
                "of these in loops": in_loops,
                "temp MiB": f"{temp:.0f}",
            }
        )
    return rows


def _time(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for point in _points(arguments, TIMED):
        base = "optax integer labels"
        chosen = list(dict.fromkeys([base, *_names(arguments, TIMED_TOO)]))
        seen = measure.times(losses(point, chosen), point, arguments.rounds)
        for name, found in seen.items():
            rows.append(
                {
                    "point": str(point),
                    "chunks or tile": _cut(point, name),
                    "loss": name,
                    "median s": f"{sorted(found.whole)[len(found.whole) // 2]:.3f}",
                    "ratio to optax": f"{measure.paired_ratio(found.whole, seen[base].whole):.2f}",
                    "of processor time": f"{measure.paired_ratio(found.cpu, seen[base].cpu):.2f}",
                    "launch ms": f"{1e3 * sorted(found.launch)[len(found.launch) // 2]:.2f}",
                    "rounds": len(found.whole),
                }
            )
    return rows


def _table(rows: list[Row]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = ["" if row.get(key) is None else str(row[key]) for key in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
