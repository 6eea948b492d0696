"""Problems as SARIF 2.1.0, which code hosts show at the lines of a change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from tilepolicy import __version__
from tilepolicy.errors import Problem
from tilepolicy.report.problems import whole_message

__all__ = ["sarif"]

SARIF_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(problems: Sequence[Problem]) -> dict[str, Any]:
    """A SARIF log with one run; columns count characters, as tilepolicy's places do."""
    rules = sorted({problem.code for problem in problems})
    return {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "tilepolicy",
                        "semanticVersion": __version__,
                        "rules": [{"id": code} for code in rules],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_sarif_result(problem, rules) for problem in problems],
            }
        ],
    }


def _sarif_result(problem: Problem, rules: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": problem.code,
        "ruleIndex": rules.index(problem.code),
        "level": problem.severity,
        "message": {"text": whole_message(problem)},
    }
    if problem.place is not None:
        physical: dict[str, Any] = {"artifactLocation": {"uri": quote(problem.place.file)}}
        if problem.place.line is not None:
            physical["region"] = {"startLine": problem.place.line}
            if problem.place.column is not None:
                physical["region"]["startColumn"] = problem.place.column
        result["locations"] = [{"physicalLocation": physical}]
    return result
