"""Tables and lines of text, as data; drawn with rich on a terminal, as aligned text elsewhere.

rich is imported only when something is drawn with it: a piped command does not pay for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["Block", "Cell", "Column", "Lines", "Row", "Table", "draw", "plain", "wants_rich"]


class Cell(NamedTuple):
    """One text of a table; ``style`` is a rich style and means nothing in plain text."""

    text: str
    style: str = ""


class Column(NamedTuple):
    """Header and alignment of a column; only a ``wrap`` column may take several lines."""

    header: str
    right: bool = False
    wrap: bool = False


class Row(NamedTuple):
    """One row of a table, with further lines that belong to it (indented below it)."""

    cells: tuple[Cell, ...]
    details: tuple[str, ...] = ()


class Table(NamedTuple):
    """A table with notes below it."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


class Lines(NamedTuple):
    """Lines shown as they are, in one rich style."""

    lines: tuple[str, ...]
    style: str = ""


type Block = Table | Lines


def wants_rich(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that can show more than plain text."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def draw(blocks: Iterable[Block], stream: TextIO | None = None) -> None:
    """Draws blocks on a stream (standard output when None), with an empty line between them."""
    target = sys.stdout if stream is None else stream
    if wants_rich(target):
        _draw_rich(tuple(blocks), target)
    else:
        target.write(plain(blocks))


def plain(blocks: Iterable[Block]) -> str:
    """Blocks as aligned text without colour; no line is wrapped, so that it can be searched."""
    texts = (_plain_table(b) if isinstance(b, Table) else list(b.lines) for b in blocks)
    return "\n\n".join("\n".join(lines) for lines in texts) + "\n"


def _plain_table(table: Table) -> list[str]:
    headers = [column.header for column in table.columns]
    grid = [headers, *([cell.text for cell in row.cells] for row in table.rows)]
    widths = [max(len(line[at]) for line in grid) for at in range(len(headers))]
    lines = [_aligned(headers, widths, table.columns)]
    for row in table.rows:
        lines.append(_aligned([cell.text for cell in row.cells], widths, table.columns))
        lines += [f"    {detail}" for detail in row.details]
    return lines + list(table.notes)


def _aligned(texts: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    parts = (
        text.rjust(width) if column.right else text.ljust(width)
        for text, width, column in zip(texts, widths, columns, strict=True)
    )
    return "  ".join(parts).rstrip()


def _draw_rich(blocks: tuple[Block, ...], stream: TextIO) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, soft_wrap=False)
    for at, block in enumerate(blocks):
        if at:
            console.print()
        if isinstance(block, Lines):
            for line in block.lines:
                console.print(Text(line, style=block.style))
            continue
        console.print(_rich_table(block))
        for note in block.notes:
            console.print(Text(note, style="dim"))


def _rich_table(table: Table) -> RichTable:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for column in table.columns:
        drawn.add_column(
            column.header,
            justify="right" if column.right else "left",
            no_wrap=not column.wrap,
            overflow="fold",
        )
    last = len(table.columns) - 1
    for row in table.rows:
        drawn.add_row(*(Text(cell.text, style=cell.style) for cell in row.cells))
        for detail in row.details:
            blank = [Text("")] * last
            drawn.add_row(*blank, Text(detail, style="dim"))
    return drawn
