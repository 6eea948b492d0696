"""What ``tune`` is going to do, and what it found, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tilepolicy.report import Block, Cell, Column, Lines, Row, Table
from tilepolicy.settings import AXES
from tilepolicy.tuning.sites import GmmTile, Site
from tilepolicy.tuning.tune import Limits, TunedSite, TuneItem, first_wave

__all__ = ["plan_blocks", "tune_json", "tuned_blocks"]

TUNE_JSON_VERSION: Final = 1
_SHOWN: Final = 3


def plan_blocks(
    items: Sequence[TuneItem], limits: Limits, *, known: int, title: str
) -> tuple[Block, ...]:
    """The plan: sites, candidates, and the best ones by the cost formula.

    Args:
        items: from :func:`tilepolicy.tuning.tune.plan`.
        limits: how far the search goes.
        known: verdicts that an interrupted run left behind.
        title: first line.
    """
    columns = (
        Column("site"),
        Column("batch_seq x embed x mlp, groups"),
        Column("backend"),
        Column("now"),
        Column("candidates", right=True),
        Column("first by the cost formula", wrap=True),
    )
    rows = tuple(_plan_row(item) for item in items)
    least = sum(1 + len(first_wave(item, limits)) for item in items)
    most = sum(1 + min(limits.most, len(item.candidates)) for item in items)
    lines = [f"{least} compiles if the first wave fits, {most} at most"]
    if known:
        lines.append(f"{known} verdicts are known from an interrupted run")
    return Lines((title,), style="bold"), Table(columns, rows), Lines(tuple(lines))


def _plan_row(item: TuneItem) -> Row:
    best = item.candidates[:_SHOWN]
    first = ", ".join(
        f"{_tile(c.tile, item.site)} ({c.seconds * 1e3:.3f} ms, {c.vmem.verdict})" for c in best
    )
    return Row(
        (
            Cell(item.name),
            Cell(_sizes(item.site)),
            Cell(item.site.backend),
            Cell(_tile(item.now.tile, item.site)),
            Cell(str(len(item.candidates))),
            Cell(first or item.skipped, "" if first else "yellow"),
        )
    )


def tuned_blocks(tuned: Sequence[TunedSite], *, output: str, hits: int) -> tuple[Block, ...]:
    """What was found, and the proof that the file gives it back.

    Args:
        tuned: from :func:`tilepolicy.tuning.tune.tune`.
        output: the file that was written.
        hits: sites whose tile the file gave back.
    """
    columns = (
        Column("site"),
        Column("now"),
        Column("ms", right=True),
        Column("compiles"),
        Column("tuned"),
        Column("ms", right=True),
        Column("VMEM MiB", right=True),
        Column("tried", right=True),
    )
    rows = tuple(_tuned_row(site) for site in tuned)
    notes = ("times are by the cost formula, not measured",)
    found = sum(site.best is not None for site in tuned)
    proof = f"{output}: loaded again, {hits} of {found} tuned sites get their tile from it"
    return Table(columns, rows, notes), Lines((proof,), style="green")


def _tuned_row(site: TunedSite) -> Row:
    gmm, best, verdict = site.item.site, site.best, site.verdict
    used = verdict.used_bytes if verdict is not None else None
    details = () if best is not None else (site.item.skipped or "no tried candidate compiles",)
    return Row(
        (
            Cell(site.item.name),
            Cell(_tile(site.now_tile, gmm)),
            Cell(_ms(site.now_seconds)),
            Cell(site.now.status if site.now is not None else "-"),
            Cell(_tile(best.tile, gmm) if best is not None else "-"),
            Cell(_ms(best.seconds) if best is not None else "-"),
            Cell(f"{used / 2**20:.1f}" if used is not None else "-"),
            Cell(str(site.tried)),
        ),
        details,
    )


def tune_json(tuned: Sequence[TunedSite], *, output: str) -> Mapping[str, Any]:
    """Plain JSON data; keys are only ever added within one ``version``."""
    return {
        "version": TUNE_JSON_VERSION,
        "output": output,
        "sites": [_site_json(site) for site in tuned],
    }


def _site_json(site: TunedSite) -> dict[str, Any]:
    gmm = site.item.site
    layer, best, verdict = gmm.layer, site.best, site.verdict
    return {
        "name": site.item.name,
        "device": site.item.now.device,
        "backend": gmm.backend,
        "sizes": {
            "batch_seq": gmm.batch_seq,
            "embed_dim": gmm.embed_dim,
            "mlp_dim": gmm.mlp_dim,
            "num_groups": gmm.num_groups,
        },
        "fixed": dict(site.item.fixed),
        "skipped": site.item.skipped,
        "candidates": len(site.item.candidates),
        "tried": site.tried,
        "now": {
            "tile": site.now_tile.to_policy(layer) if site.now_tile is not None else None,
            "seconds": site.now_seconds,
            "status": site.now.status if site.now is not None else None,
        },
        "tuned": None
        if best is None or verdict is None
        else {
            "tile": best.tile.to_policy(layer),
            "seconds": best.seconds,
            "measured_seconds": site.measured_seconds,
            "used_bytes": verdict.used_bytes,
            "available_bytes": verdict.available_bytes,
        },
    }


def _sizes(site: Site) -> str:
    return f"{site.batch_seq} x {site.embed_dim} x {site.mlp_dim}, {site.num_groups}"


def _tile(tile: GmmTile | None, site: Site) -> str:
    if tile is None:
        return "library's own"
    sizes = tile.to_policy(site.layer)
    return " x ".join(str(sizes[axis]) for axis in AXES)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"
