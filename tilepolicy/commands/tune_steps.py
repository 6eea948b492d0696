"""The steps of ``tilepolicy tune`` that its options lead to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.compiler import CompileVerdict
from tilepolicy.tuning.journal import Journal
from tilepolicy.tuning.measure import check_device, measured
from tilepolicy.tuning.pool import close_compilers
from tilepolicy.tuning.tune import Limits, TunedSite, tune
from tilepolicy.tuning.tune_job import TuneJob

__all__ = ["Search", "check_usage", "search", "show_progress"]


@dataclass(frozen=True, slots=True)
class Search:
    """How to search.

    Attributes:
        limits: how far.
        jobs: compiles at a time.
        backend: joblib backend that spreads them.
        timeout: limit of each compile, in seconds.
        measure: choose among the tiles that compile by measuring them on a TPU.
    """

    limits: Limits
    jobs: int
    backend: str
    timeout: float
    measure: bool


def check_usage(
    config: str | None,
    overrides: Sequence[str] | None,
    missed: Path | None,
    output: Path | None,
    *,
    dry_run: bool,
    force: bool,
) -> None:
    """Refuse options that do not go together.

    Raises:
        typer.BadParameter: with what is wrong.
    """
    if (config is None) == (missed is None):
        raise typer.BadParameter("give a CONFIG or --missed FILE, one of the two")
    if missed is not None and overrides:
        raise typer.BadParameter("KEY=VALUE arguments go with a CONFIG, not with --missed")
    if output is None and not dry_run:
        raise typer.BadParameter("give the policy file to write with --output, or --dry-run")
    if output is not None and output.exists() and not (force or dry_run):
        raise typer.BadParameter(f"{output} exists; --force replaces it")


def search(job: TuneJob, how: Search, journal: Journal) -> tuple[TunedSite, ...]:
    """Compile until each site has a tile, and measure where that is asked for.

    Raises:
        MissingLibraryError: a library is not installed.
        VerifyError: the compiler does not start, or there is no TPU to measure on.
    """
    if how.measure:
        check_device(job.device)
    compiler = Compiler(how.jobs, how.timeout, how.backend, journal, show_progress)
    try:
        tuned = tune(job.items, compiler, how.limits)
    finally:
        close_compilers()
    if not how.measure:
        return tuned
    return tuple(measured(site, site.shortlist, how.timeout) for site in tuned)


def show_progress(verdict: CompileVerdict, done: int, total: int, *, known: bool) -> None:
    """One line per compile on standard error."""
    request = verdict.request
    tile = request.tile or verdict.tile
    shown = f" {tile}" if tile is not None else ""
    how = "known" if known else f"{verdict.compile_seconds:.1f} s"
    sys.stderr.write(
        f"[{done}/{total}] {request.device} {request.site.name}{shown}: {verdict.status} ({how})\n"
    )
