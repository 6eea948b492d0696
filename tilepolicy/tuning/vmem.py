"""How much VMEM a tile needs: fits, surely does not, or unsure. Only the compiler decides.

The buffers of a kernel are known: its inputs (as often as they are buffered), two of its output,
and a float32 accumulator of one output tile. What the compiler adds for operands of one product
that do not stay in registers, and what it saves, is not; the factors of :data:`SPREAD` bound it.
They are the extremes that were seen in the compiles of ``tests/tuning/vmem_calibration.json``
(made by ``scripts/calibrate_vmem.py``), widened by a tenth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tilepolicy.settings import Pass
from tilepolicy.tuning.kernels import KernelOptions
from tilepolicy.tuning.sites import ITEMSIZES, Backend, GmmTile, Site
from tilepolicy.tuning.tpus import Tpu

__all__ = ["SPREAD", "Estimate", "Guess", "buffer_bytes", "estimate_vmem", "vmem_limit"]

Guess = Literal["fits", "unsure", "does-not-fit"]

_ACCUMULATOR: Final = 4
_V2_WEIGHT_BUFFERS: Final = 3
_V2_ZEROES: Final = 2 * 1024 * 1024
_V2_SHARE: Final = 0.9

SPREAD: Final[Mapping[Pass, tuple[float, float]]] = {
    "fwd": (0.75, 1.5),
    "dlhs": (0.75, 1.5),
    "drhs": (0.75, 1.5),
}
"""Smallest and largest share of :func:`buffer_bytes` that a compiled kernel really took."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is predicted of a tile.

    Attributes:
        bytes: the kernel's buffers.
        limit_bytes: the limit that applies.
        verdict: ``fits`` and ``does-not-fit`` hold whatever the compiler adds or saves.
    """

    bytes: int
    limit_bytes: int
    verdict: Guess


def estimate_vmem(
    site: Site,
    tile: GmmTile,
    chip: Tpu,
    *,
    options: KernelOptions | None = None,
    scoped_vmem_limit_kib: int | None = None,
) -> Estimate:
    """Predict whether the compiler will accept a tile.

    Args:
        site: the grouped matmul.
        tile: tile by forward axes.
        chip: the device.
        options: further fields of the kernel's config.
        scoped_vmem_limit_kib: ``--xla_tpu_scoped_vmem_limit_kib``; None for the default.
    """
    needed = buffer_bytes(site, tile, options or KernelOptions())
    limit = vmem_limit(site.backend, chip, scoped_vmem_limit_kib)
    low, high = SPREAD[site.pass_]
    verdict: Guess = "unsure"
    if needed * high <= limit:
        verdict = "fits"
    elif needed * low > limit:
        verdict = "does-not-fit"
    return Estimate(needed, limit, verdict)


def vmem_limit(backend: Backend, chip: Tpu, scoped_vmem_limit_kib: int | None = None) -> int:
    """Bytes of VMEM that one kernel may use.

    The v2 kernels ask for 90 % of the core's VMEM and do not look at the flag.
    """
    if backend in ("tokamax_v2", "tokamax_v2_heuristic"):
        return int(chip.vmem_bytes * _V2_SHARE)
    kib = scoped_vmem_limit_kib if scoped_vmem_limit_kib is not None else chip.scoped_vmem_limit_kib
    return kib * 1024


def buffer_bytes(site: Site, tile: GmmTile, options: KernelOptions) -> int:
    """Bytes of the buffers that the kernel declares.

    v1 and megablox double-buffer everything (v1's ``input_buffer_count`` is for lhs, in drhs for
    both inputs); v2 keeps three buffers of weights and zeroes of up to 2 MiB.
    """
    itemsize, weight = ITEMSIZES[site.dtype], ITEMSIZES[site.weights]
    rows_k, rows_n, k_n = tile.m * tile.k, tile.m * tile.n, tile.k * tile.n
    left, right, out = {
        "fwd": (rows_k * itemsize, k_n * weight, rows_n),
        "dlhs": (rows_n * itemsize, k_n * weight, rows_k),
        "drhs": (rows_k * itemsize, rows_n * itemsize, k_n),
    }[site.pass_]
    out_itemsize = weight if site.pass_ == "drhs" else itemsize
    fixed = out * (2 * out_itemsize + _ACCUMULATOR)
    if site.backend in ("tokamax_v2", "tokamax_v2_heuristic"):
        right_buffers = 2 if site.pass_ == "drhs" else _V2_WEIGHT_BUFFERS
        return fixed + 2 * left + right_buffers * right + _V2_ZEROES
    buffers = options.input_buffer_count or 2
    return fixed + buffers * left + (buffers if site.pass_ == "drhs" else 2) * right
