"""Tiles worth asking the compiler about, for one site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from tilepolicy.settings import AXES, Axis
from tilepolicy.tuning.cost import shared_rows, site_seconds
from tilepolicy.tuning.sites import GmmTile, Site
from tilepolicy.tuning.tpus import Tpu
from tilepolicy.tuning.vmem import Estimate, estimate_vmem

__all__ = ["Candidate", "candidate_tiles", "legal_sizes", "rank"]

_LANES: Final = 128
_MAX_ROWS: Final = 1024
"""Largest row tile of tokamax's own search space."""

_SAME: Final = 0.05
"""Candidates within this share of the best time count as equal: the formula is no better."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One tile with what is predicted of it.

    Attributes:
        tile: tile by forward axes.
        seconds: by the cost formula.
        vmem: predicted VMEM and whether that fits.
    """

    tile: GmmTile
    seconds: float
    vmem: Estimate


def legal_sizes(site: Site, axis: Axis) -> tuple[int, ...]:
    """Tile sizes that the site's kernel takes along an axis, ascending.

    Rows: powers of two from 128 that divide the padded rows (all kernels but v2 insist). Others:
    powers of two, and the dimension rounded up to 128 cut into 1 to 16 whole multiples of 128.
    tokamax v1 and megablox also take the whole dimension when it is no multiple of 128.
    """
    if axis == "batch_seq":
        rows = [size for size in _powers(_MAX_ROWS) if site.batch_seq % size == 0]
        return tuple(rows) or (site.batch_seq,)
    size = site.embed_dim if axis == "embed_dim" else site.mlp_dim
    padded = -(-size // _LANES) * _LANES
    sizes = set(_powers(padded))
    sizes |= {padded // parts for parts in range(1, 17) if padded % (parts * _LANES) == 0}
    if size % _LANES and site.backend in ("tokamax_v1", "megablox"):
        sizes = {other for other in sizes if other < size} | {size}
    return tuple(sorted(sizes))


def candidate_tiles(site: Site, fixed: Mapping[Axis, int] | None = None) -> Iterator[GmmTile]:
    """Every combination of legal sizes; ``fixed`` axes have the size given."""
    given = fixed or {}
    sizes = ((given[axis],) if axis in given else legal_sizes(site, axis) for axis in AXES)
    for chosen in product(*sizes):
        tile: dict[str, int] = dict(zip(AXES, chosen, strict=True))
        yield GmmTile.of_policy(site.layer, tile)


def rank(
    site: Site,
    chip: Tpu,
    *,
    scoped_vmem_limit_kib: int | None = None,
    fixed: Mapping[Axis, int] | None = None,
) -> tuple[Candidate, ...]:
    """Candidates from the best to the worst.

    Left out are tiles that surely do not fit, and row tiles beyond the rows of a group (and beyond
    the matrix unit): each product would be formed mostly for other groups' rows, which no formula
    here counts. Of 237 measured winners of tokamax 0.0.17, 230 keep to that.

    The order is that of the cost formula. Candidates within 5 % of the best count as equal. Among
    them those whose row tile fills the matrix unit go first, then fewer rows that are computed
    for two groups, then less VMEM: of the formula's equals this comes nearest to the row tiles
    of tokamax's measured winners.

    Args:
        site: the grouped matmul.
        chip: the device.
        scoped_vmem_limit_kib: ``--xla_tpu_scoped_vmem_limit_kib``; None for the default.
        fixed: axes that are decided elsewhere, with their sizes.
    """
    found = []
    most_rows = max(chip.mxu_rows, _power_above(site.batch_seq // site.num_groups))
    for tile in candidate_tiles(site, fixed):
        if tile.m > most_rows and "batch_seq" not in (fixed or {}):
            continue
        vmem = estimate_vmem(site, tile, chip, scoped_vmem_limit_kib=scoped_vmem_limit_kib)
        if vmem.verdict != "does-not-fit":
            found.append(Candidate(tile, site_seconds(site, tile, chip), vmem))
    best = min((candidate.seconds for candidate in found), default=0.0)

    def order(candidate: Candidate) -> tuple[float, bool, int, int]:
        equal = candidate.seconds <= best * (1 + _SAME)
        seconds, tile = best if equal else candidate.seconds, candidate.tile
        return (
            seconds,
            tile.m < chip.mxu_rows,
            shared_rows(site.shape, tile),
            candidate.vmem.least_bytes,
        )

    return tuple(sorted(found, key=order))


def _power_above(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 1 else 1


def _powers(limit: int) -> list[int]:
    sizes = []
    size = _LANES
    while size <= limit:
        sizes.append(size)
        size *= 2
    return sizes
