"""What is in force here: the active policies and the layer tag, innermost first."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tilepolicy.context import strands
from tilepolicy.context.layers import CallSites, LayerSizes, LayerTag
from tilepolicy.settings import Phase

if TYPE_CHECKING:
    from tilepolicy.resolve import Resolver
    from tilepolicy.session import Session

__all__ = ["ActivePolicy", "View", "policies", "view"]


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


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What is in force on a thread, in the forms that lookups need; made once per change.

    Attributes:
        payloads: what it was made of.
        policies: the active policies, innermost first.
        tag: the innermost layer tag, or None.
        digests: digests of the policies, each once, innermost first. A policy that is entered
            again inside itself changes nothing; of one that is active twice with another between,
            only the inner counts, because lookups reach it first.
        key: what jax keeps a trace under: the digests and the tag; empty without a policy.
        call_sites: functions whose calls tell the layer, those of inner policies first.
        told: decisions that the sessions of these policies were told of.
    """

    payloads: tuple[object, ...]
    policies: tuple[ActivePolicy, ...]
    tag: LayerTag | None
    digests: tuple[str, ...]
    key: tuple[str, ...]
    call_sites: tuple[CallSites, ...]
    told: set[object] = field(default_factory=set)


def _view(payloads: tuple[object, ...]) -> View:
    active = tuple(p for p in reversed(payloads) if isinstance(p, ActivePolicy))
    tag = next((p for p in reversed(payloads) if isinstance(p, LayerTag)), None)
    digests = tuple(dict.fromkeys(policy.digest for policy in active))
    key = (*digests, tag.tag if tag is not None else "") if digests else ()
    sites = tuple(site for policy in active for site in policy.call_sites)
    return View(payloads, active, tag, digests, key, sites)


class _Here(threading.local):
    view = _view(())


_HERE: Final = _Here()


def view() -> View:
    """What is in force here."""
    payloads = strands.active()
    if _HERE.view.payloads is not payloads:
        _HERE.view = _view(payloads)
    return _HERE.view


def policies() -> tuple[ActivePolicy, ...]:
    """The active policies, innermost first."""
    return view().policies


def _forget(payloads: tuple[object, ...]) -> None:
    """Keep no scope alive that has been left."""
    if not payloads:
        _HERE.view = _view(payloads)


strands.listen(_forget)
