"""MaxText's rules about the settings: each one broken, each one kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilepolicy.configs import read
from tilepolicy.facts import derive
from tilepolicy.guards import GUARDS, check

MOE = {"num_experts": 8, "base_moe_mlp_dim": 512, "base_mlp_dim": 512}


def codes(
    config: dict[str, object],
    resolved: dict[str, object] | None = None,
    device: str = "v6e-8",
) -> list[str]:
    """Severity and code of every rule that a config breaks."""
    values = read(MOE | config, env={})
    found = check(values, derive(values, device, versions={}), resolved)  # type: ignore[arg-type]
    return [f"{problem.severity} {problem.code}" for problem in found]


BROKEN: list[tuple[dict[str, object], str]] = [
    (
        {"num_vocab_tiling": 3, "per_device_batch_size": 1, "max_target_length": 1024},
        "error vocab-tiling-divides-tokens",
    ),
    (
        {"num_vocab_tiling": 2, "training_objective": "block_diffusion"},
        "error block-diffusion-tiling",
    ),
    ({"num_vocab_tiling": 2, "num_generations": 4}, "error rl-tiling"),
    ({"num_vocab_tiling": 2, "use_dpo": True}, "error dpo-tiling"),
    ({"num_vocab_tiling": 2, "quantize_logits_proj": True}, "error quantized-logits-tiling"),
    ({"vocab_tiling_ag_once": True}, "warning ag-once-without-tiling"),
    ({"use_gmm_v2": True}, "error gmm-v2-needs-tokamax"),
    (
        {"use_tokamax_gmm": True, "use_gmm_v2": True, "use_batch_split_schedule": True},
        "error gmm-v2-batch-split",
    ),
    (
        {"use_tokamax_gmm": True, "use_gmm_v2_heuristic_tiling": True},
        "error heuristic-needs-gmm-v2",
    ),
    ({"use_tokamax_gmm": True, "enable_diloco": True}, "error tokamax-diloco"),
    ({"use_tokamax_gmm": True, "check_vma": True}, "error tokamax-check-vma"),
    ({"use_tokamax_gmm": True, "hardware": "cpu"}, "error tokamax-on-cpu"),
    (
        {"use_tokamax_gmm": True, "use_gmm_v2": True, "sparse_matmul": False},
        "warning tokamax-dense",
    ),
    (
        {"num_moe_emb_chunks": 2, "use_tokamax_gmm": True, "use_gmm_v2": True},
        "error emb-chunks-need-gmm-v2",
    ),
    ({"moe_quantize_token_all_gather": True}, "error quantized-gather-needs-gmm-v2"),
    ({"use_ring_of_experts": True}, "error ring-needs-expert-parallelism"),
    ({"shard_optimizer_over_data": True, "ici_data_parallelism": 2}, "error zero1-fsdp"),
    (
        {
            "shard_optimizer_over_data": True,
            "ici_fsdp_parallelism": 1,
            "ici_tensor_parallelism": 8,
        },
        "warning zero1-without-data",
    ),
    ({"num_vocab_tiling": 0}, "error not-positive"),
    ({"num_vocab_tiling": -2}, "error not-positive"),
    ({"wi_tile_fwd_batch_seq": 0}, "error not-positive"),
    ({"eval_wo_tile_fwd_mlp_dim": -5}, "error not-positive"),
]


@pytest.mark.parametrize(("config", "found"), BROKEN)
def test_broken_rules(config: dict[str, object], found: str) -> None:
    """Each rule is found broken, with its severity, and nothing else is."""
    assert codes(config) == [found]


def test_every_guard_is_tested() -> None:
    """The cases here break every rule of the table."""
    tested = {found.split()[1] for _, found in BROKEN}
    assert {guard.code for guard in GUARDS} - tested == {
        "distillation-student",
        "distillation-tiling",
    }


def test_distillation() -> None:
    """A student is built from its overrides; tiling leaves no logits to distill from."""
    config = {"student_overrides": {"model_name": "llama3.1-8b"}}
    assert codes(config) == ["warning distillation-student"]
    assert codes(config | {"num_vocab_tiling": 2}) == [
        "error distillation-tiling",
        "warning distillation-student",
    ]


KEPT: list[dict[str, object]] = [
    {},
    {"num_vocab_tiling": -1},
    {"num_vocab_tiling": "auto"},
    {"num_vocab_tiling": 8, "per_device_batch_size": 0.5, "max_target_length": 1024},
    {"training_objective": "block_diffusion", "use_dpo": True, "quantize_logits_proj": True},
    {"vocab_tiling_ag_once": True, "num_vocab_tiling": 4},
    {"use_tokamax_gmm": True, "use_gmm_v2": True, "use_gmm_v2_heuristic_tiling": True},
    {"use_ring_of_experts": True, "ici_expert_parallelism": 2},
    {"use_ring_of_experts": True, "override_logical_axis_rules": True},
    {"hardware": "cpu", "megablox": False},
    {"shard_optimizer_over_data": True, "ici_fsdp_parallelism": 1, "ici_data_parallelism": -1},
    {"wi_tile_fwd_batch_seq": -1},
]


@pytest.mark.parametrize("config", KEPT)
def test_kept_rules(config: dict[str, object]) -> None:
    """Configs that MaxText runs break no rule; -1 and auto are still to be chosen."""
    assert codes(config) == []


def test_unknown_sizes_break_no_rule() -> None:
    """ZeRO-1 with an axis of unknown size is not judged."""
    config = {"shard_optimizer_over_data": True}
    assert codes(config, device="v6e") == []
    assert codes(config, device="v6e-8") == ["error zero1-fsdp", "warning zero1-without-data"]


def test_resolved_values_stand_for_the_configs() -> None:
    """The values that will be used are judged, and there -1 is a mistake."""
    assert codes({"training_objective": "block_diffusion"}, {"num_vocab_tiling": 2}) == [
        "error block-diffusion-tiling"
    ]
    assert codes({"num_vocab_tiling": 2, "use_dpo": True}, {"num_vocab_tiling": 1}) == []
    assert codes({}, {"num_vocab_tiling": -1}) == ["error not-positive"]


def test_places_of_all_keys_are_named(tmp_path: Path) -> None:
    """The problem stands at the first key that has a place and names the places of the others."""
    path = tmp_path / "a.yml"
    path.write_text(
        "base_config: base.yml\nmax_target_length: 1000\nper_device_batch_size: 1\n"
        "num_vocab_tiling: 3\n"
    )
    values = read(path, ["max_target_length=1024"], env={})
    [problem] = check(values, derive(values, "v6e-8", versions={}))
    assert str(problem) == (
        f"{path}:4:1: error: num_vocab_tiling 3 does not divide the tokens of a device, "
        "per_device_batch_size 1.0 × max_target_length 1024 "
        f"(per_device_batch_size at {path}:3, max_target_length at <command line> "
        "max_target_length=1024) (at num_vocab_tiling) [vocab-tiling-divides-tokens]\n"
        "  4 | num_vocab_tiling: 3\n"
        "      ^\n"
        "  remedy: use a divisor of the tokens, or auto"
    )


def test_not_positive_text() -> None:
    """A value below the minimum names what is allowed."""
    values = read({"wi_tile_dlhs_mlp_dim": 0}, env={})
    [problem] = check(values, derive(values, "v6e", versions={}))
    assert str(problem) == (
        "<mapping>: error: wi_tile_dlhs_mlp_dim is 0, which MaxText accepts and fails on later "
        "(at wi_tile_dlhs_mlp_dim) [not-positive]\n  remedy: use 1 or more"
    )
