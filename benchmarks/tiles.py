"""How good are the shipped tiles? Each measured shape is hidden and resolved from the others.

    python benchmarks/tiles.py [--json FILE] [--journal FILE [--compile table|all] [--jobs 2]]

For every measured shape of tokamax's shipped v1 entries (bfloat16), all of its passes are hidden,
the tables of ``tpu-*`` are made anew from the other shapes, and the hidden calls are looked up as
both layers. Compared are the tile that comes of it, the one that ``tune`` would choose, tokamax's
choice on a cache miss (``stock``: 128x128x128, on TPU7x its heuristic) and the measured winner.

All times but one column are by the cost formula, not measured: what the winner measured is shown
next to it. With ``--journal`` the TPU compiler's verdicts in that file are used, with ``--compile``
missing ones are asked for (hours on two cores; an interrupted run goes on).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tilepolicy.axes import GmmShape, layer_facts
from tilepolicy.formats.model_sites import model_sites
from tilepolicy.formats.refused import RefusedTiles
from tilepolicy.formats.tokamax_cache import shipped_caches
from tilepolicy.formats.tpu_tables import CACHES, NEAREST, Measured, device_tables, read_measured
from tilepolicy.match.rules import Found, Table
from tilepolicy.match.rules import Measured as Point
from tilepolicy.settings import LAYERS, PASSES, Layer, Pass
from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.candidates import rank
from tilepolicy.tuning.compiler import CompileRequest
from tilepolicy.tuning.cost import grid_seconds, kernel_seconds
from tilepolicy.tuning.journal import Journal
from tilepolicy.tuning.kernels import KernelOptions
from tilepolicy.tuning.sites import GmmTile, Site
from tilepolicy.tuning.tpus import TPUS

REFUSED = Path(__file__).resolve().parent.parent / "scripts" / "refused_tiles.json"
WITHIN = 1.1
MOST_CANDIDATES = 12
REACHES = tuple(
    dict(zip(NEAREST, (ratio, ratio, ratio, 2 * ratio), strict=True)) for ratio in (2.0, 4.0, 8.0)
)

type Formula = Callable[..., float]
type Compiled = bool | None
"""Whether a tile compiled; None when nobody asked."""


@dataclass(frozen=True, slots=True)
class Row:
    """One hidden call.

    Attributes:
        device: policy name.
        layer: as which layer it was looked up.
        pass_: its pass.
        shape: its forward problem.
        winner: the measured winner that was hidden.
        measured_ms: what the winner measured.
        stock: tokamax's choice on a cache miss.
        table: what the tables of the others give; None for a miss.
        table_buffers: input buffers of that.
        tuned: the first candidate of ``tune`` that compiled, or surely fits.
        table_compiled: verdict of the compiler on ``table``.
        tuned_compiled: verdict of the compiler on ``tuned``.
    """

    device: str
    layer: Layer
    pass_: Pass
    shape: GmmShape
    winner: GmmTile
    measured_ms: float
    stock: GmmTile
    table: GmmTile | None
    table_buffers: int
    tuned: GmmTile
    table_compiled: Compiled = None
    tuned_compiled: Compiled = None

    def seconds(self, tile: GmmTile, formula: Formula = grid_seconds) -> float:
        """Time of a tile for this call, by a formula."""
        return formula(self.shape, self.pass_, tile, TPUS[self.device])

    @property
    def resolved(self) -> GmmTile:
        """The table's tile, or what a miss gets."""
        return self.table if self.table is not None else self.stock


