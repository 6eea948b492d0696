"""MaxText's own programs under ``tilepolicy run``: trained on a CPU, compiled for TPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tilepolicy.settings import AXES, SETTINGS
from tilepolicy.tuning.readback import read_kernels

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

TRAIN = "maxtext.trainers.pre_train.train"
COMPILE = "maxtext.trainers.pre_train.train_compile"

TRAIN_ARGUMENTS = (
    "run_name=t model_name=default dataset_type=synthetic steps=5 enable_checkpointing=False "
    "enable_goodput_recording=False skip_jax_distributed_system=True hardware=cpu "
    "attention=dot_product per_device_batch_size=2 base_num_decoder_layers=2 base_emb_dim=128 "
    "base_mlp_dim=256 base_num_query_heads=4 base_num_kv_heads=4 head_dim=32 "
    "max_target_length=128 vocab_size=1024 enable_tensorboard=False dtype=float32 log_config=False"
)
COMPILE_ARGUMENTS = (
    "run_name=t dataset_type=synthetic enable_checkpointing=False enable_goodput_recording=False "
    "skip_jax_distributed_system=True compile_topology_num_slices=1 enable_tensorboard=False "
    "log_config=False attention=dot_product dtype=bfloat16"
)
AUTOMATIC = "max_chunk_bytes: 64KiB, max_monolithic_vocab_size: 512, min_chunk_tokens: 8"
LOSSES = ("upstream", "sparse", "chunked", "online")


def run(folder: Path, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs jobs in one process of their own (see ``programs.py``); the results by name."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("programs.py")
    done = subprocess.run(
        [sys.executable, str(script), "jobs.json", "results.json"],
        cwd=folder,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((folder / "results.json").read_text())
    failed = [result["name"] for result in results if result["exit"] != 0]
    assert not failed, done.stderr[-3000:]
    return {result["name"]: result for result in results}


def policy(folder: Path, name: str, body: str) -> str:
    """A policy file; its name."""
    (folder / f"{name}.yml").write_text(f"version: 1\nname: {name}\n{body}")
    return f"{name}.yml"


def test_five_steps_train_as_plain_maxtext(tmp_path: Path) -> None:
    """With automatic tiling, the losses of each policy equal plain MaxText's within 1e-5."""
    arguments = [*TRAIN_ARGUMENTS.split(), f"base_output_directory={tmp_path}"]
    jobs = [{"name": "plain", "plain": [TRAIN, *arguments, "metrics_file=plain.txt"]}]
    for loss in LOSSES:
        chosen = policy(tmp_path, loss, f"vocab: {{loss: {loss}, {AUTOMATIC}}}\n")
        options = ["run", "-p", chosen, "--report", f"{loss}.json", "-m", TRAIN]
        jobs.append({"name": loss, "arguments": [*options, *arguments, f"metrics_file={loss}.txt"]})
    run(tmp_path, jobs)
    expected = losses(tmp_path / "plain.txt")
    assert len(expected) == 5
    assert expected[-1] < expected[0]
    for loss in LOSSES:
        assert losses(tmp_path / f"{loss}.txt") == pytest.approx(expected, abs=1e-5)
        report = json.loads((tmp_path / f"{loss}.json").read_text())
        assert report["run"]["handed_over"]["num_vocab_tiling"] == 16
        used = [note["value"] for note in report["notes"] if note["subject"] == "loss"]
        assert used == ([] if loss == "upstream" else [loss])


def losses(metrics: Path) -> list[float]:
    """The losses that MaxText wrote, step by step."""
    return [json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()]


@pytest.mark.compiled
def test_the_head_is_gathered_once(tmp_path: Path) -> None:
    """Compiled for eight v6e with FSDP and eight tiles: 16 gathers a step become one."""
    arguments = [
        *COMPILE_ARGUMENTS.split(),
        *[
            "model_name=default",
            "compile_topology=v6e-8",
            "ici_fsdp_parallelism=8",
            "vocab_size=16384",
            "num_vocab_tiling=8",
            "base_num_decoder_layers=1",
            "base_emb_dim=512",
            "base_mlp_dim=1024",
            "base_num_query_heads=4",
            "base_num_kv_heads=4",
            "head_dim=128",
            "max_target_length=1024",
            "per_device_batch_size=1",
        ],
        f"base_output_directory={tmp_path}",
    ]
    jobs = []
    for loss, once in (("upstream", "false"), ("upstream", "true")):
        name = f"{loss}-{once}"
        body = f"vocab: {{loss: {loss}, vocab_tiling_ag_once: {once}}}\n"
        options = ["run", "-p", policy(tmp_path, name, body), "-m", COMPILE]
        jobs.append({"name": name, "hlo": f"{name}.hlo", "arguments": [*options, *arguments]})
    run(tmp_path, jobs)
    gathers = {
        job["name"]: head_gathers((tmp_path / job["hlo"]).read_text(), 512, 16384, 8)
        for job in jobs
    }
    assert gathers == {"upstream-false": 16, "upstream-true": 1}


