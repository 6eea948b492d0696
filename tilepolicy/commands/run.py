"""``tilepolicy run``: a MaxText program under a policy, without changing it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from tilepolicy.commands.common import (
    AllowOutsideOption,
    DeviceOption,
    PolicyOption,
    load_policies,
    print_warnings,
)
from tilepolicy.errors import TilepolicyError

__all__ = ["register", "run"]

EXIT_BEFORE_START: Final = 2
"""For launchers: the job did not start and will not start without a change."""


class _ModuleCommand(TyperCommand):
    """``-m MODULE`` ends the options, as it does for python: what follows is the program's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's own
        end = _end_of_options(args)
        return super().parse_args(ctx, [*args[:end], *(["--"] if args[end:] else []), *args[end:]])


def _end_of_options(args: list[str]) -> int:
    """How many arguments are tilepolicy's: up to and including ``-m MODULE``, however written."""
    for at, argument in enumerate(args):
        if argument in ("-m", "--module"):
            return at + 2
        if argument.startswith("--module=") or (argument.startswith("-m") and len(argument) > 2):
            return at + 1
    return len(args)


def run(
    module: Annotated[
        str,
        typer.Option(
            "--module",
            "-m",
            metavar="MODULE",
            help="Program to run, as for python -m.",
            show_default=False,
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS...", help="The program's own arguments.")
    ] = None,
    policy: PolicyOption = None,
    device: DeviceOption = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Refuse settings without effect; fail if a rule is never hit or a lookup misses.",
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write the report here too (.json: JSON)."),
    ] = None,
    record_missed: Annotated[
        Path | None,
        typer.Option(
            "--record-missed", metavar="FILE", help="Write what no rule decided, for tune."
        ),
    ] = None,
    allow_outside: AllowOutsideOption = False,
) -> None:
    """Run a MaxText program under a policy and report what was really used.

    A problem in policy or config exits with 2 before the program starts; otherwise the exit code
    is the program's own (1 also for a strict run that ended well but not as resolved).
    """
    from tilepolicy import run as runner
    from tilepolicy.gathering import Gathering
    from tilepolicy.report import render_problems

    _look_here_for_modules()
    files = runner.ReportFiles(report, record_missed)
    try:
        with Gathering() as problems:
            with problems.of_one():
                loaded = load_policies(policy, allow_outside=allow_outside)
            with problems.of_one():
                program = runner.read_program(module, arguments or ())
            with problems.of_one():
                files.require_writable()
        job = runner.prepare(loaded, program, device=device, strict=strict)
        print_warnings(job.warnings)
        code = runner.run(job, files)
    except TilepolicyError as error:
        sys.stderr.write(render_problems(error.problems, "text"))
        code = EXIT_BEFORE_START
    sys.exit(code)


def _look_here_for_modules() -> None:
    """Find modules in the working folder first, as ``python -m`` does and a script does not."""
    here = str(Path.cwd())
    if not sys.flags.safe_path and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "run",
        cls=_ModuleCommand,
        epilog="Example: tilepolicy run -p moe-v6e.yml -m maxtext.trainers.pre_train.train "
        "base.yml run_name=test",
    )(run)
