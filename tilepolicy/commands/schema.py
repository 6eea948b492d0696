"""``tilepolicy schema``: the JSON Schemas."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tilepolicy.commands.common import write_output, writing

__all__ = ["Kind", "register", "schema"]


class Kind(StrEnum):
    """What a schema describes."""

    POLICY = "policy"
    CONFIG = "config"
    RESOLUTION = "resolution"


def schema(
    kind: Annotated[Kind, typer.Argument(help="What the schema describes.")] = Kind.POLICY,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead."),
    ] = None,
) -> None:
    """Print a JSON Schema, for editors and other validators.

    An editor with a YAML language server completes a policy whose first line is
    `# yaml-language-server: $schema=policy.schema.json`.
    """
    from tilepolicy.files import write_atomically
    from tilepolicy.schemas import schema_text

    text = schema_text(kind.value)
    if output is None:
        write_output(text)
    else:
        with writing(output):
            write_atomically(output, text)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("schema", epilog="Example: tilepolicy schema policy --output policy.schema.json")(
        schema
    )
