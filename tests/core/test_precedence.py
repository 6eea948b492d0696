"""Who wins, and what stays visible of the others."""

from __future__ import annotations

from itertools import permutations

import pytest

from tilepolicy.precedence import ORDER, Proposal, decide
from tilepolicy.resolution import Loser, Origin, OriginKind


def proposal(kind: OriginKind, value: int, **origin: object) -> Proposal:
    """A proposal of a kind."""
    return Proposal(value, Origin(kind, **origin))  # type: ignore[arg-type]


ALL = [proposal(kind, 10 + at, name=f"by {kind}") for at, kind in enumerate(ORDER)]


def test_the_order_is_lock_config_rule_auto_default() -> None:
    """The order of strength is the documented one."""
    assert ORDER == ("lock", "config", "rule", "auto", "default")


@pytest.mark.parametrize("start", range(len(ORDER)))
def test_the_strongest_wins_whatever_the_order_of_proposals(start: int) -> None:
    """In every order of proposing the strongest kind wins; the others are listed by strength."""
    for shuffled in permutations(ALL[start:]):
        won = decide(shuffled)
        assert won.value == 10 + start
        assert won.origin.kind == ORDER[start]
        assert [loser.kind for loser in won.origin.lost] == list(ORDER[start + 1 :])


def test_each_loser_says_why_it_lost() -> None:
    """A loser carries its value, place and a reason; an automatic one its arithmetic too."""
    won = decide(
        [
            proposal("auto", 32, reason="4 GiB > 128 MiB"),
            proposal("config", 4, name="num_vocab_tiling", file="c.yml", line=3),
            proposal("rule", 8, name="vocab", file="p.yml", line=5, reason="measured"),
            proposal("default", 1),
        ]
    )
    assert won.origin.lost == (
        Loser("rule", 8, "vocab", "p.yml", 5, "an explicit value goes before a rule"),
        Loser("auto", 32, reason="an explicit value goes before an automatic value; "
              "4 GiB > 128 MiB"),
        Loser("default", 1, reason="an explicit value goes before MaxText's default"),
    )  # fmt: skip


def test_later_rules_stay_behind_the_rule_that_won() -> None:
    """Losers that a proposal brings along come right after it, before weaker kinds."""
    later = Loser("rule", 256, "second", "p.yml", 9, "an earlier rule matches")
    won = decide([proposal("default", 512), proposal("rule", 128, lost=(later,))])
    assert [loser.value for loser in won.origin.lost] == [256, 512]
    behind = decide([proposal("rule", 128, lost=(later,)), proposal("lock", 64)])
    assert [loser.value for loser in behind.origin.lost] == [128, 256]


def test_a_default_that_agrees_is_no_loser() -> None:
    """A default equal to the winner lost nothing and is not listed."""
    assert decide([proposal("rule", 512), proposal("default", 512)]).origin.lost == ()


def test_nothing_to_decide_is_a_mistake_of_the_caller() -> None:
    """Without any proposal there is no value to give."""
    with pytest.raises(ValueError, match="nothing proposes a value"):
        decide([])
