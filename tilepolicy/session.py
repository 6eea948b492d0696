"""What a scope really did: every lookup with its origin, misses, and notes of other adapters."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tilepolicy.resolution import Origin, SettingValue
from tilepolicy.settings import Layer, Pass, Phase

if TYPE_CHECKING:
    from tilepolicy.scope_inputs import Inputs

__all__ = ["Lookup", "Note", "Session"]

_LOG: Final = logging.getLogger("tilepolicy")


@dataclass(frozen=True, slots=True)
class Note:
    """A choice that was made outside of kernel lookups, for the report.

    Attributes:
        source: who made it: an adapter's name, or a part of tilepolicy such as ``losses``.
        subject: what was chosen: a setting's name, or a short name of the decision.
        value: what was chosen.
        reason: one sentence: why.
        origin: where the choice comes from, when a policy or config decided it.
    """

    source: str
    subject: str
    value: SettingValue
    reason: str = ""
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Lookup:
    """One distinct question of a kernel library and its answer.

    Attributes:
        adapter: who asked: ``tokamax``.
        op: snake-case class name of the op.
        device: normalised device name.
        facts: the facts that the call showed, as (name, value), sorted by name.
        layer: the layer; None for an op without layers, or where both layers have one tile.
        pass_: the pass of a grouped matmul.
        phase: what the step is for.
        evidence: how the layer was found.
        tile: what the policies decided, by policy name, as (field, value).
        origins: origin of each decided field, in the same order.
        config: what the library was given (its own field names); empty for a miss.
        miss: why nothing was answered and what is used instead; empty for a hit.
        undecidable: rules that may have matched but for facts that are not known here.
    """

    adapter: str
    op: str
    device: str
    facts: tuple[tuple[str, SettingValue], ...]
    layer: Layer | None = None
    pass_: Pass | None = None
    phase: Phase = "train"
    evidence: str = field(default="", compare=False)
    tile: tuple[tuple[str, SettingValue], ...] = ()
    origins: tuple[Origin, ...] = ()
    config: tuple[tuple[str, SettingValue], ...] = ()
    miss: str = ""
    undecidable: tuple[str, ...] = ()

    @property
    def site(self) -> str:
        """``wi.fwd`` for a grouped matmul, else the op's name."""
        if self.pass_ is None:
            return self.op
        return f"{self.layer or 'wi|wo'}.{self.pass_}"


@dataclass
class _Counts:
    lookups: dict[Lookup, int] = field(default_factory=dict)
    notes: dict[Note, int] = field(default_factory=dict)


class Session:
    """The record of one scope; filled by adapters, read by the report.

    Attributes:
        inputs: policy, config and facts of the scope; None for a session that belongs to none.
        versions: versions of the libraries that the adapters attach to.
    """

    def __init__(
        self, inputs: Inputs | None = None, versions: Mapping[str, str] | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._counts = _Counts()
        self._adapters: list[str] = []
        self.inputs = inputs
        self.versions = dict(versions or {})

    def entered(self, adapter: str) -> None:
        """Record that an adapter was entered."""
        self._adapters.append(adapter)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that were entered, in order."""
        return tuple(dict.fromkeys(self._adapters))

    def record(self, lookup: Lookup) -> None:
        """Record a lookup; equal lookups are counted, and logged once."""
        with self._lock:
            count = self._counts.lookups.get(lookup, 0)
            self._counts.lookups[lookup] = count + 1
        if count == 0:
            _log_lookup(lookup)

    def note(self, note: Note) -> None:
        """Record a choice; equal notes are counted, and logged once."""
        with self._lock:
            count = self._counts.notes.get(note, 0)
            self._counts.notes[note] = count + 1
        if count == 0:
            _LOG.info("%s: %s = %s (%s)", note.source, note.subject, note.value, note.reason)

    @property
    def lookups(self) -> Mapping[Lookup, int]:
        """Distinct lookups in the order of their first occurrence, with their counts."""
        with self._lock:
            return dict(self._counts.lookups)

    @property
    def notes(self) -> Mapping[Note, int]:
        """Distinct notes in the order of their first occurrence, with their counts."""
        with self._lock:
            return dict(self._counts.notes)


def _log_lookup(lookup: Lookup) -> None:
    if lookup.miss:
        _LOG.warning("%s %s: %s", lookup.adapter, lookup.site, lookup.miss)
    else:
        tile = ", ".join(f"{name}={value}" for name, value in lookup.config)
        names = ", ".join(dict.fromkeys(o.name or o.kind for o in lookup.origins))
        _LOG.info("%s %s: %s from %s", lookup.adapter, lookup.site, tile, names)
