"""Problems in words and as GitHub annotations."""

from __future__ import annotations

from collections.abc import Sequence

from tilepolicy.errors import Problem

__all__ = ["github", "summary", "whole_message"]


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
    return f"::{problem.severity} {pairs}::{_data(whole_message(problem))}"


def whole_message(problem: Problem) -> str:
    """Message, path and remedy without the place, which these formats carry on their own."""
    where = f" (at {problem.path})" if problem.path else ""
    remedy = f"\nremedy: {problem.remedy}" if problem.remedy else ""
    return f"{problem.message}{where}{remedy}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