def stock_tile(device: str, pass_: Pass, shape: GmmShape) -> GmmTile:
    """Tokamax 0.0.17's v1 choice on a cache miss, for bfloat16.

    Below TPU7x 128 along each axis. On TPU7x it starts at min(m, 1024) x k x n and halves one
    axis after the other (rows, n, k; for drhs k, n, rows) until two buffers of each input and
    three of the output take at most three quarters of half the VMEM.
    """
    if device != "v7x":
        return GmmTile(128, 128, 128)
    sizes = {"m": min(shape.m, 1024), "k": shape.k, "n": shape.n}
    inputs, output = (("mk", "mn"), "kn") if pass_ == "drhs" else (("mk", "kn"), "mn")
    order = "knm" if pass_ == "drhs" else "mnk"
    limit = 0.75 * TPUS[device].vmem_bytes / 2

    def fits() -> bool:
        area = {pair: sizes[pair[0]] * sizes[pair[1]] * 2 for pair in (*inputs, output)}
        return 2 * sum(area[pair] for pair in inputs) + 3 * area[output] <= limit

    for axis in order:
        while not fits() and sizes[axis] > 128:
            sizes[axis] = max(sizes[axis] // 2 // 128 * 128, 128)
    return GmmTile(sizes["m"], sizes["k"], sizes["n"])


class Verdicts:
    """What the compiler says of tiles: from a journal, or asked for."""

    def __init__(self, compiler: Compiler | None, ask: Literal["table", "all"] | None) -> None:
        self._compiler = compiler
        self._ask = ask

    def of_tuned(self, device: str, shape: GmmShape, pass_: Pass, tile: GmmTile) -> Compiled:
        """Whether a candidate of ``tune`` compiles; None when that is not known."""
        request = _request(device, shape, pass_, tile, None)
        if self._compiler is not None and self._ask == "all":
            return self._compiler.verdict(request).fits
        return self._known(request)

    def of_tables(self, rows: Sequence[Row]) -> list[Row]:
        """The rows, with whether the tables' tiles compile; missing verdicts in one batch."""
        asked = {
            at: _request(row.device, row.shape, row.pass_, row.table, row.table_buffers)
            for at, row in enumerate(rows)
            if row.table is not None
        }
        if self._compiler is not None and self._ask is not None:
            self._compiler.verdicts(asked.values())
        return [
            replace(row, table_compiled=self._known(asked[at])) if at in asked else row
            for at, row in enumerate(rows)
        ]

    def _known(self, request: CompileRequest) -> Compiled:
        if self._compiler is None:
            return None
        known = self._compiler.journal.get(request, 0.0)
        return None if known is None else known.fits


def _request(
    device: str, shape: GmmShape, pass_: Pass, tile: GmmTile, buffers: int | None
) -> CompileRequest:
    """The kernel does not know its layer: wi stands for both."""
    site = Site("wi", pass_, shape.m, shape.k, shape.n, shape.g)
    return CompileRequest(site, device, tile, KernelOptions(input_buffer_count=buffers))


def tuned_tile(
    device: str, shape: GmmShape, pass_: Pass, verdicts: Verdicts
) -> tuple[GmmTile, Compiled]:
    """What ``tune`` chooses: its first candidate that compiles, else that surely fits."""
    site = Site("wi", pass_, shape.m, shape.k, shape.n, shape.g)
    candidates = rank(site, TPUS[device])[:MOST_CANDIDATES]
    for candidate in candidates:
        compiled = verdicts.of_tuned(device, shape, pass_, candidate.tile)
        if compiled or (compiled is None and candidate.vmem.verdict == "fits"):
            return candidate.tile, compiled
    return candidates[0].tile, None


def hidden_tables(
    device: str, winners: Sequence[Measured], sites: Mapping[Layer, Iterable[GmmShape]]
) -> Iterator[tuple[list[Measured], dict[tuple[str, str], tuple[tuple[Point, ...], int]]]]:
    """Each shape's winners, and the tables of all the other shapes.

    Yields:
        The hidden winners; layer and pass to the points and the row multiple that is asked for.
    """
    refused = RefusedTiles.read(REFUSED)
    for shape in sorted({one.shape for one in winners}, key=lambda s: (s.k, s.n, s.g, s.m)):
        hidden = [one for one in winners if one.shape == shape]
        others = [one for one in winners if one.shape != shape]
        tables = {}
        for table in device_tables(device, others, sites, "others", refused):
            key = (str(table.when["layer"]), str(table.when["pass"]))
            points = tuple(Point(p.at, p.tile, p.source) for p in table.points)
            tables[key] = (points, int(str(table.when["batch_seq"]).removeprefix("%")))
        yield hidden, tables


def look_up(
    points: Sequence[Point], rows: int, shape: GmmShape, layer: Layer, nearest: Mapping[str, float]
) -> tuple[GmmTile, int] | None:
    """The tile and the buffers of the nearest point; None for a miss."""
    if shape.m % rows:
        return None
    found = Table(nearest, tuple(points)).find(layer_facts(shape, layer))
    if not isinstance(found, Found):
        return None
    values = {name: int(value or 0) for name, value in found.values.items()}
    return GmmTile.of_policy(layer, values), values["input_buffer_count"]


def rows_of(
    device: str, data: Path, sites: Mapping[Layer, Iterable[GmmShape]], verdicts: Verdicts
) -> tuple[list[Row], list[dict[str, Any]]]:
    """All hidden calls of a device, and what other reaches would have given."""
    rows: list[Row] = []
    reached: dict[int, list[float | None]] = {at: [] for at in range(len(REACHES))}
    for hidden, tables in hidden_tables(device, read_measured(data, device), sites):
        for one in hidden:
            stock = stock_tile(device, one.pass_, one.shape)
            tuned, tuned_compiled = tuned_tile(device, one.shape, one.pass_, verdicts)
            for layer in LAYERS:
                points, multiple = tables.get((layer, one.pass_), ((), 1))
                found = look_up(points, multiple, one.shape, layer, NEAREST) if points else None
                tile, buffers = found if found is not None else (None, 0)
                row = Row(
                    device,
                    layer,
                    one.pass_,
                    one.shape,
                    one.tile,
                    one.median_ms,
                    stock,
                    tile,
                    buffers,
                    tuned,
                    tuned_compiled=tuned_compiled,
                )
                rows.append(row)
                for at, reach in enumerate(REACHES):
                    other = look_up(points, multiple, one.shape, layer, reach) if points else None
                    gain = row.seconds(stock) / row.seconds(other[0]) if other else None
                    reached[at].append(gain)
    return rows, [_reach(device, REACHES[at], gains) for at, gains in reached.items()]


def _reach(
    device: str, reach: Mapping[str, float], gains: Sequence[float | None]
) -> dict[str, Any]:
    hits = [gain for gain in gains if gain is not None]
    return {
        "device": device,
        "reach": "/".join(f"{ratio:g}" for ratio in reach.values()),
        "calls": len(gains),
        "served": len(hits),
        "gain": geometric_mean(hits),
        "smallest_gain": min(hits, default=math.nan),
    }


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean; nan of nothing."""
    held = list(values)
    return math.exp(statistics.fmean(map(math.log, held))) if held else math.nan


def share(flags: Iterable[bool]) -> float:
    """Share of true ones; nan of nothing."""
    held = list(flags)
    return sum(held) / len(held) if held else math.nan


def _compiled(flags: Sequence[Compiled]) -> dict[str, int]:
    return {"asked": sum(flag is not None for flag in flags), "fit": sum(map(bool, flags))}


def summary(rows: Sequence[Row], formula: Formula) -> dict[str, Any]:
    """The figures of some rows by one formula."""

    def gain(tile: Callable[[Row], GmmTile]) -> float:
        return geometric_mean(
            row.seconds(row.stock, formula) / row.seconds(tile(row), formula) for row in rows
        )

    def near(tile: Callable[[Row], GmmTile]) -> float:
        return share(
            row.seconds(tile(row), formula) <= WITHIN * row.seconds(row.winner, formula)
            for row in rows
        )

    return {
        "calls": len(rows),
        "missed": sum(row.table is None for row in rows),
        "gain": {
            "winner": gain(lambda row: row.winner),
            "table": gain(lambda row: row.resolved),
            "tune": gain(lambda row: row.tuned),
        },
        "within_10_percent": {
            "table": near(lambda row: row.resolved),
            "tune": near(lambda row: row.tuned),
        },
        "same_as_winner": {
            "table": share(row.table == row.winner for row in rows),
            "tune": share(row.tuned == row.winner for row in rows),
        },
        "compiled": {
            "table": _compiled([row.table_compiled for row in rows]),
            "tune": _compiled([row.tuned_compiled for row in rows]),
        },
    }


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, equal values sharing theirs."""
    ordered = sorted(values)
    return [(ordered.index(v) + 1 + len(ordered) - ordered[::-1].index(v)) / 2 for v in values]


def against_measured(rows: Sequence[Row], formula: Formula) -> dict[str, float]:
    """How the formula's times of the winners compare with what was measured."""
    once = [row for row in rows if row.layer == LAYERS[0]]
    predicted = [1e3 * row.seconds(row.winner, formula) for row in once]
    measured = [row.measured_ms for row in once]
    ratios = [math.log(p / m) for p, m in zip(predicted, measured, strict=True)]
    enough = len(once) > 2
    return {
        "shapes": len(once),
        "spearman": statistics.correlation(ranks(predicted), ranks(measured))
        if enough
        else math.nan,
        "log_pearson": statistics.correlation(
            list(map(math.log, predicted)), list(map(math.log, measured))
        )
        if enough
        else math.nan,
        "formula_to_measured": math.exp(statistics.fmean(ratios)),
        "spread": math.exp(statistics.pstdev(ratios)),
    }


def figures(rows: Sequence[Row], reaches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything, as plain data."""
    formulas: dict[str, Formula] = {
        "cost formula": grid_seconds,
        "kernel's estimate": kernel_seconds,
    }
    found: dict[str, Any] = {"by_formula": {}, "against_measured": {}, "reaches": list(reaches)}
    for name, formula in formulas.items():
        by_device: dict[str, Any] = {}
        compared: dict[str, Any] = {}
        for device in CACHES:
            mine = [row for row in rows if row.device == device]
            by_device[device] = {"all": summary(mine, formula)}
            compared[device] = {"all": against_measured(mine, formula)}
            for pass_ in PASSES:
                part = [row for row in mine if row.pass_ == pass_]
                by_device[device][pass_] = summary(part, formula)
                compared[device][pass_] = against_measured(part, formula)
        found["by_formula"][name] = by_device
        found["against_measured"][name] = compared
    return found


def markdown(found: Mapping[str, Any]) -> str:
    """The figures as tables."""
    lines = [
        "All gains are stock's time divided by the tile's, geometric mean, **by a formula**: no",
        "TPU was timed here. Compiled: tiles that the TPU compiler was asked about and took.",
    ]
    for name, by_device in found["by_formula"].items():
        lines += [
            "",
            f"### Leave one out, by the {name}",
            "",
            "| device | pass | calls | gain: winner | table | tune | within 10 %: table | tune "
            "| winner itself: table | tune | compiled: table | tune |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for device, parts in by_device.items():
            lines += [_summary_line(device, part, one) for part, one in parts.items()]
    for name, by_device in found["against_measured"].items():
        lines += [
            "",
            f"### The winners' times: {name} against tokamax's measurements",
            "",
            "| device | pass | shapes | rank correlation | of logarithms | formula / measured "
            "| spread (factor, one sigma) |",
            "|---|---|---|---|---|---|---|",
        ]
        for device, parts in by_device.items():
            for part, one in parts.items():
                lines.append(
                    f"| {device} | {part} | {one['shapes']} | {one['spearman']:.2f} "
                    f"| {one['log_pearson']:.2f} | {one['formula_to_measured']:.2f} "
                    f"| {one['spread']:.2f} |"
                )
    lines += [
        "",
        "### Reaches (largest ratio of batch_seq/embed_dim/mlp_dim/num_groups)",
        "",
        "| device | reach | calls | served | gain of those | smallest gain |",
        "|---|---|---|---|---|---|",
    ]
    for one in found["reaches"]:
        lines.append(
            f"| {one['device']} | {one['reach']} | {one['calls']} | {one['served']} "
            f"| {one['gain']:.2f} | {one['smallest_gain']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _summary_line(device: str, part: str, one: Mapping[str, Any]) -> str:
    gain, near, same, done = (
        one[name] for name in ("gain", "within_10_percent", "same_as_winner", "compiled")
    )
    cells = [
        device,
        part,
        str(one["calls"]) + (f" ({one['missed']} missed)" if one["missed"] else ""),
        *(f"{gain[name]:.2f}" for name in ("winner", "table", "tune")),
        *(f"{near[name]:.1%}" for name in ("table", "tune")),
        *(f"{same[name]:.0%}" for name in ("table", "tune")),
        *(f"{done[name]['fit']} of {done[name]['asked']}" for name in ("table", "tune")),
    ]
    return f"| {' | '.join(cells)} |"


def measure(
    journal: Path | None, *, ask: Literal["table", "all"] | None, jobs: int
) -> tuple[list[Row], dict[str, Any]]:
    """All rows, and the figures.

    Args:
        journal: verdicts of the compiler; None to do without.
        ask: compile what the journal does not have: of the tables, or also of ``tune``.
        jobs: compiles at a time.
    """
    data, sites = shipped_caches(), model_sites()
    with Journal(journal) as kept:
        compiler = Compiler(jobs=jobs, timeout_seconds=600.0, journal=kept) if journal else None
        verdicts = Verdicts(compiler, ask)
        rows, reaches = [], []
        for device in CACHES:
            mine, reached = rows_of(device, data, sites, verdicts)
            rows += verdicts.of_tables(mine)
            reaches += reached
    return rows, figures(rows, reaches)


def main() -> None:
    """Print the figures as Markdown, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write figures and rows there")
    parser.add_argument("--journal", type=Path, help="the compiler's verdicts")
    parser.add_argument(
        "--compile", choices=("table", "all"), help="ask for what the journal lacks of these tiles"
    )
    parser.add_argument("--jobs", type=int, default=1, help="compiles of tables at a time")
    options = parser.parse_args()
    if options.compile and options.journal is None:
        parser.error("--compile needs --journal")
    rows, found = measure(options.journal, ask=options.compile, jobs=options.jobs)
    if options.json is not None:
        text = json.dumps({**found, "rows": [asdict(row) for row in rows]}, indent=1)
        options.json.write_text(text + "\n", "utf-8")
    print(markdown(found))


if __name__ == "__main__":
    main()
