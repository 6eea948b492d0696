"""MaxText's training losses computed by tilepolicy's, with MaxText's own output head.

MaxText's tiled loss (``num_vocab_tiling`` > 1) is the one place of its training step that has
hidden states and integer labels in hand, so it is the one where ``chunked`` and ``online`` can do
without the logits; ``sparse`` there is one chunk. The monolithic loss is given logits and one-hot
targets: whatever the policy says, only ``sparse`` is left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp

from tilepolicy.adapters import maxtext_head
from tilepolicy.adapters.maxtext_choice import LossChoice, choose, fell_back, note_choice
from tilepolicy.adapters.maxtext_head import HeadCall, HeadWeights
from tilepolicy.adapters.maxtext_types import Foreign
from tilepolicy.context.active import ActivePolicy
from tilepolicy.errors import AdapterError, Problem
from tilepolicy.losses import (
    chunked_sparse_cross_entropy_fn,
    online_sparse_cross_entropy,
    sparse_cross_entropy_with_logits,
)
from tilepolicy.vocab import BROKEN_TILED_LOSS, tiled_loss_is_broken

__all__ = ["TiledCall", "monolithic_loss", "tiled_loss", "vocab_tile", "working_tiles"]

_LANES: Final = 128
_SMALLEST_TILE: Final = 512

type Pair = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class TiledCall:
    """The arguments of MaxText's tiled loss.

    Attributes:
        model: MaxText's ``Transformer``, NNX or Linen.
        hidden: hidden states before the final norm, ``(B, S, D)``.
        data: MaxText's batch: ``targets`` and ``targets_segmentation``, ``(B, S)``; a token of
            segment 0 is padding.
        config: MaxText's config.
        is_train: whether dropout may be on.
        version: MaxText release.
        params: variables of a Linen model; None for an NNX model.
    """

    model: Foreign
    hidden: jax.Array
    data: Mapping[str, jax.Array]
    config: Foreign
    is_train: bool
    version: str
    params: Foreign = None

    @property
    def deterministic(self) -> bool:
        """Whether dropout is off."""
        return not (self.config.enable_dropout and self.is_train)

    def head(self) -> HeadCall:
        """The output head as a function."""
        if self.params is None:
            return maxtext_head.nnx_head(self.model, self.version, deterministic=self.deterministic)
        return maxtext_head.linen_head(
            self.model, self.params, self.version, deterministic=self.deterministic
        )

    def weights(self) -> HeadWeights | str:
        """The weights of the output head, or why they cannot be told."""
        if self.params is not None:
            return "the model is a Linen module"
        return maxtext_head.recognise(
            self.model, self.hidden, self.config, self.version, deterministic=self.deterministic
        )


def tiled_loss(original: Callable[[], Pair], scope: ActivePolicy, call: TiledCall) -> Pair:
    """The sum of the losses, z-loss included, and the sum of the z-losses.

    Args:
        original: MaxText's own loss of this call.
        scope: the scope in force.
        call: the arguments.

    Raises:
        AdapterError: only MaxText's own loss can serve this mesh, and its gradients are wrong.
    """
    choice = choose(scope, call.config)
    if choice.loss == "upstream":
        note_choice(choice, "upstream", "MaxText's own tiled loss")
        return original()
    if maxtext_head.has_explicit_axes(call.model.mesh):
        return _with_explicit_axes(original, choice, call)
    if choice.loss == "online":
        weights = call.weights()
        if isinstance(weights, HeadWeights):
            return _over_vocabulary(choice, call, weights)
        fell_back(choice, "chunked", weights)
    return _over_tokens(choice, call)


def _with_explicit_axes(original: Callable[[], Pair], choice: LossChoice, call: TiledCall) -> Pair:
    reason = "shard_mode: explicit, for which tilepolicy's losses place nothing"
    if tiled_loss_is_broken(call.version):
        raise AdapterError(
            Problem(
                code="explicit-axes",
                message=f"loss {choice.loss} does not run with {reason}, and {BROKEN_TILED_LOSS}",
                remedy="set shard_mode: auto, or num_vocab_tiling: 1 and vocab.loss: upstream",
            )
        )
    fell_back(choice, "upstream", reason)
    return original()


def _over_tokens(choice: LossChoice, call: TiledCall) -> Pair:
    head, mesh = call.head(), call.model.mesh
    wanted = 1 if choice.loss == "sparse" else choice.num_tiles
    tiles = working_tiles(wanted, call.data["targets"].size)
    sharding = head.sharding(mesh, maxtext_head.token_axes(mesh, call.hidden.shape[:-1]))
    note_choice(choice, "sparse" if tiles == 1 else "chunked", f"{tiles} chunks of tokens")
    return chunked_sparse_cross_entropy_fn(
        head.logits,
        head.params,
        call.hidden,
        call.data["targets"],
        call.data["targets_segmentation"] != 0,
        num_tiles=tiles,
        z_loss=call.config.z_loss_multiplier,
        constants=head.constants,
        sharding=sharding,
        ag_once=choice.ag_once or sharding is None,
    )


def _over_vocabulary(choice: LossChoice, call: TiledCall, head: HeadWeights) -> Pair:
    mesh, labels = call.model.mesh, call.data["targets"]
    mask = call.data["targets_segmentation"] != 0
    sharding = head.sharding(mesh, maxtext_head.token_axes(mesh, call.hidden.shape[:-1]))
    shards = 1 if sharding is None else sharding.token_shards
    vocab = head.weights.shape[0 if head.tied else 1]
    tile = vocab_tile(labels.size // shards, vocab, choice.vocab_tile_bytes)
    note_choice(choice, "online", f"vocabulary tiles of {tile}")
    losses, z_losses = online_sparse_cross_entropy(
        head.hidden,
        head.weights,
        labels,
        vocab_tile=tile,
        z_loss=call.config.z_loss_multiplier,
        tied=head.tied,
        soft_cap=head.soft_cap,
        logits_dtype=head.logits_dtype,
        sharding=sharding,
        ag_once=choice.ag_once or sharding is None,
    )
    return jnp.sum(losses * mask), jnp.sum(z_losses * mask)


def monolithic_loss(
    original: Foreign,
    scope: ActivePolicy,
    config: Foreign,
    logits: jax.Array,
    targets: jax.Array,
    z_loss: Foreign,
) -> Pair:
    """Loss and z-loss term of each token from logits and one-hot targets, ``(B, S, V)``.

    The label is found again as the position of the one: a reduction into which XLA fuses the
    one-hot, so that neither it nor the exponentials of the logits outlive the forward pass.

    Args:
        original: MaxText's ``cross_entropy_with_logits``.
        scope: the scope in force.
        config: MaxText's config.
        logits: logits.
        targets: one-hot; a row of zeros has no target.
        z_loss: coefficient of the squared log-sum-exp.
    """
    choice = choose(scope, config)
    if choice.loss == "upstream":
        note_choice(choice, "upstream", "MaxText's own loss of all logits")
        return original(logits, targets, z_loss=z_loss)  # type: ignore[no-any-return]
    if choice.loss == "sparse":
        note_choice(choice, "sparse", "of the logits that MaxText's model returned")
    else:
        fell_back(
            choice,
            "sparse",
            "MaxText's config has num_vocab_tiling: 1, so its model returned all logits; build it "
            "with tilepolicy.maxtext.resolved_config, or use tilepolicy run",
        )
    labels = jnp.argmax(targets, axis=-1).astype(jnp.int32)
    labels = jnp.where(jnp.any(targets != 0, axis=-1), labels, -1)
    return sparse_cross_entropy_with_logits(logits, jax.lax.stop_gradient(labels), z_loss=z_loss)


def vocab_tile(tokens: int, vocab: int, limit_bytes: int) -> int:
    """Vocabulary entries of a tile whose float32 logits stay within a limit.

    A multiple of 128 (a TPU's lanes), at least 512: narrower tiles leave the matrix unit idle.
    """
    fitting = limit_bytes // (4 * max(tokens, 1)) // _LANES * _LANES
    return min(vocab, max(fitting, _SMALLEST_TILE))


def working_tiles(wanted: int, tokens: int) -> int:
    """The smallest number of chunks, at least ``wanted``, that divides the tokens."""
    start = max(1, min(wanted, tokens))
    return next(count for count in range(start, tokens + 1) if tokens % count == 0)
