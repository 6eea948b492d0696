"""``tilepolicy export``: the concrete tiles of a policy in another tool's format."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tilepolicy.commands.common import AllowOutsideOption, write_output

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tilepolicy.formats.concrete import ConcreteTile, LeftOut

__all__ = ["Form", "Target", "export", "register"]

READ_IN: Final = "0.0.17"
"""The Tokamax release whose files are written where none is installed."""


class Target(StrEnum):
    """Where tiles can be exported to."""

    TOKAMAX = "tokamax"


class Form(StrEnum):
    """The two forms of Tokamax's files."""

    RESULT = "result"
    CACHE = "cache"


def export(
    policy: Annotated[
        str, typer.Argument(metavar="POLICY", show_default=False, help="Path, URL or shipped name.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            show_default=False,
            help="File of a result, or directory of caches.",
        ),
    ],
    to: Annotated[  # noqa: ARG001 - there is one target so far, and typer checks it
        Target, typer.Option("--to", help="Whose format.")
    ] = Target.TOKAMAX,
    form: Annotated[
        Form,
        typer.Option(help="An AutotuningResult of one device, or <device>/<op>.json caches."),
    ] = Form.RESULT,
    device: Annotated[
        str | None, typer.Option("--device", "-d", help="Only the tiles of this device: v6e.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Element type for rules that name none.")] = "bfloat16",
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    allow_outside: AllowOutsideOption = False,
) -> None:
    """Write the tiles of rules and table points that name a call in full.

    Rules that a cache cannot say (ranges, config facts, other ops) are listed with the reason.
    """
    from tilepolicy import policy as policies
    from tilepolicy.formats.concrete import concrete_tiles

    loaded = policies.load(policy, allow_outside=allow_outside)
    concrete = concrete_tiles(loaded, dtype=dtype)
    tiles = _of_device(concrete.tiles, device, loaded.name)
    files = _files(tiles, form, output)
    _write(files, force=force)
    write_output(_summary(files, tiles, concrete.left_out))


def _of_device(tiles: Iterable[ConcreteTile], device: str | None, name: str) -> list[ConcreteTile]:
    from tilepolicy.errors import Problem
    from tilepolicy.facts.devices import normalize_device
    from tilepolicy.formats.devices import TPU_KINDS
    from tilepolicy.formats.records import FormatError

    held = list(tiles)
    if device is None:
        return held
    wanted = normalize_device(device)
    if wanted not in TPU_KINDS:
        message = f"{device!r} is not a TPU that Tokamax has caches for"
        remedy = f"choose one of {', '.join(TPU_KINDS)}"
        raise FormatError(Problem("foreign-device", message, None, remedy))
    chosen = [tile for tile in held if tile.device == wanted]
    if held and not chosen:
        devices = ", ".join(sorted({tile.device for tile in held}))
        message = f"the policy {name!r} has no concrete tile for {wanted}, only for {devices}"
        raise FormatError(Problem("no-entries", message))
    return chosen


def _files(tiles: list[ConcreteTile], form: Form, output: Path) -> dict[Path, str]:
    from tilepolicy.formats.tokamax_export import cache_files, result_text

    if form is Form.RESULT:
        return {output: result_text(tiles, _tokamax_version())}
    return {output / path: text for path, text in cache_files(tiles).items()}


def _tokamax_version() -> str:
    try:
        return version("tokamax")
    except PackageNotFoundError:
        return READ_IN


def _write(files: Mapping[Path, str], *, force: bool) -> None:
    from tilepolicy.errors import Place, Problem
    from tilepolicy.files import write_atomically
    from tilepolicy.formats.records import FormatError

    existing = [path for path in files if path.exists()]
    if existing and not force:
        raise FormatError(
            Problem("exists", "the file exists already", Place(str(path)), "add --force")
            for path in existing
        )
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def _summary(
    files: Mapping[Path, str], tiles: list[ConcreteTile], left_out: Iterable[LeftOut]
) -> str:
    counts = Counter((tile.device, tile.kernel) for tile in tiles)
    lines = [str(path) for path in files]
    lines += [f"  {n} tiles of {kernel} on {device}" for (device, kernel), n in counts.items()]
    lines += [f"  not exported: {one.rule}: {one.reason}" for one in left_out]
    return "\n".join(lines) + "\n"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("export", epilog="Example: tilepolicy export tpu-v6e --to tokamax -o v6e.json")(
        export
    )
