"""Rules and facts to a verdict: the first matching rule wins, for each field."""

from tilepolicy.match.index import (
    Nearest,
    RuleAnswer,
    RuleIndex,
    Verdict,
)

__all__ = [
    "Nearest",
    "RuleAnswer",
    "RuleIndex",
    "Verdict",
]
