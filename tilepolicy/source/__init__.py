"""YAML text to plain values with places: safe types only, nothing lost or guessed in silence."""

from tilepolicy.source.document import (
    LIMITS,
    Dialect,
    Document,
    Limits,
    Path,
    Plain,
    parse,
)

__all__ = [
    "LIMITS",
    "Dialect",
    "Document",
    "Limits",
    "Path",
    "Plain",
    "parse",
]
