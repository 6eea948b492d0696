"""Cross-entropy over chunks of tokens: one chunk of logits alive, each logit computed once.

The weighted sum of the losses is linear in its cotangent, so its gradient can be formed while a
chunk's logits are at hand and scaled when the cotangent arrives: three matmuls as in the
monolithic loss, where recomputing the logits in the backward pass takes four. This is what
MaxText's ``num_vocab_tiling`` cuts; its loss evaluates the logits a second time.

Both outputs are differentiable. The gradient of the loss sum is formed in the forward rule; that
of the z-loss sum, which training only logs, is computed in the backward rule, and only if its
cotangent is not zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from tilepolicy.losses.arithmetic import (
    LogSumExp,
    accumulation_dtype,
    checked_labels,
    checked_z_loss,
    label_mask,
    logit_cotangent,
    token_losses,
    weighted_sum,
)
from tilepolicy.losses.head import FunctionHead, HeadModel, LinearHead
from tilepolicy.losses.layout import (
    LossSharding,
    merge_tokens,
    split_factors,
    split_tokens,
    write_chunk,
)
from tilepolicy.losses.pytrees import PyTree
from tilepolicy.losses.sparse import target_logits

__all__ = ["chunked_sparse_cross_entropy", "chunked_sparse_cross_entropy_fn"]


def chunked_sparse_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    num_tiles: int,
    z_loss: float = 0.0,
    bias: jax.Array | None = None,
    tied: bool = False,
    soft_cap: float | None = None,
    logits_dtype: DTypeLike = jnp.float32,
    sharding: LossSharding | None = None,
    ag_once: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The weighted sums of loss and z-loss over all tokens, chunk by chunk.

    Args:
        hidden: ``(*tokens, D)``; one or more token axes. Matmuls run in its dtype.
        head: ``(D, V)``, or ``(V, D)`` if ``tied``; cast to the dtype of ``hidden``.
        labels: ``tokens``, integers; one outside ``0 … V - 1`` has no target.
        weights: ``tokens``; a mask or factors; None for ones. Zero hides a token.
        num_tiles: number of chunks; divides the number of tokens.
        z_loss: coefficient of the squared log-sum-exp, known at trace time.
        bias: ``(V,)``, added to the logits.
        tied: the head is an embedding table.
        soft_cap: ``soft_cap · tanh(logits / soft_cap)``; None or 0 for none.
        logits_dtype: dtype the logits are rounded to (see ``LinearHead``).
        sharding: where tokens and head lie, under automatic sharding; None leaves it to XLA.
        ag_once: gather the head once, before the loop, over the axes the tokens lie on; needs
            ``sharding``. False leaves a gather to each chunk and holds less memory.

    Returns:
        ``(loss_sum, z_loss_sum)``, scalars in float32 (float64 for float64 hidden states); the
        first contains the second. The caller divides by the sum of weights.

    Raises:
        ValueError: shapes do not fit, or ``num_tiles`` does not divide the tokens.
        TypeError: a dtype is of the wrong kind.
    """
    linear = LinearHead(tied=tied, soft_cap=soft_cap, logits_dtype=logits_dtype)
    linear.check(hidden, head, bias)
    if sharding is not None:
        sharding = sharding.with_bias(linear.vocab_axis)
    return _chunked(
        linear, (head, bias), hidden, labels, weights, num_tiles, z_loss, sharding, ag_once
    )


