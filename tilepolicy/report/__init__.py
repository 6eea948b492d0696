"""Resolutions and problems as text: tables, JSON, YAML, MaxText arguments, SARIF, annotations.

Each name is looked up when it is first used: a table does not pay for the JSON forms.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tilepolicy.report.blocks import Block, Cell, Column, Lines, Row, Table, draw, plain
    from tilepolicy.report.changes import changes_blocks
    from tilepolicy.report.formats import (
        ProblemFormat,
        ResolutionFormat,
        maxtext_lines,
        render_problems,
        render_resolution,
    )
    from tilepolicy.report.jsonform import (
        ResolutionJson,
        problem_json,
        problems_json,
        resolution_json,
    )
    from tilepolicy.report.table import (
        origin_text,
        resolution_blocks,
        setting_blocks,
        value_text,
    )

__all__ = [
    "Block",
    "Cell",
    "Column",
    "Lines",
    "ProblemFormat",
    "ResolutionFormat",
    "ResolutionJson",
    "Row",
    "Table",
    "changes_blocks",
    "draw",
    "maxtext_lines",
    "origin_text",
    "plain",
    "problem_json",
    "problems_json",
    "render_problems",
    "render_resolution",
    "resolution_blocks",
    "resolution_json",
    "setting_blocks",
    "value_text",
]

_HOMES: Final = {
    "blocks": ("Block", "Cell", "Column", "Lines", "Row", "Table", "draw", "plain"),
    "changes": ("changes_blocks",),
    "formats": (
        "ProblemFormat",
        "ResolutionFormat",
        "maxtext_lines",
        "render_problems",
        "render_resolution",
    ),
    "jsonform": ("ResolutionJson", "problem_json", "problems_json", "resolution_json"),
    "table": ("origin_text", "resolution_blocks", "setting_blocks", "value_text"),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"tilepolicy.report.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
