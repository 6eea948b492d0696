"""A policy document to the rules that the index takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from tilepolicy import model
from tilepolicy.errors import Problem
from tilepolicy.match.rules import Measured, Rule, Table
from tilepolicy.model.conditions import Condition, Equals
from tilepolicy.model.when import When
from tilepolicy.resolution import SettingValue
from tilepolicy.settings import SETTINGS
from tilepolicy.source import Document

__all__ = ["Section", "Sections", "compile_document"]


class Section:
    """The rules of one kind, each with the path of the rule that it was made of."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.paths: list[tuple[str | int, ...]] = []

    def add(self, rule: Rule, path: tuple[str | int, ...]) -> None:
        """Append a rule."""
        self.rules.append(rule)
        self.paths.append(path)


class Sections:
    """The rules of a document by what they decide.

    Attributes:
        gmm: tile fields of grouped matmuls.
        settings: settings that are no tile knobs, from ``gmm.rules`` with ``set``.
        locks: settings that are no tile knobs.
        tile_locks: tile fields of grouped matmuls.
        ops: fields of other ops' configs, by op.
        problems: rules that can never match.
    """

    def __init__(self) -> None:
        self.gmm = Section()
        self.settings = Section()
        self.locks = Section()
        self.tile_locks = Section()
        self.ops: dict[str, Section] = {}
        self.problems: list[Problem] = []

    def all(self) -> Iterable[Section]:
        """Every section."""
        return (self.gmm, self.settings, self.locks, self.tile_locks, *self.ops.values())


def compile_document(policy: model.PolicyDocument, source: Document) -> Sections:
    """The rules of a document, each with its file and line.

    Args:
        policy: the validated document.
        source: the text it was read from.
    """
    sections = Sections()
    for index, rule in enumerate(policy.gmm.rules):
        maker = _Maker(rule, source, ("gmm", "rules", index), "rule", sections.problems)
        if rule.table is not None:
            table = _table(rule.table)
            sections.gmm.add(maker.rule(rule.when, {}, table), maker.path)
        maker.values(rule.tile, rule.set_, sections.gmm, sections.settings)
    for index, lock in enumerate(policy.locks):
        maker = _Maker(lock, source, ("locks", index), "lock", sections.problems)
        maker.values(lock.tile, lock.set_, sections.tile_locks, sections.locks)
    for position, op in enumerate(policy.ops):
        section = sections.ops.setdefault(op.op, Section())
        for index, call in enumerate(op.rules):
            maker = _Maker(
                call, source, ("ops", position, "rules", index), "rule", sections.problems
            )
            section.add(maker.rule(call.when, call.config), maker.path)
    return sections


def _table(table: model.Table) -> Table:
    points = (Measured(p.at, p.tile.fields, p.source or "") for p in table.points)
    return Table(table.nearest, tuple(points))


_TILE_FACTS: Final = ("layer", "pass", "phase")


class _Maker:
    """Makes the rules of one entry of a document."""

    def __init__(
        self,
        entry: model.Rule | model.Lock | model.OpRule,
        source: Document,
        path: tuple[str | int, ...],
        kind: Literal["rule", "lock"],
        problems: list[Problem],
    ) -> None:
        self.path = path
        self._entry = entry
        self._source = source
        self._kind = kind
        self._problems = problems

    def rule(
        self, when: When, values: Mapping[str, SettingValue], table: Table | None = None
    ) -> Rule:
        """A rule with the entry's name and place."""
        return Rule(
            self._entry.name,
            when,
            values,
            table,
            self._source.file,
            self._source.line(self.path),
            self._entry.reason or "",
            self._kind,
        )

    def values(
        self,
        tile: model.Tile | None,
        assigned: Mapping[str, SettingValue] | None,
        tiles: Section,
        settings: Section,
    ) -> None:
        """Sort what the entry decides into tile fields and other settings."""
        when = self._entry.when
        if tile is not None:
            tiles.add(self.rule(when, tile.fields), self.path)
        if assigned is None:
            return
        others = {name: v for name, v in assigned.items() if not SETTINGS[name].is_tile}
        if others:
            settings.add(self.rule(when, others), self.path)
        for knobs, values in _by_site(assigned).items():
            site = self._at_site(when, knobs, next(iter(values)))
            if site is not None:
                by_axis = {str(SETTINGS[name].axis): v for name, v in values.items()}
                tiles.add(self.rule(site, by_axis), self.path)

    def _at_site(self, when: When, site: tuple[str, str, str], knob: str) -> When | None:
        """The conditions, narrowed to the one site of a knob; None if they exclude it."""
        conditions: dict[str, Condition] = dict(when)
        for fact, value in zip(_TILE_FACTS, site, strict=True):
            given = conditions.get(fact)
            if given is not None and not given.holds(value):
                self._problems.append(
                    Problem(
                        "unreachable",
                        f"{knob} is about {fact} {value}, but the rule asks for {fact}: {given}",
                        self._source.key_place((*self.path, "set", knob)),
                        f"remove {knob}, or the condition on {fact}",
                    )
                )
                return None
            conditions[fact] = Equals.of(value)
        return When.of(conditions)


def _by_site(
    assigned: Mapping[str, SettingValue],
) -> dict[tuple[str, str, str], dict[str, SettingValue]]:
    """Tile knobs by (layer, pass, phase)."""
    sites: dict[tuple[str, str, str], dict[str, SettingValue]] = defaultdict(dict)
    for name, value in assigned.items():
        setting = SETTINGS[name]
        if setting.is_tile:
            site = (str(setting.layer), str(setting.pass_), setting.phase)
            sites[site][name] = value
    return sites
