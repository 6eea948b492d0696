"""``tilepolicy doctor``: what is installed, what works, and what to do about the rest."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tilepolicy.commands.common import write_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilepolicy.doctor import Finding
    from tilepolicy.report import Table

__all__ = ["Format", "doctor", "register"]


class Format(StrEnum):
    """How the findings are shown."""

    TABLE = "table"
    JSON = "json"


def doctor(
    form: Annotated[Format, typer.Option("--format", "-f", help="How to show it.")] = Format.TABLE,
) -> None:
    """Show what is installed, what works with it, and a remedy for the rest.

    Exits with 1 when something is installed that does not work; what is missing is no problem.
    """
    from tilepolicy.doctor import examine
    from tilepolicy.report import draw

    findings = examine()
    if form is Format.JSON:
        document = [asdict(finding) for finding in findings]
        write_output(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    else:
        draw((_table(findings),))
    sys.exit(1 if any(finding.state == "problem" for finding in findings) else 0)


def _table(findings: Sequence[Finding]) -> Table:
    from tilepolicy.report import Cell, Column, Row, Table

    styles = {"ok": "green", "missing": "yellow", "problem": "red"}
    rows = tuple(
        Row(
            (
                Cell(finding.topic, style="dim"),
                Cell(finding.name, style="bold"),
                Cell(finding.state, style=styles[finding.state]),
                Cell(finding.text),
            ),
            (f"remedy: {finding.remedy}",) if finding.remedy else (),
        )
        for finding in findings
    )
    columns = (Column("topic"), Column("name"), Column("state"), Column("found", wrap=True))
    return Table(columns, rows)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor", epilog="Example: tilepolicy doctor --format json")(doctor)
