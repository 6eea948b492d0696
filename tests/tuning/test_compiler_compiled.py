"""The real TPU compiler: verdicts, read-back, and the cost formula held against its word."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from small_moe import TOKAMAX, run, write_config, write_rules

from tilepolicy.axes import GmmShape
from tilepolicy.settings import PASSES, Pass
from tilepolicy.tuning.compiler import CompileRequest, CompileVerdict
from tilepolicy.tuning.cost import kernel_cost, kernel_seconds
from tilepolicy.tuning.kernels import KernelOptions
from tilepolicy.tuning.pool import close_compilers, compile_many
from tilepolicy.tuning.sites import BACKENDS, Backend, GmmTile, Site
from tilepolicy.tuning.tpus import TPUS, tpu
from tilepolicy.tuning.vmem import vmem_bounds

pytestmark = pytest.mark.compiled

SITE = Site("wi", "fwd", 2048, 1024, 512, 4)
TILE = GmmTile(256, 512, 256)
SECONDS = 240.0


@pytest.fixture(autouse=True, scope="module")
def warm() -> Iterator[None]:
    """One child for the whole module."""
    yield
    close_compilers()


def compiled(request: CompileRequest) -> CompileVerdict:
    """The compiler's verdict."""
    (verdict,) = compile_many([request], timeout_seconds=SECONDS)
    return verdict


@pytest.mark.maxtext
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kernel_and_pass_compiles(backend: Backend, pass_: Pass) -> None:
    """The tile that was asked for is the tile of the compiled kernel, by forward axes."""
    tile = None if backend == "tokamax_v2_heuristic" else TILE
    verdict = compiled(CompileRequest(replace(SITE, backend=backend, pass_=pass_), "v6e", tile))
    assert verdict.fits, verdict.message
    assert verdict.tile is not None
    assert tile is None or verdict.tile == tile
    assert verdict.used_bytes is not None
    least, most = vmem_bounds(verdict.request.site, verdict.tile, KernelOptions())
    assert least <= verdict.used_bytes <= most
    assert verdict.kernel_flops == 2 * 2048 * 1024 * 512
    limit = 32 * 2**20 if backend in ("tokamax_v1", "megablox") else int(128 * 2**20 * 0.9)
    assert verdict.available_bytes == limit


@pytest.mark.parametrize(
    ("device", "pass_", "tile"),
    [
        ("v5e", "fwd", GmmTile(128, 128, 256)),
        ("v5e", "drhs", GmmTile(128, 512, 384)),
        ("v5p", "dlhs", GmmTile(256, 384, 512)),
        ("v6e", "fwd", GmmTile(256, 1024, 128)),
        ("v6e", "drhs", GmmTile(512, 256, 128)),
        ("v7x", "dlhs", GmmTile(128, 1024, 128)),
    ],
)
def test_cost_formula_is_the_kernels(device: str, pass_: Pass, tile: GmmTile) -> None:
    """Flops and bytes of the formula are those that the compiled kernel carries, to the byte."""
    site = replace(SITE, pass_=pass_)
    verdict = compiled(CompileRequest(site, device, tile))
    assert verdict.fits, verdict.message
    cost = kernel_cost(site.shape, pass_, tile)
    assert (verdict.kernel_flops, verdict.kernel_bytes) == (cost.flops, cost.bytes_accessed)
    # The program adds the walk of the grid, computed from the group sizes, and layout copies.
    assert verdict.bytes_accessed is not None
    assert verdict.bytes_accessed >= cost.bytes_accessed
    assert verdict.roofline_seconds is not None
    assert verdict.roofline_seconds >= kernel_seconds(site.shape, pass_, tile, tpu(device)) * 0.99


@pytest.mark.parametrize("device", TPUS)
def test_the_hbm_of_a_program_is_the_compilers(device: str) -> None:
    """What the device table says of HBM is what the compiler names for a call without room."""
    site = Site("wi", "fwd", 1 << 24, 8192, 8192, 8)
    verdict = compiled(CompileRequest(site, device, GmmTile(128, 128, 128)))
    assert verdict.status == "failed"
    named = re.search(r"exceeds available HBM \(([0-9.]+)G\)", verdict.message)
    assert named is not None, verdict.message
    assert tpu(device).hbm_bytes == int(float(named[1]) * 2**30)


