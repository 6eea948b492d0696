"""What is in force here: the active policies and the layer tag, innermost first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilepolicy.context import strands
from tilepolicy.context.layers import CallSites, LayerSizes, LayerTag
from tilepolicy.settings import Phase

if TYPE_CHECKING:
    from tilepolicy.resolve import Resolver
    from tilepolicy.session import Session

__all__ = ["ActivePolicy", "policies", "tag"]


@dataclass(frozen=True, slots=True, eq=False)
class ActivePolicy:
    """One entered scope.

    Attributes:
        digest: content digest of policy, config, facts and the options below.
        resolver: answers lookups.
        session: records them.
        phase: what the traced step is for; a call does not show it.
        sizes: declared sizes of the layers, or None.
        call_sites: functions whose calls tell the layer.
        ops: names of the other ops that the policy has rules for.
        fail_on_miss: whether a grouped matmul without a rule is an error.
        answers: answers already given, by everything they depend on; all entries of one scope
            share it.
    """

    digest: str
    resolver: Resolver
    session: Session
    phase: Phase = "train"
    sizes: LayerSizes | None = None
    call_sites: tuple[CallSites, ...] = ()
    ops: frozenset[str] = frozenset()
    fail_on_miss: bool = False
    answers: dict[object, object] = field(default_factory=dict)


def policies() -> tuple[ActivePolicy, ...]:
    """The active policies, innermost first."""
    return tuple(p for p in reversed(strands.active()) if isinstance(p, ActivePolicy))


def tag() -> LayerTag | None:
    """The innermost layer tag, or None."""
    for payload in reversed(strands.active()):
        if isinstance(payload, LayerTag):
            return payload
    return None
