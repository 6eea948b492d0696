"""What MaxText's config is told, and which programs compute the loss that can be replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tilepolicy
from tilepolicy import configs, entries
from tilepolicy.resolve import resolver
from tilepolicy.run import handover
from tilepolicy.run.handover import Handover

VERSIONS = {"maxtext": "0.2.5", "tokamax": "0.0.17", "jax": "0.12.0"}
DENSE = {
    "decoder_block": "llama2",
    "base_emb_dim": 1024,
    "per_device_batch_size": 3,
    "max_target_length": 1000,
    "vocab_size": 131072,
    "compile_topology": "v6e-4",
    "compile_topology_num_slices": 1,
}
MOE = DENSE | {
    "decoder_block": "mixtral",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 2048,
    "base_mlp_dim": 2048,
    "max_target_length": 2048,
    "per_device_batch_size": 1,
}
TILES = """gmm:
  rules:
    - name: all
      when: {layer: wi, pass: dlhs}
      tile: {batch_seq: 256, embed_dim: 512, mlp_dim: 256}
"""


def planned(
    folder: Path, text: str, config: dict[str, Any], *, routes_loss: bool = True, **versions: str
) -> Handover:
    """What MaxText is told of a config under a policy text."""
    path = folder / "p.yml"
    path.write_text(f"version: 1\nname: p\n{text}")
    values = configs.read(config, env={}, release="0.2.5")
    answers = resolver(tilepolicy.load(path), values, versions=VERSIONS | versions)
    return handover.plan(answers.resolution(), values, routes_loss=routes_loss)


def test_automatic_tiling_is_handed_over(tmp_path: Path) -> None:
    """MaxText gets the resolved number and ag_once; keys that already have the value do not."""
    found = planned(tmp_path, "vocab: {loss: upstream}", DENSE)
    assert found == Handover({"num_vocab_tiling": 12, "vocab_tiling_ag_once": True})


def test_an_explicit_value_stays(tmp_path: Path) -> None:
    """What the user's config says is not handed over again."""
    config = DENSE | {"num_vocab_tiling": 20, "vocab_tiling_ag_once": False}
    assert planned(tmp_path, "vocab: {loss: upstream}", config) == Handover({})


def test_an_automatic_value_of_the_config_is_replaced(tmp_path: Path) -> None:
    """-1 in a config asks for the automatic number; MaxText itself takes it for none."""
    found = planned(tmp_path, "vocab: {loss: upstream}", DENSE | {"num_vocab_tiling": -1})
    assert found.settings["num_vocab_tiling"] == 12


def test_only_knobs_that_the_backend_reads_are_handed_over(tmp_path: Path) -> None:
    """Megablox reads its tiles; on Tokamax they are the scope's."""
    megablox = planned(tmp_path, TILES, MOE | {"megablox": True}).settings
    assert {key: value for key, value in megablox.items() if "_tile_" in key} == {
        "wi_tile_dlhs_batch_seq": 256,
        "wi_tile_dlhs_embed_dim": 512,
        "wi_tile_dlhs_mlp_dim": 256,
    }
    tokamax = planned(tmp_path, TILES, MOE | {"use_tokamax_gmm": True}).settings
    assert not [key for key in tokamax if key.startswith("wi_tile_dlhs")]


def test_one_chunk_of_our_loss_is_routed_through_the_tiled_one(tmp_path: Path) -> None:
    """MaxText is told the smallest divisor of its tokens, and the report says why."""
    found = planned(tmp_path, "vocab: {loss: sparse, num_vocab_tiling: 1}", DENSE)
    assert found.settings["num_vocab_tiling"] == 2
    assert found.routed == (
        "num_vocab_tiling=2 makes MaxText hand hidden states to the loss; sparse runs with the "
        "resolved num_vocab_tiling 1"
    )
    odd = DENSE | {"per_device_batch_size": 1, "max_target_length": 105}
    assert planned(tmp_path, "vocab: {loss: sparse}", odd).settings["num_vocab_tiling"] == 3


def test_a_fraction_of_a_batch_is_routed_by_its_tokens(tmp_path: Path) -> None:
    """per_device_batch_size may be below 1; MaxText divides the product."""
    config = DENSE | {"per_device_batch_size": 0.25, "max_target_length": 300}
    found = planned(tmp_path, "vocab: {loss: sparse, num_vocab_tiling: 1}", config)
    assert found.settings["num_vocab_tiling"] == 3