def chunked_sparse_cross_entropy_fn(
    logits_fn: Callable[..., jax.Array],
    params: PyTree,
    hidden: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    num_tiles: int,
    z_loss: float = 0.0,
    constants: PyTree = None,
    sharding: LossSharding | None = None,
    ag_once: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The same as ``chunked_sparse_cross_entropy`` for an arbitrary head.

    Args:
        logits_fn: ``logits_fn(params, hidden_chunk)``, or ``logits_fn(params, hidden_chunk,
            constants)`` if constants are given: logits ``(*tokens of the chunk, V)``. A chunk has
            as many axes as ``hidden``. The function must not close over traced values that need
            a gradient or belong to another trace: pass them in ``params`` or ``constants``.
        params: pytree of floating arrays, differentiated; gradients accumulate in float32.
        hidden: ``(*tokens, D)``.
        labels: ``tokens``, integers.
        weights: ``tokens``, or None for ones.
        num_tiles: number of chunks; divides the number of tokens.
        z_loss: coefficient of the squared log-sum-exp, known at trace time.
        constants: pytree of arrays that are not differentiated (other parameters, keys).
        sharding: where tokens and parameters lie; its ``head`` is a pytree like ``params``.
        ag_once: see ``chunked_sparse_cross_entropy``.

    Returns:
        ``(loss_sum, z_loss_sum)``.

    Raises:
        ValueError: shapes do not fit, or ``num_tiles`` does not divide the tokens.
        TypeError: a dtype is of the wrong kind.
    """
    function = FunctionHead(logits_fn)
    return _chunked(
        function, params, hidden, labels, weights, num_tiles, z_loss, sharding, ag_once, constants
    )


@dataclass(frozen=True)
class _Plan:
    """Everything about a call that is known at trace time."""

    model: HeadModel
    factors: tuple[int, ...]
    z_loss: float
    sharding: LossSharding | None
    ag_once: bool

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

    def in_loop(self, params: PyTree) -> PyTree:
        """The same inside the loop: without ``ag_once`` nothing may stay gathered between steps.

        A constraint outside of the loop does not hold inside: XLA would lay the loop's operand
        out as its body wants it, which is gathered.
        """
        return params if self.ag_once else self.stored(params)

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
class _Wanted:
    """Which gradients are to be formed."""

    params: bool = False
    hidden: bool = False
    weights: bool = False

    @property
    def of_logits(self) -> bool:
        """Whether the cotangent of the logits is needed at all."""
        return self.params or self.hidden


class _Result(NamedTuple):
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


def _chunked(
    model: HeadModel,
    params: PyTree,
    hidden: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    num_tiles: int,
    z_loss: float,
    sharding: LossSharding | None,
    ag_once: bool,
    constants: PyTree = None,
) -> tuple[jax.Array, jax.Array]:
    tokens = hidden.shape[:-1]
    checked_labels(labels, tokens)
    if weights is None:
        weights = jnp.ones(tokens, accumulation_dtype(hidden.dtype))
    if weights.shape != tokens:
        raise ValueError(f"weights must have the shape of the tokens {tokens}, got {weights.shape}")
    if sharding is None and not ag_once:
        raise ValueError("ag_once=False says nothing without sharding: pass a LossSharding")
    factors = split_factors(tokens, num_tiles)
    plan = _Plan(model, factors, checked_z_loss(z_loss), sharding, ag_once)
    return _sums(plan, params, hidden, labels, weights, lax.stop_gradient(constants))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(plan: _Plan, *inputs: PyTree) -> tuple[jax.Array, jax.Array]:
    result = _pass(plan, inputs, _Wanted())
    return result.loss, result.z_loss


def _sums_fwd(plan: _Plan, *inputs: PyTree) -> tuple[tuple[jax.Array, jax.Array], PyTree]:
    params, hidden, _, weights, _ = inputs
    wanted = _Wanted(_perturbed(params), _perturbed(hidden), _perturbed(weights))
    values = jax.tree.map(lambda leaf: leaf.value, inputs)
    result = _pass(plan, values, wanted)
    dtypes = jax.tree.map(lambda leaf: jnp.zeros((0,), leaf.dtype), values[:4])
    for_z_loss = values if plan.z_loss != 0.0 else None
    gradients = (result.of_params, result.of_hidden, result.token_losses)
    return (result.loss, result.z_loss), (gradients, dtypes, for_z_loss)


def _sums_bwd(
    plan: _Plan, residuals: PyTree, cotangents: tuple[PyTree, PyTree]
) -> tuple[PyTree, ...]:
    (of_params, of_hidden, losses), dtypes, for_z_loss = residuals
    of_loss, of_z = (_array_or_none(cotangent) for cotangent in cotangents)
    gradients = _scaled((of_params, of_hidden), of_loss)
    if of_z is not None and for_z_loss is not None:
        wanted = _Wanted(params=of_params is not None, hidden=of_hidden is not None)
        of_z_loss = _z_loss_gradients(plan, for_z_loss, wanted, of_z)
        gradients = jax.tree.map(jnp.add, gradients, _scaled(of_z_loss, of_z))
    of_params, of_hidden = gradients
    if of_hidden is not None:
        of_hidden = plan.on_tokens(of_hidden.astype(dtypes[1].dtype))
    if of_params is not None:
        of_params = jax.tree.map(lambda g, like: g.astype(like.dtype), of_params, dtypes[0])
    return of_params, of_hidden, None, _of_weights(plan, losses, of_loss, of_z, dtypes[3]), None


_sums.defvjp(_sums_fwd, _sums_bwd, symbolic_zeros=True)


def _pass(plan: _Plan, inputs: PyTree, wanted: _Wanted, *, of_z_loss: bool = False) -> _Result:
    """One pass over all chunks; the gradients are of the loss sum, or of the z-loss sum."""
    params, hidden, labels, weights, constants = inputs
    model, params = plan.ready(params, hidden, constants)

    def step(chunk: tuple[jax.Array, ...]) -> _Result:
        chunk = tuple(plan.on_tokens(part) for part in chunk)
        return _one_chunk(plan, model, params, chunk, wanted, of_z_loss=of_z_loss)

    chunks = tuple(plan.chunks(part) for part in (hidden, labels, weights))
    result = _over_chunks(plan, step, chunks, hidden)
    return result._replace(of_params=plan.stored(result.of_params) if wanted.params else None)


def _over_chunks(
    plan: _Plan,
    step: Callable[[tuple[jax.Array, ...]], _Result],
    chunks: tuple[jax.Array, ...],
    hidden: jax.Array,
) -> _Result:
    """Sums the results of all chunks; what belongs to single tokens is put in their places."""
    first = tuple(part[0] for part in chunks)
    if len(chunks[0]) == 1:
        only = step(first)
        return only._replace(token_losses=jax.tree.map(lambda x: x[None], only.token_losses))

    def body(carry: tuple[PyTree, PyTree], part: PyTree) -> tuple[tuple[PyTree, PyTree], PyTree]:
        index, chunk = part
        sums, of_hidden = carry
        result = step(chunk)
        if of_hidden is not None and result.of_hidden is not None:
            of_hidden = write_chunk(of_hidden, result.of_hidden, index, plan.factors)
        return (jax.tree.map(jnp.add, sums, result[:3]), of_hidden), result.token_losses

    shapes = jax.eval_shape(step, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[:3])
    of_hidden = None if shapes.of_hidden is None else jnp.zeros_like(hidden)
    numbers = jnp.arange(len(chunks[0]), dtype=jnp.int32)
    (sums, of_hidden), losses = lax.scan(body, (zeros, of_hidden), (numbers, chunks))
    return _Result(sums[0], sums[1], sums[2], of_hidden, losses)


def _one_chunk(
    plan: _Plan,
    model: HeadModel,
    params: PyTree,
    chunk: tuple[jax.Array, ...],
    wanted: _Wanted,
    *,
    of_z_loss: bool,
) -> _Result:
    """Sums and gradients of one chunk ``(hidden, labels, weights)``."""
    hidden, labels, weights = chunk
    params = plan.in_loop(params)
    if wanted.of_logits:
        logits, pullback = model.vjp(
            params, hidden, of_params=wanted.params, of_hidden=wanted.hidden
        )
    else:
        logits = model.logits(params, hidden)
    lse, valid = LogSumExp.of(logits), label_mask(labels, logits.shape[-1])
    losses = token_losses(lse, target_logits(logits, labels), valid, plan.z_loss)
    sums = (weighted_sum(losses[0], weights), weighted_sum(losses[1], weights))
    kept = losses if wanted.weights else None
    if not wanted.of_logits:
        return _Result(*sums, token_losses=kept)
    factors = weights.astype(losses[0].dtype)
    of_loss, of_z = (jnp.zeros_like(factors), factors) if of_z_loss else (factors, None)
    cotangent = logit_cotangent(logits, lse, labels, valid, of_loss, of_z, plan.z_loss)
    of_params, of_hidden = pullback(cotangent.astype(logits.dtype))
    if of_hidden is not None:
        of_hidden = plan.on_tokens(of_hidden.astype(hidden.dtype))
    if wanted.params:
        of_params = plan.in_loop(jax.tree.map(_accumulated, of_params))
    return _Result(*sums, of_params, of_hidden, kept)


def _z_loss_gradients(plan: _Plan, inputs: PyTree, wanted: _Wanted, of_z: jax.Array) -> PyTree:
    """Gradients of the z-loss sum by a second pass, skipped at run time for a zero cotangent."""

    def second_pass(inputs: PyTree) -> PyTree:
        result = _pass(plan, inputs, wanted, of_z_loss=True)
        return result.of_params, result.of_hidden

    shapes = jax.eval_shape(second_pass, inputs)
    return lax.cond(
        of_z != 0,
        second_pass,
        lambda _: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
        inputs,
    )


def _accumulated(gradient: jax.Array) -> jax.Array:
    return gradient.astype(accumulation_dtype(gradient.dtype))


def _perturbed(primals: PyTree) -> bool:
    """Whether a gradient is asked of any leaf (``CustomVJPPrimal``)."""
    return any(leaf.perturbed for leaf in jax.tree.leaves(primals))


def _array_or_none(cotangent: PyTree) -> jax.Array | None:
    return None if isinstance(cotangent, SymbolicZero) else cotangent


def _scaled(gradients: PyTree, factor: jax.Array | None) -> PyTree:
    """Gradients times a cotangent, in the accumulation dtype; None is a cotangent of zero."""
    if factor is None:
        return jax.tree.map(lambda g: jnp.zeros_like(_accumulated(g)), gradients)
    return jax.tree.map(lambda g: _accumulated(g) * factor, gradients)


def _of_weights(
    plan: _Plan, losses: PyTree, of_loss: PyTree, of_z: PyTree, like: jax.Array
) -> jax.Array | None:
    """Cotangent of the weights: each token's own loss, where a gradient of them is asked for."""
    if losses is None:
        return None
    of_losses = _scaled(losses[0], of_loss)
    if of_z is not None:
        of_losses = of_losses + losses[1] * of_z
    return plan.merged(of_losses).astype(like.dtype)
