"""Cross-entropy over tiles of the vocabulary: never more than one tile of logits.

The forward pass keeps a running maximum and sum of exponentials of each token (online
log-sum-exp, Milakov and Gimelshein 2018, arXiv:1805.02867); the backward pass computes each tile
again, so there are four matmuls where the monolithic loss has three. In exchange the logits'
memory depends on no length, no number of tokens has to be divisible by anything, and each entry
of the head's gradient is written once.

A head whose vocabulary is divided over devices is walked on all of them at once: a tile takes the
same columns of every device's share, each share keeps its own running sums, and they are joined
once, at the end.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from tilepolicy.losses.arithmetic import (
    LogSumExp,
    accumulation_dtype,
    checked_count,
    checked_labels,
    checked_z_loss,
    label_mask,
    logit_cotangent,
    token_losses,
)
from tilepolicy.losses.head import LinearHead
from tilepolicy.losses.layout import LossSharding, split_factors
from tilepolicy.losses.pytrees import Index, PyTree
from tilepolicy.losses.tiles import HeadTiles, Running, TilePlan, map_tokens

__all__ = ["online_sparse_cross_entropy"]


def online_sparse_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    *,
    vocab_tile: int,
    token_tile: int | None = None,
    z_loss: float = 0.0,
    bias: jax.Array | None = None,
    tied: bool = False,
    soft_cap: float | None = None,
    logits_dtype: DTypeLike = jnp.float32,
    sharding: LossSharding | None = None,
    ag_once: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The loss and z-loss term of each token, without the logits.

    Args:
        hidden: ``(*tokens, D)``; one or more token axes. Matmuls run in its dtype.
        head: ``(D, V)``, or ``(V, D)`` if ``tied``; cast to the dtype of ``hidden``.
        labels: ``tokens``, integers; one outside ``0 … V - 1`` has no target.
        vocab_tile: vocabulary entries of one tile, of each device's share where the vocabulary
            is divided; the last tile may be smaller.
        token_tile: tokens of one tile; divides the number of tokens; None for all of them.
        z_loss: coefficient of the squared log-sum-exp, known at trace time.
        bias: ``(V,)``, added to the logits.
        tied: the head is an embedding table.
        soft_cap: ``soft_cap · tanh(logits / soft_cap)``; None or 0 for none.
        logits_dtype: dtype the logits are rounded to (see ``LinearHead``).
        sharding: where tokens and head lie, under automatic sharding; None leaves it to XLA.
        ag_once: gather the head once, before the loops, over the axes the tokens lie on; needs
            ``sharding``. False leaves a gather to each tile.

    Returns:
        ``(loss, z_loss_term)``, both of shape ``tokens`` in float32 (float64 for float64 hidden
        states); multiply by your weights and sum. Both outputs are differentiable.

    Raises:
        ValueError: shapes do not fit, a tile is below 1, or ``token_tile`` does not divide.
        TypeError: a dtype is of the wrong kind.
    """
    linear = LinearHead(tied=tied, soft_cap=soft_cap, logits_dtype=logits_dtype)
    vocab = linear.check(hidden, head, bias)
    tokens = hidden.shape[:-1]
    labels = checked_labels(labels, tokens)
    vocab_tile = checked_count("vocab_tile", vocab_tile)
    if sharding is None and not ag_once:
        raise ValueError("ag_once=False says nothing without sharding: pass a LossSharding")
    shards = 1 if sharding is None else sharding.vocab_shards(linear.vocab_axis)
    if vocab % shards:
        raise ValueError(f"a vocabulary of {vocab} cannot be divided over {shards} devices")
    plan = TilePlan(
        linear=linear,
        factors=_token_factors(tokens, token_tile),
        vocab=vocab,
        tile=min(vocab_tile, vocab // shards),
        shards=shards,
        z_loss=checked_z_loss(z_loss),
        sharding=sharding,
        ag_once=ag_once,
    )
    return _online(plan, hidden, head, bias, labels)


def _token_factors(tokens: tuple[int, ...], token_tile: int | None) -> tuple[int, ...]:
    if token_tile is None:
        return split_factors(tokens, 1)
    total, size = math.prod(tokens), checked_count("token_tile", token_tile)
    if total % size:
        raise ValueError(f"token_tile={size} must divide the {total} tokens of shape {tokens}")
    return split_factors(tokens, total // size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _online(
    plan: TilePlan, hidden: jax.Array, head: jax.Array, bias: jax.Array | None, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(plan, hidden, HeadTiles.of(plan, plan.gathered(head, hidden), bias), labels)[0]


def _online_fwd(
    plan: TilePlan, *inputs: PyTree
) -> tuple[tuple[jax.Array, jax.Array], tuple[PyTree, ...]]:
    hidden, head, bias, labels = jax.tree.map(lambda leaf: leaf.value, inputs)
    tiles = HeadTiles.of(plan, plan.gathered(head, hidden), bias)
    losses, lse = _forward(plan, hidden, tiles, labels)
    of_params = any(leaf.perturbed for leaf in jax.tree.leaves(inputs[1:3]))
    like = (hidden[:0] if inputs[0].perturbed else None, head[:0] if of_params else None)
    return losses, (like, hidden, tiles, labels, lse)


def _forward(
    plan: TilePlan, hidden: jax.Array, params: HeadTiles, labels: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], LogSumExp]:
    """Losses and z-loss terms of the tokens, and their log-sum-exp in token tiles."""
    cut_hidden, cut_labels = plan.cut(hidden), plan.cut(labels)
    relative = plan.relative_labels(cut_labels)

    def step(running: Running, start: Index, size: int) -> Running:
        tile = params.tile(start, size, hidden)

        def tokens(part: tuple[Running, jax.Array, jax.Array]) -> Running:
            running, hidden, labels = part
            logits = plan.shares(plan.linear.logits(tile, hidden), hidden.ndim - 1)
            return running.with_tile(logits, labels - start)

        updated: Running = map_tokens(tokens, (running, cut_hidden, relative))
        return updated

    empty = Running.empty(relative.shape, accumulation_dtype(hidden.dtype))
    lse, target = plan.over_tiles(step, empty).joined(divided=plan.divided)
    losses = token_losses(lse, target, label_mask(cut_labels, plan.vocab), plan.z_loss)
    return (plan.merged(losses[0]), plan.merged(losses[1])), lse


class _Token(NamedTuple):
    """What the backward pass needs of each token, in token tiles.

    Attributes:
        hidden: ``(…, D)``.
        labels: relative to each share.
        valid: whether the label is a vocabulary entry.
        lse: log-sum-exp over the whole vocabulary.
        of_loss: cotangent of the loss.
        of_z: cotangent of the z-loss term, or None for zero.

    All but ``hidden`` have an axis more where the vocabulary is divided, for the shares.
    """

    hidden: jax.Array
    labels: jax.Array
    valid: jax.Array
    lse: LogSumExp
    of_loss: jax.Array
    of_z: jax.Array | None

    def cotangent(self, plan: TilePlan, logits: jax.Array, start: Index) -> jax.Array:
        """Cotangent of a tile of logits, all shares side by side in its last axis."""
        axis = logits.ndim - 1
        cotangent = logit_cotangent(
            self.lse.softmax(plan.shares(logits, axis)),
            self.lse,
            self.labels - start,
            self.valid,
            self.of_loss,
            self.of_z,
            plan.z_loss,
        )
        return plan.whole(cotangent, axis)


def _online_bwd(
    plan: TilePlan, residuals: PyTree, cotangents: tuple[PyTree, PyTree]
) -> tuple[PyTree, ...]:
    (like_hidden, like_head), hidden, params, labels, lse = residuals
    tokens = _tokens(plan, hidden, labels, lse, cotangents)
    of_hidden = None
    if like_hidden is not None:
        of_hidden = jnp.zeros(tokens.hidden.shape, accumulation_dtype(hidden.dtype))
    of_params = None
    if like_head is not None:
        zeros = jax.tree.map(jnp.zeros_like, params)
        of_params = HeadTiles(plan, zeros.head.astype(like_head.dtype), zeros.bias)

    def step(gradients: tuple[PyTree, PyTree], start: Index, size: int) -> tuple[PyTree, PyTree]:
        tile = params.tile(start, size, hidden)
        of_hidden, of_params = gradients
        of_tile, of_hidden = _tile_gradients(
            plan, tile, tokens, of_hidden, start, of_params is not None
        )
        if of_params is not None:
            of_params = of_params.with_tile(of_tile, start)
        return of_hidden, of_params

    of_hidden, of_params = plan.over_tiles(step, (of_hidden, of_params))
    if of_hidden is not None:
        of_hidden = plan.merged(of_hidden.astype(like_hidden.dtype))
    of_head, of_bias = (None, None) if of_params is None else of_params.joined()
    return of_hidden, of_head, of_bias, None


_online.defvjp(_online_fwd, _online_bwd, symbolic_zeros=True)


def _tokens(
    plan: TilePlan,
    hidden: jax.Array,
    labels: jax.Array,
    lse: LogSumExp,
    cotangents: tuple[PyTree, PyTree],
) -> _Token:
    cut_labels = plan.cut(labels)
    of_loss, of_z = cotangents
    if isinstance(of_loss, SymbolicZero):
        of_loss = jnp.zeros(of_loss.shape, of_loss.dtype)
    return _Token(
        hidden=plan.cut(hidden),
        labels=plan.relative_labels(cut_labels),
        valid=plan.beside_shares(label_mask(cut_labels, plan.vocab)),
        lse=plan.beside_shares(lse),
        of_loss=plan.beside_shares(plan.cut(of_loss)),
        of_z=None if isinstance(of_z, SymbolicZero) else plan.beside_shares(plan.cut(of_z)),
    )


def _tile_gradients(
    plan: TilePlan,
    tile: tuple[jax.Array, jax.Array | None],
    tokens: _Token,
    of_hidden: jax.Array | None,
    start: Index,
    of_params: bool,
) -> tuple[PyTree, jax.Array | None]:
    """Gradients of one tile's parameters, and those of hidden with the tile's share added."""

    def one(token: _Token, sum_of_hidden: jax.Array | None) -> tuple[PyTree, jax.Array | None]:
        logits, pullback = plan.linear.vjp(
            tile, token.hidden, of_params=of_params, of_hidden=of_hidden is not None
        )
        of_tile, share = pullback(token.cotangent(plan, logits, start), None)
        if sum_of_hidden is not None and share is not None:
            sum_of_hidden = sum_of_hidden + share
        return of_tile, sum_of_hidden

    first = jax.tree.map(lambda leaf: leaf[0], (tokens, of_hidden))
    if len(tokens.hidden) == 1:
        of_tile, only = one(*first)
        return of_tile, None if only is None else only[None]
    shapes = jax.eval_shape(one, *first)[0]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def body(sums: PyTree, part: tuple[_Token, PyTree]) -> tuple[PyTree, PyTree]:
        of_tile, updated = one(*part)
        return jax.tree.map(jnp.add, sums, of_tile), updated

    gradients: tuple[PyTree, jax.Array | None] = lax.scan(body, zeros, (tokens, of_hidden))
    return gradients
