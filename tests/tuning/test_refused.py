"""Tiles that the compiler refused: kept, left out of the shipped tables, and named there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilepolicy.axes import GmmShape
from tilepolicy.formats.records import FormatError
from tilepolicy.formats.refused import KernelForm, RefusedTiles
from tilepolicy.formats.tpu_tables import Measured, choose, device_tables
from tilepolicy.tuning.compiler import CompileRequest, CompileVerdict, Status
from tilepolicy.tuning.kernels import KernelOptions
from tilepolicy.tuning.sites import GmmTile, Site
from tilepolicy.tuning.tpus import TPUS

WHOLE = GmmShape(4096, 1024, 2048, 8)
"""A call whose contracted axis one of the tiles below covers."""


def test_a_refused_tile_is_not_chosen_where_the_compiler_refused_it() -> None:
    """The refusal holds for every call that makes the same kernel, and for no other."""
    best = Measured(WHOLE, "fwd", GmmTile(512, 1024, 2048), 2, 1.0)
    other = Measured(WHOLE, "fwd", GmmTile(256, 512, 512), 2, 2.0)
    call = GmmShape(8192, 1024, 2048, 16)
    form = KernelForm.of("v6e", "fwd", call, best.tile, 2)
    assert form == KernelForm("v6e", "fwd", best.tile, 2, True, True, True)
    for without, expected in (({}, best), ({form: (2, 1)}, other)):
        chosen = choose(call, "fwd", TPUS["v6e"], [best, other], RefusedTiles(without))
        assert chosen is not None
        assert chosen.taken_from is expected
    accumulating = GmmShape(8192, 1536, 2048, 16)
    chosen = choose(accumulating, "fwd", TPUS["v6e"], [best], RefusedTiles({form: (2, 1)}))
    assert chosen is not None
    assert chosen.taken_from is best


def test_a_measured_tile_that_is_refused_is_replaced_and_named() -> None:
    """The point says what it stands for."""
    best = Measured(WHOLE, "fwd", GmmTile(512, 1024, 2048), 2, 1.0)
    near = Measured(WHOLE._replace(m=8192), "fwd", GmmTile(256, 512, 512), 2, 2.0)
    refused = RefusedTiles(
        {KernelForm.of("v6e", "fwd", best.shape, best.tile, best.input_buffer_count): (2, 1)}
    )
    table = device_tables("v6e", [best, near], {}, "x", refused)[0]
    point = next(point for point in table.points if point.at["batch_seq"] == WHOLE.m)
    assert point.tile["batch_seq"] == 256
    assert point.source == (
        "chosen: tile of 8192x1024x2048 in 8 groups, 1.00 octaves away; "
        "the measured 512x1024x2048 exceeds VMEM"
    )


def test_refused_tiles_are_written_and_read(tmp_path: Path) -> None:
    """What goes out comes in again; a missing file is an empty one; another is an error."""
    path = tmp_path / "refused.json"
    assert RefusedTiles.read(path) == RefusedTiles({})
    form = KernelForm("v6e", "drhs", GmmTile(512, 1024, 2048), 3, True, False, False)
    RefusedTiles({form: (34, None)}).write(path, {"libtpu": "0.0.52"})
    assert RefusedTiles.read(path) == RefusedTiles({form: (34, None)})
    path.write_text("[]")
    with pytest.raises(FormatError, match="holds no refused tiles"):
        RefusedTiles.read(path)


def test_a_verdict_that_exceeds_vmem_is_a_refusal_and_no_other() -> None:
    """A timeout, a crash or a lack of HBM says nothing of the tile."""
    site = Site("wi", "fwd", 4096, 1024, 2048, 8)
    options = KernelOptions(input_buffer_count=2)
    request = CompileRequest(site, "v6e", GmmTile(512, 1024, 1024), options)
    statuses: tuple[Status, ...] = ("fits", "failed", "timeout", "crashed")
    others = [CompileVerdict(request, status) for status in statuses]
    assert not RefusedTiles({}).with_verdicts(others).kernels
    refusal = CompileVerdict(request, "does-not-fit", used_bytes=34, available_bytes=32)
    found = RefusedTiles({}).with_verdicts([refusal]).kernels
    assert found == {KernelForm("v6e", "fwd", request.tile, 2, True, True, True): (34, 32)}
