"""Configs and facts against MaxText itself, and the sweep over MaxText's own configs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tilepolicy.configs import read
from tilepolicy.configs.files import find_maxtext_configs
from tilepolicy.errors import ConfigError
from tilepolicy.facts import derive, site

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("maxtext_probe.py")
EXAMPLES = sorted((ROOT / "examples").glob("*.yml"))
QUIET = {
    "dataset_type": "synthetic",
    "enable_checkpointing": "false",
    "skip_jax_distributed_system": "true",
    "base_output_directory": "out",
    "run_name": "t",
    "log_config": "false",
}
"""Arguments that keep MaxText from the network and from asking for more."""

MOE = """
base_config: base.yml
decoder_block: mixtral
base_emb_dim: 256
base_num_query_heads: 4
base_num_kv_heads: 4
head_dim: 64
base_mlp_dim: 512
base_moe_mlp_dim: 512
base_num_decoder_layers: 1
num_experts: 16
num_experts_per_tok: 4
vocab_size: 1024
max_target_length: 512
per_device_batch_size: 2
scan_layers: false
attention: dot_product
compile_topology: v6e-8
compile_topology_num_slices: 1
"""
SHAPES: dict[str, tuple[str, list[str]]] = {
    "all-to-all with tensor parallelism": (
        "train",
        ["ici_expert_parallelism=2", "ici_tensor_parallelism=2", "prefuse_moe_weights=true"],
    ),
    "ragged buffer": ("train", ["ici_expert_parallelism=4", "ragged_buffer_factor=1.5"]),
    "ring of experts in chunks": (
        "train",
        ["ici_expert_parallelism=4", "use_ring_of_experts=true", "num_moe_token_chunks=2"],
    ),
    "embedding chunks": (
        "train",
        [
            "ici_expert_parallelism=4",
            "use_ring_of_experts=true",
            "num_moe_emb_chunks=2",
            "use_tokamax_gmm=true",
            "use_gmm_v2=true",
        ],
    ),
    "batch that does not divide": ("train", ["per_device_batch_size=0.5"]),
    "sequence over devices": (
        "train",
        [
            "ici_context_parallelism=2",
            "ici_tensor_sequence_parallelism=2",
            "context_parallel_load_balance=false",
            "wi_tile_fwd_batch_seq=300",
            "use_tokamax_gmm=true",
        ],
    ),
    "custom mesh": (
        "train",
        [
            "custom_mesh_and_rule=cp-as-ep",
            "ici_context_parallelism=2",
            "ici_expert_parallelism=2",
            "context_parallel_load_balance=false",
            "global_parameter_scale=4",
        ],
    ),
    "evaluation with rules of its own": (
        "eval",
        [
            "custom_mesh_and_rule_for_eval=pure-fsdp",
            "eval_wi_tile_fwd_batch_seq=768",
            "eval_per_device_batch_size=1",
        ],
    ),
}
VALUES: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "model over file": (
        "base_config: base.yml\nmodel_name: llama2-7b\nbase_emb_dim: 64\nnum_vocab_tiling: 2\n"
        "override_model_config: true\n",
        [],
        {"M_MAX_TARGET_LENGTH": "4096"},
    ),
    "argument over model": (
        "base_config: base.yml\nmodel_name: llama2-7b\n",
        ["base_emb_dim=128", "override_model_config=True", "dpo.dpo_beta=0.5"],
        {"M_BASE_MLP_DIM": "256"},
    ),
    "types and environment": (
        'base_config: base.yml\nnum_vocab_tiling: "2"\nwi_tile_fwd_batch_seq: 256.0\n'
        "learning_rate: 1e-4\nquantization: None\n",
        ["megablox=no", "wo_tile_fwd_mlp_dim='128'"],
        {"M_MODEL_NAME": "llama2-7b", "M_SPARSE_MATMUL": "f", "M_STEPS": "7"},
    ),
    "argument contradicts model": (
        "base_config: base.yml\nmodel_name: llama2-7b\n",
        ["base_emb_dim=128"],
        {},
    ),
    "variable contradicts model": (
        "base_config: base.yml\nmodel_name: llama2-7b\n",
        [],
        {"M_BASE_EMB_DIM": "4096"},
    ),
    "variable and argument": ("base_config: base.yml\n", ["steps=2"], {"M_STEPS": "2"}),
    "old key": ("base_config: base.yml\ntile_batch_seq: 512\n", [], {}),
}
DERIVED = frozenset(
    {
        "checkpoint_dir", "context_parallel_load_balance", "dcn_parallelism", "dpo",
        "dump_hlo_gcs_dir", "dump_hlo_xla_flags", "dump_jaxpr_gcs_dir", "engine",
        "eval_per_device_batch_size", "hf_access_token", "learning_rate_schedule_steps",
        "ici_parallelism", "lora", "metrics_dir", "mu_dtype", "num_slices",
        "pipeline_parallel_layers", "quantization_local_shard_count", "tensorboard_dir",
        "tokenizer_path", "tokenizer_type", "managed_mldiagnostics_dir",
        "logical_axis_rules_for_eval", "attn_logits_soft_cap", "final_logits_soft_cap",
        "constant_bound_config",
    }
)  # fmt: skip
"""Keys whose values MaxText computes anew from others after it has merged its sources."""


def _quiet(arguments: list[str]) -> list[str]:
    return [*arguments, *(f"{key}={value}" for key, value in QUIET.items())]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """MaxText's answers to every case, from one process."""
    folder = tmp_path_factory.mktemp("maxtext")
    (folder / "moe.yml").write_text(MOE)
    cases: dict[str, dict[str, Any]] = {}
    for name, (text, arguments, env) in VALUES.items():
        path = folder / f"{name.replace(' ', '-')}.yml"
        path.write_text(text)
        cases[name] = {
            "kind": "values",
            "arguments": _quiet([str(path), *arguments, "hardware=cpu"]),
            "env": env,
        }
    for example in EXAMPLES:
        cases[example.stem] = {"kind": "values", "arguments": _quiet([str(example)]), "env": {}}
    for name, (phase, arguments) in SHAPES.items():
        quiet = _quiet([str(folder / "moe.yml"), *arguments])
        cases[name] = {"kind": phase, "arguments": quiet, "env": {}}
    done = subprocess.run(
        [sys.executable, str(PROBE), json.dumps(list(cases.values()))],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=900,
    )
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(lines) == len(cases), done.stderr[-2000:]
    return {
        name: {"answer": json.loads(line), **case}
        for (name, case), line in zip(cases.items(), lines, strict=True)
    }


