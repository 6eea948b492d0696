"""Rules as the index takes them: conditions, what they decide, and where they stand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple

from tilepolicy.model.when import When
from tilepolicy.resolution import FactValue, SettingValue
from tilepolicy.settings import AXES

__all__ = ["Facts", "Found", "Measured", "Rule", "Table"]

type Facts = Mapping[str, FactValue]

_LANE: Final = 128
"""A tile may exceed its dimension up to the next multiple of this: the TPU's lane width."""


class Measured(NamedTuple):
    """One point of a table.

    Attributes:
        at: the facts that were measured.
        tile: the tile that was best there.
        source: where the measurement comes from.
    """

    at: Mapping[str, int]
    tile: Mapping[str, SettingValue]
    source: str = ""

    def __str__(self) -> str:
        at = ", ".join(f"{name} {value}" for name, value in self.at.items())
        return f"{at} ({self.source})" if self.source else at


class Found(NamedTuple):
    """The point of a table that serves a call.

    Attributes:
        values: its tile, made legal for the call.
        reason: which point, how far, and what was changed.
    """

    values: Mapping[str, SettingValue]
    reason: str


@dataclass(frozen=True)
class Table:
    """Measured points with a bounded nearest match.

    The distance of a point is the sum over facts of ``|log2(fact / point)|``. Only points within
    the declared ratio of every fact count; the nearest wins, the earlier on a tie.

    Attributes:
        nearest: fact to the largest ratio, either way; 1.0 = must be equal.
        points: the points, in the order of the file.
    """

    nearest: Mapping[str, float]
    points: tuple[Measured, ...]

    @cached_property
    def _exact(self) -> tuple[str, ...]:
        return tuple(name for name, ratio in self.nearest.items() if ratio == 1.0)

    @cached_property
    def _loose(self) -> tuple[tuple[str, float], ...]:
        return tuple((name, math.log2(r)) for name, r in self.nearest.items() if r != 1.0)

    @cached_property
    def _groups(self) -> Mapping[tuple[int, ...], list[tuple[Measured, tuple[float, ...]]]]:
        """Points by their exact facts, with the logarithms of the others."""
        groups: dict[tuple[int, ...], list[tuple[Measured, tuple[float, ...]]]] = {}
        for point in self.points:
            logs = tuple(math.log2(point.at[name]) for name, _ in self._loose)
            key = tuple(point.at[name] for name in self._exact)
            groups.setdefault(key, []).append((point, logs))
        return groups

    @cached_property
    def fields(self) -> frozenset[str]:
        """Every field that some point decides."""
        return frozenset(name for point in self.points for name in point.tile)

    def find(self, facts: Facts) -> Found | str:
        """The point that serves a call, or in words why none does.

        Args:
            facts: holds at least the facts of ``nearest``.
        """
        sizes = {name: facts[name] for name in self.nearest}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                return f"{name} is {value}, which is no size"
        group = self._groups.get(tuple(int(sizes[name]) for name in self._exact), [])
        logs = [math.log2(float(sizes[name])) for name, _ in self._loose]
        best: tuple[float, Measured] | None = None
        for point, at in group:
            gaps = [abs(a - b) for a, b in zip(logs, at, strict=True)]
            reach = zip(gaps, self._loose, strict=True)
            if all(gap <= limit + 1e-9 for gap, (_, limit) in reach):
                distance = sum(gaps)
                if best is None or distance < best[0]:
                    best = (distance, point)
        if best is None:
            return self._out_of_reach(sizes)
        return _served(*best, facts)

    def _out_of_reach(self, sizes: Facts) -> str:
        """Names the point with the smallest distance and the fact that is too far from it."""

        def gap(point: Measured, name: str) -> float:
            return abs(math.log2(float(sizes[name]) / point.at[name]))

        point = min(self.points, key=lambda p: sum(gap(p, name) for name in self.nearest))
        worst = max(self.nearest, key=lambda name: gap(point, name) - math.log2(self.nearest[name]))
        ratio, limit = 2 ** gap(point, worst), self.nearest[worst]
        allowed = "it must be equal" if limit == 1.0 else f"{limit:g}x is allowed"
        return (
            f"no point is near enough: from the nearest, {point}, {worst} {sizes[worst]} is "
            f"{ratio:.5g}x away, {allowed}"
        )


def _served(distance: float, point: Measured, facts: Facts) -> Found:
    """A point's tile for a call; a neighbour's is cut to what the call's sizes allow."""
    values = dict(point.tile)
    reason = f"table point {point}, distance {distance:.2f}"
    if distance == 0:
        return Found(values, reason)
    cuts = []
    for axis in AXES:
        tile, size = values.get(axis), facts.get(axis)
        if isinstance(tile, int) and isinstance(size, int):
            largest = -(-size // _LANE) * _LANE
            if tile > largest:
                values[axis] = largest
                cuts.append(f"{axis} cut from {tile} to {largest}")
    return Found(values, "; ".join([reason, *cuts]))


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: its name.
        when: its conditions.
        values: field or setting to value; empty for a table.
        table: its table, if it has one.
        file: file it stands in, as the user named it.
        line: 1-based line of the rule.
        note: the author's reason; empty if none was given.
        kind: ``rule`` or ``lock``.
    """

    name: str
    when: When = field(default_factory=When)
    values: Mapping[str, SettingValue] = field(default_factory=dict)
    table: Table | None = None
    file: str | None = None
    line: int | None = None
    note: str = ""
    kind: Literal["rule", "lock"] = "rule"

    @cached_property
    def fields(self) -> frozenset[str]:
        """Every field that the rule may decide."""
        return frozenset(self.values) if self.table is None else self.table.fields

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """The facts without which the rule cannot be decided."""
        conditions = [fact for fact, _ in self.when]
        return tuple(dict.fromkeys([*conditions, *(self.table.nearest if self.table else ())]))

    @cached_property
    def reason(self) -> str:
        """The author's reason, else the conditions."""
        return self.note or (f"when {self.when}" if self.when.items else "applies always")

    @cached_property
    def _always(self) -> Found:
        return Found(self.values, self.reason)

    def decide(self, facts: Facts) -> Found | str:
        """What the rule says of a call whose facts meet its conditions, or why it says nothing."""
        if self.table is None:
            return self._always
        found = self.table.find(facts)
        if isinstance(found, Found) and self.note:
            return Found(found.values, f"{self.note}; {found.reason}")
        return found
