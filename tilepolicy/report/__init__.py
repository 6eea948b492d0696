"""Resolutions and problems as text: tables, JSON, YAML, MaxText arguments, SARIF, annotations."""

from __future__ import annotations

from tilepolicy.report.blocks import Block, Cell, Column, Lines, Row, Table, draw, plain
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
from tilepolicy.report.table import origin_text, resolution_blocks, setting_blocks, value_text

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
