"""What a scope really did: lookups, misses, notes of other adapters, and the report of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tilepolicy.resolution import Origin, SettingValue

__all__ = ["Note", "Session"]


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


class Session:
    """The record of one scope."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: dict[Note, int] = {}

    def note(self, note: Note) -> None:
        """Record a choice; equal notes are counted, not repeated."""
        with self._lock:
            self._notes[note] = self._notes.get(note, 0) + 1
