"""A model of MaxText's that trains in a blink, its batch, and its loss with gradients.

Importing this module imports MaxText (most of a minute on two cores).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import maxtext
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.common.common_types import MODEL_MODE_TRAIN
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train
    from maxtext.utils import maxtext_utils, model_creation_utils

MAXTEXT = version("maxtext")
BASE = Path(next(iter(maxtext.__path__))) / "configs" / "base.yml"
BATCH, LENGTH, VOCAB = 4, 32, 1024
COTANGENT = 3.0
"""What the loss is multiplied with, so that a gradient without its cotangent shows."""

SETTINGS = (
    "run_name=t base_output_directory=/nowhere model_name=default dataset_type=synthetic "
    "enable_checkpointing=False enable_goodput_recording=False enable_tensorboard=False "
    "skip_jax_distributed_system=True hardware=cpu attention=dot_product log_config=False "
    f"per_device_batch_size={BATCH} max_target_length={LENGTH} vocab_size={VOCAB} "
    "base_num_decoder_layers=1 base_emb_dim=64 base_mlp_dim=128 base_num_query_heads=4 "
    "base_num_kv_heads=4 head_dim=16 scan_layers=False z_loss_multiplier=1e-3 dtype=float32"
).split()


@dataclass(frozen=True)
class Tiny:
    """A config with its mesh and model."""

    config: Any
    mesh: jax.sharding.Mesh
    model: Any


@dataclass(frozen=True)
class Graded:
    """Loss times ``COTANGENT``, MaxText's two sums, and the gradients of all parameters."""

    loss: float
    xent_sum: float
    z_loss: float
    gradients: Any

    def distance(self, other: Graded) -> float:
        """Largest difference of a gradient, relative to the largest entry of its array."""
        pairs = zip(jax.tree.leaves(self.gradients), jax.tree.leaves(other.gradients), strict=True)
        return max(float(np.max(np.abs(a - b)) / (np.max(np.abs(a)) + 1e-12)) for a, b in pairs)


def config(*extra: str) -> Any:
    """MaxText's config object for the tiny model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pyconfig.initialize(["train.py", str(BASE), *SETTINGS, *extra])


@functools.cache
def build(*extra: str) -> Tiny:
    """The tiny model under some ``KEY=VALUE`` arguments; the same weights whatever the tiling."""
    return with_config(config(*extra))


def with_config(chosen: Any) -> Tiny:
    """The tiny model of a config object."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(chosen), chosen.mesh_axes)
        with jax.set_mesh(mesh):
            model = model_creation_utils.from_config(
                chosen, mesh=mesh, model_mode=MODEL_MODE_TRAIN, rngs=nnx.Rngs(0)
            )
    return Tiny(chosen, mesh, model)


def batch(length: int = LENGTH) -> dict[str, jax.Array]:
    """Tokens with padding at the end of each sequence and two documents in the first."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, length + 1), dtype=np.int32)
    position = np.tile(np.arange(length, dtype=np.int32), (BATCH, 1))
    segmentation = np.ones((BATCH, length), np.int32)
    segmentation[:, -7:] = 0
    segmentation[0, : length // 2] = 2
    arrays = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "inputs_position": position,
        "targets_position": position,
        "inputs_segmentation": segmentation,
        "targets_segmentation": segmentation,
    }
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def step(tiny: Tiny) -> Callable[..., Any]:
    """MaxText's loss and its gradients as a jitted function of parameters and batch."""
    graphdef, _, rest = nnx.split(tiny.model, nnx.Param, ...)

    def loss(params: Any, data: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        model = nnx.merge(graphdef, params, rest, copy=True)
        value, aux = train.loss_fn(model, tiny.config, dict(data), None, None, is_train=True)
        return value * COTANGENT, aux

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def grade(tiny: Tiny, call: Callable[..., Any] | None = None) -> Graded:
    """Loss and gradients of the tiny model, by MaxText's own ``loss_fn``."""
    params = nnx.split(tiny.model, nnx.Param, ...)[1]
    with (
        warnings.catch_warnings(),
        jax.set_mesh(tiny.mesh),
        logical_axis_rules(tiny.config.logical_axis_rules),
    ):
        warnings.simplefilter("ignore")
        (loss, aux), gradients = (call or step(tiny))(params, batch())
    return Graded(
        float(loss),
        float(aux["xent_sum"]),
        float(aux["z_loss"]),
        jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), gradients),
    )
