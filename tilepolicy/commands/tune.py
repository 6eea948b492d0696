"""``tilepolicy tune``: find tiles that fit and pay, with the TPU compiler, without a TPU."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilepolicy.commands.common import (
    DEFAULT_POLICY,
    AllowOutsideOption,
    OverridesArgument,
    PolicyOption,
    load_policies,
    print_warnings,
    write_output,
)

if TYPE_CHECKING:
    from tilepolicy.tuning.tune_job import TuneJob

__all__ = ["Format", "register", "tune"]


class Format(StrEnum):
    """How the result is shown."""

    TABLE = "table"
    JSON = "json"


def tune(
    config: Annotated[
        str | None, typer.Argument(help="MaxText config file; or give --missed.")
    ] = None,
    overrides: OverridesArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Policy file to write."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "-d",
            metavar="DEVICE",
            help="v5e, v5p, v6e, v7x or a topology; default: the config's compile_topology.",
        ),
    ] = None,
    policy: PolicyOption = None,
    missed: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Tune what `run --record-missed FILE` recorded."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="SITE", help="Only this site (wi.fwd); repeat it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Compiles at a time.")] = 2,
    backend: Annotated[
        str,
        typer.Option(
            "--joblib-backend",
            metavar="NAME",
            help="Registered joblib backend that spreads the compiles; threading keeps one "
            "compiler process per thread here.",
        ),
    ] = "threading",
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Limit of each compile.")
    ] = 180.0,
    scoped_vmem_limit_kib: Annotated[
        int | None,
        typer.Option(min=1, metavar="KIB", help="As XLA's --xla_tpu_scoped_vmem_limit_kib."),
    ] = None,
    at_a_time: Annotated[
        int, typer.Option(min=1, metavar="N", help="Candidates of a site compiled at a time.")
    ] = 3,
    at_most: Annotated[
        int, typer.Option(min=1, metavar="N", help="Candidates compiled before giving a site up.")
    ] = 12,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Let tokamax's autotuner choose among them, on a TPU."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    form: Annotated[Format, typer.Option("--format", "-f", help="How to show it.")] = Format.TABLE,
    allow_outside: AllowOutsideOption = False,
) -> None:
    """Search tiles for each grouped matmul of a config, and write them as a policy.

    Candidates are ranked by the cost formula and compiled until one fits. The plan comes first;
    an interrupted run goes on where it stopped when it is given the same FILE. FILE is written in
    one step, then loaded and resolved again as a proof.
    """
    from tilepolicy.commands.tune_steps import Search, check_usage, search
    from tilepolicy.report import draw
    from tilepolicy.tuning.journal import Journal, library_versions
    from tilepolicy.tuning.tune import Limits
    from tilepolicy.tuning.tune_job import extends_for
    from tilepolicy.tuning.tune_report import plan_blocks, tune_json, tuned_blocks

    check_usage(config, overrides, missed, output, dry_run=dry_run, force=force)
    job = _job(
        config, overrides, missed, device, policy, only, scoped_vmem_limit_kib, allow_outside
    )
    print_warnings(job.problems)
    how = Search(Limits(at_a_time, max(at_a_time, at_most)), jobs, backend, timeout, measure)
    place = None if output is None else output.with_name(f"{output.name}.journal")
    with Journal(place, library_versions()) as journal:
        plan = plan_blocks(
            job.items, how.limits, known=len(journal), title=f"{job.source} for {job.device}"
        )
        draw(plan, sys.stderr if form is Format.JSON else None)
        if output is None or dry_run:
            return
        tuned = search(job, how, journal)
        inside, outside = extends_for(policy or [DEFAULT_POLICY], output)
        for reference in outside:
            sys.stderr.write(f"{output} cannot extend {reference}: give both with --policy\n")
        hits = job.write(tuned, output, inside)
        journal.discard()
    if form is Format.JSON:
        write_output(json.dumps(tune_json(tuned, output=str(output)), indent=2) + "\n")
    else:
        draw(tuned_blocks(tuned, output=str(output), hits=hits))
    if any(site.best is None and not site.item.skipped for site in tuned):
        raise typer.Exit(1)


def _job(
    config: str | None,
    overrides: list[str] | None,
    missed: Path | None,
    device: str | None,
    policy: list[str] | None,
    only: list[str] | None,
    limit: int | None,
    allow_outside: bool,
) -> TuneJob:
    from tilepolicy.tuning.tune_job import job_for_config, job_for_missed

    if missed is not None:
        return job_for_missed(missed, device, scoped_vmem_limit_kib=limit)
    return job_for_config(
        config or "",
        overrides or (),
        load_policies(policy, allow_outside=allow_outside),
        device,
        only=only or (),
        scoped_vmem_limit_kib=limit,
    )


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "tune",
        epilog="Example: tilepolicy tune examples/deepseek3-671b.yml --device v6e -o tuned.yml",
    )(tune)
