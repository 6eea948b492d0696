"""The shipped ``tpu-*`` policies: generated, legal, close to what was measured, compilable."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilepolicy import policy
from tilepolicy.axes import GmmShape, layer_facts
from tilepolicy.backends import illegal_tile
from tilepolicy.errors import TilepolicyError
from tilepolicy.formats.model_sites import model_sites
from tilepolicy.formats.refused import KernelForm, RefusedTiles
from tilepolicy.formats.tokamax_cache import shipped_caches
from tilepolicy.formats.tpu_tables import (
    CACHES,
    NEAREST,
    REACH,
    Measured,
    choose,
    device_tables,
    distance,
    has_room,
    read_measured,
    rows_between,
)
from tilepolicy.settings import LAYERS, PASSES, Layer, Pass
from tilepolicy.tuning.cost import grid_seconds
from tilepolicy.tuning.sites import GmmTile
from tilepolicy.tuning.tpus import TPUS

ROOT = Path(__file__).resolve().parents[2]
DEVICES = tuple(CACHES)
REFUSED_WINNERS = 1
"""Measured entries of TPU7x whose tile does not compile for their own call any more."""


def load_file(path: str) -> ModuleType:
    """A module of scripts/ or benchmarks/, which are no packages."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """The script that writes the policies."""
    return load_file("scripts/make_tpu_policies.py")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The benchmark that hides shapes."""
    return load_file("benchmarks/tiles.py")


@pytest.fixture(scope="module")
def winners() -> dict[str, tuple[Measured, ...]]:
    """Measured winners by device."""
    return {device: read_measured(shipped_caches(), device) for device in DEVICES}


@pytest.fixture(scope="module")
def refused(maker: ModuleType) -> RefusedTiles:
    """What the compiler refused."""
    found: RefusedTiles = RefusedTiles.read(maker.REFUSED)
    return found


def form_of(device: str, one: Measured) -> KernelForm:
    """The kernel that a measured winner makes for its own call."""
    return KernelForm.of(device, one.pass_, one.shape, one.tile, one.input_buffer_count)


@pytest.fixture(scope="module")
def shipped() -> dict[str, policy.Policy]:
    """The shipped policies by device."""
    return {device: policy.load(f"tpu-{device}") for device in DEVICES}


def tile_of(
    loaded: policy.Policy, device: str, layer: Layer, pass_: Pass, shape: GmmShape
) -> dict[str, Any]:
    """What a policy decides for a v1 call, by field; the origin's reason under ``reason``."""
    facts = {
        "device": device,
        "backend": "tokamax_v1",
        "layer": layer,
        "pass": pass_,
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        **layer_facts(shape, layer),
    }
    tile = loaded.gmm.lookup(facts).tile
    values: dict[str, Any] = {name: choice.value for name, choice in tile.items()}
    return values | ({"reason": tile["batch_seq"].origin.reason} if tile else {})


def test_the_files_are_what_the_script_writes(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Generated from the installed Tokamax; after an update run scripts/make_tpu_policies.py."""
    monkeypatch.setattr(sys, "argv", ["make_tpu_policies.py", "--check"])
    code = maker.main()
    assert (code, capsys.readouterr().err) == (0, "")


def test_a_file_that_differs_is_found(
    maker: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The gate can fail: one changed and three missing files."""
    (tmp_path / "tpu-v6e.yml").write_text("version: 1\n")
    monkeypatch.setattr(maker, "POLICIES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_tpu_policies.py", "--check"])
    assert maker.main() == 1
    assert capsys.readouterr().err.count("is not what scripts/make_tpu_policies.py writes") == 4


@pytest.mark.parametrize("device", DEVICES)
def test_the_header_names_source_release_and_licence(device: str) -> None:
    """Every file says whose measurements these are."""
    header = (ROOT / "policies" / f"tpu-{device}.yml").read_text().split("version: 1")[0]
    assert f"tokamax/data/autotuning/{CACHES[device][0]}/pallas_mosaic_tpu_ragged_dot" in header
    assert "tokamax 0.0.17's shipped autotuning entries" in header
    assert "Apache License 2.0" in header
    assert "nobody measured these calls" in header


