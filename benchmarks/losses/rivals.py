"""Every loss that is compared, as ``(hidden, head, labels) -> mean loss``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from benchmarks.losses.plain import plain_scan
from tilepolicy.losses import (
    chunked_sparse_cross_entropy,
    online_sparse_cross_entropy,
    sparse_cross_entropy_with_logits,
)
from tilepolicy.vocab import choose_tiling

type Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Point:
    """One setting.

    Attributes:
        tokens: N.
        vocab: V.
        depth: D.
        vocab_tile: entries of a tile of the online loss.
        dtype: dtype of hidden states and head.
        token_tile: tokens of a tile of the online loss; None for all.
    """

    tokens: int
    vocab: int
    depth: int
    vocab_tile: int
    dtype: str
    token_tile: int | None = None

    @property
    def num_tiles(self) -> int:
        """Token chunks: what ``num_vocab_tiling: auto`` gives, and at least two."""
        choice = choose_tiling(self.tokens, self.vocab, 4).num_tiles
        return max(2, choice or 1)

    def __str__(self) -> str:
        return f"N={self.tokens} V={self.vocab} D={self.depth} {self.dtype}"


def _nine(depth: int, dtype: str) -> list[Point]:
    return [
        Point(256, vocab, depth, tile, dtype)
        for vocab in (32768, 131072, 262144)
        for tile in (1024, 2048, 4096)
    ]


# The nine published points say neither D nor a device. On a CPU tiles of the head count among
# the temporaries, so that a small D shows the logits; on a TPU they do not, and D and dtype are
# those of a model.
NINE = _nine(64, "float32")
NINE_ON_TPU = _nine(2048, "bfloat16")
LARGE = [
    Point(4096, 262144, 2048, 1024, "bfloat16"),
    Point(8192, 262144, 2048, 1024, "bfloat16"),
]
# Tiles of 4096 by 512 tokens are as large as those of tokamax's `chunked_xla`, 2048 by 1024: the
# fewer tokens in a tile, the shorter is what XLA runs on one core after each, the sum of the
# hidden gradient.
TIMED = [
    Point(256, 262144, 512, 4096, "float32"),
    Point(4096, 131072, 512, 4096, "float32", token_tile=512),
]


def losses(point: Point, names: list[str] | None = None) -> dict[str, Loss]:
    """The losses by name; ``names`` selects some of them.

    Raises:
        ImportError: a rival's library is missing: ``pip install 'tilepolicy[maxtext,test]'``.
    """
    makers: dict[str, Callable[[Point], Loss]] = {
        "optax integer labels": _optax,
        "MaxText dense": _maxtext_dense,
        "MaxText tiled": _maxtext_tiled,
        "tokamax chunked_xla": lambda point: _tokamax(point, "chunked_xla"),
        "tokamax mosaic_tpu": lambda point: _tokamax(point, "mosaic_tpu"),
        "sparse": _sparse,
        "chunked": _chunked,
        "online": _online,
        "plain scan": lambda _: lambda *arrays: plain_scan(*arrays).mean(),
        "three matmuls": lambda _: _squares,
        "four matmuls": lambda _: jax.checkpoint(_squares),
    }
    return {name: makers[name](point) for name in (names or makers)}


def _logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    return (hidden @ head).astype(jnp.float32)


def _squares(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """No loss, but the matmuls of one, and next to nothing beside them: what no loss can beat.

    Logits, and their cotangent times head and times hidden; under ``checkpoint`` the logits again,
    as in a loss that does not keep them.
    """
    del labels
    return (_logits(hidden, head) ** 2).mean()


def _sparse(_: Point) -> Loss:
    def loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        return sparse_cross_entropy_with_logits(_logits(hidden, head), labels)[0].mean()

    return loss


def _chunked(point: Point) -> Loss:
    def loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        # Weights that are already divided by their sum leave a cotangent of one, and with it no
        # pass over the gradients to scale them.
        weights = jnp.full(labels.shape, 1 / labels.size)
        tiles = point.num_tiles
        return chunked_sparse_cross_entropy(hidden, head, labels, weights, num_tiles=tiles)[0]

    return loss


def _online(point: Point) -> Loss:
    def loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        tiles = {"vocab_tile": point.vocab_tile, "token_tile": point.token_tile}
        return online_sparse_cross_entropy(hidden, head, labels, **tiles)[0].mean()

    return loss


def _optax(_: Point) -> Loss:
    def loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        logits = _logits(hidden, head)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


def _tokamax(_: Point, implementation: str) -> Loss:
    import tokamax

    def loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        return tokamax.linear_softmax_cross_entropy_loss(
            hidden, labels, head, reduction="mean", implementation=implementation
        )

    return loss


def _maxtext_dense(point: Point) -> Loss:
    from maxtext.utils import max_utils

    def loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        one_hot = jax.nn.one_hot(labels, point.vocab)
        return max_utils.cross_entropy_with_logits(_logits(hidden, head), one_hot)[0].mean()

    return loss


def _maxtext_tiled(point: Point) -> Loss:
    from flax import nnx
    from maxtext.common.common_types import ShardMode
    from maxtext.utils import vocabulary_tiling

    class Dense(nnx.Module):
        def __init__(self, kernel: jax.Array) -> None:
            self.kernel = nnx.Param(kernel)

    class Model(nnx.Module):
        """What MaxText's loss needs of a model: a mesh, and logits of hidden states."""

        def __init__(self, kernel: jax.Array, mesh: Mesh) -> None:
            self.logits_dense, self.mesh = Dense(kernel), mesh

        def logits_from_hidden_states_for_vocab_tiling(
            self, hidden: jax.Array, deterministic: bool, model_mode: str
        ) -> jax.Array:
            del deterministic, model_mode
            return _logits(hidden, self.logits_dense.kernel[...])

    config = SimpleNamespace(
        enable_dropout=False,
        shard_mode=ShardMode.AUTO,
        debug_sharding=False,
        num_vocab_tiling=point.num_tiles,
        vocab_tiling_ag_once=False,
        vocab_size=point.vocab,
        z_loss_multiplier=0.0,
    )

    def loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        data: dict[str, Any] = {
            "targets": labels[None],
            "targets_segmentation": jnp.ones_like(labels)[None],
        }
        model = Model(head, _mesh())
        total, _ = vocabulary_tiling.vocab_tiling_nnx_loss(model, hidden[None], data, config, True)
        return total / labels.size

    return loss


def _mesh() -> Mesh:
    """A mesh of one device with the axes that MaxText's rules name."""
    ambient = jax.sharding.get_abstract_mesh()
    if not ambient.empty:
        return ambient  # type: ignore[return-value]
    return Mesh(np.array(jax.devices()[:1]), ("fsdp",))
