"""How well does the cost formula find the tiles that won measurements?

    python scripts/formula_quality.py [--every N]

For each bfloat16 call of tokamax's shipped v1 entries: of the tiles that may fit the device's
VMEM, the share that is better than the measured winner, by the kernel's own estimate and by the
cost formula; and how far, by the formula, the first candidate that surely fits is from the winner.
The correlation compares the formula's time of each winner with its measured time.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tilepolicy.axes import GmmShape
from tilepolicy.formats.tokamax_cache import shipped_caches
from tilepolicy.formats.tpu_tables import Measured, read_measured
from tilepolicy.settings import Pass
from tilepolicy.tuning.candidates import candidate_tiles, rank
from tilepolicy.tuning.cost import grid_seconds, kernel_seconds
from tilepolicy.tuning.sites import GmmTile, Site
from tilepolicy.tuning.tpus import TPUS, Tpu
from tilepolicy.tuning.vmem import estimate_vmem

__all__ = ["Quality", "quality"]

type Formula = Callable[[GmmShape, Pass, GmmTile, Tpu], float]


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures of one device.

    Attributes:
        shapes: measured calls.
        kernel_share: mean share of tiles better than the winner by the kernel's estimate.
        grid_share: the same by the cost formula.
        correlation: of the logarithms of formula and measured times.
        first_ratio: geometric mean of the first sure candidate's time over the winner's, formula.
        within: share of shapes whose first sure candidate is within 10 % of the winner.
    """

    shapes: int
    kernel_share: float
    grid_share: float
    correlation: float
    first_ratio: float
    within: float


def quality(device: str, *, every: int = 1) -> Quality:
    """The figures of a device.

    Args:
        device: policy name.
        every: look at each n-th shape only.
    """
    measured = read_measured(shipped_caches(), device)[::every]
    chip = TPUS[device]
    ratios = [_first_ratio(entry, chip) for entry in measured]
    times = [grid_seconds(e.shape, e.pass_, e.tile, chip) for e in measured]
    return Quality(
        shapes=len(measured),
        kernel_share=statistics.fmean(_better(e, chip, kernel_seconds) for e in measured),
        grid_share=statistics.fmean(_better(e, chip, grid_seconds) for e in measured),
        correlation=statistics.correlation(
            [math.log(time) for time in times], [math.log(entry.median_ms) for entry in measured]
        ),
        first_ratio=statistics.geometric_mean(ratios),
        within=sum(ratio <= 1.1 for ratio in ratios) / len(ratios),
    )


def _site(entry: Measured) -> Site:
    """The call as layer wi's, where k is embed and n is mlp."""
    shape = entry.shape
    return Site("wi", entry.pass_, shape.m, shape.k, shape.n, shape.g)


def _better(entry: Measured, chip: Tpu, formula: Formula) -> float:
    """Share of the tiles that may fit whose time is more than 1 % under the winner's."""
    site = _site(entry)
    tiles = [t for t in candidate_tiles(site) if _may_fit(site, t, chip)]
    time = formula(entry.shape, entry.pass_, entry.tile, chip)
    better = sum(formula(entry.shape, entry.pass_, tile, chip) < time * 0.99 for tile in tiles)
    return better / len(tiles)


def _may_fit(site: Site, tile: GmmTile, chip: Tpu) -> bool:
    return estimate_vmem(site, tile, chip).verdict != "does-not-fit"


def _first_ratio(entry: Measured, chip: Tpu) -> float:
    """Time of what ``tune`` would compile first and surely take, over that of the winner."""
    sure = next(c for c in rank(_site(entry), chip) if c.vmem.verdict == "fits")
    return sure.seconds / grid_seconds(entry.shape, entry.pass_, entry.tile, chip)


def main() -> None:
    """Print one row per device."""
    parser = argparse.ArgumentParser(description="Quality of the cost formula.")
    parser.add_argument("--every", type=int, default=1)
    every = parser.parse_args().every
    print("device  calls  kernel  formula  corr   first/winner  within 10 %")
    for device in TPUS:
        q = quality(device, every=every)
        print(
            f"{device:6}  {q.shapes:5}  {q.kernel_share:6.1%}  {q.grid_share:7.1%}  "
            f"{q.correlation:5.3f}  {q.first_ratio:12.3f}  {q.within:11.1%}"
        )


if __name__ == "__main__":
    main()
