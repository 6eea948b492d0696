"""MaxText's programs: which config they read and what their loss is, read in 0.2.0 to 0.2.5.

The default configs are those of ``configs/pyconfig.py`` (``_CONFIG_FILE_MAPPING``): a program
started without a ``.yml`` gets its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Entry", "find"]

_PRETRAIN: Final = "maxtext.trainers.pre_train"
_POST_TRAIN: Final = "maxtext.trainers.post_train"

_PRETRAINING_LOSS: Final = frozenset(
    {
        f"{_PRETRAIN}.train",
        f"{_PRETRAIN}.train_compile",
        f"{_POST_TRAIN}.sft.train_sft",
        f"{_POST_TRAIN}.sft.train_sft_native",
    }
)
"""Programs whose step calls MaxText's pre-training ``loss_fn``."""

_CONFIGS: Final = {
    f"{_POST_TRAIN}.distillation.train_distill": "post_train/distillation.yml",
    f"{_POST_TRAIN}.dpo.train_dpo": "post_train/dpo.yml",
    f"{_POST_TRAIN}.rl.train_rl": "post_train/rl.yml",
    f"{_POST_TRAIN}.sft.train_sft": "post_train/sft.yml",
    f"{_POST_TRAIN}.sft.train_sft_native": "post_train/sft.yml",
}
_BASE: Final = "base.yml"


@dataclass(frozen=True, slots=True)
class Entry:
    """A program and the MaxText config that its arguments name.

    Attributes:
        module: dotted name, as after ``-m``.
        arguments: what follows it, as the user gave it.
        config: config file; None for a program of which no argument names one.
        overrides: its ``KEY=VALUE`` arguments.
        pretraining_loss: whether its step calls MaxText's pre-training loss.
    """

    module: str
    arguments: tuple[str, ...]
    config: str | None
    overrides: tuple[str, ...]
    pretraining_loss: bool

    @property
    def compiles_for_another_machine(self) -> bool:
        """Whether it compiles for a topology that its config names."""
        return self.module == f"{_PRETRAIN}.train_compile"


def find(module: str, arguments: Sequence[str]) -> Entry:
    """The config that a program would read, by MaxText's rules.

    The first argument is the config file if it ends in ``.yml``; a program of MaxText's without
    one reads its default. Arguments that start with ``-`` are flags of absl, not of the config.
    """
    given = tuple(arguments)
    named = bool(given) and given[0].endswith(".yml")
    config: str | None = given[0] if named else None
    if config is None and module.split(".")[0] == "maxtext":
        config = _CONFIGS.get(module, _BASE)
    rest = given[1:] if named else given
    overrides = tuple(text for text in rest if "=" in text and not text.startswith("-"))
    return Entry(module, given, config, overrides, module in _PRETRAINING_LOSS)
