"""One pass over the chunks of the tokens: sums, and the gradients that are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tilepolicy.losses.arithmetic import (
    LogSumExp,
    label_mask,
    logit_cotangent,
    token_losses,
    weighted_sum,
)
from tilepolicy.losses.head import HeadModel
from tilepolicy.losses.layout import (
    LossSharding,
    merge_tokens,
    split_tokens,
    write_chunk,
)
from tilepolicy.losses.pytrees import PyTree
from tilepolicy.losses.sparse import target_then_logits

__all__ = ["ChunkPlan", "ChunkSums", "Wanted", "sum_over_chunks"]


@dataclass(frozen=True)
class ChunkPlan:
    """Everything about a call that is known at trace time."""

    model: HeadModel
    factors: tuple[int, ...]
    z_loss: float
    sharding: LossSharding | None
    ag_once: bool
    reduce_once: bool

    def ready(
        self, params: PyTree, hidden: jax.Array, constants: PyTree
    ) -> tuple[HeadModel, PyTree]:
        """The model and its parameters, cast and gathered once before the loop."""
        model = self.model.bind(constants)
        params = model.prepare(params, hidden)
        if self.sharding is not None:
            params = self.sharding.stored(params)
            if self.ag_once:
                params = self.sharding.gathered(params)
        return model, params

    def stored(self, params: PyTree) -> PyTree:
        """Parameters or their gradients, sharded as the parameters are stored."""
        return params if self.sharding is None else self.sharding.stored(params)

    # The same inside the loop. A constraint outside of the loop does not hold inside: XLA lays the
    # loop's operands out as its body wants them, which is gathered for the parameters, and its
    # results as their user does, which is stored for the gradients. Hence the sums of gradients
    # are constrained before, in and after the loop.

    def params_in_loop(self, params: PyTree) -> PyTree:
        """Parameters of one chunk: without ``ag_once`` nothing stays gathered between chunks."""
        return params if self.ag_once else self.stored(params)

    def gradients_in_loop(self, gradients: PyTree) -> PyTree:
        """Gradients of one chunk: with ``reduce_once`` each device sums its own tokens' share."""
        if self.sharding is None or not self.reduce_once:
            return self.stored(gradients)
        return self.sharding.gathered(gradients)

    def on_tokens(self, values: jax.Array) -> jax.Array:
        """An array whose first axes are those of the tokens, left where the tokens are."""
        return values if self.sharding is None else self.sharding.of_tokens(values)

    def chunks(self, values: jax.Array) -> jax.Array:
        """``values`` cut into chunks along a new first axis."""
        return split_tokens(self.on_tokens(values), self.factors)

    def merged(self, chunks: jax.Array) -> jax.Array:
        """The inverse of ``chunks``."""
        return self.on_tokens(merge_tokens(chunks, self.factors))


@dataclass(frozen=True)
class Wanted:
    """Which gradients are to be formed."""

    params: bool = False
    hidden: bool = False
    weights: bool = False

    @property
    def of_logits(self) -> bool:
        """Whether the cotangent of the logits is needed at all."""
        return self.params or self.hidden


class ChunkSums(NamedTuple):
    """What one pass over the tokens gives; the gradients belong to a cotangent of one.

    Attributes:
        loss: weighted sum of the losses.
        z_loss: weighted sum of the z-loss terms.
        of_params: pytree in the accumulation dtype, or None.
        of_hidden: ``(*tokens, D)`` in the dtype of hidden, or None.
        token_losses: losses and z-loss terms of each token, in chunks, or None.
    """

    loss: jax.Array
    z_loss: jax.Array
    of_params: PyTree = None
    of_hidden: jax.Array | None = None
    token_losses: tuple[jax.Array, jax.Array] | None = None


