"""What a config trains: which of MaxText's trainers it is for, and what its loss needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

from tilepolicy.configs.keys import release_keys
from tilepolicy.configs.values import ConfigValues

__all__ = ["TRAINERS", "Trainer", "needs_whole_logits", "trainer_of"]

Trainer = Literal["pre_train", "sft", "dpo", "rl", "distillation"]
TRAINERS: Final[tuple[Trainer, ...]] = get_args(Trainer)

_DISTILLS: Final = ("student_overrides", "teacher_overrides")


def trainer_of(values: ConfigValues) -> Trainer:
    """The trainer that a config is for, told by the keys that only it reads.

    MaxText chooses the trainer by the module that is run; its configs name it by
    ``use_dpo``, ``use_sft``, the overrides of a student or teacher, or keys of ``RLConfig``.
    """
    rl = release_keys(values.release).rl
    if any(key in rl for key, entry in values.entries.items() if entry.source != "default"):
        return "rl"
    if values.get("use_dpo") is True:
        return "dpo"
    if any(values.get(key) for key in _DISTILLS):
        return "distillation"
    return "sft" if values.get("use_sft") is True else "pre_train"


def needs_whole_logits(facts: Mapping[str, object]) -> str | None:
    """Why ``num_vocab_tiling`` must be 1 for these facts; None where it may be more.

    Args:
        facts: facts of the config; ``trainer``, ``training_objective`` and
            ``quantize_logits_proj`` are looked at.
    """
    if facts.get("training_objective") == "block_diffusion":
        return "block-diffusion losses need the whole logits tensor"
    trainer = facts.get("trainer")
    if trainer == "dpo":
        return "train_dpo rejects a tiled head"
    if trainer == "rl":
        return "train_rl rejects a tiled head"
    if trainer == "distillation":
        return "with a tiled head the model returns no logits to distill from"
    if facts.get("quantize_logits_proj") is True:
        return "quantize_logits_proj is not supported with a tiled head"
    return None
