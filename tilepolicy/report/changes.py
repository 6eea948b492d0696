"""Two snapshots side by side."""

from __future__ import annotations

from collections.abc import Iterable

from tilepolicy.report.blocks import Block, Cell, Column, Lines, Row, Table
from tilepolicy.report.table import origin_text, value_text
from tilepolicy.resolve.snapshot import Change, Recorded, Snapshot, compare

__all__ = ["changes_blocks"]


def changes_blocks(title: str, before: Snapshot, after: Snapshot) -> tuple[list[Block], bool]:
    """What differs, and whether any setting does.

    A changed policy digest, version, device or backend is shown, but only a setting counts.
    """
    changes = compare(before, after)
    head = [title, *_context(before, after)]
    if not changes:
        return [Lines((*head, f"no setting differs ({len(after.settings)} compared)"))], False
    columns = (
        Column("setting"),
        Column("before", right=True),
        Column("after", right=True),
        Column("honoured by"),
        Column("from", wrap=True),
    )
    return [Lines(tuple(head)), Table(columns, tuple(_row(change) for change in changes))], True


def _context(before: Snapshot, after: Snapshot) -> Iterable[str]:
    pairs = [
        ("policy", f"{before.policy} {before.digest[:12]}", f"{after.policy} {after.digest[:12]}"),
        ("device", before.device or "not known", after.device or "not known"),
        ("backend", before.backend, after.backend),
    ]
    pairs += [
        (name, before.versions.get(name, "none"), after.versions.get(name, "none"))
        for name in dict.fromkeys((*before.versions, *after.versions))
    ]
    return (f"  {name}  {one} → {other}" for name, one, other in pairs if one != other)


def _row(change: Change) -> Row:
    readers = list(
        dict.fromkeys(
            one.by or "nothing" for one in (change.before, change.after) if one is not None
        )
    )
    cells = (
        Cell(change.name, style="bold"),
        Cell(_value(change.before), style="red"),
        Cell(_value(change.after), style="green"),
        Cell(" → ".join(readers)),
        Cell(_origin(change.after)),
    )
    return Row(cells)


def _value(recorded: Recorded | None) -> str:
    return "absent" if recorded is None else value_text(recorded.value)


def _origin(recorded: Recorded | None) -> str:
    if recorded is None or recorded.origin is None:
        return ""
    return f"{recorded.origin.kind} {origin_text(recorded.origin, full=False)}".rstrip()