@pytest.mark.parametrize("device", DEVICES)
def test_measured_shapes_get_the_measured_winner_as_both_layers(
    device: str,
    winners: dict[str, tuple[Measured, ...]],
    shipped: dict[str, policy.Policy],
    refused: RefusedTiles,
) -> None:
    """The origin names release, directory, time and the distance 0."""
    assert len(winners[device]) == {"v5e": 11, "v5p": 76, "v6e": 74, "v7x": 76}[device]
    compiling = [one for one in winners[device] if form_of(device, one) not in refused]
    assert len(winners[device]) - len(compiling) == (REFUSED_WINNERS if device == "v7x" else 0)
    for one, layer in itertools.product(compiling, LAYERS):
        found = tile_of(shipped[device], device, layer, one.pass_, one.shape)
        assert GmmTile.of_policy(layer, found) == one.tile
        assert found["input_buffer_count"] == one.input_buffer_count
        assert f"(tokamax 0.0.17 {CACHES[device][0]}, " in found["reason"]
        assert found["reason"].endswith("distance 0.00")


@pytest.mark.parametrize("device", DEVICES)
def test_every_moe_model_of_maxtext_gets_a_legal_tile(
    device: str,
    winners: dict[str, tuple[Measured, ...]],
    shipped: dict[str, policy.Policy],
    refused: RefusedTiles,
) -> None:
    """Ten models, three batch sizes, two expert parallelisms; the origin says how it was found.

    In 12 of the calls the operands alone are larger than the HBM of a v5e.
    """
    measured = {
        (one.shape, one.pass_) for one in winners[device] if form_of(device, one) not in refused
    }
    served = 0
    for layer, shapes in model_sites().items():
        fitting = [shape for shape in shapes if has_room(shape, TPUS[device])]
        for shape, pass_ in itertools.product(fitting, PASSES):
            found = tile_of(shipped[device], device, layer, pass_, shape)
            sizes = layer_facts(shape, layer)
            assert not illegal_tile(found, "tokamax_v1", layer, pass_, sizes)
            assert shape.m % found["batch_seq"] == 0
            assert ("chosen: tile of" in found["reason"]) is ((shape, pass_) not in measured)
            served += 1
    assert served == (342 if device == "v5e" else 354)


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_between_the_points_gets_a_neighbours_tile_made_legal(
    device: str, shipped: dict[str, policy.Policy]
) -> None:
    """Cut to the call's sizes, the origin names the point and its distance."""
    found = tile_of(shipped[device], device, "wi", "fwd", GmmShape(98304, 3968, 768, 96))
    assert found["embed_dim"] <= 3968
    assert found["mlp_dim"] <= 768
    assert ", distance 0.00" not in found["reason"]
    assert "distance" in found["reason"]


@pytest.mark.parametrize(
    "shape",
    [
        GmmShape(131072 + 128, 7168, 2048, 256),  # rows that not every tile divides
        GmmShape(131072, 512 * 7168, 2048, 256),  # beyond the declared reach
        GmmShape(256, 7168, 2048, 256),
    ],
)
def test_calls_out_of_reach_are_a_miss(shape: GmmShape, shipped: dict[str, policy.Policy]) -> None:
    """The nearest match is bounded; nothing is guessed beyond it."""
    assert tile_of(shipped["v6e"], "v6e", "wi", "fwd", shape) == {}


def test_other_backends_devices_and_types_are_a_miss(shipped: dict[str, policy.Policy]) -> None:
    """The tiles were measured with Tokamax's v1 kernel in bfloat16."""
    shape = GmmShape(131072, 7168, 2048, 256)
    facts = {"device": "v6e", "backend": "tokamax_v1", "layer": "wi", "pass": "fwd"}
    facts |= {"dtype": "bfloat16", "weight_dtype": "bfloat16"}
    sizes = layer_facts(shape, "wi")
    assert shipped["v6e"].gmm.lookup(facts | sizes).tile
    for name, value in (
        ("backend", "megablox"),
        ("device", "v5p"),
        ("dtype", "float32"),
        ("weight_dtype", "int8"),
    ):
        assert not shipped["v6e"].gmm.lookup(facts | sizes | {name: value}).tile


