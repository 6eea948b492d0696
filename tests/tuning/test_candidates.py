"""Which tiles are proposed, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepolicy.backends import illegal_tile
from tilepolicy.settings import AXES, LAYERS, PASSES
from tilepolicy.tuning.candidates import candidate_tiles, legal_sizes, rank
from tilepolicy.tuning.sites import Backend, GmmTile, Site
from tilepolicy.tuning.tpus import TPUS, tpu

KERNELS = ("tokamax_v1", "tokamax_v2", "megablox")

sites = st.builds(
    Site,
    st.sampled_from(LAYERS),
    st.sampled_from(PASSES),
    st.integers(1, 64).map(lambda rows: 128 * rows),
    st.integers(128, 3000),
    st.integers(128, 3000),
    st.integers(1, 32),
    backend=st.sampled_from(KERNELS),
)


@given(sites)
def test_every_candidate_is_legal(site: Site) -> None:
    """The backend's own rules have nothing against any proposed tile, and rows are divided."""
    sizes = {"batch_seq": site.batch_seq, "embed_dim": site.embed_dim, "mlp_dim": site.mlp_dim}
    for tile in candidate_tiles(site):
        named = tile.to_policy(site.layer)
        assert illegal_tile(named, site.backend, site.layer, site.pass_, sizes) == ()
        assert site.batch_seq % tile.m == 0


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        # 2880 is no multiple of 128: v1 and megablox take it whole, v2 its next multiple.
        ("tokamax_v1", (128, 256, 512, 1024, 2048, 2880)),
        ("megablox", (128, 256, 512, 1024, 2048, 2880)),
        ("tokamax_v2", (128, 256, 512, 1024, 2048, 2944)),
    ],
)
def test_sizes_of_an_odd_dimension(backend: Backend, expected: tuple[int, ...]) -> None:
    """gpt-oss's 2880 = 22.5 x 128."""
    site = Site("wi", "fwd", 4096, 2880, 2880, 4, backend=backend)
    assert legal_sizes(site, "embed_dim") == expected


def test_sizes_of_an_even_dimension() -> None:
    """Powers of two, and whole fractions that are multiples of 128."""
    site = Site("wi", "fwd", 4096, 7168, 768, 4)
    assert legal_sizes(site, "embed_dim") == (
        (128, 256, 512, 896, 1024, 1792, 2048, 3584, 4096, 7168)
    )
    assert legal_sizes(site, "mlp_dim") == (128, 256, 384, 512, 768)


def test_rows_are_powers_of_two_that_divide() -> None:
    """384 rows take a tile of 128 only; rows that 128 does not divide take one whole tile."""
    assert legal_sizes(Site("wi", "fwd", 384, 256, 256, 1), "batch_seq") == (128,)
    assert legal_sizes(Site("wi", "fwd", 8192, 256, 256, 1), "batch_seq") == (128, 256, 512, 1024)
    assert legal_sizes(Site("wi", "fwd", 200, 256, 256, 1), "batch_seq") == (200,)


def test_fixed_axes_keep_their_size() -> None:
    """An axis that the config decides has that size in every candidate, even an odd one."""
    site = Site("wo", "fwd", 4096, 1024, 512, 4)
    tiles = tuple(candidate_tiles(site, {"embed_dim": 320}))
    assert {tile.n for tile in tiles} == {320}
    assert len(tiles) == len(legal_sizes(site, "batch_seq")) * len(legal_sizes(site, "mlp_dim"))


def test_order_is_that_of_the_formula_beyond_its_precision() -> None:
    """After the candidates within 5 % of the best, times never fall."""
    site = Site("wi", "fwd", 131072, 7168, 2048, 256)
    found = rank(site, tpu("v6e"))
    best = min(candidate.seconds for candidate in found)
    times = [c.seconds if c.seconds > best * 1.05 else best for c in found]
    assert times == sorted(times)
    assert all(candidate.vmem.verdict != "does-not-fit" for candidate in found)


def test_equals_fill_the_matrix_unit_first() -> None:
    """Among equals: 256 rows on v6e, 128 on v5p, whose matrix units have that many."""
    site = Site("wi", "fwd", 8192, 512, 512, 8)
    assert rank(site, tpu("v6e"))[0].tile.m == 256
    assert rank(site, tpu("v5p"))[0].tile.m == 128


@pytest.mark.parametrize("device", TPUS)
def test_row_tiles_stay_within_a_group(device: str) -> None:
    """No row tile is larger than the rows of a group (next power of two) and the matrix unit."""
    site = Site("wi", "fwd", 8192, 1024, 1024, 64)
    most = max(candidate.tile.m for candidate in rank(site, tpu(device)))
    assert most == max(128, TPUS[device].mxu_rows)


def test_fixed_rows_may_exceed_a_group() -> None:
    """What the config decides is not second-guessed."""
    site = Site("wi", "fwd", 8192, 1024, 1024, 64)
    found = rank(site, tpu("v6e"), fixed={"batch_seq": 1024})
    assert {candidate.tile.m for candidate in found} == {1024}


def test_a_higher_limit_admits_larger_tiles() -> None:
    """The scoped VMEM limit is an input of the ranking."""
    site = Site("wi", "fwd", 131072, 7168, 2048, 256)
    low = rank(site, tpu("v6e"))
    high = rank(site, tpu("v6e"), scoped_vmem_limit_kib=98304)
    assert {c.tile for c in low} < {c.tile for c in high}
    assert high[0].seconds < low[0].seconds


def test_nothing_fits_an_absurd_limit() -> None:
    """An empty ranking, not an error: the caller says so."""
    assert rank(Site("wi", "fwd", 256, 256, 256, 1), tpu("v6e"), scoped_vmem_limit_kib=1) == ()


@given(sites)
def test_tiles_go_through_policy_names(site: Site) -> None:
    """Forward axes to policy names and back, for both layers."""
    tile = GmmTile(128, 256, 384)
    named = tile.to_policy(site.layer)
    assert GmmTile.of_policy(site.layer, named) == tile
    assert set(named) == set(AXES)
    assert named["embed_dim" if site.layer == "wi" else "mlp_dim"] == 256