@pytest.mark.parametrize("device", TPUS)
@pytest.mark.parametrize(
    ("shape", "bound"),
    [
        (GmmShape(2048, 2048, 2048, 1), "flops"),
        (GmmShape(256, 1024, 1024, 32), "bytes"),
    ],
)
def test_roofline_is_the_compilers(device: str, shape: GmmShape, bound: str) -> None:
    """Peak and bandwidth of the device table, seen in a program that is one v2 kernel."""
    site = Site("wi", "fwd", shape.m, shape.k, shape.n, shape.g, backend="tokamax_v2")
    verdict = compiled(CompileRequest(site, device, GmmTile(256, 512, 512)))
    assert verdict.fits, verdict.message
    assert verdict.roofline_seconds is not None
    assert verdict.bytes_accessed is not None
    chip = tpu(device)
    work = (
        2 * shape.m * shape.k * shape.n / chip.flops_per_second
        if bound == "flops"
        else verdict.bytes_accessed / chip.hbm_bytes_per_second
    )
    assert verdict.roofline_seconds == pytest.approx(work, rel=0.002)


def test_other_fields_reach_the_kernel() -> None:
    """The input_buffer_count is read back, and takes VMEM."""
    request = CompileRequest(SITE, "v6e", TILE)
    four = replace(request, options=KernelOptions(input_buffer_count=4))
    two_buffers, four_buffers = compiled(request), compiled(four)
    assert (two_buffers.input_buffer_count, four_buffers.input_buffer_count) == (2, 4)
    assert two_buffers.used_bytes is not None
    assert four_buffers.used_bytes is not None
    assert four_buffers.used_bytes - two_buffers.used_bytes == 2 * 256 * 512 * 2


def test_vmem_verdict_and_limit() -> None:
    """A tile beyond the scoped limit is refused with both numbers; a higher limit admits it."""
    site = Site("wi", "fwd", 2048, 2048, 1024, 2)
    request = CompileRequest(site, "v5p", GmmTile(1024, 2048, 1024))
    refused = compiled(request)
    assert refused.status == "does-not-fit"
    assert refused.available_bytes == 16 * 2**20
    assert refused.used_bytes is not None
    assert refused.used_bytes > 16 * 2**20
    assert refused.message.startswith("Scoped allocation with size ")
    assert refused.tile == request.tile
    admitted = compiled(replace(request, scoped_vmem_limit_kib=40960))
    assert admitted.fits
    assert admitted.available_bytes == 40960 * 1024


def test_a_kernel_refuses_a_tile() -> None:
    """Rows that the tile does not divide: the kernel's own words, before anything is compiled."""
    verdict = compiled(CompileRequest(SITE, "v6e", GmmTile(384, 128, 128)))
    assert (verdict.status, verdict.message) == (
        "rejected",
        "m=2048 must be divisible by tile size (384).",
    )


def test_quantised_types_are_refused() -> None:
    """There is no kernel for a bare int8 operand; the message says why."""
    verdict = compiled(CompileRequest(replace(SITE, dtype="int8"), "v6e", TILE))
    assert verdict.status == "rejected"
    assert "quantised operands carry scales" in verdict.message


def test_stock_tiles_are_read_back() -> None:
    """Without a tile tokamax decides: 128 x 128 x 128 on v6e, its heuristic on TPU7x."""
    stock = compiled(CompileRequest(SITE, "v6e", None))
    assert stock.tile == GmmTile(128, 128, 128)
    heuristic = compiled(CompileRequest(SITE, "v7x", None))
    assert heuristic.tile == GmmTile(1024, 1024, 512)


def test_a_compile_is_cut_off() -> None:
    """The limit holds for the real compiler too."""
    (verdict,) = compile_many([CompileRequest(SITE, "v6e", TILE)], timeout_seconds=0.01)
    assert verdict.status == "timeout"


@pytest.mark.slow
def test_verify_names_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line to the compiler: one site fails, a change that fits is found."""
    rules = write_rules(
        tmp_path,
        "layer: wi, pass: fwd => batch_seq: 1024, embed_dim: 1024, mlp_dim: 512",
        "layer: wo, pass: fwd => batch_seq: 128, embed_dim: 256, mlp_dim: 256",
    )
    config = write_config(tmp_path, TOKAMAX)
    arguments = ["verify", config, "-p", rules, "-d", "v5e", "-f", "json"]
    code, out, _ = run(capsys, [*arguments, "--scoped-vmem-limit-kib", "8192"])
    assert code == 1
    sites = {f"{s['layer']}.{s['pass']}": s for s in json.loads(out)["devices"][0]["sites"]}
    assert {n for n, s in sites.items() if s["outcome"] != "fits"} == {"wi.fwd"}
    assert sites["wo.fwd"]["compiled_tile"] == sites["wo.fwd"]["tile"]
    smaller, higher = sites["wi.fwd"]["suggestions"]
    assert len(smaller["changed"]) == 1
    assert smaller["used_bytes"] <= 8192 * 1024
    assert higher["tile"] == sites["wi.fwd"]["tile"]
    assert 8192 < higher["scoped_vmem_limit_kib"] < 16384
