"""``tilepolicy export --to tokamax``: concrete tiles as files that Tokamax itself loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from format_files import arguments, record, v1_config, write_cache
from test_import import run

from tilepolicy import policy
from tilepolicy.axes import GmmShape
from tilepolicy.formats.concrete import concrete_tiles
from tilepolicy.formats.policies import gmm_tables
from tilepolicy.formats.tokamax_cache import read_cache_directory
from tilepolicy.formats.tokamax_entries import UNMEASURED_MS
from tilepolicy.formats.tokamax_export import OP_CLASSES, cache_files, result_text
from tilepolicy.formats.tokamax_result import read_result
from tilepolicy.settings import PASSES, Pass

SHAPE = GmmShape(m=4096, k=512, n=256, g=8)
EXACT = "batch_seq: 4096, embed_dim: 512, mlp_dim: 256, num_groups: 8"
TILE = "{batch_seq: 512, embed_dim: 512, mlp_dim: 128}"


def write_policy(folder: Path, *rules: str, name: str = "p") -> Path:
    """A policy of rules, each ``WHEN => TILE``."""
    lines = ["version: 1", f"name: {name}", "gmm:", "  rules:"]
    for number, rule in enumerate(rules, 1):
        when, _, tile = rule.partition(" => ")
        lines += [f"    - name: r{number}", f"      when: {{{when}}}", f"      tile: {tile}"]
    path = folder / f"{name}.yml"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def reasons(folder: Path, *rules: str) -> dict[str, str]:
    """Why rules are not concrete."""
    found = concrete_tiles(policy.load(write_policy(folder, *rules)))
    return {one.rule: one.reason for one in found.left_out}


def test_a_rule_that_names_a_call_in_full_is_concrete(tmp_path: Path) -> None:
    """Axes become the kernel's fields, per pass; both layers of a problem are one call."""
    path = write_policy(
        tmp_path,
        f"device: v6e, backend: tokamax_v1, layer: wi, pass: dlhs, {EXACT} => {TILE}",
        f"device: v6e, backend: tokamax_v2, layer: wi, pass: dlhs, {EXACT} => {TILE}",
    )
    v1, v2 = concrete_tiles(policy.load(path)).tiles
    assert (v1.device, v1.kernel, v1.pass_, v1.shape) == ("v6e", "tokamax_v1", "dlhs", SHAPE)
    assert v1.config == {"tile_m": 512, "tile_k": 512, "tile_n": 128}
    assert v2.config == {"tile_m": 512, "tile_k": 128, "tile_n": 512}
    assert (v1.dtype, v1.weight_dtype, v1.median_ms) == ("bfloat16", "bfloat16", None)


def test_lists_and_open_names_give_every_call_that_they_allow(tmp_path: Path) -> None:
    """Two row counts, three passes, both kernels; fields of one kernel only go to that one."""
    path = write_policy(
        tmp_path,
        "device: [v6e], layer: wi, batch_seq: [4096, 8192], embed_dim: 512, mlp_dim: 256,"
        " num_groups: 8 => {batch_seq: 512, embed_dim: 512, mlp_dim: 128, input_buffer_count: 3}",
    )
    tiles = concrete_tiles(policy.load(path)).tiles
    assert {(tile.kernel, tile.pass_, tile.shape.m) for tile in tiles} == {
        ("tokamax_v1", pass_, rows) for pass_ in PASSES for rows in (4096, 8192)
    }
    assert all(tile.config["input_buffer_count"] == 3 for tile in tiles)


def test_the_tile_is_what_the_whole_policy_decides(tmp_path: Path) -> None:
    """An earlier rule wins, also where the later one is the concrete one."""
    path = write_policy(
        tmp_path,
        "device: v6e, pass: fwd => {batch_seq: 1024}",
        f"device: v6e, backend: tokamax_v1, layer: wi, pass: fwd, {EXACT} => {TILE}",
    )
    (tile,) = concrete_tiles(policy.load(path)).tiles
    assert tile.config["tile_m"] == 1024
    assert tile.origin == "r1 (wi)"


