"""Rules of a scope's policy: which ones decided something, and which could have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from tilepolicy.resolution import FactValue, Origin

if TYPE_CHECKING:
    from tilepolicy.match import RuleIndex
    from tilepolicy.match.rules import Rule
    from tilepolicy.policy import Policy

__all__ = ["RuleKey", "key_of", "never_hit"]

type RuleKey = tuple[str, str | None, int | None]
"""Name, file and line of a rule."""

# What each call has a value of its own for: a config's fact of that name says nothing of a rule.
_OF_THE_CALL: Final = frozenset(
    {
        "batch_seq",
        "dtype",
        "embed_dim",
        "layer",
        "mlp_dim",
        "num_groups",
        "pass",
        "rows_per_group",
        "weight_dtype",
    }
)


def key_of(place: Rule | Origin) -> RuleKey:
    """What identifies a rule, also in origins: rules of two files may share a name."""
    return (place.name, place.file, place.line)


def never_hit(
    policy: Policy,
    facts: Mapping[str, FactValue],
    seen: Iterable[Mapping[str, FactValue]],
    hit: Iterable[RuleKey],
) -> tuple[Rule, ...]:
    """The rules for calls that decided nothing, although they are for this run.

    A rule that a fact of the run rules out (another device, another backend, another model) is
    for another run and not among them.

    Args:
        policy: the policy.
        facts: facts of the scope.
        seen: device and backend of the lookups that were made.
        hit: the rules that decided something.
    """
    known = {name: value for name, value in facts.items() if name not in _OF_THE_CALL}
    runs = [known | dict(places) for places in seen] or [known]
    used = set(hit)
    return tuple(
        rule
        for index in _indexes(policy)
        for rule in index.rules
        if key_of(rule) not in used and any(_could_match(index, rule, run) for run in runs)
    )


def _indexes(policy: Policy) -> Iterator[RuleIndex]:
    yield policy.tile_locks
    yield policy.gmm
    yield from policy.ops.values()


def _could_match(index: RuleIndex, rule: Rule, facts: Mapping[str, FactValue]) -> bool:
    return not any(
        answer.rule is rule and answer.outcome == "fails" for answer in index.explain(facts)
    )
