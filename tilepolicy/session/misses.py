"""The grouped matmuls that no rule decided, in the form that ``tilepolicy tune`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilepolicy.tuning.missed import MissedSite

if TYPE_CHECKING:
    from tilepolicy.session import Lookup

__all__ = ["missed_sites"]


def missed_sites(misses: Mapping[Lookup, int]) -> list[MissedSite]:
    """Lookups that missed, with their counts, as sites; other ops than grouped matmuls are none."""
    return [
        MissedSite(
            layer=lookup.layer,
            pass_=lookup.pass_,
            facts={name: value for name, value in lookup.facts if value is not None},
            phase=lookup.phase,
            count=count,
            instead=lookup.miss,
        )
        for lookup, count in misses.items()
        if lookup.pass_ is not None
    ]
