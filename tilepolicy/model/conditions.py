"""Conditions on one fact: frozen nodes, one type per meaning, equal when they mean the same.

A condition answers with a reason. It takes the value of the fact as its argument and knows
nothing of where the value comes from. ``condition_text`` parses what a policy says into these.
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from tilepolicy.versions import Version

__all__ = [
    "AllOf",
    "Answer",
    "AnyOf",
    "Condition",
    "Equals",
    "Glob",
    "Interval",
    "Multiple",
    "NotEqual",
    "Value",
    "show",
    "value_key",
]

type Value = bool | int | float | str | Version
type Ordered = int | float | Version

# Text that needs no quotes in a policy, and words that would be something else without them.
_BARE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_+/-]*")
_WORDS: Final = frozenset({"true", "false", "null"})


class Answer(NamedTuple):
    """Whether a condition holds, and why.

    Attributes:
        holds: the answer.
        reason: ``2048 is not >=4096``; true of the answer it comes with.
    """

    holds: bool
    reason: str


def value_key(value: Value) -> tuple[str, Value]:
    """A value with its kind: true, 1 and "1" differ, 1 and 1.0 do not."""
    if isinstance(value, bool):
        return ("flag", value)
    if isinstance(value, int | float):
        return ("number", value)
    return ("text" if isinstance(value, str) else "version", value)


def show(value: Value) -> str:
    """A value as a policy would write it; text that could be read otherwise in quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and (value in _WORDS or not _BARE.fullmatch(value)):
        return f'"{value}"'
    return str(value)


class Condition(ABC):
    """What a rule asks of one fact. ``str(condition)`` is its normal form."""

    __slots__ = ()

    @abstractmethod
    def holds(self, value: Value) -> bool:
        """Whether the condition holds for a value of the fact."""

    def evaluate(self, value: Value) -> Answer:
        """Whether the condition holds for a value of the fact, with the reason."""
        holds = self.holds(value)
        return Answer(holds, f"{show(value)} is {'' if holds else 'not '}{self}")


@dataclass(frozen=True, slots=True)
class Equals(Condition):
    """Exactly this value, of exactly this kind."""

    kind: str
    value: Value

    @classmethod
    def of(cls, value: Value) -> Equals:
        """The condition that a value equals this one."""
        return cls(*value_key(value))

    def holds(self, value: Value) -> bool:
        """Whether the value is this one."""
        return value_key(value) == (self.kind, self.value)

    def __str__(self) -> str:
        return show(self.value)


@dataclass(frozen=True, slots=True)
class NotEqual(Condition):
    """Any number or version but this one."""

    kind: str
    value: Ordered

    def holds(self, value: Value) -> bool:
        """Whether the value is of this kind and another one."""
        kind, value = value_key(value)
        return kind == self.kind and value != self.value

    def __str__(self) -> str:
        return f"!={self.value}"


@dataclass(frozen=True, slots=True)
class Interval(Condition):
    """Numbers or versions between two bounds.

    Attributes:
        kind: ``number`` or ``version``.
        low: lower bound, None for none.
        high: upper bound, None for none.
        low_open: the lower bound itself is left out.
        high_open: the upper bound itself is left out.
    """

    kind: str
    low: Ordered | None = None
    high: Ordered | None = None
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: Value) -> bool:
        """Whether the value is of this kind and lies between the bounds."""
        if value_key(value)[0] != self.kind:
            return False
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):  # type: ignore[operator]  # the kinds are equal here
            return False
        return self.high is None or value < self.high or (value == self.high and not self.high_open)  # type: ignore[operator]  # the kinds are equal here

    @property
    def empty(self) -> bool:
        """Whether no value lies between the bounds."""
        if self.low is None or self.high is None:
            return False
        if self.low == self.high:
            return self.low_open or self.high_open
        return bool(self.low > self.high)  # type: ignore[operator]  # both are of one kind

    def meet(self, other: Interval) -> Interval:
        """The values that both intervals hold."""
        low, low_open = self.low, self.low_open
        if other.low is not None:
            if low is None or other.low > low:  # type: ignore[operator]  # both are of one kind
                low, low_open = other.low, other.low_open
            elif other.low == low:
                low_open = low_open or other.low_open
        high, high_open = self.high, self.high_open
        if other.high is not None:
            if high is None or other.high < high:  # type: ignore[operator]  # both are of one kind
                high, high_open = other.high, other.high_open
            elif other.high == high:
                high_open = high_open or other.high_open
        return Interval(self.kind, low, high, low_open, high_open)

    def __str__(self) -> str:
        if self.low is not None and self.high is not None and not (self.low_open or self.high_open):
            return f"{self.low}..{self.high}"
        low = "" if self.low is None else f">{'' if self.low_open else '='}{self.low}"
        high = "" if self.high is None else f"<{'' if self.high_open else '='}{self.high}"
        return ",".join(part for part in (low, high) if part)


@dataclass(frozen=True, slots=True)
class Multiple(Condition):
    """Whole numbers that this one divides."""

    of: int

    def holds(self, value: Value) -> bool:
        """Whether the value is a whole number and a multiple."""
        return value_key(value)[0] == "number" and value % self.of == 0  # type: ignore[operator]  # a number here

    def __str__(self) -> str:
        return f"%{self.of}"


@dataclass(frozen=True, slots=True)
class Glob(Condition):
    """Text that a shell pattern matches: ``*`` any, ``?`` one, ``[ab]`` one of."""

    pattern: str

    def holds(self, value: Value) -> bool:
        """Whether the value is text, or a version's text, that the whole pattern matches."""
        text = value.text if isinstance(value, Version) else value
        return isinstance(text, str) and _regex(self.pattern).fullmatch(text) is not None

    def __str__(self) -> str:
        return self.pattern


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern))


@dataclass(frozen=True, slots=True)
class AllOf(Condition):
    """Several conditions at once; made by :meth:`of`, which keeps one order."""

    parts: tuple[Condition, ...]

    @classmethod
    def of(cls, parts: set[Condition]) -> Condition:
        """The conjunction of one or more conditions."""
        ordered = tuple(sorted(parts, key=str))
        return ordered[0] if len(ordered) == 1 else cls(ordered)

    def holds(self, value: Value) -> bool:
        """Whether every part holds."""
        return all(part.holds(value) for part in self.parts)

    def __str__(self) -> str:
        return ",".join(map(str, self.parts))


@dataclass(frozen=True, slots=True)
class AnyOf(Condition):
    """A list of alternatives; made by :meth:`of`, which keeps one order and drops repetitions."""

    parts: tuple[Condition, ...]

    @classmethod
    def of(cls, parts: set[Condition]) -> Condition:
        """The disjunction of one or more conditions, nested lists flattened."""
        flat: set[Condition] = set()
        for part in parts:
            flat.update(part.parts if isinstance(part, AnyOf) else {part})
        ordered = tuple(sorted(flat, key=str))
        return ordered[0] if len(ordered) == 1 else cls(ordered)

    def holds(self, value: Value) -> bool:
        """Whether one of the parts holds."""
        return any(part.holds(value) for part in self.parts)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.parts))}]"
