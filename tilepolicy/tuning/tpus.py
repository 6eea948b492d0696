"""The TPUs that tiles are verified and tuned for: topology, roofline, VMEM.

The roofline is the one of XLA's own TPU cost model, so that predictions agree with the
``optimal_seconds`` that the compiler reports: one device is one jax device (a v5p chip is two
cores working as one, a TPU7x core is half a chip). The figures were read off compiled kernels
whose time one side of the roofline decides (libtpu 0.0.52;
``tests/tuning/test_compiler_compiled.py`` repeats this). The vendor's peaks, in
``jax._src.tpu_info`` of jax 0.12, differ where noted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tilepolicy.errors import Problem, VerifyError
from tilepolicy.facts.devices import DEFAULT_SCOPED_VMEM_KIB

__all__ = ["TPUS", "Tpu", "tpu"]

_MIB: Final = 1024 * 1024
_GIB: Final = 1024 * _MIB


@dataclass(frozen=True, slots=True)
class Tpu:
    """One TPU generation as seen by one jax device.

    Attributes:
        name: tilepolicy's name, ``v6e``.
        kind: jax's ``device_kind``.
        topology: name of the smallest topology that libtpu describes offline.
        flops_per_second: bfloat16 peak that XLA's cost model uses.
        hbm_bytes_per_second: HBM bandwidth that XLA's cost model uses.
        hbm_bytes: HBM that one program may use, as the compiler (libtpu 0.0.52) names it when a
            program needs more.
        vmem_bytes: physical VMEM of one core; v2 kernels ask for 90 % of it by themselves.
        mxu_rows: rows and columns of the matrix unit.
    """

    name: str
    kind: str
    topology: str
    flops_per_second: float
    hbm_bytes_per_second: float
    hbm_bytes: int
    vmem_bytes: int
    mxu_rows: int

    @property
    def scoped_vmem_limit_kib(self) -> int:
        """Default of ``--xla_tpu_scoped_vmem_limit_kib``, for kernels that set no limit."""
        return DEFAULT_SCOPED_VMEM_KIB[self.name]


TPUS: Final[Mapping[str, Tpu]] = {
    row.name: row
    for row in (
        # Vendor: 197 TFLOP/s, 820 GB/s.
        Tpu("v5e", "TPU v5 lite", "v5e:2x2", 197e12, 737.66e9, int(15.75 * _GIB), 128 * _MIB, 128),
        # Vendor: 459 TFLOP/s, 2.46 TB/s.
        Tpu("v5p", "TPU v5", "v5p:2x2x1", 394e12, 2350.4e9, int(95.73 * _GIB), 64 * _MIB, 128),
        # Vendor: 920 TFLOP/s, 1.64 TB/s.
        Tpu("v6e", "TPU v6 lite", "v6e:2x2", 918e12, 1638e9, int(31.24 * _GIB), 128 * _MIB, 256),
        # Vendor, per core (half a chip): 1153 TFLOP/s, 3.7 TB/s.
        Tpu("v7x", "TPU7x", "tpu7x:2x2x1", 996e12, 3686e9, int(94.74 * _GIB), 64 * _MIB, 256),
    )
}


def tpu(name: str) -> Tpu:
    """The TPU of a normalised device name.

    Raises:
        VerifyError: there is no offline TPU compiler for this device.
    """
    try:
        return TPUS[name]
    except KeyError:
        raise VerifyError(
            Problem(
                code="unknown-tpu",
                message=f"there is no offline TPU compiler for device {name!r}",
                remedy=f"choose one of {', '.join(TPUS)}",
            )
        ) from None