@pytest.mark.maxtext
@pytest.mark.slow
@pytest.mark.parametrize("name", list(VALUES)[:3])
def test_values_are_maxtexts(answers: Mapping[str, Any], name: str) -> None:
    """Every value read from files, arguments and environment is the one MaxText gets."""
    case = answers[name]
    theirs = case["answer"]
    assert isinstance(theirs, dict), theirs
    ours = read(case["arguments"][0], case["arguments"][1:], env=case["env"])
    differing = {
        key: (ours[key], theirs[key])
        for key in set(theirs) & set(ours) - DERIVED
        if ours[key] != theirs[key] and ours[key] not in ("", None)
    }
    assert differing == {}
    told = set(theirs["__fields_set__"])
    assert told == {
        key
        for key in told | set(ours)
        if key in ours and ours.entries[key].source in ("command line", "environment")
    }


@pytest.mark.maxtext
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "theirs", "code"),
    [
        (
            "argument contradicts model",
            "ValueError: Keys ['base_emb_dim'] are overridden by both model config and CLI/kwargs",
            "contradicts-model",
        ),
        (
            "variable contradicts model",
            "ValueError: Key 'base_emb_dim' is overridden by both model config and environment",
            "contradicts-model",
        ),
        (
            "variable and argument",
            "ValueError: Key 'steps' is overridden by both CLI/kwargs and environment variable",
            "set-twice",
        ),
        ("old key", "ValueError: 'tile_batch_seq' not in ", "old-key"),
    ],
)
def test_refusals_are_maxtexts(
    answers: Mapping[str, Any], name: str, theirs: str, code: str
) -> None:
    """What MaxText refuses is refused here too, with a place."""
    case = answers[name]
    assert str(case["answer"]).startswith(theirs)
    with pytest.raises(ConfigError) as caught:
        read(case["arguments"][0], case["arguments"][1:], env=case["env"])
    assert [problem.code for problem in caught.value.problems] == [code]


