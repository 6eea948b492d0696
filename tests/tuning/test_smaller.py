"""The smallest change of a tile that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_compiler import FakeTpuCompiler
from hypothesis import given
from hypothesis import strategies as st

from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.compiler import CompileRequest
from tilepolicy.tuning.sites import GmmTile, Site
from tilepolicy.tuning.smaller import fitting_limit, smaller_tiles, smallest_change
from tilepolicy.tuning.tpus import tpu
from tilepolicy.tuning.vmem import estimate_vmem

SITE = Site("wi", "fwd", 8192, 2048, 1024, 8, backend="megablox")
TILE = GmmTile(1024, 2048, 1024)
REQUEST = CompileRequest(SITE, "v5p", TILE, scoped_vmem_limit_kib=17408)


def test_order_is_by_change() -> None:
    """Halves first, one axis before two; among them the cheaper by the cost formula."""
    first = list(smaller_tiles(SITE, TILE))[:4]
    assert first[0] == GmmTile(512, 2048, 1024)
    assert set(first[:3]) == {
        GmmTile(512, 2048, 1024),
        GmmTile(1024, 1024, 1024),
        GmmTile(1024, 2048, 512),
    }


@given(
    st.sampled_from((128, 256, 512, 1024)),
    st.integers(1, 16).map(lambda size: 128 * size),
    st.integers(1, 8).map(lambda size: 128 * size),
)
def test_smaller_tiles_are_nowhere_larger(m: int, k: int, n: int) -> None:
    """Every proposal differs, and no axis of it grows."""
    for tile in smaller_tiles(SITE, GmmTile(m, k, n)):
        assert tile != (m, k, n)
        assert tile.m <= m
        assert tile.k <= k
        assert tile.n <= n


def test_the_smallest_change_is_confirmed_by_compiling() -> None:
    """The first that the compiler takes; what surely does not fit is never compiled."""
    fake = FakeTpuCompiler()
    found = smallest_change(REQUEST, TILE, Compiler(run=fake))
    assert found is not None
    assert found.changed("wi") == ("batch_seq",)
    assert found.tile == GmmTile(512, 2048, 1024)
    assert found.verdict.fits
    assert found.scoped_vmem_limit_kib is None
    assert [request.tile for request in fake.requests] == [GmmTile(512, 2048, 1024)]


def test_what_surely_does_not_fit_is_not_compiled() -> None:
    """With a tight limit the first proposals are hopeless: the search goes past them for free."""
    fake = FakeTpuCompiler()
    tight = replace(REQUEST, scoped_vmem_limit_kib=4096)
    found = smallest_change(tight, TILE, Compiler(run=fake))
    assert found is not None
    for request in fake.requests:
        assert request.tile is not None
        guess = estimate_vmem(SITE, request.tile, tpu("v5p"), scoped_vmem_limit_kib=4096)
        assert guess.verdict != "does-not-fit"


def test_a_refused_proposal_is_passed_over() -> None:
    """A tile that the compiler fails on for another reason is no suggestion."""
    fake = FakeTpuCompiler()
    fake.statuses[GmmTile(512, 2048, 1024)] = "failed"
    found = smallest_change(REQUEST, TILE, Compiler(run=fake))
    assert found is not None
    assert found.tile != GmmTile(512, 2048, 1024)
    assert fake.requests[0].tile == GmmTile(512, 2048, 1024)


def test_the_search_ends() -> None:
    """Eight compiles without success, then there is no suggestion."""
    fake = FakeTpuCompiler()
    fake.statuses.update(dict.fromkeys(smaller_tiles(SITE, TILE), "failed"))
    assert smallest_change(REQUEST, TILE, Compiler(run=fake)) is None
    assert len(fake.requests) == 8


def test_the_limit_that_a_tile_needs() -> None:
    """The lowest whole MiB under which the tile compiles, without changing it."""
    found = fitting_limit(REQUEST, TILE, Compiler(run=FakeTpuCompiler()))
    assert found is not None
    assert found.changed("wi") == ()
    limit = found.scoped_vmem_limit_kib
    assert limit is not None
    assert limit % 1024 == 0
    assert found.verdict.used_bytes is not None
    assert limit * 1024 - 2**20 < found.verdict.used_bytes <= limit * 1024


@pytest.mark.parametrize(
    "request_",
    [
        replace(REQUEST, site=replace(SITE, backend="tokamax_v2")),
        replace(REQUEST, site=replace(SITE, dtype="float32", embed_dim=8192, mlp_dim=8192)),
    ],
)
def test_no_limit_helps(request_: CompileRequest) -> None:
    """A v2 kernel does not look at the flag; a tile beyond the VMEM itself fits under none."""
    tile = GmmTile(1024, 8192, 8192)
    assert fitting_limit(request_, tile, Compiler(run=FakeTpuCompiler())) is None
