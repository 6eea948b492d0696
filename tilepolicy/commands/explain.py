"""``tilepolicy explain``: everything about one setting."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from tilepolicy.commands.common import (
    AllowOutsideOption,
    ConfigArgument,
    DeviceOption,
    OverridesArgument,
    PolicyOption,
    prepare,
    print_warnings,
)

__all__ = ["explain", "register"]


def _setting_names(incomplete: str) -> list[str]:
    """Shell completion: the settings."""
    from tilepolicy.settings import SETTINGS

    return [name for name in SETTINGS if name.startswith(incomplete)]


def explain(
    config: ConfigArgument,
    setting: Annotated[
        str,
        typer.Argument(
            metavar="SETTING",
            help="Its name, wi_tile_fwd_embed_dim.",
            autocompletion=_setting_names,
            show_default=False,
        ),
    ],
    overrides: OverridesArgument = None,
    policy: PolicyOption = None,
    device: DeviceOption = None,
    allow_outside: AllowOutsideOption = False,
) -> None:
    """Show one setting in full: its origin, the arithmetic, what lost, and what each rule said."""
    from tilepolicy.explanation import rule_lines
    from tilepolicy.report import Lines, draw, setting_blocks

    resolver = prepare(config, overrides, policy, device, allow_outside=allow_outside)
    resolution = resolver.resolution()
    found = resolution.settings.get(setting)
    if found is None:
        near = difflib.get_close_matches(setting, resolution.settings, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise typer.BadParameter(f"there is no setting {setting!r}{hint}", param_hint="SETTING")
    blocks = list(setting_blocks(setting, found))
    if lines := rule_lines(resolver, setting):
        blocks.append(Lines(lines))
    draw(blocks)
    print_warnings(problem for problem in resolution.warnings if problem.path == setting)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "explain",
        epilog="Example: tilepolicy explain examples/gemma3-12b.yml num_vocab_tiling",
    )(explain)
