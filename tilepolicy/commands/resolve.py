"""``tilepolicy resolve``: every setting of a config, with its origin."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, cast

import typer

from tilepolicy.commands.common import (
    AllowOutsideOption,
    ConfigArgument,
    DeviceOption,
    OverridesArgument,
    PolicyOption,
    print_warnings,
    resolve_config,
    write_output,
)

if TYPE_CHECKING:
    from tilepolicy.report import ResolutionFormat

__all__ = ["Format", "register", "resolve"]


class Format(StrEnum):
    """How a resolution is shown."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    MAXTEXT = "maxtext"


def resolve(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    policy: PolicyOption = None,
    device: DeviceOption = None,
    form: Annotated[
        Format,
        typer.Option("--format", "-f", help="`maxtext` prints KEY=VALUE lines for MaxText."),
    ] = Format.TABLE,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what lost, and the whole arithmetic.")
    ] = False,
    allow_outside: AllowOutsideOption = False,
) -> None:
    """Show every setting that a MaxText config will run with, and where each comes from.

    Values that nothing reads on the selected backend are in parentheses.
    """
    from tilepolicy.report import draw, render_resolution, resolution_blocks

    resolution = resolve_config(config, overrides, policy, device, allow_outside=allow_outside)
    if form is Format.TABLE:
        draw(resolution_blocks(resolution, title=config, explain=explain))
        return
    print_warnings(resolution.warnings)
    write_output(render_resolution(resolution, cast("ResolutionFormat", form.value)))


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "resolve",
        epilog="Example: tilepolicy resolve examples/deepseek3-671b.yml --device v6e",
    )(resolve)
