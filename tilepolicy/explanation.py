"""What every lock and rule says about one setting, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tilepolicy.match import RuleIndex
from tilepolicy.resolution import FactValue
from tilepolicy.resolve.sites import resolve_sites
from tilepolicy.resolve.tiles import TileResolver
from tilepolicy.settings import SETTINGS

__all__ = ["rule_lines"]

_MARKS = {"matches": "+", "fails": "-", "undecidable": "?"}


def rule_lines(resolver: TileResolver, setting: str) -> tuple[str, ...]:
    """One line for each lock and rule that could decide a setting, in the order they are tried.

    Args:
        resolver: policy, config and facts.
        setting: a setting, or a kernel field's name such as ``wi_tile_fwd_input_buffer_count``.
    """
    policy = resolver.policy
    site = next((s for s in resolve_sites(resolver) if setting.startswith(s.prefix)), None)
    if site is None:
        facts, field = resolver.facts.values, setting
        indexes = {"locks": policy.locks, "rules": policy.settings}
    else:
        row = SETTINGS.get(setting)
        field = row.axis if row is not None and row.axis else setting.removeprefix(site.prefix)
        facts = site.facts
        indexes = {"locks": policy.tile_locks, "rules": policy.gmm}
    lines: list[str] = []
    for title, index in indexes.items():
        found = list(_lines(index, facts, field))
        lines += [f"{title}:", *found] if found else []
    if lines:
        lines.append("(+ matches, - does not, ? depends on what is not known)")
    return tuple(lines)


def _lines(index: RuleIndex, facts: Mapping[str, FactValue], field: str) -> Iterator[str]:
    for answer in index.explain(facts):
        if field in answer.rule.fields:
            where = f"{answer.rule.file}:{answer.rule.line}" if answer.rule.file else ""
            reasons = "; ".join(answer.reasons) or "no condition"
            yield f"  {_MARKS[answer.outcome]} {where} {answer.rule.name}: {reasons}"
