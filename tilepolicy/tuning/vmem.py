"""How much VMEM a tile needs: fits, surely does not, or unsure. Only the compiler decides.

The buffers that a kernel declares are a floor (in drhs 95 % of them): its inputs, as often as they
are buffered, two of its output, and a float32 accumulator of one output tile, which XLA leaves out
when one tile covers the whole contracted axis. No compiled kernel took less.

What the compiler adds, for operands that do not stay in registers, is at most a copy of the left
operand's tile, half of the accumulator and a quarter of the right operand's tile, and half a MiB:
no compiled kernel took more. Both hold for every compile in
``tests/tuning/vmem_calibration.json``, which ``scripts/calibrate_vmem.py`` makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tilepolicy.tuning.kernels import KernelOptions
from tilepolicy.tuning.sites import ITEMSIZES, Backend, GmmTile, Site
from tilepolicy.tuning.tpus import Tpu

__all__ = ["Estimate", "Guess", "estimate_vmem", "vmem_bounds", "vmem_limit"]

Guess = Literal["fits", "unsure", "does-not-fit"]

_ACCUMULATOR: Final = 4
_LANES: Final = 128
_V2_WEIGHT_BUFFERS: Final = 3
_V2_ZERO_BYTES: Final = 2 * 1024 * 1024
_V2_SHARE: Final = 0.9
_SLACK: Final = 512 * 1024


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is predicted of a tile.

    Attributes:
        least_bytes: what the kernel declares.
        most_bytes: with everything that compilers were seen to add.
        limit_bytes: the limit that applies.
        verdict: ``unsure`` when the limit is between the two.
    """

    least_bytes: int
    most_bytes: int
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
    least, most = vmem_bounds(site, tile, options or KernelOptions())
    limit = vmem_limit(site.backend, chip, scoped_vmem_limit_kib)
    verdict: Guess = "fits" if most <= limit else "unsure" if least <= limit else "does-not-fit"
    return Estimate(least, most, limit, verdict)


def vmem_limit(backend: Backend, chip: Tpu, scoped_vmem_limit_kib: int | None = None) -> int:
    """Bytes of VMEM that one kernel may use.

    The v2 kernels ask for 90 % of the core's VMEM and do not look at the flag.
    """
    if backend in ("tokamax_v2", "tokamax_v2_heuristic"):
        return int(chip.vmem_bytes * _V2_SHARE)
    kib = scoped_vmem_limit_kib if scoped_vmem_limit_kib is not None else chip.scoped_vmem_limit_kib
    return kib * 1024


def vmem_bounds(site: Site, tile: GmmTile, options: KernelOptions) -> tuple[int, int]:
    """Least and most bytes of VMEM that the kernel takes.

    v1 and megablox double-buffer everything (v1's ``input_buffer_count`` is for lhs, in drhs for
    both inputs); v2 keeps three buffers of weights, and zeroes of up to 2 MiB.
    """
    itemsize, weight = ITEMSIZES[site.dtype], ITEMSIZES[site.weights]
    rows_k, rows_n, k_n = tile.m * tile.k, tile.m * tile.n, tile.k * tile.n
    left, right, out, whole = {
        "fwd": (rows_k * itemsize, k_n * weight, rows_n, tile.k >= site.shape.k),
        "dlhs": (rows_n * itemsize, k_n * weight, rows_k, tile.n >= site.shape.n),
        "drhs": (rows_k * itemsize, rows_n * itemsize, k_n, False),
    }[site.pass_]
    out_itemsize = weight if site.pass_ == "drhs" else itemsize
    v2 = site.backend in ("tokamax_v2", "tokamax_v2_heuristic")
    left_buffers = 2 if v2 else options.input_buffer_count or 2
    right_buffers = left_buffers if site.pass_ == "drhs" else _V2_WEIGHT_BUFFERS if v2 else 2
    accumulator = _ACCUMULATOR * out
    least = left_buffers * left + right_buffers * right + 2 * out * out_itemsize
    least += 0 if whole else accumulator
    if v2:
        rows = site.shape.k if site.pass_ == "drhs" else site.shape.m
        row_bytes = _LANES * out_itemsize
        least += min(_V2_ZERO_BYTES // row_bytes, rows) * row_bytes
    most = least
    if site.pass_ == "drhs":
        least -= least // 20  # one kernel of the calibration took 4.5 % less than it declares
    # v2 keeps the accumulator sometimes even when one tile covers the contraction.
    kept = accumulator if v2 and whole else 0
    return least, most + kept + left + accumulator // 2 + right // 4 + _SLACK
