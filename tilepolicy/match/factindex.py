"""Which of many rules hold for a value of one fact, as a bit mask, without asking each.

Bit ``i`` of a mask stands for rule ``i``. Equalities are looked up, intervals found by bisection in
sorted bounds, and the few other conditions asked once per value. Masks of thousands of rules are
combined by a handful of operations on whole integers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

from tilepolicy.model.condition_text import normalize_value
from tilepolicy.model.conditions import AnyOf, Condition, Equals, Interval, Value, value_key
from tilepolicy.model.factnames import Fact

__all__ = ["FactIndex", "bits_of", "mask_of"]

_STRIDE: Final = 4
_MAX_REMEMBERED: Final = 1024


def mask_of(bits: Iterable[int]) -> int:
    """The mask with these bits set."""
    listed = list(bits)
    if len(listed) == 1:
        return 1 << listed[0]
    buffer = bytearray(max(listed, default=0) // 8 + 1)
    for bit in listed:
        buffer[bit >> 3] |= 1 << (bit & 7)
    return int.from_bytes(buffer, "little")


def bits_of(mask: int) -> Iterator[int]:
    """The set bits of a mask, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class _Bounds:
    """Bounds in ascending order, each with its rule's bit; answers with cumulative masks.

    A mask is kept for every fourth bound only: one for each would take 12 MB for 10,000 rules.
    """

    def __init__(self, bounds: list[tuple[Any, int]]) -> None:
        bounds.sort()
        self._keys = [key for key, _ in bounds]
        self._bits = [bit for _, bit in bounds]
        self._masks = [0]
        for start in range(0, len(bounds), _STRIDE):
            self._masks.append(self._masks[-1] | mask_of(self._bits[start : start + _STRIDE]))
        self._all = self._masks[-1]

    def at_most(self, key: tuple[Any, int]) -> int:
        """Rules whose bound is at most ``key``."""
        return self._first(bisect_right(self._keys, key))

    def at_least(self, key: tuple[Any, int]) -> int:
        """Rules whose bound is at least ``key``."""
        return self._all ^ self._first(bisect_left(self._keys, key))

    def _first(self, count: int) -> int:
        whole = count // _STRIDE
        mask = self._masks[whole]
        for bit in self._bits[whole * _STRIDE : count]:
            mask |= 1 << bit
        return mask


class _Intervals:
    """Intervals of one kind, at most one per rule."""

    def __init__(self, items: list[tuple[int, Interval]]) -> None:
        # The second part of a key orders open against closed bounds of one value.
        self._lows = _Bounds([((i.low, int(i.low_open)), b) for b, i in items if i.low is not None])
        self._highs = _Bounds(
            [((i.high, int(not i.high_open)), b) for b, i in items if i.high is not None]
        )
        self._no_low = mask_of(b for b, i in items if i.low is None)
        self._no_high = mask_of(b for b, i in items if i.high is None)

    def holding(self, value: Value) -> int:
        """Rules whose interval holds the value."""
        low = self._no_low | self._lows.at_most((value, 0))
        return low & (self._no_high | self._highs.at_least((value, 1)))

    def containing(self, interval: Interval) -> int:
        """Rules whose interval holds all of another."""
        low, high = self._no_low, self._no_high
        if interval.low is not None:
            low |= self._lows.at_most((interval.low, int(interval.low_open)))
        if interval.high is not None:
            high |= self._highs.at_least((interval.high, int(not interval.high_open)))
        return low & high


def _by_condition(
    conditions: Iterable[tuple[int, Condition]],
) -> Collection[tuple[Condition, list[int]]]:
    """Conditions with the rules that share them.

    Told apart by identity: the reader of a policy gives one object for one text, and comparing
    ten thousand conditions by value would take longer than all the rest.
    """
    shared: dict[int, tuple[Condition, list[int]]] = {}
    for bit, condition in conditions:
        found = shared.get(id(condition))
        if found is None:
            shared[id(condition)] = (condition, [bit])
        else:
            found[1].append(bit)
    return shared.values()


class FactIndex:
    """All conditions on one fact.

    Attributes:
        mentions: the rules that have a condition on the fact.
        variety: number of different conditions.
    """

    def __init__(self, fact: Fact | None, conditions: Iterable[tuple[int, Condition]]) -> None:
        self._fact = fact
        self._seen: dict[tuple[type, object], int] = {}
        self._implied: dict[Condition, int] = {}
        equal: dict[tuple[str, Value], list[int]] = defaultdict(list)
        intervals: dict[str, list[tuple[int, Interval]]] = defaultdict(list)
        others: dict[Condition, list[int]] = defaultdict(list)
        mentions: list[int] = []
        shared = _by_condition(conditions)
        self.variety = len(shared)
        for condition, bits in shared:
            mentions += bits
            if isinstance(condition, Interval):
                intervals[condition.kind] += [(bit, condition) for bit in bits]
                continue
            rest = []
            for part in condition.parts if isinstance(condition, AnyOf) else (condition,):
                if isinstance(part, Equals):
                    equal[part.kind, part.value] += bits
                else:
                    rest.append(part)
            if rest:
                others[AnyOf.of(set(rest))] += bits
        self.mentions = mask_of(mentions)
        self._equal = {key: mask_of(bits) for key, bits in equal.items()}
        self._intervals = {kind: _Intervals(items) for kind, items in intervals.items()}
        self._others = {condition: mask_of(bits) for condition, bits in others.items()}

    def allowing(self, raw: bool | int | float | str) -> int:
        """The rules that a value of the fact does not rule out, those without a condition too.

        A negative number: its infinitely many leading ones stand for the rules that say nothing.
        """
        key = (type(raw), raw)
        mask = self._seen.get(key)
        if mask is None:
            mask = self._holding(normalize_value(self._fact, raw)) | ~self.mentions
            if len(self._seen) >= _MAX_REMEMBERED:
                self._seen.clear()
            self._seen[key] = mask
        return mask

    def _holding(self, value: Value) -> int:
        kind, value = value_key(value)
        mask = self._equal.get((kind, value), 0)
        if kind in self._intervals:
            mask |= self._intervals[kind].holding(value)
        for condition, bits in self._others.items():
            if condition.holds(value):
                mask |= bits
        return mask

    def containing(self, condition: Condition) -> int:
        """Rules whose condition is implied by another one.

        Exact for equalities, intervals and lists of them. Of two other conditions it sees only
        that they are the same: a rule may be missing from the mask, but never be wrong in it.
        """
        mask = self._implied.get(condition)
        if mask is None:
            mask = self._implied[condition] = self._containing(condition)
        return mask

    def _containing(self, condition: Condition) -> int:
        if isinstance(condition, Equals):
            return self._holding(condition.value)
        mask = self._others.get(condition, 0)
        if isinstance(condition, Interval):
            if condition.kind in self._intervals:
                mask |= self._intervals[condition.kind].containing(condition)
            return mask
        if isinstance(condition, AnyOf):
            common = -1
            for part in condition.parts:
                common &= self.containing(part)
            mask |= common
        return mask
