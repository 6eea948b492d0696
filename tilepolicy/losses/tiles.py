"""Tiles of a vocabulary: where they start, what they hold, and the running sums over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilepolicy.losses.arithmetic import LogSumExp, finite_or_zero, label_mask
from tilepolicy.losses.head import LinearHead
from tilepolicy.losses.layout import LossSharding, for_tiles, merge_tokens, split_tokens
from tilepolicy.losses.pytrees import Index, PyTree
from tilepolicy.losses.sparse import target_logits

__all__ = ["HeadTiles", "Running", "TilePlan", "map_tokens"]


@dataclass(frozen=True)
class TilePlan:
    """Everything about a call that is known at trace time.

    Attributes:
        linear: how hidden states become logits.
        factors: how the token axes are cut into token tiles.
        vocab: vocabulary entries.
        tile: vocabulary entries of a tile, of each share.
        shards: number of devices among which the vocabulary is divided; each walks its own
            share. Arrays have an axis of that size only if it is not 1.
        z_loss: coefficient of the squared log-sum-exp.
        sharding: where tokens and head lie.
        ag_once: gather the head before the loops.
    """

    linear: LinearHead
    factors: tuple[int, ...]
    vocab: int
    tile: int
    shards: int
    z_loss: float
    sharding: LossSharding | None
    ag_once: bool

    def cut(self, values: jax.Array) -> jax.Array:
        """``(*tokens, …)`` as token tiles ``(tiles, *tokens of a tile, …)``."""
        if self.sharding is not None:
            values = self.sharding.of_tokens(values)
        return split_tokens(values, self.factors)

    def merged(self, tiles: jax.Array) -> jax.Array:
        """The inverse of ``cut``."""
        return merge_tokens(tiles, self.factors)

    def gathered(self, head: jax.Array, hidden: jax.Array) -> jax.Array:
        """The head as the loops read it: gathered in the matmul's dtype if ``ag_once``."""
        if self.sharding is None or not self.ag_once:
            return head
        stored = self.sharding.stored(head.astype(hidden.dtype))
        gathered: jax.Array = self.sharding.gathered(stored)
        return gathered

    def stored(self, shares: jax.Array) -> jax.Array:
        """A head or its gradient, split into shares, laid out as the head is stored."""
        if self.sharding is None:
            return shares
        if not self.divided:
            stored: jax.Array = self.sharding.stored(shares)
            return stored
        return self.sharding.of_shares(shares, self.linear.vocab_axis)

    @property
    def divided(self) -> bool:
        """Whether the vocabulary is divided among devices."""
        return self.shards > 1

    def shares(self, array: jax.Array, axis: int) -> jax.Array:
        """``array`` with its vocabulary axis split into ``(shards, entries of a share)``."""
        if not self.divided:
            return array
        shape = array.shape
        return array.reshape(*shape[:axis], self.shards, -1, *shape[axis + 1 :])

    def whole(self, array: jax.Array, axis: int) -> jax.Array:
        """The inverse of ``shares``."""
        if not self.divided:
            return array
        shape = array.shape
        return array.reshape(*shape[:axis], -1, *shape[axis + 2 :])

    def beside_shares[T](self, values: T) -> T:
        """Arrays ``(…,)`` of tokens that broadcast against ``(…, shards)``."""
        if not self.divided:
            return values
        expanded: T = jax.tree.map(lambda leaf: leaf[..., None], values)
        return expanded

    @property
    def share(self) -> int:
        """Vocabulary entries of a share."""
        return self.vocab // self.shards

    def relative_labels(self, labels: jax.Array) -> jax.Array:
        """Labels counted from the first entry of each share: ``(…, shards)``."""
        if not self.divided:
            return labels
        first = jnp.arange(self.shards, dtype=labels.dtype) * self.share
        return labels[..., None] - first

    def over_tiles[T](self, step: Callable[[T, Index, int], T], carry: T) -> T:
        """Runs ``step(carry, start, size)`` over the tiles of a share, a smaller last one too."""
        return for_tiles(self.share, self.tile, step, carry)


