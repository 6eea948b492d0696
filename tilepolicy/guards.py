"""MaxText's rules about the settings, checked before a job is queued.

Some of them MaxText rejects itself, after the job has started (``configs/types.py``,
``train_dpo.py``); others it accepts in silence and fails on later, or ignores the setting. Both
kinds stand in one table. A guard looks at values as they will be used: the config's, the resolved
settings in place of its own, and the derived facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

from tilepolicy.configs.values import ConfigValues, is_automatic
from tilepolicy.errors import Place, Problem, Severity
from tilepolicy.facts import Facts
from tilepolicy.resolution import SettingValue
from tilepolicy.settings import SETTINGS

__all__ = ["GUARDS", "Guard", "View", "check"]


@dataclass(frozen=True)
class View:
    """What a guard sees.

    Attributes:
        config: the config.
        facts: the derived facts.
        resolved: setting to the value that will be used.
    """

    config: ConfigValues
    facts: Facts
    resolved: Mapping[str, SettingValue]

    def __getitem__(self, key: str) -> object:
        """The value that will be used; None where there is none."""
        if key in self.resolved:
            return self.resolved[key]
        if key in self.facts.values:
            return self.facts.values[key]
        return self.config.get(key)

    def number(self, key: str) -> float:
        """A number; 0 where the value is none."""
        value = self[key]
        return value if isinstance(value, int | float) else 0

    @property
    def tiled(self) -> bool:
        """Whether the loss is cut into more than one chunk."""
        return self.number("num_vocab_tiling") > 1


class Guard(NamedTuple):
    """One rule.

    Attributes:
        code: stable identifier.
        keys: the keys involved, the one to change first; their places are named.
        broken: whether a view breaks the rule.
        message: what is wrong; ``{key}`` stands for the value of a key or fact.
        remedy: what to do.
        severity: ``error`` or ``warning``.
        source: where the rule comes from.
    """

    code: str
    keys: tuple[str, ...]
    broken: Callable[[View], bool]
    message: str
    remedy: str
    source: str
    severity: Severity = "error"


def _tokens_do_not_divide(view: View) -> bool:
    """MaxText divides the float product of batch and length, whatever the mesh does."""
    tiles, batch = view.number("num_vocab_tiling"), view.number("per_device_batch_size")
    if tiles < 1 or batch <= 0:
        return False
    tokens = Fraction(batch).limit_denominator(1 << 20) * Fraction(view.number("max_target_length"))
    return tokens % Fraction(tiles) != 0


def _fsdp_shards(view: View) -> float:
    axes = ("fsdp_shards", "fsdp_transpose_shards")
    return max(view.number(axes[0]), 1) * max(view.number(axes[1]), 1)


def _ag_once_is_idle(view: View) -> bool:
    chosen = view.config.is_explicit("vocab_tiling_ag_once")
    return chosen and view["vocab_tiling_ag_once"] is True and view["num_vocab_tiling"] == 1


_PYCONFIG: Final = "MaxText rejects it (configs/types.py)"
_SILENT: Final = "MaxText accepts it in silence"
_TOKAMAX: Final = "use_tokamax_gmm"

GUARDS: Final[tuple[Guard, ...]] = (
    Guard(
        "vocab-tiling-divides-tokens",
        ("num_vocab_tiling", "per_device_batch_size", "max_target_length"),
        _tokens_do_not_divide,
        "num_vocab_tiling {num_vocab_tiling} does not divide the tokens of a device, "
        "per_device_batch_size {per_device_batch_size} × max_target_length {max_target_length}",
        "use a divisor of the tokens, or auto",
        _PYCONFIG,
    ),
    Guard(
        "block-diffusion-tiling",
        ("num_vocab_tiling", "training_objective"),
        lambda view: view.tiled and view["training_objective"] == "block_diffusion",
        "training_objective block_diffusion needs the whole logits: num_vocab_tiling must be 1, "
        "not {num_vocab_tiling}",
        "set num_vocab_tiling to 1",
        _PYCONFIG,
    ),
    Guard(
        "rl-tiling",
        ("num_vocab_tiling",),
        lambda view: view.tiled and view["trainer"] == "rl",
        "train_rl needs num_vocab_tiling 1, not {num_vocab_tiling}",
        "set num_vocab_tiling to 1",
        "MaxText rejects it (RLConfig)",
    ),
    Guard(
        "dpo-tiling",
        ("num_vocab_tiling", "use_dpo"),
        lambda view: view.tiled and view["trainer"] == "dpo",
        "DPO needs the whole logits: num_vocab_tiling must be 1, not {num_vocab_tiling}",
        "set num_vocab_tiling to 1",
        "train_dpo rejects it, the config does not",
    ),
    Guard(
        "distillation-tiling",
        ("num_vocab_tiling", "student_overrides", "teacher_overrides"),
        lambda view: view.tiled and view["trainer"] == "distillation",
        "with num_vocab_tiling {num_vocab_tiling} the model returns no logits to distill from",
        "set num_vocab_tiling to 1",
        _SILENT,
    ),
    Guard(
        "quantized-logits-tiling",
        ("num_vocab_tiling", "quantize_logits_proj"),
        lambda view: view.tiled and view["quantize_logits_proj"] is True,
        "quantize_logits_proj is not supported with num_vocab_tiling {num_vocab_tiling}",
        "set num_vocab_tiling to 1, or quantize_logits_proj to false",
        _PYCONFIG,
    ),
    Guard(
        "ag-once-without-tiling",
        ("vocab_tiling_ag_once", "num_vocab_tiling"),
        _ag_once_is_idle,
        "vocab_tiling_ag_once does nothing with one vocabulary tile",
        "remove it, or raise num_vocab_tiling",
        _SILENT,
        "warning",
    ),
    Guard(
        "gmm-v2-needs-tokamax",
        ("use_gmm_v2", _TOKAMAX),
        lambda view: view["use_gmm_v2"] is True and view[_TOKAMAX] is not True,
        "use_gmm_v2 needs use_tokamax_gmm",
        "set use_tokamax_gmm to true",
        _PYCONFIG,
    ),
    Guard(
        "gmm-v2-batch-split",
        ("use_gmm_v2", "use_batch_split_schedule"),
        lambda view: view["use_gmm_v2"] is True and view["use_batch_split_schedule"] is True,
        "use_gmm_v2 cannot run under use_batch_split_schedule",
        "turn one of the two off",
        _PYCONFIG,
    ),
    Guard(
        "heuristic-needs-gmm-v2",
        ("use_gmm_v2_heuristic_tiling", "use_gmm_v2"),
        lambda view: view["use_gmm_v2_heuristic_tiling"] is True and view["use_gmm_v2"] is not True,
        "use_gmm_v2_heuristic_tiling needs use_gmm_v2",
        "set use_gmm_v2 to true, or use_gmm_v2_heuristic_tiling to false",
        _PYCONFIG,
    ),
    Guard(
        "tokamax-diloco",
        (_TOKAMAX, "enable_diloco"),
        lambda view: view[_TOKAMAX] is True and view["enable_diloco"] is True,
        "use_tokamax_gmm cannot run under enable_diloco",
        "set use_tokamax_gmm to false",
        _PYCONFIG,
    ),
    Guard(
        "tokamax-check-vma",
        (_TOKAMAX, "check_vma"),
        lambda view: view[_TOKAMAX] is True and view["check_vma"] is True,
        "use_tokamax_gmm is not supported with check_vma",
        "set check_vma to false",
        _PYCONFIG,
    ),
    Guard(
        "tokamax-on-cpu",
        (_TOKAMAX, "hardware"),
        lambda view: (
            view[_TOKAMAX] is True
            and view["hardware"] == "cpu"
            and view.facts.values.get("backend") in ("tokamax_v1", "tokamax_v2")
        ),
        "use_tokamax_gmm asks for kernels that do not run on hardware cpu",
        "set use_tokamax_gmm and megablox to false",
        _SILENT,
    ),
    Guard(
        "tokamax-dense",
        (_TOKAMAX, "sparse_matmul"),
        lambda view: view[_TOKAMAX] is True and view.facts.values.get("backend") == "dense_moe",
        "sparse_matmul is false, so use_tokamax_gmm and use_gmm_v2 have no effect",
        "set sparse_matmul to true",
        _SILENT,
        "warning",
    ),
    Guard(
        "emb-chunks-need-gmm-v2",
        ("num_moe_emb_chunks", "use_gmm_v2", "use_ring_of_experts"),
        lambda view: (
            view.number("num_moe_emb_chunks") > 0
            and not (view["use_gmm_v2"] is True and view["use_ring_of_experts"] is True)
        ),
        "num_moe_emb_chunks {num_moe_emb_chunks} needs use_gmm_v2 and use_ring_of_experts",
        "set both to true, or num_moe_emb_chunks to 0",
        _PYCONFIG,
    ),
    Guard(
        "quantized-gather-needs-gmm-v2",
        ("moe_quantize_token_all_gather", "use_gmm_v2"),
        lambda view: (
            view["moe_quantize_token_all_gather"] is True and view["use_gmm_v2"] is not True
        ),
        "moe_quantize_token_all_gather needs use_gmm_v2",
        "set use_gmm_v2 to true",
        _PYCONFIG,
    ),
    Guard(
        "ring-needs-expert-parallelism",
        ("use_ring_of_experts", "ici_expert_parallelism"),
        lambda view: (
            view["use_ring_of_experts"] is True
            and view["expert_parallelism"] == 1
            and view["override_logical_axis_rules"] is not True
        ),
        "use_ring_of_experts needs experts on more than one device",
        "raise ici_expert_parallelism, or set use_ring_of_experts to false",
        _PYCONFIG,
    ),
    Guard(
        "zero1-fsdp",
        ("shard_optimizer_over_data", "ici_fsdp_parallelism", "ici_fsdp_transpose_parallelism"),
        lambda view: view["shard_optimizer_over_data"] is True and _fsdp_shards(view) > 1,
        "shard_optimizer_over_data (ZeRO-1) cannot be combined with FSDP: the fsdp axes have "
        "{fsdp_shards} × {fsdp_transpose_shards} shards",
        "set ici_fsdp_parallelism and ici_fsdp_transpose_parallelism to 1",
        _PYCONFIG,
    ),
    Guard(
        "zero1-without-data",
        ("shard_optimizer_over_data", "ici_data_parallelism"),
        lambda view: view["shard_optimizer_over_data"] is True and view["data_shards"] == 1,
        "shard_optimizer_over_data (ZeRO-1) has no data axis to shard over: its size is 1",
        "raise ici_data_parallelism, or turn shard_optimizer_over_data off",
        _SILENT,
        "warning",
    ),
    Guard(
        "distillation-student",
        ("student_overrides",),
        lambda view: bool(view.config.get("student_overrides")),
        "train_distill builds the student from student_overrides; the sizes here are those of "
        "the config without them",
        "resolve with the student's keys as KEY=VALUE arguments",
        "trainers/post_train/distillation/train_distill.py",
        "warning",
    ),
)


def check(
    config: ConfigValues, facts: Facts, resolved: Mapping[str, SettingValue] | None = None
) -> tuple[Problem, ...]:
    """Every rule that a config breaks.

    Args:
        config: the config.
        facts: its facts.
        resolved: setting to the value that will be used; None for the config's own values, where
            -1 and ``auto`` (still to be chosen) break no rule.

    Returns:
        Errors and warnings, in the order of the table; each names the places of all keys involved.
    """
    view = View(config, facts, resolved if resolved is not None else {})
    found = [_below_minimum(view, name) for name in SETTINGS]
    found += [_problem(view, guard) for guard in GUARDS if guard.broken(view)]
    return tuple(problem for problem in found if problem is not None)


def _below_minimum(view: View, name: str) -> Problem | None:
    """A tile or number of tiles of zero or less, which MaxText accepts and fails on later."""
    minimum, value = SETTINGS[name].minimum, view[name]
    if minimum is None or not isinstance(value, int) or value >= minimum:
        return None
    if name not in view.resolved and is_automatic(value):
        return None
    return Problem(
        "not-positive",
        f"{name} is {value}, which MaxText accepts and fails on later",
        view.config.place(name),
        f"use {minimum} or more",
        path=name,
    )


def _problem(view: View, guard: Guard) -> Problem:
    places = {key: place for key in guard.keys if (place := view.config.place(key)) is not None}
    lead = next(iter(places), None)
    values = {key: view[key] for key in _fields(guard.message)}
    message = guard.message.format_map({k: "?" if v is None else v for k, v in values.items()})
    others = [f"{key} at {_position(place)}" for key, place in places.items() if key != lead]
    if others:
        message += f" ({', '.join(others)})"
    return Problem(
        guard.code,
        message,
        places[lead] if lead is not None else None,
        guard.remedy,
        path=guard.keys[0],
        severity=guard.severity,
    )


def _fields(message: str) -> list[str]:
    return [part.split("}")[0] for part in message.split("{")[1:]]


def _position(place: Place) -> str:
    """A place in brackets: its file and line, and for an argument the argument itself."""
    if place.file.startswith("<") and place.text:
        return f"{place.file} {place.text}"
    return f"{place.file}:{place.line}"
