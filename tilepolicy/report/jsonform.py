"""The stable JSON form of a resolution and of problems; YAML output has the same form.

The types here are what ``schemas/resolution.schema.json`` is generated from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypedDict

from pydantic import ConfigDict, with_config

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


def _titled(title: str) -> Callable[[type[Any]], type[Any]]:
    """Gives a form its title; its descriptions are the texts below its keys."""
    return with_config(ConfigDict(title=title, use_attribute_docstrings=True))


@_titled("place")
class PlaceJson(TypedDict):
    """Where something stands in a file."""

    file: str
    """File as the user named it."""
    line: int | None
    """1-based line; null for the whole file."""
    column: int | None
    """1-based column in characters; null for the whole line."""


@_titled("problem")
class ProblemJson(TypedDict):
    """One error or warning."""

    code: str
    """Stable identifier, `unknown-key`."""
    severity: Literal["error", "warning"]
    """An error makes a command fail."""
    message: str
    """What is wrong, in one sentence."""
    path: str
    """Path inside the document, `gmm.rules[0].tile`; empty where there is none."""
    place: PlaceJson | None
    """Where it is; null for a problem of no file."""
    remedy: str | None
    """What to do about it."""


@_titled("loser")
class LoserJson(TypedDict):
    """A value that was proposed for a setting and lost."""

    kind: KindJson
    """What proposed it."""
    value: Json
    """The value it proposed."""
    name: str
    """Rule or lock name, or the key of the config."""
    file: str | None
    """File of the proposal; null for defaults and automatic values."""
    line: int | None
    """1-based line in the file."""
    reason: str
    """Why it lost."""


@_titled("origin")
class OriginJson(TypedDict):
    """Where a value comes from, why, and what lost against it."""

    kind: KindJson
    """What decided, in order of strength: lock, config, rule, auto, default."""
    name: str
    """Rule or lock name, or the key of the config."""
    file: str | None
    """File that decided; null for defaults and automatic values."""
    line: int | None
    """1-based line in the file."""
    reason: str
    """The arithmetic, or the author's words."""
    lost: list[LoserJson]
    """The weaker proposals, strongest first."""


@_titled("honoured")
class HonouredJson(TypedDict):
    """Who makes a setting take effect on the selected backend."""

    by: Literal["maxtext", "apply"] | None
    """MaxText itself, only `tilepolicy apply` and `run`, or nothing at all."""
    why: str
    """Why, in one sentence."""


@_titled("setting")
class SettingJson(TypedDict):
    """One setting with its value, who honours it, and its origin."""

    value: Json
    """The value that the run will use, if something honours it."""
    honoured: HonouredJson
    """Who honours it."""
    origin: OriginJson
    """Where the value comes from."""


@_titled("policy")
class PolicyJson(TypedDict):
    """Identity of a policy."""

    name: str
    """Its name."""
    digest: str
    """SHA-256 of its content, in hexadecimal."""
    files: list[str]
    """Its files, inherited ones included."""


@_titled("tilepolicy resolution")
class ResolutionJson(TypedDict):
    """All settings of one MaxText config under one policy."""

    policy: PolicyJson
    """The policy that decided."""
    device: str | None
    """Normalised device name, `v6e`; null where it is not known."""
    backend: str
    """Grouped-matmul path that MaxText takes for this config."""
    settings: dict[str, SettingJson]
    """Setting name to its value and origin."""
    facts: dict[str, Json]
    """What the decisions could depend on."""
    warnings: list[ProblemJson]
    """Problems that do not make the resolution wrong."""


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
