"""The grouped matmuls of MaxText's MoE models: the calls for which the shipped tables have points.

Sizes come from MaxText's own model files, read without importing MaxText, through the same facts
as ``resolve`` uses.
"""

from __future__ import annotations

from typing import Final

from tilepolicy import configs
from tilepolicy.axes import GmmShape, forward_axes
from tilepolicy.errors import Problem
from tilepolicy.facts import derive, site
from tilepolicy.formats.records import FormatError
from tilepolicy.settings import LAYERS, Layer

__all__ = ["BATCHES", "EXPERT_SHARDS", "LENGTH", "MODELS", "model_sites"]

MODELS: Final = (
    "deepseek3-671b",
    "gpt-oss-120b",
    "gpt-oss-20b",
    "kimi-k2-1t",
    "llama4-17b-128e",
    "llama4-17b-16e",
    "mixtral-8x22b",
    "mixtral-8x7b",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b",
)
BATCHES: Final = (1, 4, 8)
"""``per_device_batch_size``."""
LENGTH: Final = 4096
"""``max_target_length``."""
EXPERT_SHARDS: Final = (1, 4)
"""``ici_expert_parallelism``."""

# Sizes do not depend on the kind of device, only on how many there are.
_TOPOLOGY: Final = "v6e:2x2"


def model_sites() -> dict[Layer, frozenset[GmmShape]]:
    """The forward problems of every model, batch size and expert parallelism, by layer.

    Raises:
        ConfigError: MaxText is not installed, or does not have one of the models.
        FormatError: a size is not known.
    """
    found: dict[Layer, set[GmmShape]] = {layer: set() for layer in LAYERS}
    for model in MODELS:
        for batch in BATCHES:
            for shards in EXPERT_SHARDS:
                config: dict[str, object] = {
                    "model_name": model,
                    "per_device_batch_size": batch,
                    "max_target_length": LENGTH,
                    "ici_expert_parallelism": shards,
                    "use_tokamax_gmm": True,
                }
                facts = derive(configs.read(config), _TOPOLOGY)
                for layer in LAYERS:
                    found[layer].add(_shape(site(facts, layer, "fwd"), layer, model))
    return {layer: frozenset(shapes) for layer, shapes in found.items()}


def _shape(facts: dict[str, bool | int | float | str], layer: Layer, model: str) -> GmmShape:
    sizes = [facts.get(name) for name in (*forward_axes(layer), "num_groups")]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) != len(sizes):
        message = f"the sizes of {layer} of {model} are not known"
        raise FormatError(Problem("unknown-size", message))
    return GmmShape(*known)
