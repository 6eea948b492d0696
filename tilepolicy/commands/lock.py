"""``tilepolicy lock``: a record of every resolved value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilepolicy.commands.common import (
    AllowOutsideOption,
    DeviceOption,
    PolicyOption,
    load_policies,
    print_warnings,
    split_overrides,
    write_output,
    writing,
)

__all__ = ["lock", "register"]


def lock(
    configs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG...",
            help="MaxText configs; KEY=VALUE arguments hold for all of them.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The lock to write.")
    ] = Path("tiles.lock.yml"),
    policy: PolicyOption = None,
    device: DeviceOption = None,
    allow_outside: AllowOutsideOption = False,
) -> None:
    """Record every resolved value of some configs, with policy digest and library versions.

    `tilepolicy diff FILE` compares the record with today.
    """
    from tilepolicy.gathering import Gathering
    from tilepolicy.lockfile import LockedConfig, Request, write_lock
    from tilepolicy.resolve.snapshot import snapshot_of

    files, overrides = split_overrides(configs)
    loaded = load_policies(policy, allow_outside=allow_outside)
    locked = []
    with Gathering() as problems:
        for config in files:
            with problems.of_one():
                resolution = loaded.resolve(config, overrides, device=device)
                print_warnings(resolution.warnings)
                request = Request(config, overrides, tuple(policy or ()), device)
                locked.append(LockedConfig(request, snapshot_of(resolution)))
    with writing(output):
        write_lock(output, locked)
    count = sum(len(one.snapshot.settings) for one in locked)
    write_output(f"{output}: {count} settings of {len(locked)} configs\n")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "lock",
        epilog="Example: tilepolicy lock examples/mixtral-8x7b.yml --device v6e -o tiles.lock.yml",
    )(lock)
