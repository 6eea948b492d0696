"""``tilepolicy diff``: two policies, two locks, or a lock with today."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilepolicy.commands.common import (
    AllowOutsideOption,
    DeviceOption,
    load_policies,
    print_warnings,
)

if TYPE_CHECKING:
    from tilepolicy.lockfile import LockedConfig
    from tilepolicy.report import Block
    from tilepolicy.resolve.snapshot import Snapshot

__all__ = ["diff", "register"]


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="Policy or lock.", show_default=False)],
    after: Annotated[
        str | None,
        typer.Argument(metavar="B", help="Policy or lock; none compares lock A with today."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="CONFIG", help="MaxText config for two policies."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="As on MaxText's command line."),
    ] = None,
    device: DeviceOption = None,
    allow_outside: AllowOutsideOption = False,
) -> None:
    """Show which settings differ between two policies, two locks, or a lock and today.

    Exits with 1 when a value, or who honours it, differs.
    """
    from tilepolicy.lockfile import read_lock
    from tilepolicy.report import draw

    locks = [name for name in (before, after) if name is not None and _is_lock(name)]
    if after is None and not locks:
        raise typer.BadParameter("give a second policy and --config, or one lock")
    if len(locks) == 1 and after is not None:
        raise typer.BadParameter(f"{locks[0]} is a lock and the other is not")
    if not locks:
        if config is None or after is None:
            raise typer.BadParameter("two policies are compared under a --config")
        pairs = [_policies(before, after, config, overrides or [], device, allow_outside)]
    else:
        old = read_lock(before)
        new = read_lock(after) if after is not None else _today(old, allow_outside=allow_outside)
        pairs = _matched(old, new)
    blocks: list[Block] = []
    changed = False
    for title, one, other in pairs:
        shown, differs = _compared(title, one, other)
        blocks += shown
        changed |= differs
    draw(blocks)
    sys.exit(1 if changed else 0)


type _Pair = tuple[str, Snapshot | None, Snapshot | None]


def _is_lock(name: str) -> bool:
    from tilepolicy.lockfile import is_lock
    from tilepolicy.source import parse

    return Path(name).is_file() and is_lock(parse(Path(name).read_bytes(), name))


def _policies(
    before: str,
    after: str,
    config: str,
    overrides: Sequence[str],
    device: str | None,
    allow_outside: bool,
) -> _Pair:
    from tilepolicy.gathering import Gathering
    from tilepolicy.resolve.snapshot import snapshot_of

    found = []
    with Gathering() as problems:
        for name in (before, after):
            with problems.of_one():
                policy = load_policies([name], allow_outside=allow_outside)
                resolution = policy.resolve(config, tuple(overrides), device=device)
                print_warnings(resolution.warnings)
                found.append(snapshot_of(resolution))
    return config, found[0], found[1]


def _today(old: Sequence[LockedConfig], *, allow_outside: bool) -> list[LockedConfig]:
    """The same requests, resolved now."""
    from tilepolicy.gathering import Gathering
    from tilepolicy.lockfile import LockedConfig
    from tilepolicy.resolve.snapshot import snapshot_of

    new = []
    with Gathering() as problems:
        for one in old:
            with problems.of_one():
                request = one.request
                policy = load_policies(request.policies, allow_outside=allow_outside)
                resolution = policy.resolve(
                    request.config, request.overrides, device=request.device
                )
                new.append(LockedConfig(request, snapshot_of(resolution)))
    return new


def _matched(old: Sequence[LockedConfig], new: Sequence[LockedConfig]) -> list[_Pair]:
    """Pairs of the same request, in the order of ``old``, then those that only ``new`` has."""
    before = {_title(one): one.snapshot for one in old}
    after = {_title(one): one.snapshot for one in new}
    names = dict.fromkeys((*before, *after))
    return [(name, before.get(name), after.get(name)) for name in names]


def _title(one: LockedConfig) -> str:
    return " ".join((one.request.config, *one.request.overrides))


def _compared(title: str, one: Snapshot | None, other: Snapshot | None) -> tuple[list[Block], bool]:
    from tilepolicy.report import Lines
    from tilepolicy.report.changes import changes_blocks

    if one is None or other is None:
        side = "A" if other is None else "B"
        return [Lines((title, f"only in {side}"))], True
    return changes_blocks(title, one, other)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "diff",
        epilog="Example: tilepolicy diff maxtext-default deepseek3-671b-v6e "
        "--config examples/deepseek3-671b.yml --device v6e",
    )(diff)