def test_dlhs_tiles_of_older_kernels_have_their_axes_names(
    winners: dict[str, tuple[Measured, ...]],
) -> None:
    """No tile exceeds its dimension, which on TPU7x holds only with the names exchanged."""
    for device in DEVICES:
        for one in winners[device]:
            assert one.tile.k < one.shape.k + 128
            assert one.tile.n < one.shape.n + 128
    narrow = [o for o in winners["v7x"] if o.pass_ == "dlhs" and o.shape.k == 256]
    assert [one.tile for one in narrow] == [GmmTile(512, 128, 7168)]


sizes = st.sampled_from([256, 512, 768, 1024, 1536, 2048, 2880, 4096, 7168])
shapes = st.builds(
    GmmShape,
    m=st.integers(2, 64).map(lambda n: 1024 * n),
    k=sizes,
    n=sizes,
    g=st.sampled_from([2, 8, 32, 128, 256]),
)
measured = st.builds(
    Measured,
    shape=shapes,
    pass_=st.sampled_from(PASSES),
    tile=st.builds(GmmTile, m=st.sampled_from([128, 256, 512, 1024, 3072]), k=sizes, n=sizes),
    input_buffer_count=st.integers(2, 4),
    median_ms=st.floats(0.1, 9.0),
)


@settings(max_examples=60)
@given(shape=shapes, pass_=st.sampled_from(PASSES), held=st.lists(measured, max_size=6))
def test_choose_takes_the_cheapest_legal_tile_of_the_near_ones(
    shape: GmmShape, pass_: Pass, held: list[Measured]
) -> None:
    """Never beyond a dimension, never rows that do not divide, never a far one if one is near."""
    chosen = choose(shape, pass_, TPUS["v6e"], held)
    legal = [one for one in held if one.pass_ == pass_ and shape.m % one.tile.m == 0]
    near = [one for one in legal if distance(shape, one.shape) <= REACH]
    if chosen is None:
        assert not legal
        return
    assert shape.m % chosen.tile.m == 0
    assert chosen.tile.k < shape.k + 128
    assert chosen.tile.n < shape.n + 128
    if near:
        assert chosen.taken_from in near
    seconds = grid_seconds(shape, pass_, chosen.tile, TPUS["v6e"])
    for one in near or legal:
        tile = GmmTile(
            one.tile.m, *(min(t, math.ceil(d / 128) * 128) for t, d in _dims(one.tile, shape))
        )
        assert seconds <= grid_seconds(shape, pass_, tile, TPUS["v6e"]) * (1 + 1e-9)


def _dims(tile: GmmTile, shape: GmmShape) -> Iterable[tuple[int, int]]:
    return (tile.k, shape.k), (tile.n, shape.n)


def test_calls_without_room_in_hbm_get_no_point() -> None:
    """1,048,576 rows of 7168 alone are 14 GiB; a v5e has 15.75 GiB for a program."""
    large = GmmShape(1048576, 7168, 2048, 64)
    assert not has_room(large, TPUS["v5e"])
    assert has_room(large, TPUS["v6e"])
    near = Measured(large._replace(m=262144), "fwd", GmmTile(256, 512, 512), 2, 2.0)
    rows = {
        device: [
            p.at["batch_seq"] for p in device_tables(device, [near], {"wi": [large]}, "x")[0].points
        ]
        for device in ("v5e", "v6e")
    }
    assert 1048576 in rows["v6e"]
    assert 1048576 not in rows["v5e"]


def test_a_tile_of_the_mirror_image_serves_where_nothing_is_near() -> None:
    """Fwd of (m, k, n) and dlhs of (m, n, k) walk the same grid."""
    fwd = Measured(GmmShape(4096, 1024, 7168, 8), "fwd", GmmTile(512, 1024, 3584), 3, 1.0)
    chosen = choose(GmmShape(4096, 7168, 1024, 8), "dlhs", TPUS["v6e"], [fwd])
    assert chosen is not None
    assert chosen.tile == GmmTile(512, 3584, 1024)
    assert chosen.distance == 0.0
    assert choose(GmmShape(4096, 7168, 1024, 8), "drhs", TPUS["v6e"], [fwd]) is None


def test_rows_between_and_around_the_measured_ones_get_points() -> None:
    """Powers of two from an octave below to an octave above, without the measured rows."""
    held = [
        Measured(GmmShape(rows, 512, 256, 8), "fwd", GmmTile(128, 128, 128), 2, 1.0)
        for rows in (8192, 65536)
    ]
    assert {shape.m for shape in rows_between(held)} == {4096, 16384, 32768, 131072}


