"""VMEM bounds, held against kernels that were really compiled."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tilepolicy.tuning.kernels import KernelOptions
from tilepolicy.tuning.sites import GmmTile, Site
from tilepolicy.tuning.tpus import TPUS, tpu
from tilepolicy.tuning.vmem import Estimate, estimate_vmem, vmem_bounds, vmem_limit

MIB = 2**20
CALIBRATION = json.loads(
    (Path(__file__).parent / "vmem_calibration.json").read_text(encoding="utf-8")
)
COMPILES: list[dict[str, Any]] = CALIBRATION["compiles"]


def estimate(row: dict[str, Any]) -> Estimate:
    """The estimate for a compile of the calibration."""
    site = Site("wi", row["pass"], *row["shape"], dtype=row["dtype"], backend=row["backend"])
    options = KernelOptions(input_buffer_count=row["input_buffer_count"])
    return estimate_vmem(
        site,
        GmmTile(*row["tile"]),
        tpu(row["device"]),
        options=options,
        scoped_vmem_limit_kib=row["scoped_vmem_limit_kib"],
    )


def test_compiled_kernels_are_within_the_bounds() -> None:
    """No kernel of the calibration takes less than the floor or more than the ceiling."""
    for row in COMPILES:
        if row["status"] == "fits":
            found = estimate(row)
            assert found.least_bytes <= row["used_bytes"] <= found.most_bytes, row


def test_sure_guesses_are_right() -> None:
    """What surely fits was never refused for VMEM, what surely does not was never accepted."""
    seen = Counter((estimate(row).verdict, row["status"]) for row in COMPILES)
    assert seen["fits", "does-not-fit"] == 0
    assert seen["does-not-fit", "fits"] == 0


def test_most_guesses_are_sure() -> None:
    """Half of the sample lies near the limit; still at most a third of the guesses are unsure."""
    unsure = sum(estimate(row).verdict == "unsure" for row in COMPILES)
    assert unsure <= len(COMPILES) / 3


def test_calibration_covers_every_kernel() -> None:
    """Each device, kernel and pass was compiled, and both verdicts were seen."""
    kinds = {(row["device"], row["backend"], row["pass"]) for row in COMPILES}
    assert len(kinds) == len(TPUS) * 3 * 3
    assert {"fits", "does-not-fit"} <= {row["status"] for row in COMPILES}


def test_bounds_by_hand() -> None:
    """Two buffers of everything, an accumulator unless one tile covers the contraction."""
    site = Site("wi", "fwd", 8192, 2048, 1024, 8)
    least, most = vmem_bounds(site, GmmTile(1024, 1024, 1024), KernelOptions())
    # lhs 2 MiB, weights 2 MiB, out 2 MiB, each twice, accumulator 4 MiB
    assert least == 16 * MIB
    assert most == (16 + 2 + 2 + 0.5 + 0.5) * MIB
    least, _ = vmem_bounds(site, GmmTile(1024, 2048, 1024), KernelOptions())
    assert least == 20 * MIB


def test_buffers_of_v1() -> None:
    """The input_buffer_count is for lhs in fwd and dlhs, for both inputs in drhs."""
    four = KernelOptions(input_buffer_count=4)
    tile = GmmTile(1024, 1024, 1024)
    for pass_, more in (("fwd", 4), ("dlhs", 4), ("drhs", 8)):
        site = Site("wi", pass_, 8192, 2048, 2048, 8)  # type: ignore[arg-type]  # literals
        two, _ = vmem_bounds(site, tile, KernelOptions())
        share = 0.95 if pass_ == "drhs" else 1.0
        assert vmem_bounds(site, tile, four)[0] - two == pytest.approx(more * MIB * share, abs=1)


def test_v2_keeps_three_weights_and_zeroes() -> None:
    """One weight buffer more than v1, and up to 2 MiB of zeroes."""
    tile = GmmTile(512, 2048, 1024)
    v1 = Site("wi", "fwd", 8192, 2048, 1024, 8)
    v2 = Site("wi", "fwd", 8192, 2048, 1024, 8, backend="tokamax_v2")
    difference = (
        vmem_bounds(v2, tile, KernelOptions())[0] - vmem_bounds(v1, tile, KernelOptions())[0]
    )
    assert difference == (4 + 2) * MIB
    few_rows = Site("wi", "fwd", 1024, 2048, 1024, 8, backend="tokamax_v2")
    assert (
        vmem_bounds(v2, tile, KernelOptions())[0] - vmem_bounds(few_rows, tile, KernelOptions())[0]
        == 2 * MIB - 1024 * 128 * 2
    )


def test_limits() -> None:
    """The device's default, the flag, and 90 % of the VMEM for v2, which ignores the flag."""
    assert vmem_limit("tokamax_v1", tpu("v5p")) == 16 * MIB
    assert vmem_limit("megablox", tpu("v6e")) == 32 * MIB
    assert vmem_limit("megablox", tpu("v6e"), 98304) == 96 * MIB
    assert vmem_limit("tokamax_v2", tpu("v6e"), 1024) == int(128 * MIB * 0.9)


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(15 * 1024, "does-not-fit"), (16 * 1024, "unsure"), (21 * 1024, "fits")],
)
def test_three_answers(limit: int, verdict: str) -> None:
    """Below the floor, between floor and ceiling, above the ceiling."""
    site = Site("wi", "fwd", 8192, 2048, 1024, 8)
    found = estimate_vmem(site, GmmTile(1024, 1024, 1024), tpu("v6e"), scoped_vmem_limit_kib=limit)
    assert found.verdict == verdict