def test_rules_that_a_cache_cannot_say_are_listed_with_the_reason(tmp_path: Path) -> None:
    """Config facts, ranges, missing devices, partial tiles, foreign fields, conflicts."""
    call = f"backend: tokamax_v1, layer: wi, pass: fwd, {EXACT}"
    assert reasons(tmp_path, f"{call} => {TILE}") == {"r1": "names no device"}
    assert reasons(tmp_path, f"device: v6e, model_name: x, {call} => {TILE}") == {
        "r1": "depends on model_name, which a cache does not know"
    }
    ranged = call.replace("batch_seq: 4096", 'batch_seq: ">=4096"')
    assert reasons(tmp_path, f"device: v6e, {ranged} => {TILE}") == {
        "r1": "gives no exact batch_seq"
    }
    assert reasons(tmp_path, f"device: v6e, {call} => {{batch_seq: 512}}") == {
        "r1": "decides only some axes of the tile"
    }
    assert reasons(tmp_path, f"device: gpu, {call} => {TILE}") == {
        "r1": "names no call of a TPU kernel of Tokamax"
    }
    other = TILE.replace("}", ", bucket_base: 128}")
    assert reasons(tmp_path, f"device: v6e, {call} => {other}") == {
        "r1": "tokamax_v1 has no field bucket_base"
    }
    earlier = "model_name: x => {batch_seq: 256}"
    assert reasons(tmp_path, earlier, f"device: v6e, {call} => {TILE}") == {
        "r1": "depends on model_name, which a cache does not know",
        "r2": "depends on facts of the config through r1",
    }


def test_wi_and_wo_of_one_call_with_different_tiles_are_a_conflict(tmp_path: Path) -> None:
    """The kernel cannot tell the layers apart; the first tile is kept and the other named."""
    wo = "batch_seq: 4096, embed_dim: 256, mlp_dim: 512, num_groups: 8"
    call = "device: v6e, backend: tokamax_v1, pass: fwd"
    path = write_policy(
        tmp_path,
        f"{call}, layer: wi, {EXACT} => {TILE}",
        f"{call}, layer: wo, {wo} => {{batch_seq: 256, embed_dim: 128, mlp_dim: 512}}",
    )
    found = concrete_tiles(policy.load(path))
    assert [tile.config["tile_m"] for tile in found.tiles] == [512]
    assert [one.reason for one in found.left_out] == [
        "wi and wo of one call have different tiles; that of r1 (wi) is kept"
    ]


def test_rules_of_other_ops_are_listed(tmp_path: Path) -> None:
    """Their conditions never name a call in full."""
    path = tmp_path / "ops.yml"
    path.write_text(
        "version: 1\nname: ops\nops:\n  - op: splash_attention\n    rules:\n"
        "      - {name: a, config: {block_q: 128}}\n"
    )
    (one,) = concrete_tiles(policy.load(path)).left_out
    assert (one.rule, one.reason) == (
        "splash_attention",
        "rules of other ops do not name a call in full",
    )


