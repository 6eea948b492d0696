"""Which trainer a config is for, and whether its loss needs the whole logits."""

from __future__ import annotations

import pytest

from tilepolicy.configs import read
from tilepolicy.objectives import TRAINERS, needs_whole_logits, trainer_of


@pytest.mark.parametrize(
    ("config", "trainer"),
    [
        ({}, "pre_train"),
        ({"use_sft": True}, "sft"),
        ({"use_dpo": True}, "dpo"),
        ({"student_overrides": {"model_name": "llama3.1-8b"}}, "distillation"),
        ({"teacher_overrides": {"model_name": "llama3.1-8b"}}, "distillation"),
        ({"student_overrides": {}}, "pre_train"),
        ({"num_generations": 4}, "rl"),
        ({"num_generations": 4, "use_dpo": True}, "rl"),
    ],
)
def test_trainer(config: dict[str, object], trainer: str) -> None:
    """The trainer is told by the keys that only it reads."""
    assert trainer_of(read(config, env={})) == trainer


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainers_that_need_whole_logits(trainer: str) -> None:
    """Pre-training and fine-tuning may tile the logits; the others read them."""
    reason = needs_whole_logits({"trainer": trainer})
    assert (reason is None) == (trainer in ("pre_train", "sft"))


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (
            {"training_objective": "block_diffusion"},
            "block-diffusion losses need the whole logits tensor",
        ),
        (
            {"quantize_logits_proj": True},
            "quantize_logits_proj is not supported with a tiled head",
        ),
        ({}, None),
    ],
)
def test_reasons(facts: dict[str, object], reason: str | None) -> None:
    """Each reason is a sentence for the origin of the value."""
    assert needs_whole_logits(facts) == reason
