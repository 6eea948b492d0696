"""What MaxText's own config has to be told so that a resolution takes effect in it.

MaxText reads tiles and ``num_vocab_tiling`` from its config and from nowhere else. This module
works out which of its keys have to change; ``tilepolicy run`` appends them to the command line,
:func:`tilepolicy.maxtext.resolved_config` puts them into a config object.

One key may be given another value than the resolved one. MaxText hands hidden states and integer
labels to its loss only if ``num_vocab_tiling`` is greater than 1, and a loss of tilepolicy's needs
them even for one chunk: such a run gets the smallest number that divides its tokens, and the loss
that is called cuts as the resolution says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tilepolicy.configs.values import ConfigValues
from tilepolicy.errors import Place, Problem
from tilepolicy.resolution import Resolution, ResolvedSetting, SettingValue
from tilepolicy.resolve.readers import PADDING_KNOBS
from tilepolicy.settings import SETTINGS, tile_setting

__all__ = ["Handover", "ignored", "plan"]

_TILING: Final = "num_vocab_tiling"
_DECIDED: Final = ("lock", "config", "rule")


@dataclass(frozen=True, slots=True)
class Handover:
    """Changes to MaxText's config.

    Attributes:
        settings: key to value; only keys whose value is another than the config's.
        routed: why ``num_vocab_tiling`` is not the resolved one; empty where it is.
    """

    settings: Mapping[str, SettingValue]
    routed: str = ""


def plan(resolution: Resolution, config: ConfigValues, *, routes_loss: bool) -> Handover:
    """The keys of MaxText's config that have to change.

    Args:
        resolution: all settings of the config.
        config: the config as MaxText would read it.
        routes_loss: whether the program computes MaxText's pre-training loss, so that a loss of
            tilepolicy's can take its place.
    """
    own_loss = routes_loss and _own_loss(resolution, config)
    changes: dict[str, SettingValue] = {}
    for name, setting in resolution.settings.items():
        if name in SETTINGS and _told_to_maxtext(name, setting, own_loss=own_loss):
            changes[name] = setting.value
    routed = ""
    if own_loss and changes.get(_TILING) == 1 and (count := _smallest_count(config)) is not None:
        changes[_TILING] = count
        routed = (
            f"{_TILING}={count} makes MaxText hand hidden states to the loss; "
            f"{resolution.settings['loss'].value} runs with the resolved "
            f"{_TILING} {resolution.settings[_TILING].value}"
        )
    differing = {key: value for key, value in changes.items() if _differs(config, key, value)}
    return Handover(differing, routed)


def _told_to_maxtext(name: str, setting: ResolvedSetting, *, own_loss: bool) -> bool:
    if SETTINGS[name].since is None:
        return False
    if name == _TILING and own_loss:
        return True
    pads = name in PADDING_KNOBS and setting.honoured.by == "apply"
    return setting.honoured.by == "maxtext" or pads


def _own_loss(resolution: Resolution, config: ConfigValues) -> bool:
    """Whether a loss of tilepolicy's is selected, and MaxText allows to tile this config."""
    barred = (
        config.get("training_objective") == "block_diffusion"
        or config.get("quantize_logits_proj") is True
        or config.get("use_dpo") is True
    )
    return resolution.settings["loss"].value != "upstream" and not barred


def _smallest_count(config: ConfigValues) -> int | None:
    """The smallest ``num_vocab_tiling`` above 1 that MaxText accepts; None if there is none."""
    batch, length = config.get("per_device_batch_size"), config.get("max_target_length")
    if not isinstance(batch, int | float) or not isinstance(length, int):
        return None
    tokens = batch * length
    return next((n for n in range(2, int(tokens) + 1) if tokens % n == 0), None)


def _differs(config: ConfigValues, key: str, value: SettingValue) -> bool:
    if key not in config:
        return True
    present = config[key]
    return present != value or isinstance(present, bool) is not isinstance(value, bool)


def ignored(resolution: Resolution, *, severity: str = "warning") -> list[Problem]:
    """The settings that somebody chose and nothing will read, one problem each.

    Args:
        resolution: all settings of the config.
        severity: ``error`` under ``--strict``.
    """
    return [
        Problem(
            code="not-honoured",
            message=f"{name} = {setting.value} has no effect: {setting.honoured.why}",
            place=Place(setting.origin.file, setting.origin.line) if setting.origin.file else None,
            remedy="remove it, or select a backend that reads it",
            path=name,
            severity="error" if severity == "error" else "warning",
        )
        for name, setting in resolution.settings.items()
        if setting.honoured.by is None
        and setting.origin.kind in _DECIDED
        and not _as_in_training(name, setting, resolution)
    ]


def _as_in_training(name: str, setting: ResolvedSetting, resolution: Resolution) -> bool:
    """Whether this is an evaluation tile that training has too.

    Where MaxText evaluates with the train knobs, a rule for both phases has its effect.
    """
    row = SETTINGS.get(name)
    if row is None or row.phase != "eval" or row.layer is None or row.pass_ is None:
        return False
    if row.axis is None:
        return False
    train = resolution.settings.get(tile_setting(row.layer, row.pass_, row.axis))
    return train is not None and train.value == setting.value
