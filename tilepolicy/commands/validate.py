"""``tilepolicy validate``: every mistake of policies, configs and locks."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tilepolicy.commands.common import AllowOutsideOption, write_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilepolicy.validation import Checked

__all__ = ["Format", "register", "validate"]


class Format(StrEnum):
    """How problems are shown."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


def validate(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Policies, MaxText configs, locks.", show_default=False
        ),
    ],
    form: Annotated[
        Format, typer.Option("--format", "-f", help="`sarif` and `github` are for CI.")
    ] = Format.TEXT,
    allow_outside: AllowOutsideOption = False,
) -> None:
    """Find every mistake of policies and MaxText configs, in one run.

    What a file is, is seen from its content. Exits with 1 when there is an error.
    """
    from tilepolicy.report import render_problems
    from tilepolicy.validation import validate as check

    checked = check(files, allow_outside=allow_outside)
    problems = [problem for one in checked for problem in one.problems]
    if form is Format.TEXT:
        write_output(_verdicts(checked))
    write_output(render_problems(problems, form.value))
    sys.exit(0 if all(one.valid for one in checked) else 1)


def _verdicts(checked: Sequence[Checked]) -> str:
    words = {True: "valid", False: "INVALID"}
    return "".join(f"{one.file}: {one.kind}, {words[one.valid]}\n" for one in checked)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "validate",
        epilog="Example: tilepolicy validate policies/*.yml examples/*.yml --format github",
    )(validate)
