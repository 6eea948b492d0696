"""Who wins: lock > explicit config value > first matching rule > auto > MaxText's default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from tilepolicy.resolution import Loser, Origin, OriginKind, SettingValue

__all__ = ["ORDER", "Proposal", "decide"]

ORDER: Final[tuple[OriginKind, ...]] = ("lock", "config", "rule", "auto", "default")
"""From the strongest to the weakest."""

_WORDS: Final[dict[OriginKind, str]] = {
    "lock": "a lock",
    "config": "an explicit value",
    "rule": "a rule",
    "auto": "an automatic value",
    "default": "MaxText's default",
}


class Proposal(NamedTuple):
    """A value that something wants a setting to have.

    Attributes:
        value: the value.
        origin: who wants it and why; its ``lost`` are weaker proposals of the same kind, such as
            later rules.
    """

    value: SettingValue
    origin: Origin


def decide(proposals: Iterable[Proposal]) -> Proposal:
    """The strongest proposal, with all others as its losers, strongest first.

    Among proposals of one kind the first wins. A default that agrees with the winner lost nothing
    and is not listed.

    Raises:
        ValueError: there is no proposal.
    """
    ranked = sorted(proposals, key=lambda proposal: ORDER.index(proposal.origin.kind))
    if not ranked:
        raise ValueError("nothing proposes a value")
    winner = ranked[0]
    losers = list(winner.origin.lost)
    for other in ranked[1:]:
        if other.origin.kind == "default" and other.value == winner.value:
            continue
        losers.append(_loser(other, winner.origin.kind))
        losers.extend(other.origin.lost)
    origin = winner.origin
    return Proposal(
        winner.value,
        Origin(origin.kind, origin.name, origin.file, origin.line, origin.reason, tuple(losers)),
    )


def _loser(proposal: Proposal, winner: OriginKind) -> Loser:
    origin = proposal.origin
    why = f"{_WORDS[winner]} goes before {_WORDS[origin.kind]}"
    return Loser(
        kind=origin.kind,
        value=proposal.value,
        name=origin.name,
        file=origin.file,
        line=origin.line,
        reason=f"{why}; {origin.reason}" if origin.kind == "auto" and origin.reason else why,
    )
