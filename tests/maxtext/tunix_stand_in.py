"""The four types that MaxText 0.2.5's training engine imports from Tunix, where Tunix lacks them.

The engine needs ``tunix.experimental``, which no release of ``google-tunix`` on PyPI has (looked at
up to 0.1.7; MaxText's own requirements name a commit). What the engine uses of the types is written
out here, so that it can be run with what can be installed.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

__all__ = ["install"]


@flax.struct.dataclass
class WeightedMetric:
    """A sum and what it is to be divided by."""

    unreduced_sum: jax.Array
    denominator: jax.Array
    eps: float | None = flax.struct.field(default=None, pytree_node=False)
    min_denom: float | None = flax.struct.field(default=None, pytree_node=False)

    def compute_scale(self) -> jax.Array:
        """One over the denominator, and 0 for 0."""
        denominator = jnp.asarray(self.denominator, jnp.float32) + (self.eps or 0.0)
        denominator = jnp.maximum(denominator, self.min_denom or 0.0)
        return jnp.where(denominator == 0, 0.0, 1.0 / jnp.where(denominator == 0, 1, denominator))

    def compute(self) -> jax.Array:
        """The quotient."""
        return self.unreduced_sum * self.compute_scale()


@flax.struct.dataclass
class LossOutput:
    """A loss and what is logged with it."""

    primary_loss: WeightedMetric
    aux_metrics: dict[str, Any]


@flax.struct.dataclass
class TrainerPayload:
    """Base of what an engine trains on."""


@flax.struct.dataclass
class RLTrainerPayload(TrainerPayload):
    """A payload of reinforcement learning; none is used here."""


def install() -> None:
    """Make the types importable under Tunix's names, unless Tunix itself has them."""
    if "tunix.experimental.common.datatypes" in sys.modules:
        return  # Tunix's own, or those of an earlier call: they have no spec to be found by.
    found = importlib.util.find_spec("tunix")
    if found is not None and importlib.util.find_spec("tunix.experimental") is not None:
        return
    names = {
        "tunix.sft.utils": (LossOutput, WeightedMetric),
        "tunix.experimental.common.datatypes": (RLTrainerPayload, TrainerPayload),
    }
    for module, types in names.items():
        parent = ""
        for part in module.split("."):
            parent = f"{parent}.{part}" if parent else part
            if parent not in sys.modules:
                made = ModuleType(parent)
                made.__path__ = []
                sys.modules[parent] = made
        for kind in types:
            setattr(sys.modules[module], kind.__name__, kind)
