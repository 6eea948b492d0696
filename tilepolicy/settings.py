"""The one table of settings: MaxText's knobs and tilepolicy's own, with their releases.

Which MaxText release has which knob was read in the wheels of 0.2.0 to 0.2.5
(``tests/core/test_settings.py`` holds the table against the installed release).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

from tilepolicy.resolution import SettingValue

__all__ = [
    "AXES",
    "LATEST_MAXTEXT",
    "LAYERS",
    "MAXTEXT_RELEASES",
    "PASSES",
    "SETTINGS",
    "Axis",
    "Layer",
    "Pass",
    "Phase",
    "Setting",
    "settings_of_release",
    "tile_setting",
]

Layer = Literal["wi", "wo"]
Pass = Literal["fwd", "dlhs", "drhs"]
Axis = Literal["batch_seq", "embed_dim", "mlp_dim"]
Phase = Literal["train", "eval"]

LAYERS: Final[tuple[Layer, ...]] = get_args(Layer)
PASSES: Final[tuple[Pass, ...]] = get_args(Pass)
AXES: Final[tuple[Axis, ...]] = get_args(Axis)

MAXTEXT_RELEASES: Final = ("0.2.0", "0.2.1", "0.2.2", "0.2.3", "0.2.4", "0.2.5")
LATEST_MAXTEXT: Final = MAXTEXT_RELEASES[-1]

_TILE_DEFAULTS: Final[dict[Axis, int]] = {"batch_seq": 512, "embed_dim": 1024, "mlp_dim": 1024}


class Setting(NamedTuple):
    """One knob.

    Attributes:
        name: MaxText's own name, or tilepolicy's (``loss``, ``engine.cache_pure_state``).
        default: MaxText's default in its ``base.yml``.
        kind: the Python type of a value.
        minimum: smallest legal value of an integer setting.
        since: first MaxText release that has it; None for tilepolicy's own settings.
        layer: ``wi`` or ``wo`` for a tile knob.
        pass_: ``fwd``, ``dlhs`` or ``drhs`` for a tile knob.
        axis: tile axis for a tile knob.
        phase: ``eval`` for the evaluation knobs, else ``train``.
        summary: one sentence for listings and schemas.
    """

    name: str
    default: SettingValue
    kind: type
    summary: str
    minimum: int | None = None
    since: str | None = "0.2.0"
    layer: Layer | None = None
    pass_: Pass | None = None
    axis: Axis | None = None
    phase: Phase = "train"

    @property
    def is_tile(self) -> bool:
        """Whether this is one of the 18 train or 6 eval tile knobs."""
        return self.axis is not None


def tile_setting(layer: Layer, pass_: Pass, axis: Axis, phase: Phase = "train") -> str:
    """MaxText's name of a tile knob: ``wi_tile_dlhs_embed_dim``, ``eval_wo_tile_fwd_mlp_dim``."""
    prefix = "eval_" if phase == "eval" else ""
    return f"{prefix}{layer}_tile_{pass_}_{axis}"


def _tiles(layer: Layer, pass_: Pass, phase: Phase) -> list[Setting]:
    moment = "evaluation" if phase == "eval" else "training"
    return [
        Setting(
            name=tile_setting(layer, pass_, axis, phase),
            default=_TILE_DEFAULTS[axis],
            kind=int,
            minimum=1,
            since="0.2.5" if phase == "eval" else "0.2.0",
            layer=layer,
            pass_=pass_,
            axis=axis,
            phase=phase,
            summary=f"{axis} tile of the {layer} grouped matmul, {pass_} pass, in {moment}.",
        )
        for axis in AXES
    ]


def _table() -> dict[str, Setting]:
    rows = [
        Setting(
            name="num_vocab_tiling",
            default=1,
            kind=int,
            minimum=1,
            summary="Number of token chunks in which the loss forms its logits.",
        ),
        Setting(
            name="vocab_tiling_ag_once",
            default=False,
            kind=bool,
            since="0.2.4",
            summary="All-gather the output head once before the tiled loss.",
        ),
    ]
    for layer in LAYERS:
        for pass_ in PASSES:
            rows += _tiles(layer, pass_, "train")
    for layer in LAYERS:
        rows += _tiles(layer, "fwd", "eval")
    rows += [
        Setting(
            name="shard_optimizer_over_data",
            default=False,
            kind=bool,
            summary="ZeRO-1: shard the optimizer state over the data axis.",
        ),
        Setting(
            name="loss",
            default="upstream",
            kind=str,
            since=None,
            summary="Which cross-entropy computes the training loss.",
        ),
        Setting(
            name="engine.cache_pure_state",
            default="auto",
            kind=str,
            since=None,
            summary="Keep the training engine's split state between steps.",
        ),
    ]
    return {row.name: row for row in rows}


SETTINGS: Final[dict[str, Setting]] = _table()


def settings_of_release(maxtext: str) -> dict[str, Setting]:
    """The settings that a MaxText release has, tilepolicy's own included.

    Args:
        maxtext: release, ``0.2.4``. A later release than the last known one is taken to have
            all settings, an earlier one than the first known those of the first.
    """
    wanted = _release_key(maxtext)
    return {
        name: setting
        for name, setting in SETTINGS.items()
        if setting.since is None
        or _release_key(setting.since) <= max(wanted, _release_key(MAXTEXT_RELEASES[0]))
    }


def _release_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