def test_import_and_export_lose_nothing_that_both_can_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shape, pass, types, device, every field of the tile and the median come back."""
    entries = {
        json.dumps(arguments(SHAPE, pass_)): {
            v1_config(512, 512 - 128 * at, 256, 2 + at): record(0.1 + at / 3, 0.7, 0.9)
        }
        for at, pass_ in enumerate(PASSES)
    }
    first = read_cache_directory(write_cache(tmp_path / "in", entries).parent.parent)
    assert run(capsys, "import", "tokamax", tmp_path / "in", "-o", tmp_path / "p.yml")[0] == 0
    for form, target in (("cache", tmp_path / "out"), ("result", tmp_path / "out.json")):
        code, out, _ = run(
            capsys, "export", tmp_path / "p.yml", "-o", target, "--form", form, "--to", "tokamax"
        )
        assert code == 0
        assert "  3 tiles of tokamax_v1 on v6e\n" in out
        back = read_cache_directory(target) if form == "cache" else read_result(target)
        back.raise_errors()

        def told(report: Any) -> set[tuple[object, ...]]:
            return {
                (e.op, e.device, e.gmm, e.median_ms, *sorted((e.config | e.facts).items()))
                for e in report.entries
            }

        assert told(back) == told(first)


def test_times_that_nobody_measured_are_not_invented(tmp_path: Path) -> None:
    """They are written as slower than any real time, say so, and come back as not measured."""
    path = write_policy(
        tmp_path, f"device: v6e, backend: tokamax_v1, pass: fwd, layer: wi, {EXACT} => {TILE}"
    )
    text = result_text(concrete_tiles(policy.load(path)).tiles, "0.0.17")
    (_, configs) = json.loads(text)["data"][0]
    (benchmark,) = configs.values()
    assert benchmark["evaluation_times_ms"] == [UNMEASURED_MS]
    assert benchmark["metadata"] == {"tilepolicy": "not measured; r1 (wi)"}
    (tmp_path / "r.json").write_text(text)
    report = read_result(tmp_path / "r.json")
    assert {entry.median_ms for entry in report.entries} == {None}
    assert all("ms" not in point.source for t in gmm_tables(report.entries) for point in t.points)


def test_one_result_file_is_for_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Empty and foreign devices, several devices and existing files are refused with a reason."""
    call = f"backend: tokamax_v1, pass: fwd, layer: wi, {EXACT}"
    path = write_policy(tmp_path, f"device: [v6e, v5p], {call} => {TILE}")
    target = tmp_path / "out.json"
    code, _, errors = run(capsys, "export", path, "-o", target)
    assert code == 1
    assert "an AutotuningResult is for one device; the policy has v5p, v6e" in errors
    assert "remedy: choose one with --device" in errors
    for device, message in (
        ("v5e", "the policy 'p' has no concrete tile for v5e, only for v5p, v6e"),
        ("cpu", "'cpu' is not a TPU that Tokamax has caches for"),
        ("abacus", "'abacus' is not a TPU that Tokamax has caches for"),
    ):
        code, _, errors = run(capsys, "export", path, "-o", target, "--device", device)
        assert (code, message in errors) == (1, True)
    assert run(capsys, "export", path, "-o", target, "--device", "TPU v5")[0] == 0
    assert json.loads(target.read_text())["device_kind"] == "TPU v5"
    code, _, errors = run(capsys, "export", path, "-o", target, "--device", "v5p")
    assert (code, "the file exists already" in errors) == (1, True)
    assert run(capsys, "export", path, "-o", target, "--device", "v5p", "--force")[0] == 0
    empty = write_policy(tmp_path, f"{call} => {TILE}", name="empty")
    code, _, errors = run(capsys, "export", empty, "-o", tmp_path / "e.json")
    assert (code, "there is no concrete tile to export" in errors) == (1, True)


def test_types_without_a_short_name_are_refused(tmp_path: Path) -> None:
    """Tokamax's keys have no word for them."""
    path = write_policy(
        tmp_path,
        f"device: v6e, backend: tokamax_v1, pass: fwd, layer: wi, dtype: bool, {EXACT} => {TILE}",
    )
    tiles = concrete_tiles(policy.load(path)).tiles
    assert '"lhs": "bool[4096,512]"' in result_text(tiles, "0.0.17")
    odd = [type(tiles[0])(**{**_fields(tiles[0]), "dtype": "float1"})]
    with pytest.raises(Exception, match="Tokamax has no short name for the dtype float1"):
        cache_files(odd)


