"""Plain YAML values, the offsets beside them, and how large a text may be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tilepolicy.source.scalars import Atom

__all__ = ["Limits", "MappingMarks", "Marks", "Plain", "SequenceMarks"]

type Plain = Atom | list["Plain"] | dict[str, "Plain"]


class Limits(NamedTuple):
    """How large a text may be before it is refused; a refusal is a problem with a place.

    Attributes:
        max_bytes: bytes of the text in UTF-8.
        max_depth: nested mappings and sequences, aliases expanded.
        max_nodes: scalars, mappings and sequences that are written out.
        max_alias_nodes: nodes that aliases add to them.
        max_problems: problems after which reading stops.
    """

    max_bytes: int = 16 * 2**20
    max_depth: int = 64
    max_nodes: int = 1_000_000
    max_alias_nodes: int = 50_000
    max_problems: int = 100


@dataclass(slots=True)
class SequenceMarks:
    """Offsets of a sequence and of its items."""

    offset: int
    items: list[Marks] = field(default_factory=list)


@dataclass(slots=True)
class MappingMarks:
    """Offsets of a mapping, of its keys and of its values."""

    offset: int
    keys: dict[str, int] = field(default_factory=dict)
    values: dict[str, Marks] = field(default_factory=dict)


type Marks = int | SequenceMarks | MappingMarks
"""The offsets of a value: a bare offset for a scalar, to keep ten thousand rules small."""
