"""Facts of a config: what a decision may depend on, computed as MaxText computes it."""

from tilepolicy.facts.derivation import (
    DEVICES,
    Facts,
    derive,
    normalize_device,
    site,
)

__all__ = [
    "DEVICES",
    "Facts",
    "derive",
    "normalize_device",
    "site",
]
