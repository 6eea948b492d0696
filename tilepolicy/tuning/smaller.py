"""The smallest change of a tile that fits, confirmed by compiling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from tilepolicy.backends import illegal_tile
from tilepolicy.settings import AXES, Axis, Layer
from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.candidates import legal_sizes
from tilepolicy.tuning.compiler import CompileRequest, CompileVerdict
from tilepolicy.tuning.cost import site_seconds
from tilepolicy.tuning.sites import GmmTile, Site
from tilepolicy.tuning.tpus import tpu
from tilepolicy.tuning.vmem import estimate_vmem

__all__ = ["Suggestion", "fitting_limit", "smaller_tiles", "smallest_change"]

_ATTEMPTS: Final = 8
_FLAG_STEP_KIB: Final = 1024
_FLAG_SHARE: Final = 0.9
"""Share of the physical VMEM up to which a higher limit is suggested."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change with which the kernel compiled.

    wi and wo can share a kernel (with equal sizes), so that the axes are named by the caller's
    layer.

    Attributes:
        old: the tile that failed, by forward axes.
        tile: the tile that compiled, by forward axes.
        scoped_vmem_limit_kib: the limit under which it compiled; None for the one that applied.
        verdict: the compile that confirmed it.
    """

    old: GmmTile
    tile: GmmTile
    scoped_vmem_limit_kib: int | None
    verdict: CompileVerdict

    def changed(self, layer: Layer) -> tuple[Axis, ...]:
        """The axes that differ, when the kernel is the given layer's."""
        before, after = self.old.to_policy(layer), self.tile.to_policy(layer)
        return tuple(axis for axis in AXES if before[axis] != after[axis])


def smaller_tiles(site: Site, tile: GmmTile) -> Iterator[GmmTile]:
    """Legal tiles that are nowhere larger, from the smallest change to the largest.

    The change is the sum over the axes of log2(old / new). Among equal changes those of fewer
    axes go first, then the cheaper ones by the cost formula on v6e's roofline.
    """
    old = tile.to_policy(site.layer)
    sizes = {"batch_seq": site.batch_seq, "embed_dim": site.embed_dim, "mlp_dim": site.mlp_dim}
    options = (_reductions(site, axis, old[axis]) for axis in AXES)
    found = []
    for chosen in product(*options):
        new: dict[str, int] = dict(zip(AXES, chosen, strict=True))
        if illegal_tile(new, site.backend, site.layer, site.pass_, sizes):
            continue
        change = sum(math.log2(old[axis] / new[axis]) for axis in AXES)
        axes = sum(old[axis] != new[axis] for axis in AXES)
        smaller = GmmTile.of_policy(site.layer, new)
        if axes:
            cost = site_seconds(site, smaller, tpu("v6e"))
            found.append(((round(change, 6), axes, cost), smaller))
    yield from (smaller for _, smaller in sorted(found))


def smallest_change(
    request: CompileRequest, tile: GmmTile, compiler: Compiler
) -> Suggestion | None:
    """The first of :func:`smaller_tiles` that compiles; None when none of the tried ones does.

    Tiles that surely do not fit by the estimate are not compiled; at most eight are.

    Args:
        request: the request that failed.
        tile: the tile that it failed with.
        compiler: how to compile.
    """
    site, chip = request.site, tpu(request.device)
    attempts = 0
    for smaller in smaller_tiles(site, tile):
        guess = estimate_vmem(
            site,
            smaller,
            chip,
            options=request.options,
            scoped_vmem_limit_kib=request.scoped_vmem_limit_kib,
        )
        if guess.verdict == "does-not-fit":
            continue
        verdict = compiler.verdict(replace(request, tile=smaller))
        if verdict.fits:
            return Suggestion(tile, smaller, None, verdict)
        attempts += 1
        if attempts == _ATTEMPTS:
            return None
    return None


def fitting_limit(request: CompileRequest, tile: GmmTile, compiler: Compiler) -> Suggestion | None:
    """The lowest scoped VMEM limit under which the same tile compiles, in steps of 1 MiB.

    None for v2, which sets its own limit, and when even 90 % of the VMEM is too little. Searched
    by compiling, since what a failing kernel reports may be less than it needs.

    Args:
        request: the request that failed.
        tile: the tile that it failed with.
        compiler: how to compile.
    """
    chip = tpu(request.device)
    if request.site.backend not in ("tokamax_v1", "megablox"):
        return None
    most = int(chip.vmem_bytes * _FLAG_SHARE) // 1024 // _FLAG_STEP_KIB * _FLAG_STEP_KIB
    asked = replace(request, tile=tile, scoped_vmem_limit_kib=most)
    verdict = compiler.verdict(asked)
    if not verdict.fits or verdict.used_bytes is None:
        return None
    # What a kernel takes does not depend on the limit, but the last kilobytes are not certain.
    least = -(-verdict.used_bytes // (_FLAG_STEP_KIB * 1024)) * _FLAG_STEP_KIB
    for limit in (least, least + _FLAG_STEP_KIB):
        confirmed = compiler.verdict(replace(asked, scoped_vmem_limit_kib=limit))
        if confirmed.fits:
            return Suggestion(tile, tile, limit, confirmed)
    return Suggestion(tile, tile, most, verdict)


def _reductions(site: Site, axis: Axis, old: int) -> tuple[int, ...]:
    return (old, *(size for size in legal_sizes(site, axis) if size < old))
