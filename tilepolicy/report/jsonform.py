"""The stable JSON form of a resolution and of problems; YAML output has the same form.

The types here are what ``schemas/resolution.schema.json`` is generated from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, TypedDict

from pydantic import Field

from tilepolicy.errors import Place, Problem
from tilepolicy.resolution import Loser, Origin, Resolution, ResolvedSetting

__all__ = [
    "HonouredJson",
    "LoserJson",
    "OriginJson",
    "PlaceJson",
    "PolicyJson",
    "ProblemJson",
    "ResolutionJson",
    "SettingJson",
    "problem_json",
    "problems_json",
    "resolution_json",
]

type Json = bool | int | float | str | None
KindJson = Literal["lock", "config", "rule", "auto", "default"]


class PlaceJson(TypedDict):
    """Where something stands in a file."""

    file: Annotated[str, Field(description="File as the user named it.")]
    line: Annotated[int | None, Field(description="1-based line.")]
    column: Annotated[int | None, Field(description="1-based column, in characters.")]


class ProblemJson(TypedDict):
    """One error or warning."""

    code: Annotated[str, Field(description="Stable identifier, `unknown-key`.")]
    severity: Literal["error", "warning"]
    message: str
    path: Annotated[str, Field(description="Path inside the document, `gmm.rules[0].tile`.")]
    place: PlaceJson | None
    remedy: Annotated[str | None, Field(description="What to do about it.")]


class LoserJson(TypedDict):
    """A value that was proposed for a setting and lost."""

    kind: KindJson
    value: Json
    name: str
    file: str | None
    line: int | None
    reason: Annotated[str, Field(description="Why it lost.")]


class OriginJson(TypedDict):
    """Where a value comes from, why, and what lost against it."""

    kind: KindJson
    name: Annotated[str, Field(description="Rule or lock name, or the key of the config.")]
    file: str | None
    line: int | None
    reason: str
    lost: Annotated[list[LoserJson], Field(description="Weaker proposals, strongest first.")]


class HonouredJson(TypedDict):
    """Who makes a setting take effect on the selected backend."""

    by: Annotated[
        Literal["maxtext", "apply"] | None,
        Field(description="MaxText itself, `tilepolicy apply`/`run`, or nothing at all."),
    ]
    why: str


class SettingJson(TypedDict):
    """One setting with its value, who honours it, and its origin."""

    value: Json
    honoured: HonouredJson
    origin: OriginJson


class PolicyJson(TypedDict):
    """Identity of the policy."""

    name: str
    digest: Annotated[str, Field(description="SHA-256 of the content, in hexadecimal.")]
    files: list[str]


class ResolutionJson(TypedDict):
    """All settings of one MaxText config under one policy."""

    policy: PolicyJson
    device: Annotated[str | None, Field(description="Normalised device name, `v6e`.")]
    backend: Annotated[str, Field(description="Grouped-matmul path that MaxText takes.")]
    settings: Annotated[dict[str, SettingJson], Field(description="Setting name to its value.")]
    facts: Annotated[dict[str, Json], Field(description="What the decisions could depend on.")]
    warnings: list[ProblemJson]


def resolution_json(resolution: Resolution) -> ResolutionJson:
    """The stable JSON form of a resolution."""
    return {
        "policy": {
            "name": resolution.policy.name,
            "digest": resolution.policy.digest,
            "files": list(resolution.policy.files),
        },
        "device": resolution.device,
        "backend": resolution.backend,
        "settings": {name: _setting(one) for name, one in resolution.settings.items()},
        "facts": dict(resolution.facts),
        "warnings": problems_json(resolution.warnings),
    }


def problems_json(problems: Iterable[Problem]) -> list[ProblemJson]:
    """Problems in their order."""
    return [problem_json(problem) for problem in problems]


def problem_json(problem: Problem) -> ProblemJson:
    """One problem."""
    return {
        "code": problem.code,
        "severity": problem.severity,
        "message": problem.message,
        "path": problem.path,
        "place": None if problem.place is None else _place(problem.place),
        "remedy": problem.remedy,
    }


def _place(place: Place) -> PlaceJson:
    return {"file": place.file, "line": place.line, "column": place.column}


def _setting(setting: ResolvedSetting) -> SettingJson:
    return {
        "value": setting.value,
        "honoured": {"by": setting.honoured.by, "why": setting.honoured.why},
        "origin": _origin(setting.origin),
    }


def _origin(origin: Origin) -> OriginJson:
    return {
        "kind": origin.kind,
        "name": origin.name,
        "file": origin.file,
        "line": origin.line,
        "reason": origin.reason,
        "lost": [_loser(loser) for loser in origin.lost],
    }


def _loser(loser: Loser) -> LoserJson:
    return {
        "kind": loser.kind,
        "value": loser.value,
        "name": loser.name,
        "file": loser.file,
        "line": loser.line,
        "reason": loser.reason,
    }