def _fields(tile: Any) -> dict[str, object]:
    return {name: getattr(tile, name) for name in type(tile).__slots__}


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Cache directory and result of a policy with one tile for each pass of both kernels."""
    rules = [
        f"device: v6e, backend: {kernel}, layer: wi, pass: {pass_}, {EXACT} => {TILE}"
        for kernel in OP_CLASSES
        for pass_ in PASSES
    ]
    tiles = concrete_tiles(policy.load(write_policy(tmp_path, *rules))).tiles
    assert len(tiles) == 6
    (tmp_path / "result.json").write_text(result_text(tiles, "0.0.17"))
    for name, text in cache_files(tiles).items():
        target = tmp_path / "cache" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return tmp_path


@pytest.mark.compiled
def test_tokamax_loads_the_result_file(exported: Path) -> None:
    """Its own ``AutotuningResult.loads``, both ops, with the tiles as configs."""
    from tokamax._src.autotuning.api import AutotuningResult

    result = AutotuningResult.loads((exported / "result.json").read_text())
    assert result.device_kind == "TPU v6 lite"
    assert len(result.data) == 16
    found = {
        (f"{type(call.op).__module__}.{type(call.op).__name__}", data.fastest_config.tile_k)
        for call, data in result.data
    }
    assert found == {
        (OP_CLASSES["tokamax_v1"], 512),
        (OP_CLASSES["tokamax_v2"], 512),
        (OP_CLASSES["tokamax_v2"], 128),
    }


@pytest.mark.compiled
def test_tokamax_finds_real_calls_in_the_exported_cache(exported: Path) -> None:
    """Forward alone and under autodiff, and both backward passes as the VJP makes them."""
    from tokamax._src.autotuning.cache import AutotuningCache
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import PallasMosaicTpuRaggedDot

    op = PallasMosaicTpuRaggedDot()
    cache = AutotuningCache(op.replace(vjp=None), paths=[str(exported / "cache")])["TPU v6 lite"]
    looked_up = _keys_of_a_train_step()
    assert [pass_ for pass_, _ in looked_up] == ["fwd", "fwd", "dlhs", "drhs"]
    for pass_, key in looked_up:
        assert cache[key].fastest_config.tile_n == 128, pass_


def _keys_of_a_train_step() -> list[tuple[Pass, Any]]:
    """The keys under which Tokamax looks up a forward call, and one with its gradient."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import tokamax
    from jax.experimental import topologies
    from jax.sharding import Mesh
    from tokamax._src.ops.op import AUTOTUNING_CACHE_OVERLAY_STACK
    from tokamax._src.ops.ragged_dot.base import (
        DEFAULT_RAGGED_DOT_DIM_NUMS,
        TRANS_RHS_RAGGED_DOT_DIM_NUMS,
    )

    seen: list[tuple[Pass, Any]] = []

    class Recorder:
        """An overlay that answers nothing and keeps the keys."""

        def get(self, op: Any, default: Any = None) -> Any:
            return _Inner()

    class _Inner(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            if isinstance(key, str):
                return self
            numbers = key["ragged_dot_dimension_numbers"]
            forward = numbers == DEFAULT_RAGGED_DOT_DIM_NUMS
            backward = "dlhs" if numbers == TRANS_RHS_RAGGED_DOT_DIM_NUMS else "drhs"
            seen.append(("fwd" if forward else backward, key))
            return default

    def loss(lhs: Any, rhs: Any, sizes: Any) -> Any:
        out = tokamax.ragged_dot(
            lhs, rhs, sizes, preferred_element_type=jnp.bfloat16, implementation="mosaic"
        )
        return out.astype(jnp.float32).sum()

    chips = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2")
    mesh = Mesh(np.array(chips.devices[:1]), ("x",))
    operands = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((SHAPE.m, SHAPE.k), jnp.bfloat16),
            ((SHAPE.g, SHAPE.k, SHAPE.n), jnp.bfloat16),
            ((SHAPE.g,), jnp.int32),
        )
    ]
    token = AUTOTUNING_CACHE_OVERLAY_STACK.set((Recorder(),))
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), tokamax.config.cross_compile(True):
            jax.jit(loss).trace(*operands)
            jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*operands)
    finally:
        AUTOTUNING_CACHE_OVERLAY_STACK.reset(token)
    return seen
