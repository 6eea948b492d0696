"""MaxText's own programs as command lines of ``tilepolicy run``, and what to read in their output.

Used by the tests, which hold the figures to what is claimed, and by
``benchmarks/maxtext_programs.py``, which prints them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tilepolicy.tuning.readback import KernelReadback, read_kernels

TRAIN: Final = "maxtext.trainers.pre_train.train"
COMPILE: Final = "maxtext.trainers.pre_train.train_compile"
LOSSES: Final = ("upstream", "sparse", "chunked", "online")

type Job = dict[str, Any]
type Tiles = Mapping[tuple[str, str], tuple[int, int, int]]

_QUIET = (
    "run_name=t dataset_type=synthetic enable_checkpointing=False enable_goodput_recording=False "
    "skip_jax_distributed_system=True enable_tensorboard=False log_config=False "
    "attention=dot_product "
)
_TRAINED = (
    "model_name=default steps=5 hardware=cpu per_device_batch_size=2 base_num_decoder_layers=2 "
    "base_emb_dim=128 base_mlp_dim=256 base_num_query_heads=4 base_num_kv_heads=4 head_dim=32 "
    "max_target_length=128 vocab_size=1024 dtype=float32"
)
_COMPILED = "compile_topology_num_slices=1 dtype=bfloat16 "
_FSDP_8 = (
    "model_name=default compile_topology=v6e-8 ici_fsdp_parallelism=8 num_vocab_tiling=8 "
    "base_num_decoder_layers=1 "
)
_SMALL_LAYER = (
    "base_mlp_dim=1024 base_num_query_heads=4 base_num_kv_heads=4 head_dim=128 "
    "max_target_length=1024 per_device_batch_size=1"
)
SMALL_HEAD: Final = f"vocab_size=16384 base_emb_dim=512 {_SMALL_LAYER}"
LARGE_VOCAB, LARGE_EMBED = 131072, 1024
LARGE_HEAD: Final = f"vocab_size={LARGE_VOCAB} base_emb_dim={LARGE_EMBED} {_SMALL_LAYER}"

_ONE_LAYER = "override_model_config=True vocab_size=4096 compile_topology=v6e-4 "
_TOKAMAX = (
    "use_tokamax_gmm=True ici_fsdp_parallelism=4 per_device_batch_size=1 max_target_length=1024"
)
DEEPSEEK3: Final = (
    f"model_name=deepseek3-671b {_ONE_LAYER} base_num_decoder_layers=1 first_num_dense_layers=0 "
    f"base_mlp_dim=2048 num_experts=16 {_TOKAMAX}"
)
GPT_OSS: Final = (
    f"model_name=gpt-oss-20b {_ONE_LAYER} base_num_decoder_layers=2 num_experts=8 {_TOKAMAX}"
)
MIXTRAL: Final = (
    "model_name=default decoder_block=mixtral num_experts=8 num_experts_per_tok=2 "
    "base_emb_dim=1024 base_mlp_dim=512 base_moe_mlp_dim=512 base_num_decoder_layers=1 "
    "base_num_query_heads=8 base_num_kv_heads=8 head_dim=128 vocab_size=1024 "
    "compile_topology=v6e-4 ici_fsdp_parallelism=4 per_device_batch_size=1 max_target_length=512"
)
KERNELS: Final = {"megablox": "", "gmm_v2": "use_tokamax_gmm=True use_gmm_v2=True"}
"""The kernels that take their tiles from MaxText's knobs, by the arguments that select them."""

SIX: Final[Tiles] = {
    # rows, embed, mlp: a tile of its own for each layer and pass, also as the kernel sees it
    ("wi", "fwd"): (128, 256, 384),
    ("wi", "dlhs"): (256, 128, 384),
    ("wi", "drhs"): (256, 384, 128),
    ("wo", "fwd"): (128, 256, 384),
    ("wo", "dlhs"): (512, 128, 256),
    ("wo", "drhs"): (512, 256, 128),
}
SIX_SMALL: Final[Tiles] = {
    ("wi", "fwd"): (128, 256, 128),
    ("wi", "dlhs"): (256, 128, 256),
    ("wi", "drhs"): (512, 512, 128),
    ("wo", "fwd"): (128, 512, 256),
    ("wo", "dlhs"): (256, 512, 128),
    ("wo", "drhs"): (512, 128, 256),
}


