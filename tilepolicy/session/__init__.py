"""What a scope really did: every lookup with its origin, misses, and notes of other adapters."""

from tilepolicy.session.session import (
    Lookup,
    Note,
    Session,
)

__all__ = [
    "Lookup",
    "Note",
    "Session",
]
