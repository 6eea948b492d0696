"""What a kernel costs by its own formula, and the time that the roofline makes of it.

tokamax's v1 kernel and MaxText's megablox hand XLA a ``CostEstimate`` that depends on the tile
(``gmm`` and ``tgmm`` in tokamax 0.0.17 ``pallas_mosaic_tpu_kernel.py``, in MaxText 0.2.5
``kernels/megablox/backend.py``; read in both). :func:`kernel_cost` is that formula. It counts
every tile of the left operand once per column of output tiles, every weight tile once per row
of tiles, and every group boundary inside a row tile as one more row tile.

The v2 kernels give XLA an estimate that ignores their tile; :func:`kernel_cost` still describes
the traffic of their grid, which is walked in the same order.

:func:`walk_cost` goes further than the kernels do: it leaves out the fetches that the Pallas
pipeline skips because the block did not change, and counts whole tiles of work where a group ends
inside one. It breaks ties of the first; neither is a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilepolicy.axes import GmmShape
from tilepolicy.settings import Pass
from tilepolicy.tuning.sites import ITEMSIZES, GmmTile, Site
from tilepolicy.tuning.tpus import Tpu

__all__ = [
    "KernelCost",
    "kernel_cost",
    "kernel_seconds",
    "roofline_seconds",
    "site_seconds",
    "walk_cost",
    "walk_seconds",
]


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Work of one call.

    Attributes:
        flops: multiply-adds counted twice.
        bytes_accessed: bytes moved between HBM and VMEM.
    """

    flops: int
    bytes_accessed: int


def kernel_cost(
    shape: GmmShape,
    pass_: Pass,
    tile: GmmTile,
    *,
    itemsize: int = 2,
    weight_itemsize: int = 2,
) -> KernelCost:
    """The ``CostEstimate`` of tokamax v1 and megablox.

    Args:
        shape: the forward problem.
        pass_: which pass of it.
        tile: tile by forward axes.
        itemsize: bytes of an element of activations and their gradients.
        weight_itemsize: bytes of an element of the weights and their gradients.
    """
    m, k, n, g = shape.m, shape.k, shape.n, shape.g
    flops = 2 * m * k * n
    lhs, grad, weights = m * k * itemsize, m * n * itemsize, k * n * weight_itemsize
    if pass_ == "drhs":
        moved = lhs * _tiles(n, tile.n) + grad * _tiles(k, tile.k) + g * weights
        return KernelCost(flops, moved)
    row_tiles = m // tile.m + g - 1
    if pass_ == "dlhs":
        return KernelCost(flops, grad * _tiles(k, tile.k) + weights * row_tiles + lhs)
    return KernelCost(flops, lhs * _tiles(n, tile.n) + weights * row_tiles + grad)


def walk_cost(
    shape: GmmShape,
    pass_: Pass,
    tile: GmmTile,
    *,
    itemsize: int = 2,
    weight_itemsize: int = 2,
) -> KernelCost:
    """Work of the grid that is really walked, with rows spread evenly over the groups.

    Grid of fwd and dlhs: columns, then row tiles, then the contracted axis; of drhs: columns,
    rows of the output, then row tiles. A block is fetched when its index changes. The product of
    a row tile is formed whole for each group that has rows in it.

    Args:
        shape: the forward problem.
        pass_: which pass of it.
        tile: tile by forward axes.
        itemsize: bytes of an element of activations and their gradients.
        weight_itemsize: bytes of an element of the weights and their gradients.
    """
    m, k, n, g = shape.m, shape.k, shape.n, shape.g
    visits = _row_visits(m, tile.m, g)
    k_tiles, n_tiles = _tiles(k, tile.k), _tiles(n, tile.n)
    flops = 2 * visits * tile.m * k_tiles * tile.k * n_tiles * tile.n
    if pass_ == "drhs":
        lhs = visits * tile.m * k * itemsize * n_tiles
        grad = visits * tile.m * n * itemsize * k_tiles
        return KernelCost(flops, lhs + grad + g * k * n * weight_itemsize)
    contracted, columns = (n, k) if pass_ == "dlhs" else (k, n)
    contracted_tiles, column_tiles = (n_tiles, k_tiles) if pass_ == "dlhs" else (k_tiles, n_tiles)
    # With one contracted tile the weight block stays while the group does, and the row block
    # stays while neighbouring groups share a row tile.
    row_fetches = m // tile.m if contracted_tiles == 1 else visits
    weight_fetches = g if contracted_tiles == 1 else visits
    moved = row_fetches * tile.m * contracted * itemsize * column_tiles
    moved += weight_fetches * k * n * weight_itemsize
    return KernelCost(flops, moved + m * columns * itemsize)


def roofline_seconds(cost: KernelCost, device: Tpu) -> float:
    """The longer of computing and moving, in seconds: XLA's ``optimal_seconds`` of one kernel."""
    return max(
        cost.flops / device.flops_per_second, cost.bytes_accessed / device.hbm_bytes_per_second
    )


def kernel_seconds(
    shape: GmmShape,
    pass_: Pass,
    tile: GmmTile,
    device: Tpu,
    *,
    itemsize: int = 2,
    weight_itemsize: int = 2,
) -> float:
    """Roofline time of :func:`kernel_cost`, in seconds."""
    cost = kernel_cost(shape, pass_, tile, itemsize=itemsize, weight_itemsize=weight_itemsize)
    return roofline_seconds(cost, device)


def site_seconds(site: Site, tile: GmmTile, device: Tpu) -> float:
    """Roofline time of the kernel's formula for a site, in seconds."""
    return kernel_seconds(
        site.shape,
        site.pass_,
        tile,
        device,
        itemsize=ITEMSIZES[site.dtype],
        weight_itemsize=ITEMSIZES[site.weights],
    )


def walk_seconds(site: Site, tile: GmmTile, device: Tpu) -> float:
    """Roofline time of :func:`walk_cost` for a site, in seconds."""
    cost = walk_cost(
        site.shape,
        site.pass_,
        tile,
        itemsize=ITEMSIZES[site.dtype],
        weight_itemsize=ITEMSIZES[site.weights],
    )
    return roofline_seconds(cost, device)


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


@lru_cache(maxsize=1024)
def _row_visits(m: int, tile_m: int, groups: int) -> int:
    """Row tiles visited when m rows are spread evenly over the groups: one per (tile, group)."""
    boundaries = {(i * m // groups) for i in range(1, groups)}
    inside = sum(1 for b in boundaries if b % tile_m)
    return _tiles(m, tile_m) + inside