@pytest.mark.maxtext
@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_maxtext_accepts_the_examples(answers: Mapping[str, Any], example: Path) -> None:
    """Each example is a config that MaxText builds; devices and batch are what facts say."""
    theirs = answers[example.stem]["answer"]
    assert isinstance(theirs, dict), theirs
    facts = derive(read(example, env={}))
    assert facts.undecided == {}
    assert facts.values["num_devices"] == theirs["num_target_devices"]
    tokens = theirs["micro_batch_size_to_train_on"] * theirs["max_target_length"]
    assert facts.values["tokens_per_device"] * theirs["num_target_devices"] == tokens


@pytest.mark.maxtext
@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_sizes_of_grouped_matmuls_are_maxtexts(answers: Mapping[str, Any], name: str) -> None:
    """Rows, dimensions and experts of wi and wo are those of the calls that MaxText traces."""
    case = answers[name]
    theirs = case["answer"]
    assert isinstance(theirs, list), theirs
    facts = derive(read(case["arguments"][0], case["arguments"][1:], env={}))
    phase = case["kind"]
    wi, wo = site(facts, "wi", "fwd", phase), site(facts, "wo", "fwd", phase)
    ours = [
        [wi[name] for name in ("batch_seq", "embed_dim", "num_groups", "mlp_dim")],
        [wo[name] for name in ("batch_seq", "mlp_dim", "num_groups", "embed_dim")],
    ]
    assert ours == [theirs[0], theirs[-1]]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_stand_alone(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example resolves every fact without MaxText, and without a warning."""
    monkeypatch.setattr("tilepolicy.configs.files.find_maxtext_configs", lambda: None)
    values = read(example, env={})
    facts = derive(values)
    assert values.warnings == ()
    assert facts.problems == ()
    assert facts.undecided == {}


def test_number_of_examples() -> None:
    """The five models that the documentation speaks of are there."""
    assert [path.stem for path in EXAMPLES] == [
        "deepseek3-671b",
        "gemma3-12b",
        "gpt-oss-20b",
        "mixtral-8x7b",
        "qwen3-30b-a3b",
    ]


@pytest.mark.maxtext
def test_sweep_over_maxtexts_own_configs() -> None:
    """Every YAML under MaxText's configs resolves, names what is missing, or is no config."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "sweep_maxtext_configs.py"), "--device", "v6e"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    *lines, counts = done.stdout.splitlines()
    assert counts == "129 files: 96 resolved, 32 missing facts, 1 refused"
    assert [line.split()[1] for line in lines if line.startswith("refused")] == [
        "post_train/lora_module_path.yml"
    ]
    assert all(": (" in line for line in lines if line.startswith("missing facts"))


@pytest.mark.maxtext
def test_topologies_are_maxtexts() -> None:
    """Every topology name of MaxText has the number of devices that MaxText gives it."""
    import ast

    from tilepolicy.facts.devices import parse_device

    folder = find_maxtext_configs()
    assert folder is not None, "MaxText is not installed"
    tree = ast.parse((folder.parent / "utils" / "accelerator_to_spec_map.py").read_text())
    [table] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    ]
    names = {
        ast.literal_eval(key): ast.literal_eval(value.args[4])
        for key, value in zip(table.keys, table.values, strict=True)
        if key is not None and isinstance(value, ast.Call)
    }
    assert len(names) > 200
    assert names == {name: (parse_device(name) or parse_device("cpu")).devices for name in names}  # type: ignore[union-attr]
