"""Problems with a place and a remedy, and the exceptions that carry them.

This module imports nothing of the package, so that everything may import it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

__all__ = [
    "AdapterError",
    "ConfigError",
    "HostMismatchError",
    "LayerError",
    "MissingLibraryError",
    "Place",
    "PolicyError",
    "Problem",
    "ScopeError",
    "StrictError",
    "TilepolicyError",
    "VerifyError",
]

Severity = Literal["error", "warning"]


class Place(NamedTuple):
    """Where something stands in a file.

    Attributes:
        file: path as the user named it, or a word such as ``<command line>``.
        line: 1-based line number; None when the whole file is meant.
        column: 1-based column in characters; None when the whole line is meant.
        text: the source line without its newline, shown above the caret.
    """

    file: str
    line: int | None = None
    column: int | None = None
    text: str | None = None

    def __str__(self) -> str:
        """``file:line:column``, as editors and compilers write it."""
        parts = [self.file]
        if self.line is not None:
            parts.append(str(self.line))
            if self.column is not None:
                parts.append(str(self.column))
        return ":".join(parts)

    def snippet(self) -> str:
        """The source line with a caret under the column; empty when it is not known."""
        if self.text is None or self.line is None:
            return ""
        shown = self.text.replace("\t", " ")
        column = min(self.column or 1, len(shown) + 1)
        start = max(0, column - 60)
        shown = shown[start : start + 100]
        gutter = f"{self.line} | "
        return f"{gutter}{shown}\n{' ' * (len(gutter) + column - 1 - start)}^"


class Problem(NamedTuple):
    """One thing that is wrong, where, and what to do about it.

    Attributes:
        code: stable kebab-case identifier (``unknown-key``), used by SARIF and in tests.
        message: one sentence without a trailing period.
        place: where it is; None for a problem of no file (a missing library).
        remedy: what to do, in the imperative; None when the message says it.
        path: path inside the document, ``gmm.rules[0].tile.embed_dim``.
        severity: ``error`` makes the command fail, ``warning`` does not.
    """

    code: str
    message: str
    place: Place | None = None
    remedy: str | None = None
    path: str = ""
    severity: Severity = "error"

    def __str__(self) -> str:
        head = f"{self.place}: " if self.place is not None else ""
        where = f" (at {self.path})" if self.path else ""
        lines = [f"{head}{self.severity}: {self.message}{where} [{self.code}]"]
        if self.place is not None and (snippet := self.place.snippet()):
            lines.extend(f"  {line}" for line in snippet.splitlines())
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)


class TilepolicyError(Exception):
    """Base of every exception that tilepolicy raises on purpose.

    Attributes:
        problems: every problem found in one run, in the order of files and lines.
    """

    problems: tuple[Problem, ...]

    def __init__(self, problems: Iterable[Problem] | Problem | str) -> None:
        if isinstance(problems, str):
            problems = Problem(code="error", message=problems)
        if isinstance(problems, Problem):
            problems = (problems,)
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class PolicyError(TilepolicyError):
    """A policy cannot be read, is malformed, or contradicts itself."""


class ConfigError(TilepolicyError):
    """A MaxText config or a ``KEY=VALUE`` argument is wrong, or breaks one of MaxText's rules."""


class MissingLibraryError(TilepolicyError, ImportError):
    """An optional library is not installed; the message gives the install line."""


class AdapterError(TilepolicyError):
    """An installed foreign library does not have what its adapter attaches to."""


class LayerError(TilepolicyError, ValueError):
    """Nothing says whether a grouped matmul belongs to wi or wo, and the two tables differ."""


class ScopeError(TilepolicyError):
    """A scope is used in a way that it does not support."""


class StrictError(TilepolicyError):
    """A strict scope ended with unused rules, missed lookups, or a differing effective config."""


class HostMismatchError(TilepolicyError):
    """Processes of one jax run entered a scope with different policies, configs or versions."""


class VerifyError(TilepolicyError):
    """A compiled program does not carry the tile that was resolved, or a tile does not fit."""