class Running(NamedTuple):
    """Running sums of each token over the tiles of a share, all ``(…, 1)`` or ``(…, shards, 1)``.

    Attributes:
        largest: largest logit so far; -inf before the first.
        total: ``Σ exp(logit - largest)`` so far.
        target: logit of the label, once its tile has been seen; else 0.
    """

    largest: jax.Array
    total: jax.Array
    target: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: DTypeLike) -> Running:
        """The sums before the first tile, for tokens and shares of this shape."""
        zeros = jnp.zeros((*shape, 1), dtype)
        return cls(jnp.full_like(zeros, -jnp.inf), zeros, zeros)

    def with_tile(self, logits: jax.Array, labels: jax.Array) -> Running:
        """The sums after a tile ``(…, columns)``; labels are relative to its first column."""
        largest = jnp.maximum(self.largest, jnp.max(logits, axis=-1, keepdims=True))
        shift = finite_or_zero(largest)
        total = self.total * jnp.exp(self.largest - shift)
        total = total + jnp.sum(jnp.exp(logits - shift), axis=-1, keepdims=True)
        target = lax.platform_dependent(
            logits, labels, tpu=_target_by_sum, default=_target_by_gather
        )
        return Running(largest, total, self.target + target[..., None])

    def joined(self, *, divided: bool) -> tuple[LogSumExp, jax.Array]:
        """Log-sum-exp ``(…, 1)`` and target ``(…,)`` over the vocabulary."""
        if not divided:
            lse = LogSumExp(finite_or_zero(self.largest), jnp.log(self.total))
            return lse, self.target[..., 0]
        shift = finite_or_zero(jnp.max(self.largest, axis=-2))
        total = jnp.sum(self.total * jnp.exp(self.largest - shift[..., None]), axis=-2)
        return LogSumExp(shift, jnp.log(total)), jnp.sum(self.target, axis=(-2, -1))


def _target_by_sum(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The logit of each label that lies in the tile, else 0.

    The comparison rides along with the sum of exponentials on a TPU, where gathering single
    numbers in every tile would cost more than the matmuls.
    """
    columns = lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    return jnp.sum(jnp.where(columns == labels[..., None], logits, 0), axis=-1)


def _target_by_gather(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The same without touching the rest of the tile."""
    inside = label_mask(labels, logits.shape[-1])
    return jnp.where(inside, target_logits(logits, labels), 0)


@dataclass(frozen=True)
class HeadTiles:
    """Head and bias, read and written tile by tile.

    Attributes:
        plan: the call.
        head: ``(D, V)``, or ``(V, D)`` if tied; V split into shares.
        bias: ``(V,)``, split likewise, or None.
    """

    plan: TilePlan
    head: jax.Array
    bias: jax.Array | None

    @classmethod
    def of(cls, plan: TilePlan, head: jax.Array, bias: jax.Array | None) -> HeadTiles:
        """The tiles of a head and bias as the user has them."""
        split = None if bias is None else plan.shares(bias, 0)
        return cls(plan, plan.shares(head, plan.linear.vocab_axis), split)

    def tile(
        self, start: Index, size: int, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Parameters of ``LinearHead`` for one tile: ``shards · size`` entries, cast."""
        axis = self._axis
        head = lax.dynamic_slice_in_dim(self.head, start, size, axis)
        if not self.plan.ag_once:
            head = self.plan.stored(head)
        head = self.plan.whole(head, self.plan.linear.vocab_axis)
        bias = self.bias
        if bias is not None:
            bias = lax.dynamic_slice_in_dim(bias, start, size, bias.ndim - 1).reshape(-1)
        prepared: tuple[jax.Array, jax.Array | None] = self.plan.linear.prepare(
            (head, bias), hidden
        )
        return prepared

    def with_tile(self, tile: tuple[jax.Array, jax.Array | None], start: Index) -> HeadTiles:
        """These tiles with one of them overwritten, rounded to the dtype held here."""
        head = self.plan.stored(self.plan.shares(tile[0], self.plan.linear.vocab_axis))
        head = head.astype(self.head.dtype)
        head = lax.dynamic_update_slice_in_dim(self.head, head, start, self._axis)
        bias = self.bias
        if bias is not None and tile[1] is not None:
            part = self.plan.shares(tile[1], 0).astype(bias.dtype)
            bias = lax.dynamic_update_slice_in_dim(bias, part, start, bias.ndim - 1)
        return HeadTiles(self.plan, head, bias)

    def joined(self) -> tuple[jax.Array, jax.Array | None]:
        """Head and bias as the user has them."""
        head = self.plan.whole(self.head, self.plan.linear.vocab_axis)
        return head, None if self.bias is None else self.bias.reshape(-1)

    @property
    def _axis(self) -> int:
        return self.plan.linear.vocab_axis + self.plan.divided


jax.tree_util.register_dataclass(HeadTiles, data_fields=["head", "bias"], meta_fields=["plan"])


def map_tokens[T](function: Callable[[T], PyTree], tiles: T) -> PyTree:
    """``function`` of every token tile along the first axis, one after the other."""
    if jax.tree.leaves(tiles)[0].shape[0] == 1:
        only = function(jax.tree.map(lambda leaf: leaf[0], tiles))
        return jax.tree.map(lambda leaf: leaf[None], only)
    return lax.map(function, tiles)
