"""MaxText's own programs under ``tilepolicy run``: trained on a CPU, compiled for TPUs."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest

from tilepolicy.settings import AXES, SETTINGS

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

LAYERS, PASSES = ("wi", "wo"), ("fwd", "dlhs", "drhs")
EVERY_SITE = {f"{layer}.{step}" for layer in LAYERS for step in PASSES}


def test_five_steps_train_as_plain_maxtext(tmp_path: Path) -> None:
    """With automatic tiling, the losses of each policy equal plain MaxText's within 1e-5."""
    jobs.run(tmp_path, jobs.train_jobs(tmp_path))
    expected = jobs.losses(tmp_path / "plain.txt")
    assert len(expected) == 5
    assert expected[-1] < expected[0]
    for loss in jobs.LOSSES:
        found = jobs.losses(tmp_path / f"{loss}.txt")
        assert found == pytest.approx(expected, rel=0, abs=1e-5)
        report = json.loads((tmp_path / f"{loss}.json").read_text())
        assert report["run"]["handed_over"]["num_vocab_tiling"] == 16
        used = [note["value"] for note in report["notes"] if note["subject"] == "loss"]
        assert used == ([] if loss == "upstream" else [loss])


@pytest.mark.compiled
def test_the_head_is_gathered_once(tmp_path: Path) -> None:
    """Compiled for eight v6e with FSDP and eight tiles: 16 gathers a step become one."""
    variants = [("upstream", False), ("upstream", True)]
    planned = jobs.head_jobs(tmp_path, jobs.SMALL_HEAD, variants)
    results = jobs.run(tmp_path, planned)
    gathers = {
        name: jobs.head_gathers((tmp_path / f"{name}.hlo").read_text(), 512, 16384, 8)
        for name in results
    }
    assert gathers == {"upstream-false": 16, "upstream-true": 1}


@pytest.mark.compiled
def test_deepseek3_carries_the_shipped_tiles(tmp_path: Path) -> None:
    """The upstream proposal's command: 128 forward, 256 and 512 backward, in wi and in wo."""
    job = jobs.compile_job(tmp_path, "ds3", "deepseek3-671b-v6e", jobs.DEEPSEEK3)
    jobs.run(tmp_path, [job])
    tiles = {"fwd": (128,) * 3, "dlhs": (256,) * 3, "drhs": (512,) * 3}
    found = jobs.compiled_kernels(tmp_path / "ds3.hlo")
    assert set(found) == {(layer, step, tiles[step]) for layer in LAYERS for step in PASSES}
    assert set(jobs.hits(tmp_path / "ds3.json")) == EVERY_SITE


@pytest.mark.compiled
def test_gpt_oss_tells_six_tiles_apart(tmp_path: Path) -> None:
    """Embedding and MLP have one size, so shapes tell nothing: still each call its own tile."""
    chosen = jobs.policy(tmp_path, "six", jobs.six_rules(jobs.SIX))
    jobs.run(tmp_path, [jobs.compile_job(tmp_path, "oss", chosen, jobs.GPT_OSS)])
    found = jobs.compiled_kernels(tmp_path / "oss.hlo")
    expected = {
        (layer, step): ("?", step, jobs.forward_tile(layer, tile))
        for (layer, step), tile in jobs.SIX.items()
    }
    assert set(found) == set(expected.values())
    assert len(found) == 6
    for step in PASSES:
        # gate and up projection are two matmuls of wi, each as often as the one of wo
        assert found[expected["wi", step]] == 2 * found[expected["wo", step]]
    assert set(jobs.hits(tmp_path / "oss.json")) == EVERY_SITE


@pytest.mark.compiled
def test_knobs_arrive_in_maxtexts_own_kernels(tmp_path: Path) -> None:
    """Megablox and the vendored v2 take the nine numbers of each layer from MaxText's config."""
    chosen = jobs.policy(tmp_path, "small", jobs.six_rules(jobs.SIX_SMALL))
    planned = [
        jobs.compile_job(tmp_path, name, chosen, f"{jobs.MIXTRAL} {more}")
        for name, more in jobs.KERNELS.items()
    ]
    jobs.run(tmp_path, planned)
    expected = {
        (layer, step, jobs.forward_tile(layer, tile))
        for (layer, step), tile in jobs.SIX_SMALL.items()
    }
    assert set(jobs.compiled_kernels(tmp_path / "megablox.hlo")) == expected
    as_walked = {
        (layer, step, tile) if step == "drhs" else ("?", "?", walked(step, tile))
        for layer, step, tile in expected
    }
    assert set(jobs.compiled_kernels(tmp_path / "gmm_v2.hlo")) == as_walked
    for name in jobs.KERNELS:
        report = json.loads((tmp_path / f"{name}.json").read_text())
        assert report["lookups"] == []
        handed = report["run"]["handed_over"]
        assert {key: handed[key] for key in handed if "_tile_" in key} == {
            f"{layer}_tile_{step}_{axis}": size
            for (layer, step), tile in jobs.SIX_SMALL.items()
            for axis, size in zip(AXES, tile, strict=True)
            if size != SETTINGS[f"{layer}_tile_{step}_{axis}"].default
        }


def walked(step: str, tile: tuple[int, int, int]) -> tuple[int, int, int]:
    """A forward tile in the order in which v2 walks: its dlhs is a forward product transposed."""
    m, k, n = tile
    return (m, n, k) if step == "dlhs" else (m, k, n)
