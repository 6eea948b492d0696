"""Problems as text, JSON, SARIF 2.1.0 and GitHub annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from tilepolicy import __version__
from tilepolicy.errors import Problem

__all__ = ["github", "sarif", "summary"]

SARIF_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def summary(problems: Sequence[Problem]) -> str:
    """``2 errors, 1 warning``; empty when there is nothing."""
    counts = {
        word: sum(problem.severity == word for problem in problems) for word in ("error", "warning")
    }
    return ", ".join(
        f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts.items() if count
    )


def github(problem: Problem) -> str:
    """One workflow command that GitHub shows as an annotation at the line."""
    properties = {}
    if problem.place is not None:
        properties["file"] = problem.place.file
        if problem.place.line is not None:
            properties["line"] = str(problem.place.line)
        if problem.place.column is not None:
            properties["col"] = str(problem.place.column)
    properties["title"] = f"tilepolicy: {problem.code}"
    pairs = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{problem.severity} {pairs}::{_data(_whole(problem))}"


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
        "message": {"text": _whole(problem)},
    }
    if problem.place is not None:
        physical: dict[str, Any] = {"artifactLocation": {"uri": quote(problem.place.file)}}
        if problem.place.line is not None:
            physical["region"] = {"startLine": problem.place.line}
            if problem.place.column is not None:
                physical["region"]["startColumn"] = problem.place.column
        result["locations"] = [{"physicalLocation": physical}]
    return result


def _whole(problem: Problem) -> str:
    """Message, path and remedy without the place, which these formats carry on their own."""
    where = f" (at {problem.path})" if problem.path else ""
    remedy = f"\nremedy: {problem.remedy}" if problem.remedy else ""
    return f"{problem.message}{where}{remedy}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
