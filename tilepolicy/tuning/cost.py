"""What a tile costs: the kernel's own estimate, the formula that tiles are ranked by, the roofline.

:func:`kernel_cost` is what tokamax's v1 kernel and MaxText's megablox hand XLA as ``CostEstimate``
(``gmm`` and ``tgmm`` in ``pallas_mosaic_tpu_kernel.py`` of tokamax 0.0.17 and in
``kernels/megablox/backend.py`` of MaxText 0.2.5). The compiler reports it back to the byte, and
makes its ``optimal_seconds`` of it.

:func:`grid_cost` is **the cost formula** that tiles are compared by. It is the same but for one
term: the estimate counts the weights of a group once per row tile, although the Pallas pipeline
does not fetch a block again whose index stays the same, which is so for all row tiles of a group
when one tile covers the whole contracted axis. The term decides: of the tiles that may fit, on
average over tokamax 0.0.17's bfloat16 measurements, the measured winner is among the best 15 % by
:func:`kernel_cost` on v6e, 40 % on v5p, 28 % on v5e and 17 % on TPU7x, and among the best 0.8 %,
0.2 %, 0.7 % and 1.4 % by :func:`grid_cost` (``scripts/formula_quality.py``).

The v2 kernels walk their grid in the same order, and give XLA an estimate that ignores the tile.

None of this is a measurement: both know nothing of latency, of the matrix unit's shape, or of
how rows are spread over groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilepolicy.axes import GmmShape
from tilepolicy.settings import Pass
from tilepolicy.tuning.sites import ITEMSIZES, GmmTile, Site
from tilepolicy.tuning.tpus import Tpu

__all__ = [
    "Cost",
    "grid_cost",
    "grid_seconds",
    "kernel_cost",
    "kernel_seconds",
    "roofline_seconds",
    "shared_rows",
    "site_seconds",
]


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one call.

    Attributes:
        flops: multiply-adds counted twice.
        bytes_accessed: bytes moved between HBM and VMEM.
    """

    flops: int
    bytes_accessed: int


def kernel_cost(
    shape: GmmShape, pass_: Pass, tile: GmmTile, *, itemsize: int = 2, weight_itemsize: int = 2
) -> Cost:
    """The ``CostEstimate`` of tokamax v1 and megablox.

    Args:
        shape: the forward problem.
        pass_: which pass of it.
        tile: tile by forward axes; its m divides the problem's.
        itemsize: bytes of an element of activations and their gradients.
        weight_itemsize: bytes of an element of the weights and their gradients.
    """
    row_tiles = shape.m // tile.m + shape.g - 1
    return _cost(shape, pass_, tile, itemsize, weight_itemsize, weight_fetches=row_tiles)


def grid_cost(
    shape: GmmShape, pass_: Pass, tile: GmmTile, *, itemsize: int = 2, weight_itemsize: int = 2
) -> Cost:
    """The cost formula: :func:`kernel_cost` without the fetches that the pipeline skips.

    Args:
        shape: the forward problem.
        pass_: which pass of it.
        tile: tile by forward axes; its m divides the problem's.
        itemsize: bytes of an element of activations and their gradients.
        weight_itemsize: bytes of an element of the weights and their gradients.
    """
    whole = tile.n >= shape.n if pass_ == "dlhs" else tile.k >= shape.k
    fetches = shape.g if whole else shape.m // tile.m + shape.g - 1
    return _cost(shape, pass_, tile, itemsize, weight_itemsize, weight_fetches=fetches)


def shared_rows(shape: GmmShape, tile: GmmTile) -> int:
    """Rows that may be multiplied for a group they do not belong to: one row tile per boundary.

    A row tile in which a group ends is computed once for each of its groups. No cost above counts
    this; it decides between tiles that cost the same.
    """
    return tile.m * (shape.g - 1)


def roofline_seconds(cost: Cost, chip: Tpu) -> float:
    """The longer of computing and moving, in seconds: XLA's ``optimal_seconds`` of one kernel."""
    return max(cost.flops / chip.flops_per_second, cost.bytes_accessed / chip.hbm_bytes_per_second)


def kernel_seconds(
    shape: GmmShape,
    pass_: Pass,
    tile: GmmTile,
    chip: Tpu,
    *,
    itemsize: int = 2,
    weight_itemsize: int = 2,
) -> float:
    """Roofline of :func:`kernel_cost`, in seconds."""
    cost = kernel_cost(shape, pass_, tile, itemsize=itemsize, weight_itemsize=weight_itemsize)
    return roofline_seconds(cost, chip)


def grid_seconds(
    shape: GmmShape,
    pass_: Pass,
    tile: GmmTile,
    chip: Tpu,
    *,
    itemsize: int = 2,
    weight_itemsize: int = 2,
) -> float:
    """Roofline of :func:`grid_cost`, in seconds: what tiles are ranked by."""
    cost = grid_cost(shape, pass_, tile, itemsize=itemsize, weight_itemsize=weight_itemsize)
    return roofline_seconds(cost, chip)


def site_seconds(site: Site, tile: GmmTile, chip: Tpu) -> float:
    """:func:`grid_seconds` of a site.

    Raises:
        KeyError: an operand's type is not one of :data:`tilepolicy.tuning.sites.ITEMSIZES`.
    """
    return grid_seconds(
        site.shape,
        site.pass_,
        tile,
        chip,
        itemsize=ITEMSIZES[site.dtype],
        weight_itemsize=ITEMSIZES[site.weights],
    )


def _cost(
    shape: GmmShape,
    pass_: Pass,
    tile: GmmTile,
    itemsize: int,
    weight_itemsize: int,
    *,
    weight_fetches: int,
) -> Cost:
    """Operands times how often each is fetched; ``weight_fetches`` counts one group's weights."""
    m, k, n = shape.m, shape.k, shape.n
    lhs, grad, weights = m * k * itemsize, m * n * itemsize, k * n * weight_itemsize
    k_tiles, n_tiles = -(-k // tile.k), -(-n // tile.n)
    if pass_ == "drhs":
        moved = lhs * n_tiles + grad * k_tiles + shape.g * weights
    elif pass_ == "dlhs":
        moved = grad * k_tiles + weights * weight_fetches + lhs
    else:
        moved = lhs * n_tiles + weights * weight_fetches + grad
    return Cost(2 * m * k * n, moved)
