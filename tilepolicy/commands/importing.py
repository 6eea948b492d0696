"""``tilepolicy import``: tuned tiles of other tools as a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilepolicy.commands.common import print_warnings, write_output

if TYPE_CHECKING:
    from tilepolicy.formats.policies import PolicyText
    from tilepolicy.formats.records import ImportReport, Unusable

__all__ = ["FormatName", "NamesOfDlhs", "import_", "register"]


class FormatName(StrEnum):
    """What can be imported."""

    TOKAMAX = "tokamax"
    VLLM = "vllm"
    SGLANG = "sglang"
    TPU_INFERENCE = "tpu-inference"


class NamesOfDlhs(StrEnum):
    """What ``tile_k`` of a Tokamax v1 dlhs entry means."""

    AUTO = "auto"
    FORWARD = "forward"
    CONTRACTING_FIRST = "contracting-first"


def import_(
    source_format: Annotated[
        FormatName, typer.Argument(metavar="FORMAT", show_default=False, help="Whose files.")
    ],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            show_default=False,
            help="File or directory: a Tokamax cache or AutotuningResult, fused-MoE files, "
            "tuned*.py tables (parsed, never executed).",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Policy to write."),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "-d",
            help="Device of files that name none; of a directory of several, the one to read.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the policy; default: from the output file.")
    ] = None,
    op: Annotated[
        str, typer.Option(metavar="GLOB", help="Which Tokamax ops of a directory.")
    ] = "*ragged_dot",
    nearest: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FACT=RATIO",
            help="How far a call may be from a point: batch_seq=2. Default: equal sizes only.",
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="vllm, sglang: experts of a token.")
    ] = None,
    dlhs_names: Annotated[
        NamesOfDlhs, typer.Option(help="tokamax: meaning of tile_k in v1 dlhs entries.")
    ] = NamesOfDlhs.AUTO,
    list_unusable: Annotated[
        bool, typer.Option("--list", help="List every entry that gives no tile, with its place.")
    ] = False,
) -> None:
    """Write a policy from tiles that were measured or tuned elsewhere.

    Entries without a usable tile are counted by reason, never dropped silently; a malformed file
    is an error that names file and line, and nothing is written.
    """
    from tilepolicy.files import write_atomically
    from tilepolicy.formats.policies import check_policy_text
    from tilepolicy.formats.sources import SourceOptions, read_source

    options = SourceOptions(_device(device), op, dlhs_names.value, top_k)
    report = read_source(source_format.value, source, options)
    report.raise_errors()
    print_warnings(report.problems)
    policy = _policy_text(report, name or _name_of(output), source_format, source, nearest)
    check_policy_text(policy.text, str(output))
    write_atomically(output, policy.text)
    write_output(_summary(report, policy, output, list_unusable=list_unusable))


def _device(name: str | None) -> str | None:
    from tilepolicy.facts.devices import normalize_device

    if name is None:
        return None
    device = normalize_device(name)
    if device is None:
        raise typer.BadParameter(f"{name!r} is not a device", param_hint="--device")
    return device


def _name_of(output: Path) -> str:
    """A legal policy name from a file's name."""
    kept = "".join(c if c.isalnum() or c in "._+-" else "-" for c in output.stem)
    return kept if kept[:1].isalnum() else f"imported{kept}"


def _policy_text(
    report: ImportReport,
    name: str,
    source_format: FormatName,
    source: Path,
    nearest: Sequence[str] | None,
) -> PolicyText:
    from tilepolicy.formats.policies import policy_text

    header = (
        f"Imported by tilepolicy from {source_format.value}: {source.name}.\n"
        f"{len(report.entries)} usable entries, {len(report.unusable)} without a usable tile.\n"
    )
    return policy_text(report, name=name, header=header, nearest=_ratios(nearest or ()))


def _ratios(given: Iterable[str]) -> dict[str, float]:
    from tilepolicy.formats.policies import EXACT

    ratios = dict(EXACT)
    for text in given:
        fact, _, ratio = text.partition("=")
        try:
            value = float(ratio)
        except ValueError:
            value = 0.0
        if fact not in ratios or not 1.0 <= value < float("inf"):
            message = f"{text!r} is not FACT=RATIO with a ratio of 1 or more and one of: "
            raise typer.BadParameter(message + ", ".join(ratios), param_hint="--nearest")
        ratios[fact] = value
    return ratios


def _summary(report: ImportReport, policy: PolicyText, output: Path, *, list_unusable: bool) -> str:
    left_out = [*report.unusable, *policy.left_out]
    lines = [
        f"{output}: {policy.rules} rules, {policy.points} table points, "
        f"from {len(report.entries)} usable entries"
    ]
    lines += _reasons(left_out)
    if list_unusable:
        lines += [f"  {one.place}: {one.op}: {one.reason}" for one in left_out]
    return "\n".join(lines) + "\n"


def _reasons(left_out: Iterable[Unusable]) -> list[str]:
    counts = Counter((one.op, one.device or "any device", one.reason) for one in left_out)
    if not counts:
        return []
    width = len(str(max(counts.values())))
    rows = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    head = f"{sum(counts.values())} entries give no tile of their own:"
    return [
        head,
        *(f"  {n:>{width}}  {op} on {device}: {reason}" for (op, device, reason), n in rows),
    ]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "import",
        epilog="Example: tilepolicy import tokamax tokamax/data/autotuning/tpu_v6_lite "
        "-o tuned.yml",
    )(import_)