def head_gathers(hlo: str, embed: int, vocab: int, trips: int) -> int:
    """How often a step gathers an array of the head's size; one in a loop counts each trip.

    The loops of this program's loss are the only ones that run ``trips`` times.
    """
    shapes = "|".join(re.escape(f"[{a},{b}]") for a, b in ((embed, vocab), (vocab, embed)))
    gather = re.compile(rf"= \(?[^=]*?(?:{shapes})[^=]* (?:all-gather|all-gather-start)\(")
    bodies = set(re.findall(r"body=%?([\w.-]+)", hlo))
    total = 0
    for name, text in computations(hlo).items():
        count = len(gather.findall(text))
        total += count * (trips if name in bodies else 1)
    return total


def computations(hlo: str) -> dict[str, str]:
    """The computations of an HLO module, by name."""
    found: dict[str, list[str]] = {}
    current = ""
    for line in hlo.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line)
        if head and not line.startswith(" "):
            current = head.group(1)
            found[current] = []
        elif current:
            found[current].append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


SIX = {
    # rows, embed, mlp: a tile of its own for each layer and pass
    ("wi", "fwd"): (128, 256, 384),
    ("wi", "dlhs"): (256, 128, 384),
    ("wi", "drhs"): (256, 384, 128),
    ("wo", "fwd"): (128, 256, 384),
    ("wo", "dlhs"): (512, 128, 256),
    ("wo", "drhs"): (512, 256, 128),
}


def six_rules(tiles: dict[tuple[str, str], tuple[int, int, int]]) -> str:
    """A policy's rules for a tile of each layer and pass."""
    rules = [
        f"    - name: {layer} {step}\n      when: {{layer: {layer}, pass: {step}}}\n"
        f"      tile: {{batch_seq: {rows}, embed_dim: {embed}, mlp_dim: {mlp}}}\n"
        for (layer, step), (rows, embed, mlp) in tiles.items()
    ]
    return "gmm:\n  rules:\n" + "".join(rules)


def forward_tile(layer: str, tile: tuple[int, int, int]) -> tuple[int, int, int]:
    """A tile as m, k and n of the layer's forward problem."""
    rows, embed, mlp = tile
    return (rows, embed, mlp) if layer == "wi" else (rows, mlp, embed)


def compiled_tiles(hlo: Path) -> Counter[tuple[str | None, tuple[int, int, int]]]:
    """Pass and tile (m, k, n of the forward problem) of each grouped matmul of a program."""
    return Counter(
        (kernel.pass_, (kernel.tile.m, kernel.tile.k, kernel.tile.n))
        for kernel in read_kernels(hlo.read_text())
    )


def hits(report: Path) -> dict[str, int]:
    """``wi.fwd`` and so on to the number of lookups that a rule decided."""
    found: Counter[str] = Counter()
    for lookup in json.loads(report.read_text())["lookups"]:
        if not lookup["miss"]:
            found[f"{lookup['layer']}.{lookup['pass']}"] += lookup["count"]
    return dict(found)


@pytest.mark.compiled
def test_deepseek3_carries_the_shipped_tiles(tmp_path: Path) -> None:
    """The upstream proposal's command: 128 forward, 256 and 512 backward, in wi and in wo."""
    arguments = [
        *COMPILE_ARGUMENTS.split(),
        *[
            "model_name=deepseek3-671b",
            "override_model_config=True",
            "vocab_size=4096",
            "compile_topology=v6e-4",
            "base_num_decoder_layers=1",
            "first_num_dense_layers=0",
            "base_mlp_dim=2048",
            "num_experts=16",
            "use_tokamax_gmm=True",
            "ici_fsdp_parallelism=4",
            "per_device_batch_size=1",
            "max_target_length=1024",
        ],
        f"base_output_directory={tmp_path}",
    ]
    options = ["run", "-p", "deepseek3-671b-v6e", "--report", "report.json", "-m", COMPILE]
    run(tmp_path, [{"name": "ds3", "hlo": "hlo.txt", "arguments": [*options, *arguments]}])
    found = compiled_tiles(tmp_path / "hlo.txt")
    assert set(found) == {
        ("fwd", (128, 128, 128)),
        ("dlhs", (256, 256, 256)),
        ("drhs", (512, 512, 512)),
    }
    assert set(hits(tmp_path / "report.json")) == {
        f"{layer}.{step}" for layer in ("wi", "wo") for step in ("fwd", "dlhs", "drhs")
    }


