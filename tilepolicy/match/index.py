"""Rules and facts to a verdict: the first matching rule wins, for each field.

The index answers in microseconds for thousands of rules; see :mod:`tilepolicy.match.factindex`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

from tilepolicy.match.factindex import FactIndex, bits_of, mask_of
from tilepolicy.match.rules import Facts, Found, Rule
from tilepolicy.model.condition_text import normalize_value
from tilepolicy.model.conditions import AnyOf, Condition, Equals, Interval
from tilepolicy.model.factnames import find_fact
from tilepolicy.resolution import FieldChoice, Loser, Origin

__all__ = ["Nearest", "RuleAnswer", "RuleIndex", "Verdict"]

MAX_COMPARED: Final = 64
"""Rules with equally few failures whose sizes are compared to find the nearest."""

MAX_LOSERS: Final = 4
"""Losers kept in the origin of a looked-up field; :meth:`RuleIndex.explain` lists all rules."""


@dataclass(frozen=True)
class Verdict:
    """What the rules of an index say of one set of facts.

    Attributes:
        fields: every decided field with its value and origin.
    """

    fields: Mapping[str, FieldChoice]
    _index: RuleIndex
    _open: int
    _facts: Facts

    @property
    def tile(self) -> Mapping[str, FieldChoice]:
        """The decided fields; their name where the rules are about tiles."""
        return self.fields

    @cached_property
    def undecidable(self) -> Mapping[str, tuple[str, ...]]:
        """Rules that would have been tried before the deciding ones, but need unknown facts.

        Rule name to the missing facts. Rules that a known fact rules out are not among them.
        """
        return {
            self._index.label(bit): tuple(
                fact for fact in self._index.rules[bit].needs if fact not in self._facts
            )
            for bit in bits_of(self._open)
        }


class RuleAnswer(NamedTuple):
    """Whether one rule matches, and why.

    Attributes:
        rule: the rule.
        outcome: ``matches``, ``fails`` (a known fact rules it out) or ``undecidable``.
        reasons: one sentence for each condition that decided the outcome.
        missing: the facts that are not known, for an undecidable rule.
    """

    rule: Rule
    outcome: Literal["matches", "fails", "undecidable"]
    reasons: tuple[str, ...]
    missing: tuple[str, ...] = ()


class Nearest(NamedTuple):
    """The rule that came closest to matching, and why it did not.

    Attributes:
        rule: the rule.
        reasons: one sentence for each thing that failed.
    """

    rule: Rule
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        where = f" ({self.rule.file}:{self.rule.line})" if self.rule.file else ""
        return f"rule {self.rule.name!r}{where}: {'; '.join(self.reasons)}"


class RuleIndex:
    """Rules in the order in which they are tried, with an index over their conditions.

    Attributes:
        rules: the rules.
        by_fact: for each fact with conditions, which rules hold for which value.
        deciders: for each field, the mask of the rules that may decide it.
    """

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = tuple(rules)
        self._all = (1 << len(self.rules)) - 1
        conditions: dict[str, list[tuple[int, Condition]]] = defaultdict(list)
        measured: dict[str, list[int]] = defaultdict(list)
        deciders: dict[str, list[int]] = defaultdict(list)
        for bit, rule in enumerate(self.rules):
            for fact, condition in rule.when:
                conditions[fact].append((bit, condition))
            for fact in rule.table.nearest if rule.table is not None else ():
                measured[fact].append(bit)
            for name in rule.fields:
                deciders[name].append(bit)
        self.by_fact: Mapping[str, FactIndex] = {
            fact: FactIndex(find_fact(fact, arguments=True), items)
            for fact, items in conditions.items()
        }
        self._measured = {fact: mask_of(bits) for fact, bits in measured.items()}
        self.deciders: Mapping[str, int] = {name: mask_of(bits) for name, bits in deciders.items()}

    def __len__(self) -> int:
        return len(self.rules)

    @property
    def facts(self) -> frozenset[str]:
        """Every fact that some rule depends on."""
        return frozenset(self.by_fact) | frozenset(self._measured)

    @property
    def fields(self) -> frozenset[str]:
        """Every field that some rule may decide."""
        return frozenset(self.deciders)

    def label(self, bit: int) -> str:
        """The name of a rule; with its place where an extended policy has one of the same name."""
        rule = self.rules[bit]
        if self._names[rule.name] == 1:
            return rule.name
        return f"{rule.name} ({rule.file}:{rule.line})"

    @cached_property
    def _names(self) -> Mapping[str, int]:
        counts: dict[str, int] = defaultdict(int)
        for rule in self.rules:
            counts[rule.name] += 1
        return counts

    def lookup(self, facts: Facts, fields: Iterable[str] | None = None) -> Verdict:
        """What the rules say: for each field the first rule that matches.

        Args:
            facts: what is known; a fact that is not in it is unknown.
            fields: the fields that are asked for; all of them by default.
        """
        possible, unknown = self._split(facts)
        matching = possible & ~unknown
        waiting = possible & unknown
        names = self.deciders if fields is None else fields
        if not waiting and not matching & (matching - 1):
            return Verdict(self._only(matching, names, facts), self, 0, facts)
        found: dict[int, Found | None] = {}
        choices: dict[str, FieldChoice] = {}
        undecided = 0
        for name in names:
            deciders = self.deciders.get(name, 0)
            winner, choice = self._first(name, matching & deciders, facts, found)
            if choice is not None:
                choices[name] = choice
            if waiting:
                earlier = (1 << winner) - 1 if choice is not None else self._all
                undecided |= waiting & deciders & earlier
        return Verdict(choices, self, undecided, facts)

    def _split(self, facts: Facts) -> tuple[int, int]:
        """Rules that no known fact rules out, and rules that need an unknown fact."""
        possible, unknown = self._all, 0
        for fact, index in self.by_fact.items():
            value = facts.get(fact)
            if value is None:
                unknown |= index.mentions
            else:
                possible &= index.allowing(value)
        for fact, measured in self._measured.items():
            if fact not in facts:
                unknown |= measured
        return possible, unknown

    def _only(self, mask: int, names: Iterable[str], facts: Facts) -> dict[str, FieldChoice]:
        """What the only matching rule decides, or none: the usual case, without losers."""
        if not mask:
            return {}
        rule = self.rules[mask.bit_length() - 1]
        says = rule.decide(facts)
        if isinstance(says, str):
            return {}
        origin = Origin(rule.kind, rule.name, rule.file, rule.line, says.reason)
        return {n: FieldChoice(says.values[n], origin) for n in names if n in says.values}

    def _first(
        self, name: str, candidates: int, facts: Facts, found: dict[int, Found | None]
    ) -> tuple[int, FieldChoice | None]:
        """The first candidate that decides a field, with those after it as losers."""
        winner: tuple[int, Found] | None = None
        losers: list[Loser] = []
        for bit in bits_of(candidates):
            if bit not in found:
                answer = self.rules[bit].decide(facts)
                found[bit] = answer if isinstance(answer, Found) else None
            says = found[bit]
            if says is None or name not in says.values:
                continue
            if winner is None:
                winner = (bit, says)
                continue
            rule = self.rules[bit]
            losers.append(
                Loser(
                    rule.kind,
                    says.values[name],
                    rule.name,
                    rule.file,
                    rule.line,
                    "an earlier rule decides",
                )
            )
            if len(losers) == MAX_LOSERS:
                break
        if winner is None:
            return -1, None
        bit, says = winner
        rule = self.rules[bit]
        origin = Origin(rule.kind, rule.name, rule.file, rule.line, says.reason, tuple(losers))
        return bit, FieldChoice(says.values[name], origin)

    def explain(self, facts: Facts) -> tuple[RuleAnswer, ...]:
        """Every rule in order, whether it matches, and why."""
        return tuple(self._answer(rule, facts) for rule in self.rules)

    def _answer(self, rule: Rule, facts: Facts) -> RuleAnswer:
        failed: list[str] = []
        held: list[str] = []
        for fact, condition in rule.when:
            if fact in facts:
                value = normalize_value(find_fact(fact, arguments=True), facts[fact])
                answer = condition.evaluate(value)
                (held if answer.holds else failed).append(f"{fact} {answer.reason}")
        if failed:
            return RuleAnswer(rule, "fails", tuple(failed))
        if missing := tuple(fact for fact in rule.needs if fact not in facts):
            return RuleAnswer(
                rule, "undecidable", tuple(f"{f} is not known" for f in missing), missing
            )
        found = rule.decide(facts)
        if isinstance(found, str):
            return RuleAnswer(rule, "fails", (found,))
        return RuleAnswer(rule, "matches", (*held, *([found.reason] if rule.table else [])))

    def nearest(self, facts: Facts) -> Nearest | None:
        """The rule with the fewest failing conditions, the closest sizes among those.

        None when there is no rule, or when a rule matches.
        """
        possible, _ = self._split(facts)
        candidates = self._fewest_failures(facts) if possible == 0 else possible
        best: tuple[float, int] | None = None
        for count, bit in enumerate(bits_of(candidates)):
            if count == MAX_COMPARED:
                break
            gap = self._gap(self.rules[bit], facts)
            if best is None or gap < best[0]:
                best = (gap, bit)
        if best is None:
            return None
        answer = self._answer(self.rules[best[1]], facts)
        return None if answer.outcome == "matches" else Nearest(answer.rule, answer.reasons)

    def _fewest_failures(self, facts: Facts) -> int:
        """Rules with the smallest number of conditions that fail.

        Counts for all rules at once: ``planes[k]`` holds bit ``k`` of every rule's count.
        """
        planes: list[int] = []
        for fact, index in self.by_fact.items():
            if fact not in facts:
                continue
            carry = ~index.allowing(facts[fact])
            for k, plane in enumerate(planes):
                planes[k], carry = plane ^ carry, plane & carry
            if carry:
                planes.append(carry)
        fewest = self._all
        for plane in reversed(planes):
            if fewest & ~plane:
                fewest &= ~plane
        return fewest

    def _gap(self, rule: Rule, facts: Facts) -> float:
        """How far the known facts are from a rule: octaves for sizes, 1 for anything else."""
        gap = 0.0
        for fact, condition in rule.when:
            if fact in facts:
                value = normalize_value(find_fact(fact, arguments=True), facts[fact])
                if not condition.holds(value):
                    gap += _octaves(condition, value)
        return gap


def _octaves(condition: Condition, value: object) -> float:
    """``|log2|`` of a size over the nearest bound of a condition; 1 where that means nothing."""
    bounds: list[object] = []
    for part in condition.parts if isinstance(condition, AnyOf) else (condition,):
        if isinstance(part, Equals):
            bounds.append(part.value)
        elif isinstance(part, Interval):
            bounds += [part.low, part.high]
    sizes = [b for b in bounds if isinstance(b, int | float) and not isinstance(b, bool) and b > 0]
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0 or not sizes:
        return 1.0
    return min(abs(math.log2(value / size)) for size in sizes)
