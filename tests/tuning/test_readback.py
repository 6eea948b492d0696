"""Grouped-matmul kernels read back from HLO text, and VMEM errors read from messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tilepolicy.axes import GmmShape
from tilepolicy.settings import Pass
from tilepolicy.tuning.readback import find_tile, parse_vmem_error, read_kernels
from tilepolicy.tuning.sites import GmmTile

HLO = Path(__file__).parent / "hlo"
SHAPE = GmmShape(8192, 2048, 1024, 8)


def text(name: str) -> str:
    """An HLO module with one kernel, as libtpu 0.0.52 prints it, its body left out."""
    return (HLO / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "kernel", "pass_", "tile", "buffers"),
    [
        ("v1_fwd", "v1", "fwd", GmmTile(1024, 2048, 1024), 2),
        ("v1_dlhs", "v1", "dlhs", GmmTile(512, 1024, 1024), 2),
        ("v1_drhs", "v1", "drhs", GmmTile(512, 1024, 1024), 2),
        ("megablox_fwd", "megablox", "fwd", GmmTile(512, 1024, 1024), None),
        ("megablox_drhs", "megablox", "drhs", GmmTile(512, 1024, 1024), None),
        ("v2_fwd", "v2", None, GmmTile(512, 1024, 1024), None),
        ("v2_drhs", "v2", "drhs", GmmTile(512, 1024, 1024), None),
    ],
)
def test_kernel_is_read_back(
    name: str, kernel: str, pass_: Pass | None, tile: GmmTile, buffers: int | None
) -> None:
    """Kernel, pass, tile and shape of the forward problem come out of the HLO text alone."""
    (found,) = read_kernels(text(name))
    assert (found.kernel, found.pass_, found.tile) == (kernel, pass_, tile)
    assert found.shape == SHAPE
    assert found.input_buffer_count == buffers


def test_dlhs_is_given_by_forward_axes() -> None:
    """The kernel's own tile_k is the contracted axis: n in dlhs."""
    swapped = text("v1_dlhs").replace(r"\"tile_k\": 1024", r"\"tile_k\": 256")
    (found,) = read_kernels(swapped)
    assert found.tile == GmmTile(m=512, k=1024, n=256)


def test_estimates_and_vmem_are_read_back() -> None:
    """The kernel's own cost estimate, the VMEM that was allocated, and a limit of its own."""
    (v1,) = read_kernels(text("v1_fwd"))
    assert (v1.flops, v1.bytes_accessed) == (2 * 8192 * 2048 * 1024, 113246208)
    assert (v1.vmem_bytes, v1.vmem_limit_bytes) == (22339584, None)
    (v2,) = read_kernels(text("v2_fwd"))
    assert (v2.vmem_bytes, v2.vmem_limit_bytes) == (16359424, 120795955)


def test_several_kernels_keep_their_order() -> None:
    """A module with a forward and a backward call gives both, in the order of the text."""
    found = read_kernels(text("v1_fwd") + text("v1_drhs"))
    assert [kernel.pass_ for kernel in found] == ["fwd", "drhs"]
    assert [kernel.instruction for kernel in found] == [
        "pallas_tpu_ragged_dot_gmm.1",
        "pallas_tpu_ragged_dot_tgmm.1",
    ]


def test_other_custom_calls_are_passed_over() -> None:
    """A TPU kernel that is no grouped matmul (no tiling in its metadata) is not reported."""
    other = text("v1_fwd").replace(r"\"tiling\":", r"\"blocks\":")
    assert read_kernels(other) == ()
    bare = text("v1_fwd").replace("kernel_metadata={", "something_else={")
    assert read_kernels(bare) == ()


def test_text_without_kernels() -> None:
    """A program without TPU kernels gives nothing."""
    assert read_kernels("ENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(1)\n}\n") == ()


def test_unknown_metadata_is_an_error() -> None:
    """A grouped matmul whose metadata has another form is never guessed at."""
    broken = text("v1_fwd").replace(r"\"tile_n\"", r"\"tile_x\"")
    with pytest.raises(ValueError, match=r"kernel metadata of an unknown form in pallas_tpu_rag"):
        read_kernels(broken)


@pytest.mark.parametrize(
    ("message", "used", "limit"),
    [
        (
            "Ran out of memory in memory space vmem while allocating. Scoped allocation with size "
            "20.00M and limit 16.00M exceeded scoped vmem limit by 4.00M.",
            20 * 2**20,
            16 * 2**20,
        ),
        (
            "Ran out of memory in memory space vmem. Used 153.81M of 127.94M vmem. Exceeded",
            round(153.81 * 2**20),
            round(127.94 * 2**20),
        ),
        (
            "Ran out of memory in memory space vmem: Scoped allocation with size 1.5G and limit "
            "512.0K exceeded",
            round(1.5 * 2**30),
            512 * 2**10,
        ),
    ],
)
def test_vmem_errors_are_read(message: str, used: int, limit: int) -> None:
    """Both forms of the compiler's verdict give used and available bytes."""
    found = parse_vmem_error(message)
    assert found is not None
    assert (found.used_bytes, found.available_bytes) == (used, limit)
    assert found.sentence in message


@pytest.mark.parametrize(
    "message",
    [
        "INVALID_ARGUMENT: something else",
        "Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm.",
        "Ran out of memory in memory space vmem, without numbers",
    ],
)
def test_other_errors_are_not_vmem_errors(message: str) -> None:
    """HBM exhaustion and other failures are no verdict on a tile."""
    assert parse_vmem_error(message) is None


def test_tile_is_found_in_an_error() -> None:
    """An error quotes the kernel's metadata, v1's as JSON in JSON, v2's as flat keys."""
    v1 = r'"{\"tiling\": {\"tile_m\": 1024, \"tile_k\": 2048, \"tile_n\": 512}}"'
    assert find_tile(v1, "drhs") == GmmTile(1024, 2048, 512)
    assert find_tile(v1, "dlhs") == GmmTile(1024, 512, 2048)
    v2 = '"tiles.tile_k":2048,\n"tiles.tile_m":8192,\n"tiles.tile_n":1024,'
    assert find_tile(v2, "fwd") == GmmTile(8192, 2048, 1024)
    assert find_tile("no tile here", "fwd") is None


def test_readback_starts_nothing() -> None:
    """The module can check any program's text: it imports neither jax nor process machinery."""
    code = (
        "import sys, tilepolicy.tuning.readback\n"
        "heavy = {'jax', 'tokamax', 'maxtext', 'subprocess', 'joblib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