@pytest.mark.compiled
def test_gpt_oss_tells_six_tiles_apart(tmp_path: Path) -> None:
    """Embedding and MLP have one size, so shapes tell nothing: still each call its own tile."""
    arguments = [
        *COMPILE_ARGUMENTS.split(),
        *[
            "model_name=gpt-oss-20b",
            "override_model_config=True",
            "vocab_size=4096",
            "num_experts=8",
            "compile_topology=v6e-4",
            "base_num_decoder_layers=2",
            "use_tokamax_gmm=True",
            "ici_fsdp_parallelism=4",
            "per_device_batch_size=1",
            "max_target_length=1024",
        ],
        f"base_output_directory={tmp_path}",
    ]
    chosen = policy(tmp_path, "six", six_rules(SIX))
    options = ["run", "-p", chosen, "--report", "report.json", "-m", COMPILE]
    run(tmp_path, [{"name": "oss", "hlo": "hlo.txt", "arguments": [*options, *arguments]}])
    found = compiled_tiles(tmp_path / "hlo.txt")
    expected = {key: (key[1], forward_tile(key[0], tile)) for key, tile in SIX.items()}
    assert set(found) == set(expected.values())
    assert len(found) == 6
    for step in ("fwd", "dlhs", "drhs"):
        # gate and up projection are two matmuls of wi, each as often as the one of wo
        assert found[expected["wi", step]] == 2 * found[expected["wo", step]]
    assert set(hits(tmp_path / "report.json")) == {f"{layer}.{step}" for layer, step in SIX}


SMALL = {
    ("wi", "fwd"): (128, 256, 128),
    ("wi", "dlhs"): (256, 128, 256),
    ("wi", "drhs"): (512, 512, 128),
    ("wo", "fwd"): (128, 512, 256),
    ("wo", "dlhs"): (256, 512, 128),
    ("wo", "drhs"): (512, 128, 256),
}


@pytest.mark.compiled
def test_knobs_arrive_in_maxtexts_own_kernels(tmp_path: Path) -> None:
    """Megablox and the vendored v2 take the nine numbers of each layer from MaxText's config."""
    arguments = [
        *COMPILE_ARGUMENTS.split(),
        *[
            "model_name=default",
            "decoder_block=mixtral",
            "num_experts=8",
            "num_experts_per_tok=2",
            "base_emb_dim=1024",
            "base_mlp_dim=512",
            "base_moe_mlp_dim=512",
            "base_num_decoder_layers=1",
            "base_num_query_heads=8",
            "base_num_kv_heads=8",
            "head_dim=128",
            "vocab_size=1024",
            "compile_topology=v6e-4",
            "ici_fsdp_parallelism=4",
            "per_device_batch_size=1",
            "max_target_length=512",
        ],
        f"base_output_directory={tmp_path}",
    ]
    chosen = policy(tmp_path, "small", six_rules(SMALL))
    paths = {"megablox": [], "gmm_v2": ["use_tokamax_gmm=True", "use_gmm_v2=True"]}
    jobs = [
        {
            "name": name,
            "hlo": f"{name}.hlo",
            "arguments": [
                *("run", "-p", chosen, "--report", f"{name}.json", "-m", COMPILE),
                *arguments,
                *more,
            ],
        }
        for name, more in paths.items()
    ]
    run(tmp_path, jobs)
    expected = {(step, forward_tile(layer, tile)) for (layer, step), tile in SMALL.items()}
    assert len(expected) == 6
    assert set(compiled_tiles(tmp_path / "megablox.hlo")) == expected
    as_walked = {
        ("drhs", forward_tile(layer, tile)) if step == "drhs" else (None, walked(layer, step, tile))
        for (layer, step), tile in SMALL.items()
    }
    assert set(compiled_tiles(tmp_path / "gmm_v2.hlo")) == as_walked
    for name in paths:
        report = json.loads((tmp_path / f"{name}.json").read_text())
        assert report["lookups"] == []
        handed = report["run"]["handed_over"]
        assert {key: handed[key] for key in handed if "_tile_" in key} == {
            f"{layer}_tile_{step}_{axis}": size
            for (layer, step), tile in SMALL.items()
            for axis, size in zip(AXES, tile, strict=True)
            if size != SETTINGS[f"{layer}_tile_{step}_{axis}"].default
        }


def walked(layer: str, step: str, tile: tuple[int, int, int]) -> tuple[int, int, int]:
    """A tile in the order in which a v2 kernel walks: its dlhs is a forward product transposed."""
    m, k, n = forward_tile(layer, tile)
    return (m, n, k) if step == "dlhs" else (m, k, n)
