"""The cost formulas by hand and by their properties; test_compiler_compiled asks the compiler."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepolicy.axes import GmmShape
from tilepolicy.errors import VerifyError
from tilepolicy.settings import PASSES, Pass
from tilepolicy.tuning.cost import (
    Cost,
    grid_cost,
    grid_seconds,
    kernel_cost,
    kernel_seconds,
    roofline_seconds,
    shared_rows,
    site_seconds,
)
from tilepolicy.tuning.sites import GmmTile, Site
from tilepolicy.tuning.tpus import TPUS, tpu

SHAPE = GmmShape(8192, 2048, 1024, 8)

shapes = st.builds(
    lambda m, k, n, g: GmmShape(128 * m, k, n, g),
    st.integers(1, 64),
    st.integers(128, 4096),
    st.integers(128, 4096),
    st.integers(1, 64),
)


@st.composite
def shapes_and_tiles(draw: st.DrawFn) -> tuple[GmmShape, GmmTile]:
    """A problem, and a tile whose rows divide its rows."""
    shape = draw(shapes)
    rows = [size for size in (128, 256, 512, 1024) if shape.m % size == 0]
    sizes = st.integers(1, 40).map(lambda size: 128 * size)
    return shape, GmmTile(draw(st.sampled_from(rows)), draw(sizes), draw(sizes))


@pytest.mark.parametrize(
    ("pass_", "tile", "moved"),
    [
        # lhs 32 MiB x column tiles, weights 4 MiB x (row tiles + groups - 1), out 16 MiB
        ("fwd", GmmTile(1024, 2048, 1024), (32 * 1 + 4 * (8 + 7) + 16) * 2**20),
        ("fwd", GmmTile(128, 128, 128), (32 * 8 + 4 * (64 + 7) + 16) * 2**20),
        # the gradient 16 MiB x column tiles of k
        ("dlhs", GmmTile(512, 1024, 1024), (16 * 2 + 4 * (16 + 7) + 32) * 2**20),
        # both operands once per tile of the other, the output 4 MiB x groups
        ("drhs", GmmTile(512, 1024, 1024), (32 * 1 + 16 * 2 + 4 * 8) * 2**20),
    ],
)
def test_kernel_cost_by_hand(pass_: Pass, tile: GmmTile, moved: int) -> None:
    """The kernel's estimate, term by term; the first was seen in a compiled kernel too."""
    assert kernel_cost(SHAPE, pass_, tile) == Cost(2 * 8192 * 2048 * 1024, moved)


def test_grid_fetches_weights_once_per_group_when_one_tile_covers_the_contraction() -> None:
    """The one term in which the formula differs from the kernel's estimate."""
    whole = GmmTile(128, 2048, 512)
    assert grid_cost(SHAPE, "fwd", whole).bytes_accessed == (32 * 2 + 4 * 8 + 16) * 2**20
    assert kernel_cost(SHAPE, "fwd", whole).bytes_accessed == (32 * 2 + 4 * 71 + 16) * 2**20
    cut = GmmTile(128, 1024, 512)
    assert grid_cost(SHAPE, "fwd", cut) == kernel_cost(SHAPE, "fwd", cut)
    # dlhs contracts n.
    assert grid_cost(SHAPE, "dlhs", GmmTile(128, 512, 1024)).bytes_accessed == (
        (16 * 4 + 4 * 8 + 32) * 2**20
    )


@given(shapes_and_tiles(), st.sampled_from(PASSES))
def test_grid_never_costs_more_than_the_kernel_says(
    problem: tuple[GmmShape, GmmTile], pass_: Pass
) -> None:
    """Skipped fetches only ever save; the work of the matrix unit is the same."""
    shape, tile = problem
    grid, kernel = grid_cost(shape, pass_, tile), kernel_cost(shape, pass_, tile)
    assert grid.flops == kernel.flops == 2 * shape.m * shape.k * shape.n
    assert grid.bytes_accessed <= kernel.bytes_accessed
    assert (pass_ == "drhs") <= (grid == kernel)


@given(shapes_and_tiles(), st.sampled_from(PASSES), st.integers(1, 3))
def test_larger_columns_never_cost_more(
    problem: tuple[GmmShape, GmmTile], pass_: Pass, factor: int
) -> None:
    """Widening the tile of an output column reads the other operand less often."""
    shape, tile = problem
    wide = tile._replace(k=tile.k * factor) if pass_ == "dlhs" else tile._replace(n=tile.n * factor)
    assert (
        grid_cost(shape, pass_, wide).bytes_accessed <= grid_cost(shape, pass_, tile).bytes_accessed
    )


@given(shapes_and_tiles(), st.sampled_from(PASSES))
def test_item_sizes_scale_the_bytes(problem: tuple[GmmShape, GmmTile], pass_: Pass) -> None:
    """float32 operands move twice the bytes of bfloat16 ones."""
    shape, tile = problem
    half = kernel_cost(shape, pass_, tile)
    full = kernel_cost(shape, pass_, tile, itemsize=4, weight_itemsize=4)
    assert full == Cost(half.flops, 2 * half.bytes_accessed)


def test_roofline_is_the_longer_of_the_two() -> None:
    """v6e: 918 TFLOP/s against 1.638 TB/s."""
    chip = tpu("v6e")
    assert roofline_seconds(Cost(918_000_000, 0), chip) == pytest.approx(1e-6)
    assert roofline_seconds(Cost(918_000_000, 3_276_000), chip) == pytest.approx(2e-6)


def test_seconds_of_a_site() -> None:
    """A site's time is the grid's roofline for its shape, pass and element types."""
    site = Site("wo", "fwd", 8192, embed_dim=1024, mlp_dim=2048, num_groups=8, dtype="float32")
    tile, chip = GmmTile(512, 1024, 1024), tpu("v5e")
    assert site_seconds(site, tile, chip) == grid_seconds(
        SHAPE, "fwd", tile, chip, itemsize=4, weight_itemsize=4
    )
    assert kernel_seconds(SHAPE, "fwd", tile, chip) == roofline_seconds(
        kernel_cost(SHAPE, "fwd", tile), chip
    )


def test_rows_at_group_boundaries() -> None:
    """At most one row tile per boundary between groups is computed twice."""
    assert shared_rows(SHAPE, GmmTile(256, 128, 128)) == 256 * 7
    assert shared_rows(GmmShape(8192, 2048, 1024, 1), GmmTile(256, 128, 128)) == 0


def test_unknown_tpu_is_an_error() -> None:
    """Only devices that libtpu describes offline have a roofline."""
    with pytest.raises(VerifyError, match=r"no offline TPU compiler for device 'v4' \[unknown-tpu"):
        tpu("v4")
    assert list(TPUS) == ["v5e", "v5p", "v6e", "v7x"]
