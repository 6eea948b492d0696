"""Checking files of any kind that tilepolicy reads: which kind it is, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tilepolicy.errors import Place, Problem, TilepolicyError
from tilepolicy.source import Document, parse

__all__ = ["Checked", "Kind", "kind_of", "validate"]

Kind = Literal["policy", "config", "lock", "unreadable"]

_POLICY_KEYS: Final = frozenset({"extends", "vocab", "gmm", "locks", "ops", "engine"})
"""Top-level keys of a policy that no MaxText config has."""

_LOCK_KEY: Final = "tiles_lock"
_NOT_KNOWN_HERE: Final = ("missing-fact",)
"""Codes that are errors when resolving, and no fault of the file."""

_ABOUT_THE_POLICY: Final = ("no-match", "undecidable-rule")
"""Codes that say something of the policy, not of the config that is checked."""


@dataclass(frozen=True, slots=True)
class Checked:
    """One file.

    Attributes:
        file: as the user named it.
        kind: what it was taken for, by its content.
        problems: errors and warnings.
    """

    file: str
    kind: Kind
    problems: tuple[Problem, ...]

    @property
    def valid(self) -> bool:
        """Whether there is no error; warnings are none."""
        return not any(problem.severity == "error" for problem in self.problems)


def kind_of(document: Document) -> Kind:
    """What a document is: a lock by its key, a policy by its sections, else a MaxText config."""
    value = document.value
    if not document.readable or not isinstance(value, Mapping):
        return "unreadable"
    if _LOCK_KEY in value:
        return "lock"
    if _POLICY_KEYS & value.keys() or value.keys() <= {"version", "name"}:
        return "policy"
    return "config"


def validate(files: Iterable[str], *, allow_outside: bool = False) -> tuple[Checked, ...]:
    """Check files; one that is wrong does not keep the next from being checked.

    A config is resolved under ``maxtext-default``, so that MaxText's own rules count too; a size
    that cannot be known here (because MaxText is not installed) is a warning.

    Args:
        files: paths of policies, MaxText configs and locks.
        allow_outside: accept ``extends`` paths outside the extending policy's own folder.
    """
    return tuple(_validate(file, allow_outside=allow_outside) for file in files)


def _validate(file: str, *, allow_outside: bool) -> Checked:
    try:
        document = parse(Path(file).read_bytes(), file)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        problem = Problem("unreadable", f"cannot be read: {reason}", Place(file))
        return Checked(file, "unreadable", (problem,))
    kind = kind_of(document)
    if kind == "unreadable":
        return Checked(file, kind, document.problems or (_neither(document),))
    check = {"policy": _policy_problems, "config": _config_problems, "lock": _lock_problems}[kind]
    try:
        problems = check(file, allow_outside)
    except TilepolicyError as error:
        problems = error.problems
    return Checked(file, kind, tuple(_downgraded(problem) for problem in problems))


def _neither(document: Document) -> Problem:
    return Problem(
        "no-mapping",
        "this is neither a policy nor a MaxText config: it has no keys",
        document.place(),
        "a policy starts with `version: 1` and `name: …`",
    )


def _policy_problems(file: str, allow_outside: bool) -> tuple[Problem, ...]:
    from tilepolicy.policy import load

    load(file, allow_outside=allow_outside)
    return ()


def _config_problems(file: str, allow_outside: bool) -> tuple[Problem, ...]:  # noqa: ARG001 - one signature for all kinds
    from tilepolicy.policy import load
    from tilepolicy.resolve import resolve

    warnings = resolve(load("maxtext-default"), file).warnings
    return tuple(problem for problem in warnings if problem.code not in _ABOUT_THE_POLICY)


def _lock_problems(file: str, allow_outside: bool) -> tuple[Problem, ...]:  # noqa: ARG001 - as above
    from tilepolicy.lockfile import read_lock

    read_lock(file)
    return ()


def _downgraded(problem: Problem) -> Problem:
    if problem.code in _NOT_KNOWN_HERE:
        return problem._replace(severity="warning")
    return problem
