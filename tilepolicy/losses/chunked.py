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

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from tilepolicy.losses.arithmetic import (
    accumulation_dtype,
    checked_count,
    checked_labels,
    checked_weights,
    checked_z_loss,
)
from tilepolicy.losses.chunks import ChunkPlan, Wanted, sum_over_chunks
from tilepolicy.losses.head import FunctionHead, HeadModel, LinearHead
from tilepolicy.losses.layout import LossSharding, split_factors
from tilepolicy.losses.pytrees import PyTree

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
    reduce_once: bool | None = None,
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
        reduce_once: sum the head's gradient over devices once, after the loop, as MaxText's
            ``vocab_tiling_ag_once`` does: each device holds a whole gradient in float32 until
            then. False reduces each chunk's into the sharded sum; None is as ``ag_once``.

    Returns:
        ``(loss_sum, z_loss_sum)``, scalars in float32 (float64 for float64 hidden states); the
        first contains the second. The caller divides by the sum of weights.

    Raises:
        ValueError: shapes do not fit, or ``num_tiles`` does not divide the tokens.
        TypeError: a dtype is of the wrong kind.
    """
    linear = LinearHead(
        tied=tied, soft_cap=soft_cap, logits_dtype=logits_dtype, in_slabs=sharding is None
    )
    linear.check(hidden, head, bias)
    if sharding is not None:
        sharding = sharding.with_bias(linear.vocab_axis)
    plan = _plan(linear, hidden.shape[:-1], num_tiles, z_loss, sharding, ag_once, reduce_once)
    return _chunked(plan, (head, bias), hidden, labels, weights)


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
    reduce_once: bool | None = None,
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
        reduce_once: see ``chunked_sparse_cross_entropy``.

    Returns:
        ``(loss_sum, z_loss_sum)``.

    Raises:
        ValueError: shapes do not fit, or ``num_tiles`` does not divide the tokens.
        TypeError: a dtype is of the wrong kind.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} must be floating, got {dtype}: pass what is "
                "not differentiated in constants"
            )
    function = FunctionHead(logits_fn)
    plan = _plan(function, hidden.shape[:-1], num_tiles, z_loss, sharding, ag_once, reduce_once)
    return _chunked(plan, params, hidden, labels, weights, constants)


def _plan(
    model: HeadModel,
    tokens: tuple[int, ...],
    num_tiles: int,
    z_loss: float,
    sharding: LossSharding | None,
    ag_once: bool,
    reduce_once: bool | None,
) -> ChunkPlan:
    if sharding is None and not (ag_once and reduce_once in (None, True)):
        raise ValueError(
            "ag_once=False and reduce_once=False say nothing without sharding: pass a LossSharding"
        )
    factors = split_factors(tokens, checked_count("num_tiles", num_tiles))
    reduce_once = ag_once if reduce_once is None else reduce_once
    return ChunkPlan(model, factors, checked_z_loss(z_loss), sharding, ag_once, reduce_once)


def _chunked(
    plan: ChunkPlan,
    params: PyTree,
    hidden: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    constants: PyTree = None,
) -> tuple[jax.Array, jax.Array]:
    tokens = hidden.shape[:-1]
    labels = checked_labels(labels, tokens)
    weights = checked_weights(weights, tokens, accumulation_dtype(hidden.dtype))
    return _sums(plan, params, hidden, labels, weights, lax.stop_gradient(constants))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(plan: ChunkPlan, *inputs: PyTree) -> tuple[jax.Array, jax.Array]:
    result = sum_over_chunks(plan, inputs, Wanted())
    return result.loss, result.z_loss


def _sums_fwd(plan: ChunkPlan, *inputs: PyTree) -> tuple[tuple[jax.Array, jax.Array], PyTree]:
    params, hidden, _, weights, _ = inputs
    wanted = Wanted(_perturbed(params), _perturbed(hidden), _perturbed(weights))
    values = jax.tree.map(lambda leaf: leaf.value, inputs)
    result = sum_over_chunks(plan, values, wanted)
    dtypes = jax.tree.map(lambda leaf: jnp.zeros((0,), leaf.dtype), values[:4])
    for_z_loss = values if plan.z_loss != 0.0 else None
    gradients = (result.of_params, result.of_hidden, result.token_losses)
    return (result.loss, result.z_loss), (gradients, dtypes, for_z_loss)


def _sums_bwd(
    plan: ChunkPlan, residuals: PyTree, cotangents: tuple[PyTree, PyTree]
) -> tuple[PyTree, ...]:
    (of_params, of_hidden, losses), dtypes, for_z_loss = residuals
    of_loss, of_z = (_array_or_none(cotangent) for cotangent in cotangents)
    gradients = _scaled((of_params, of_hidden), of_loss)
    if of_z is not None and for_z_loss is not None:
        wanted = Wanted(params=of_params is not None, hidden=of_hidden is not None)
        of_z_loss = _z_loss_gradients(plan, for_z_loss, wanted, of_z)
        gradients = jax.tree.map(jnp.add, gradients, _scaled(of_z_loss, of_z))
    of_params, of_hidden = gradients
    if of_hidden is not None:
        of_hidden = plan.on_tokens(of_hidden.astype(dtypes[1].dtype))
    if of_params is not None:
        of_params = jax.tree.map(lambda g, like: g.astype(like.dtype), of_params, dtypes[0])
    return of_params, of_hidden, None, _of_weights(plan, losses, of_loss, of_z, dtypes[3]), None


_sums.defvjp(_sums_fwd, _sums_bwd, symbolic_zeros=True)


def _z_loss_gradients(plan: ChunkPlan, inputs: PyTree, wanted: Wanted, of_z: jax.Array) -> PyTree:
    """Gradients of the z-loss sum by a second pass, skipped at run time for a zero cotangent."""

    def second_pass(inputs: PyTree) -> PyTree:
        result = sum_over_chunks(plan, inputs, wanted, of_z_loss=True)
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
    plan: ChunkPlan, losses: PyTree, of_loss: PyTree, of_z: PyTree, like: jax.Array
) -> jax.Array | None:
    """Cotangent of the weights: each token's own loss, where a gradient of them is asked for."""
    if losses is None:
        return None
    of_losses = _scaled(losses[0], of_loss)
    if of_z is not None:
        of_losses = of_losses + losses[1] * of_z
    return plan.merged(of_losses).astype(like.dtype)
