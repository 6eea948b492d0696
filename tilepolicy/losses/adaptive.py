"""The loss that fits the shapes, by the same rule as ``tilepolicy resolve``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilepolicy.context import active
from tilepolicy.losses.arithmetic import checked_count, checked_weights, weighted_sum
from tilepolicy.losses.chunked import chunked_sparse_cross_entropy
from tilepolicy.losses.head import LinearHead
from tilepolicy.losses.layout import LossSharding
from tilepolicy.losses.online import online_sparse_cross_entropy
from tilepolicy.model import VocabSettings
from tilepolicy.session import Note
from tilepolicy.vocab import Thresholds, TilingChoice, choose_loss, choose_tiling, weigh_ag_once

if TYPE_CHECKING:
    from tilepolicy.policy import Policy

__all__ = ["AdaptiveLoss", "LossDecision", "make_adaptive_sparse_cross_entropy"]

_LOG: Final = logging.getLogger("tilepolicy")
_REASONS: Final = {
    "sparse": "one chunk holds all logits",
    "chunked": "the tokens are cut",
    "online": "the tokens cannot be cut that small, so the vocabulary is",
}

OwnLoss = Literal["sparse", "chunked", "online"]


@dataclass(frozen=True, slots=True)
class LossDecision:
    """Which loss was chosen for some shapes, and why.

    Attributes:
        loss: ``sparse`` (all logits at once), ``chunked`` or ``online``.
        num_tiles: token chunks; 1 unless ``chunked``.
        vocab_tile: vocabulary entries of a tile; None unless ``online``.
        ag_once: whether a sharded head is gathered once.
        reason: the arithmetic that decided, in one line.
    """

    loss: OwnLoss
    num_tiles: int
    vocab_tile: int | None
    ag_once: bool
    reason: str


@dataclass(frozen=True)
class AdaptiveLoss:
    """A cross-entropy that chooses its form from the shapes it is traced with.

    Built by ``make_adaptive_sparse_cross_entropy``, which describes the attributes.
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    loss: Literal["auto", "sparse", "chunked", "online"] = "auto"
    num_tiles: int | None = None
    ag_once: bool | Literal["auto"] = True
    vocab_tile: int = 2048
    z_loss: float = 0.0
    tied: bool = False
    soft_cap: float | None = None
    logits_dtype: DTypeLike = jnp.float32
    sharding: LossSharding | None = None

    def __post_init__(self) -> None:
        checked_count("vocab_tile", self.vocab_tile)

    def __call__(
        self,
        hidden: jax.Array,
        head: jax.Array,
        labels: jax.Array,
        weights: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """The weighted sums of loss and z-loss; arguments as of ``chunked_sparse_cross_entropy``.

        Raises:
            ValueError: shapes do not fit, or a loss is asked for that these shapes do not allow.
        """
        LinearHead(tied=self.tied).check(hidden, head, bias)
        decision = self.decision(hidden.shape, head.shape, hidden.dtype)
        _report(decision)
        options: dict[str, Any] = {
            "z_loss": self.z_loss,
            "bias": bias,
            "tied": self.tied,
            "soft_cap": self.soft_cap,
            "logits_dtype": self.logits_dtype,
            "sharding": self.sharding,
            "ag_once": decision.ag_once or self.sharding is None,
        }
        if decision.vocab_tile is None:
            return chunked_sparse_cross_entropy(
                hidden, head, labels, weights, num_tiles=decision.num_tiles, **options
            )
        loss, z_term = online_sparse_cross_entropy(
            hidden, head, labels, vocab_tile=decision.vocab_tile, **options
        )
        weights = checked_weights(weights, loss.shape, loss.dtype)
        return weighted_sum(loss, weights), weighted_sum(z_term, weights)

    def decision(
        self,
        hidden_shape: tuple[int, ...],
        head_shape: tuple[int, ...],
        dtype: DTypeLike = jnp.bfloat16,
    ) -> LossDecision:
        """What a call with these (global) shapes chooses; traces nothing.

        Args:
            hidden_shape: ``(*tokens, D)``.
            head_shape: ``(D, V)``, or ``(V, D)`` if tied.
            dtype: dtype of the hidden states, for the bytes of a gathered head.

        Raises:
            ValueError: the tokens cannot be divided over the mesh, or no number of chunks fits
                and ``chunked`` is asked for.
        """
        tokens, vocab = self._sizes_per_device(hidden_shape, head_shape)
        itemsize = jnp.dtype(self.logits_dtype).itemsize
        tiling = choose_tiling(tokens, vocab, itemsize, self.thresholds)
        if self.num_tiles is not None:
            tiling = TilingChoice(self.num_tiles, f"num_vocab_tiling is set to {self.num_tiles}")
        loss = cast("OwnLoss", choose_loss(tiling)) if self.loss == "auto" else self.loss
        if loss == "chunked" and tiling.num_tiles is None:
            raise ValueError(f"the chunked loss cannot run here: {tiling.reason}; use online")
        num_tiles = tiling.num_tiles if loss == "chunked" and tiling.num_tiles else 1
        steps = math.ceil(vocab / self.vocab_tile) if loss == "online" else num_tiles
        ag_once, about_gather = self._gather_once(steps, head_shape, vocab, dtype)
        how = _REASONS[loss] if self.loss == "auto" else f"loss is set to {loss}"
        return LossDecision(
            loss=loss,
            num_tiles=num_tiles,
            vocab_tile=self.vocab_tile if loss == "online" else None,
            ag_once=ag_once,
            reason=f"{tiling.reason}: {how}{about_gather}",
        )

    def _sizes_per_device(
        self, hidden_shape: tuple[int, ...], head_shape: tuple[int, ...]
    ) -> tuple[int, int]:
        """Tokens and vocabulary entries of one device."""
        tokens, vocab = math.prod(hidden_shape[:-1]), head_shape[0 if self.tied else 1]
        if self.sharding is None:
            return tokens, vocab
        token_shards = self.sharding.token_shards
        vocab_shards = self.sharding.vocab_shards(0 if self.tied else 1)
        if tokens % token_shards or vocab % vocab_shards:
            raise ValueError(
                f"{tokens} tokens and {vocab} vocabulary entries cannot be divided over "
                f"{token_shards} and {vocab_shards} devices"
            )
        return tokens // token_shards, vocab // vocab_shards

    def _gather_once(
        self, steps: int, head_shape: tuple[int, ...], vocab: int, dtype: DTypeLike
    ) -> tuple[bool, str]:
        """Whether to gather the head once, and the reason if that was weighed."""
        if self.ag_once != "auto":
            return self.ag_once, ""
        choice = weigh_ag_once(
            num_tiles=steps,
            vocab=vocab,
            embed_dim=head_shape[1 if self.tied else 0],
            head_itemsize=jnp.dtype(dtype).itemsize,
            gradient_itemsize=4,
            head_shards=1 if self.sharding is None else self.sharding.head_shards,
            max_held_bytes=self.thresholds.max_monolithic_bytes,
        )
        return choice.value, f"; ag_once: {choice.reason}"


def make_adaptive_sparse_cross_entropy(
    policy: Policy | VocabSettings | Thresholds | None = None,
    *,
    vocab_tile: int = 2048,
    z_loss: float = 0.0,
    tied: bool = False,
    soft_cap: float | None = None,
    logits_dtype: DTypeLike = jnp.float32,
    sharding: LossSharding | None = None,
) -> AdaptiveLoss:
    """A cross-entropy that chooses its form at trace time, as ``tilepolicy resolve`` would.

    The choice and its arithmetic go to the report of the active scopes and to the logger
    ``tilepolicy``; ``.decision(hidden_shape, head_shape)`` gives them without a trace.

    Args:
        policy: a loaded policy or its ``vocab`` section, whose ``loss``, ``num_vocab_tiling``,
            ``vocab_tiling_ag_once`` and thresholds hold; thresholds alone choose automatically;
            None takes the default thresholds.
        vocab_tile: vocabulary entries of a tile, should ``online`` be chosen.
        z_loss: coefficient of the squared log-sum-exp.
        tied: the head is an embedding table ``(V, D)``.
        soft_cap: ``soft_cap · tanh(logits / soft_cap)``; None or 0 for none.
        logits_dtype: dtype of the logits: its size decides too.
        sharding: where tokens and head lie; without it the shapes are taken to be those of one
            device.

    Returns:
        A callable ``(hidden, head, labels, weights=None, *, bias=None) -> (loss_sum,
        z_loss_sum)``.

    Raises:
        ValueError: the policy asks for ``upstream``, which is MaxText's own loss.
        TypeError: ``policy`` is none of these: a name or path has to be loaded first.
    """
    chosen: Mapping[str, Any] = {}
    if isinstance(policy, Thresholds):
        chosen = {"thresholds": policy}
    elif policy is not None:
        vocab = policy if isinstance(policy, VocabSettings) else getattr(policy, "vocab", None)
        if not isinstance(vocab, VocabSettings):
            raise TypeError(
                "policy must be what tilepolicy.load returns, its vocab section or Thresholds, got "
                f"{policy!r}"
            )
        chosen = _from_section(vocab)
    return AdaptiveLoss(
        **chosen,
        vocab_tile=vocab_tile,
        z_loss=z_loss,
        tied=tied,
        soft_cap=soft_cap,
        logits_dtype=logits_dtype,
        sharding=sharding,
    )


def _from_section(vocab: VocabSettings) -> Mapping[str, Any]:
    """What the ``vocab`` section of a policy decides."""
    if vocab.loss == "upstream":
        raise ValueError(
            "vocab.loss is upstream: that is MaxText's own loss, not one of tilepolicy's; set it "
            "to auto, sparse, chunked or online"
        )
    return {
        "thresholds": Thresholds(
            max_chunk_bytes=vocab.max_chunk_bytes,
            max_monolithic_vocab_size=vocab.max_monolithic_vocab_size,
            max_monolithic_bytes=vocab.max_monolithic_bytes,
            min_chunk_tokens=vocab.min_chunk_tokens,
        ),
        "loss": vocab.loss,
        "num_tiles": None if vocab.num_vocab_tiling == "auto" else vocab.num_vocab_tiling,
        "ag_once": vocab.vocab_tiling_ag_once,
    }


def _report(decision: LossDecision) -> None:
    """Tells the sessions of the active scopes, and the log, what was chosen."""
    form = {"chunked": f" with num_tiles {decision.num_tiles}", "sparse": ""}
    value = decision.loss + form.get(decision.loss, f" with vocab_tile {decision.vocab_tile}")
    sessions = {scope.session for scope in active.policies()}
    for session in sessions:
        session.note(Note("losses", "loss", value, decision.reason))
    if not sessions:
        _LOG.info("losses: loss = %s (%s)", value, decision.reason)
