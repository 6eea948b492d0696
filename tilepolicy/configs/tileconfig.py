"""The keys of a MaxText config that decide about tiles, as a model: for its JSON Schema.

A MaxText config has some 900 keys; the model knows the settings and the keys that choose a path
or a size, and lets all others be. Reading a config (:mod:`tilepolicy.configs`) knows all of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from tilepolicy.settings import SETTINGS, Setting

__all__ = ["PATH_KEYS", "tile_config_model"]

PATH_KEYS: Final[dict[str, tuple[type, str]]] = {
    "base_config": (str, "Config that this one builds on, a path or base.yml."),
    "model_name": (str, "Model whose own file gives its sizes."),
    "decoder_block": (str, "Kind of decoder layers."),
    "training_objective": (str, "What the loss is computed for."),
    "hardware": (str, "tpu, gpu or cpu."),
    "compile_topology": (str, "Topology to compile for, v6e-256; names the device."),
    "dtype": (str, "Type of the activations."),
    "per_device_batch_size": (float, "Sequences of one microbatch on one device."),
    "max_target_length": (int, "Tokens of one sequence."),
    "vocab_size": (int, "Vocabulary entries."),
    "num_experts": (int, "Experts of one layer; 1 for a dense model."),
    "num_experts_per_tok": (int, "Experts that each token is routed to."),
    "sparse_matmul": (bool, "Grouped matmuls instead of dense einsums over all experts."),
    "megablox": (bool, "MaxText's megablox kernels (default)."),
    "use_tokamax_gmm": (bool, "Tokamax's grouped matmul."),
    "use_gmm_v2": (bool, "MaxText's vendored gmm_v2 kernels, with use_tokamax_gmm."),
    "use_gmm_v2_heuristic_tiling": (bool, "Let gmm_v2 calculate its tiles."),
    "cast_logits_to_fp32": (bool, "Logits are float32: four bytes each."),
    "logits_dot_in_fp32": (bool, "Logits are computed in float32: four bytes each."),
}
"""Key to its type and what it does, beside the settings."""


def tile_config_model() -> type[BaseModel]:
    """The model; every field may be left out, and other keys are let be."""
    fields: dict[str, Any] = {
        name: (_annotation(setting), _field(setting))
        for name, setting in SETTINGS.items()
        if setting.since is not None
    }
    fields |= {
        name: (
            kind,
            Field(
                default=None, title=name, description=summary, json_schema_extra=_without_default
            ),
        )
        for name, (kind, summary) in PATH_KEYS.items()
    }
    return create_model(
        "TileConfig",
        __config__=ConfigDict(strict=True, extra="allow", protected_namespaces=()),
        __doc__="Keys of a MaxText config that decide about tiles and vocabulary tiling.",
        **fields,
    )


def _annotation(setting: Setting) -> Any:  # noqa: ANN401 - a type that is put together here
    """The setting's own type, or ``auto`` (for numbers also -1): an automatic choice."""
    if setting.kind is bool:
        return bool | Literal["auto"]
    return Annotated[int, Field(ge=setting.minimum)] | Literal[-1, "auto"]


def _field(setting: Setting) -> Any:  # noqa: ANN401 - pydantic's FieldInfo, whose stub says Any
    default = str(setting.default).lower() if setting.kind is bool else setting.default
    return Field(
        default=None,
        title=setting.name,
        description=f"{setting.summary} MaxText's default is {default}, since {setting.since}.",
        json_schema_extra=_without_default,
    )


def _without_default(schema: dict[str, Any]) -> None:
    """Drop the null that only stands for a key that is left out."""
    schema.pop("default", None)
