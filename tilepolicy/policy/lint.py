"""Rules of one file that can never decide anything, and names that are used twice."""

from __future__ import annotations

from tilepolicy.errors import Problem
from tilepolicy.match import RuleIndex
from tilepolicy.match.factindex import bits_of, mask_of
from tilepolicy.policy.compile import Section, Sections
from tilepolicy.source import Document

__all__ = ["lint"]


def lint(sections: Sections, indexes: list[RuleIndex], source: Document) -> list[Problem]:
    """Problems of rules that could not matter.

    A rule is shadowed when earlier rules of the same file match whenever it does and decide all
    of its fields. Rules of extended policies are meant to be overridden and are left alone.

    Args:
        sections: the rules of one file.
        indexes: an index of each section, in the order of ``sections.all()``.
        source: the file.
    """
    problems = [*sections.problems, *_repeated_names(sections, source)]
    for section, index in zip(sections.all(), indexes, strict=True):
        problems += _shadowed(section, index, source)
    return problems


def _repeated_names(sections: Sections, source: Document) -> list[Problem]:
    """Rules of one list with one name: origins and reports name rules, so names must tell them."""
    problems = []
    first: dict[tuple[str, str], tuple[str | int, ...]] = {}
    for section in sections.all():
        for rule, path in zip(section.rules, section.paths, strict=True):
            key = (str(path[:-1]), rule.name)
            known = first.setdefault(key, path)
            if known != path:
                line = source.line(known)
                message = f"the name {rule.name!r} is taken by the rule on line {line}"
                place = source.place((*path, "name"))
                problems.append(Problem("duplicate-name", message, place, "give another name"))
    return list(dict.fromkeys(problems))


def _shadowed(section: Section, index: RuleIndex, source: Document) -> list[Problem]:
    covering = _Covering(index)
    problems = []
    for bit, rule in enumerate(section.rules):
        by = covering.of(bit)
        if by is None:
            continue
        other = section.rules[by]
        problems.append(
            Problem(
                "shadowed",
                f"the rule {rule.name!r} never decides: {other.name!r} on line {other.line} "
                "matches whenever it does and comes first",
                source.place(section.paths[bit]),
                f"delete it, narrow {other.name!r}, or put it above line {other.line}",
            )
        )
    return problems


class _Covering:
    """Finds earlier rules that take everything from a later one."""

    def __init__(self, index: RuleIndex) -> None:
        self._index = index
        # The fact with the most different conditions first: it leaves the fewest rules.
        self._facts = sorted(index.by_fact.items(), key=lambda item: -item[1].variety)
        # Whether a table decides depends on the call, so it takes nothing for certain.
        certain = mask_of(b for b, rule in enumerate(index.rules) if rule.table is None)
        self._deciders = {name: mask & certain for name, mask in index.deciders.items()}

    def of(self, bit: int) -> int | None:
        """The first rule that takes a field from rule ``bit``, if earlier ones take all fields."""
        rule = self._index.rules[bit]
        asked = dict(rule.when)
        earlier = (1 << bit) - 1
        for fact, by_fact in self._facts:
            implied = by_fact.containing(asked[fact]) if fact in asked else 0
            earlier &= implied | ~by_fact.mentions
            if not earlier:
                return None
        takers = [earlier & self._deciders[name] for name in rule.fields]
        if not all(takers):
            return None
        return min(next(bits_of(mask)) for mask in takers)