def train_jobs(folder: Path) -> list[Job]:
    """Five steps on a CPU: plain MaxText, then each loss with automatic tiling."""
    arguments = [*_QUIET.split(), *_TRAINED.split(), f"base_output_directory={folder}"]
    jobs: list[Job] = [{"name": "plain", "plain": [TRAIN, *arguments, "metrics_file=plain.txt"]}]
    small = "max_chunk_bytes: 64KiB, max_monolithic_vocab_size: 512, min_chunk_tokens: 8"
    for loss in LOSSES:
        chosen = policy(folder, loss, f"vocab: {{loss: {loss}, {small}}}\n")
        options = ["run", "-p", chosen, "--report", f"{loss}.json", "-m", TRAIN]
        jobs.append({"name": loss, "arguments": [*options, *arguments, f"metrics_file={loss}.txt"]})
    return jobs


def head_jobs(folder: Path, model: str, variants: list[tuple[str, bool]]) -> list[Job]:
    """The train step for eight v6e, for pairs of loss and ag_once; named ``chunked-true``."""
    jobs = []
    for loss, once in variants:
        name = f"{loss}-{str(once).lower()}"
        body = f"vocab: {{loss: {loss}, vocab_tiling_ag_once: {once}}}\n"
        jobs.append(compile_job(folder, name, policy(folder, name, body), _FSDP_8 + model))
    return jobs


def compile_job(folder: Path, name: str, chosen: str, model: str) -> Job:
    """``train_compile`` under a policy; its report and HLO go to ``name.json`` and ``name.hlo``."""
    arguments = [*_QUIET.split(), *_COMPILED.split(), *model.split()]
    options = ["run", "-p", chosen, "--report", f"{name}.json", "-m", COMPILE]
    place = f"base_output_directory={folder}"
    return {"name": name, "hlo": f"{name}.hlo", "arguments": [*options, *arguments, place]}


def run(folder: Path, jobs: list[Job]) -> dict[str, Any]:
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


def six_rules(tiles: Tiles) -> str:
    """A policy's rules for a tile of each layer and pass."""
    rules = [
        f"    - name: {layer} {step}\n      when: {{layer: {layer}, pass: {step}}}\n"
        f"      tile: {{batch_seq: {rows}, embed_dim: {embed}, mlp_dim: {mlp}}}\n"
        for (layer, step), (rows, embed, mlp) in tiles.items()
    ]
    return "gmm:\n  rules:\n" + "".join(rules)


def losses(metrics: Path) -> list[float]:
    """The losses that MaxText wrote, step by step."""
    return [json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()]


def forward_tile(layer: str, tile: tuple[int, int, int]) -> tuple[int, int, int]:
    """A tile as m, k and n of the layer's forward problem."""
    rows, embed, mlp = tile
    return (rows, embed, mlp) if layer == "wi" else (rows, mlp, embed)


def compiled_kernels(hlo: Path) -> Counter[tuple[str, str, tuple[int, int, int]]]:
    """How many grouped matmuls of a program have which layer, pass and tile (m, k, n).

    In these models the embedding is larger than the MLP, which tells the layer; ``?`` if equal. A
    v2 kernel does not say whether it is forward or dlhs, so that its pass and layer may be ``?``.
    """
    return Counter(
        (_layer(kernel), kernel.pass_ or "?", (kernel.tile.m, kernel.tile.k, kernel.tile.n))
        for kernel in read_kernels(hlo.read_text())
    )


def _layer(kernel: KernelReadback) -> str:
    if kernel.pass_ is None or kernel.shape.k == kernel.shape.n:
        return "?"
    return "wi" if kernel.shape.k > kernel.shape.n else "wo"


def hits(report: Path) -> dict[str, int]:
    """``wi.fwd`` and so on to the number of lookups that a rule decided."""
    found: Counter[str] = Counter()
    for lookup in json.loads(report.read_text())["lookups"]:
        if not lookup["miss"]:
            found[f"{lookup['layer']}.{lookup['pass']}"] += lookup["count"]
    return dict(found)


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