def test_tables_ask_for_rows_that_all_their_tiles_divide() -> None:
    """So that no call gets a row tile that does not divide its rows."""
    held = [
        Measured(GmmShape(3072, 512, 256, 8), "fwd", GmmTile(tile, 512, 256), 2, 1.0)
        for tile in (512, 384)
    ]
    held[1] = Measured(GmmShape(768, 512, 256, 8), "fwd", held[1].tile, 2, 1.0)
    table = device_tables("v6e", held, {}, "x")[0]
    assert table.when["batch_seq"] == "%1536"
    assert table.nearest == NEAREST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "least_gain"), [("v5e", 3.5), ("v5p", 2.5), ("v6e", 5.5), ("v7x", 1.3)]
)
def test_hidden_shapes_are_resolved_close_to_their_winner(
    bench: ModuleType, winners: dict[str, tuple[Measured, ...]], device: str, least_gain: float
) -> None:
    """By the cost formula: the gain over stock, and nine of ten within 10 % of the winner."""
    gains, near = [], []
    for hidden, tables in bench.hidden_tables(device, winners[device], model_sites()):
        for one, layer in itertools.product(hidden, LAYERS):
            points, rows = tables[layer, one.pass_]
            found = bench.look_up(points, rows, one.shape, layer, NEAREST)
            stock = bench.stock_tile(device, one.pass_, one.shape)
            tile = stock if found is None else found[0]
            seconds = [
                grid_seconds(one.shape, one.pass_, candidate, TPUS[device])
                for candidate in (stock, tile, one.tile)
            ]
            gains.append(seconds[0] / seconds[1])
            near.append(seconds[1] <= 1.1 * seconds[2])
    assert bench.geometric_mean(gains) >= least_gain
    assert sum(near) / len(near) >= 0.9


@pytest.mark.compiled
@pytest.mark.parametrize("pass_", PASSES)
def test_the_stock_tile_of_tpu7x_is_what_tokamax_calculates(bench: ModuleType, pass_: Pass) -> None:
    """The benchmark's copy of the heuristic, against the installed Tokamax."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from tokamax._src.ops.ragged_dot.base import GroupSizes
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import (
        DLHS_RAGGED_DOT_DIM_NUMS,
        DRHS_RAGGED_DOT_DIM_NUMS,
        PallasMosaicTpuRaggedDot,
    )

    numbers = {"fwd": None, "dlhs": DLHS_RAGGED_DOT_DIM_NUMS, "drhs": DRHS_RAGGED_DOT_DIM_NUMS}
    chips = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1")
    mesh = jax.sharding.Mesh(np.array(chips.devices[:1]), ("x",))
    for shape in (GmmShape(8192, 2880, 1536, 8), GmmShape(256, 7168, 14336, 4)):
        lhs, rhs = (jax.ShapeDtypeStruct(s, "bfloat16") for s in shape.operands(pass_))
        groups = GroupSizes(jax.ShapeDtypeStruct((shape.g,), "int32"), shape.m)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            call = PallasMosaicTpuRaggedDot().bind(
                lhs, rhs, group_sizes=groups, ragged_dot_dimension_numbers=numbers[pass_]
            )
            config = call.heuristics_config
        tile = GmmTile(config.tile_m, config.tile_k, config.tile_n)
        assert tile == bench.stock_tile("v7x", pass_, shape)


@pytest.mark.compiled
def test_a_sample_of_the_shipped_tiles_compiles() -> None:
    """One kernel a device; scripts/compile_shipped.py compiles them all."""
    from tilepolicy.tuning.compiler import compile_here

    script = load_file("scripts/compile_shipped.py")
    for at, device in enumerate(DEVICES):
        wanted = [script.request_of(call) for call in script.calls(device)]
        assert None not in wanted
        request = sorted(wanted, key=lambda r: r.site.batch_seq)[at]
        verdict = compile_here(request)
        assert verdict.fits, verdict
        assert verdict.tile == request.tile
        assert verdict.input_buffer_count == request.options.input_buffer_count


def test_a_device_whose_cache_is_missing_is_an_error(tmp_path: Path) -> None:
    """Not an empty table."""
    with pytest.raises(TilepolicyError, match="the file cannot be read"):
        read_measured(tmp_path, "v6e")