@pytest.mark.parametrize(
    "bar",
    [
        {"training_objective": "block_diffusion", "dataset_type": "hf", "packing": False},
        {"quantize_logits_proj": True, "quantization": "fp8_full"},
    ],
    ids=["block_diffusion", "quantize_logits_proj"],
)
def test_what_maxtext_does_not_tile_is_not_routed(tmp_path: Path, bar: dict[str, Any]) -> None:
    """Block diffusion and a quantized output head keep one tile."""
    text = "vocab: {loss: sparse, num_vocab_tiling: 1}"
    found = planned(tmp_path, text, DENSE | bar)
    assert "num_vocab_tiling" not in found.settings
    assert found.routed == ""


def test_a_program_with_another_loss_is_not_routed(tmp_path: Path) -> None:
    """A loss that is not called must not change what the model returns."""
    text = "vocab: {loss: sparse, num_vocab_tiling: 1}"
    assert planned(tmp_path, text, DENSE, routes_loss=False).routed == ""


def test_broken_upstream_tiling_is_handed_over_with_our_loss(tmp_path: Path) -> None:
    """On 0.2.4 the number is used by tilepolicy's loss alone, so MaxText may be told it."""
    found = planned(tmp_path, "vocab: {loss: chunked}", DENSE, maxtext="0.2.4")
    assert found.settings["num_vocab_tiling"] == 12
    assert (
        "num_vocab_tiling"
        not in planned(
            tmp_path, "vocab: {loss: chunked}", DENSE, routes_loss=False, maxtext="0.2.4"
        ).settings
    )


def test_settings_without_effect_are_named(tmp_path: Path) -> None:
    """A tile for a path that reads none: one problem for each knob, an error under strict."""
    (tmp_path / "p.yml").write_text(f"version: 1\nname: p\n{TILES}")
    config = MOE | {"sparse_matmul": False, "megablox": False}
    values = configs.read(config, env={}, release="0.2.5")
    answers = resolver(tilepolicy.load(tmp_path / "p.yml"), values, versions=VERSIONS)
    found = handover.ignored(answers.resolution())
    assert {problem.path for problem in found} == {
        f"wi_tile_dlhs_{axis}" for axis in ("batch_seq", "embed_dim", "mlp_dim")
    }
    assert found[0].severity == "warning"
    assert found[0].message.startswith("wi_tile_dlhs_batch_seq = 256 has no effect: ")
    assert handover.ignored(answers.resolution(), severity="error")[0].severity == "error"


@pytest.mark.parametrize(
    ("module", "arguments", "config", "overrides", "pretraining"),
    [
        (
            "maxtext.trainers.pre_train.train",
            ["my.yml", "steps=3", "--logtostderr", "--verbosity=1"],
            "my.yml",
            ("steps=3",),
            True,
        ),
        ("maxtext.trainers.pre_train.train", ["steps=3"], "base.yml", ("steps=3",), True),
        ("maxtext.trainers.pre_train.train_compile", [], "base.yml", (), True),
        ("maxtext.trainers.post_train.sft.train_sft", [], "post_train/sft.yml", (), True),
        ("maxtext.trainers.post_train.dpo.train_dpo", [], "post_train/dpo.yml", (), False),
        ("maxtext.inference.decode", ["a=b"], "base.yml", ("a=b",), False),
        ("my.training", ["my.yml", "a=b"], "my.yml", ("a=b",), False),
        ("my.training", ["a=b"], None, ("a=b",), False),
    ],
)
def test_a_programs_config_is_found_as_maxtext_finds_it(
    module: str,
    arguments: list[str],
    config: str | None,
    overrides: tuple[str, ...],
    pretraining: bool,
) -> None:
    """The first argument if it is a YAML file, else the program's default; flags are no keys."""
    entry = entries.find(module, arguments)
    assert entry.config == config
    assert entry.overrides == overrides
    assert entry.pretraining_loss is pretraining
    assert entry.arguments == tuple(arguments)


@pytest.mark.maxtext
def test_default_configs_are_maxtexts_own() -> None:
    """Each program's default config is that of the installed MaxText's own table."""
    import ast

    from tilepolicy.adapters import maxtext_api as api

    path = api.module_path("maxtext.configs.pyconfig")
    assert path is not None
    tree = ast.parse(path.read_text())
    (theirs,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == "_CONFIG_FILE_MAPPING"
        and node.value is not None
    ]
    found = {module: entries.find(module, ()).config for module in theirs}
    assert found == theirs
