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
        jobs.append(
            {"name": loss, "arguments": [*options, *arguments, f"metrics_file={loss}.txt"]}
        )
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
        *(
            "model_name=default compile_topology=v6e-8 ici_fsdp_parallelism=8 vocab_size=131072 "
            "num_vocab_tiling=8 base_num_decoder_layers=1 base_emb_dim=2048 base_mlp_dim=4096 "
            "base_num_query_heads=16 base_num_kv_heads=16 head_dim=128 max_target_length=2048 "
            "per_device_batch_size=1"
        ).split(),
        f"base_output_directory={tmp_path}",
    ]
    jobs = []
    for loss, once in (("upstream", "false"), ("upstream", "true"), ("chunked", "true")):
        name = f"{loss}-{once}"
        body = f"vocab: {{loss: {loss}, vocab_tiling_ag_once: {once}}}\n"
        options = ["run", "-p", policy(tmp_path, name, body), "-m", COMPILE]
        jobs.append(
            {"name": name, "hlo": f"{name}.hlo", "arguments": [*options, *arguments]}
        )
    run(tmp_path, jobs)
    gathers = {
        job["name"]: head_gathers((tmp_path / job["hlo"]).read_text(), 2048, 131072, 8)
        for job in jobs
    }
    assert gathers == {"upstream-false": 16, "upstream-true": 1, "chunked-true": 1}


def head_gathers(hlo: str, embed: int, vocab: int, trips: int) -> int:
    """How often a step gathers an array of the head's size; one in a loop counts each trip.

    The loops of this program's loss are the only ones that run ``trips`` times.
    """
    shapes = "|".join(
        re.escape(f"[{a},{b}]") for a, b in ((embed, vocab), (vocab, embed))
    )
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


def kernels(hlo: str) -> Counter[tuple[str, str, tuple[int, ...]]]:
    """What the compiled program's grouped matmuls carry: layer, pass, tile (m, k, n)."""
    raise NotImplementedError(hlo)