def sum_over_chunks(
    plan: ChunkPlan, inputs: PyTree, wanted: Wanted, *, of_z_loss: bool = False
) -> ChunkSums:
    """One pass over all chunks; the gradients are of the loss sum, or of the z-loss sum."""
    params, hidden, labels, weights, constants = inputs
    model, params = plan.ready(params, hidden, constants)

    def step(chunk: tuple[jax.Array, ...], of_params: PyTree) -> ChunkSums:
        chunk = tuple(plan.on_tokens(part) for part in chunk)
        return _one_chunk(plan, model, params, chunk, wanted, of_params, of_z_loss=of_z_loss)

    chunks = tuple(plan.chunks(part) for part in (hidden, labels, weights))
    result = _over_chunks(plan, step, chunks, hidden)
    return result._replace(of_params=plan.stored(result.of_params) if wanted.params else None)


def _over_chunks(
    plan: ChunkPlan,
    step: Callable[[tuple[jax.Array, ...], PyTree], ChunkSums],
    chunks: tuple[jax.Array, ...],
    hidden: jax.Array,
) -> ChunkSums:
    """Sums the results of all chunks; what belongs to single tokens is put in their places."""
    first = tuple(part[0] for part in chunks)
    if len(chunks[0]) == 1:
        only = step(first, None)
        return only._replace(token_losses=jax.tree.map(lambda x: x[None], only.token_losses))

    def body(carry: tuple[PyTree, PyTree], part: PyTree) -> tuple[tuple[PyTree, PyTree], PyTree]:
        index, chunk = part
        (loss, z_loss, of_params), of_hidden = carry
        result = step(chunk, of_params)
        if of_hidden is not None and result.of_hidden is not None:
            of_hidden = write_chunk(of_hidden, result.of_hidden, index, plan.factors)
        sums = (loss + result.loss, z_loss + result.z_loss, result.of_params)
        return (in_loop(sums), of_hidden), result.token_losses

    def in_loop(sums: tuple[jax.Array, jax.Array, PyTree]) -> tuple[jax.Array, jax.Array, PyTree]:
        loss, z_loss, of_params = sums
        return loss, z_loss, None if of_params is None else plan.gradients_in_loop(of_params)

    shapes = jax.eval_shape(step, first, None)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[:3])
    of_hidden = None if shapes.of_hidden is None else jnp.zeros_like(hidden)
    numbers = jnp.arange(len(chunks[0]), dtype=jnp.int32)
    start = (in_loop(zeros), of_hidden)
    (sums, of_hidden), losses = lax.scan(body, start, (numbers, chunks))
    return ChunkSums(*in_loop(sums), of_hidden, losses)


def _one_chunk(
    plan: ChunkPlan,
    model: HeadModel,
    params: PyTree,
    chunk: tuple[jax.Array, ...],
    wanted: Wanted,
    of_params: PyTree,
    *,
    of_z_loss: bool,
) -> ChunkSums:
    """Sums and gradients of one chunk ``(hidden, labels, weights)``.

    Those of the parameters are added to ``of_params``, the sum over earlier chunks, if there is
    one.
    """
    hidden, labels, weights = chunk
    params = plan.params_in_loop(params)
    if wanted.of_logits:
        logits, pullback = model.vjp(
            params, hidden, of_params=wanted.params, of_hidden=wanted.hidden
        )
    else:
        logits = model.logits(params, hidden)
    target, logits = target_then_logits(logits, labels)
    lse, valid = LogSumExp.of(logits), label_mask(labels, logits.shape[-1])
    losses = token_losses(lse, target, valid, plan.z_loss)
    sums = (weighted_sum(losses[0], weights), weighted_sum(losses[1], weights))
    kept = losses if wanted.weights else None
    if not wanted.of_logits:
        return ChunkSums(*sums, token_losses=kept)
    factors = weights.astype(losses[0].dtype)
    of_loss, of_z = (jnp.zeros_like(factors), factors) if of_z_loss else (factors, None)
    softmax = lse.softmax_of_kept(lse.kept(logits))
    cotangent = logit_cotangent(softmax, lse, labels, valid, of_loss, of_z, plan.z_loss)
    of_params, of_hidden = pullback(cotangent.astype(logits.dtype), of_params)
    if of_hidden is not None:
        of_hidden = plan.on_tokens(of_hidden.astype(hidden.dtype))
    return ChunkSums(*sums, of_params, of_hidden, kept)
