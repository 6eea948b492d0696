"""Cross-entropy of given logits with integer labels: no one-hot, one array of their size."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tilepolicy.losses.arithmetic import (
    LogSumExp,
    checked_labels,
    checked_z_loss,
    label_mask,
    logit_cotangent,
    token_losses,
)

__all__ = ["sparse_cross_entropy_with_logits", "target_logits", "target_then_logits"]


def sparse_cross_entropy_with_logits(
    logits: jax.Array, labels: jax.Array, *, z_loss: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy of each token, as MaxText's with a one-hot target.

    The target logit is gathered and the cotangent of the logits is one elementwise expression of
    the logits and their log-sum-exp: no one-hot is formed, and one array of the logits' size is
    kept for the backward pass. These are the logits; on a CPU, for float32 and float64, their
    exponentials in place of them and in the same memory, because computing them twice costs more
    than the memory traffic.

    Args:
        logits: ``(..., V)``, any floating dtype.
        labels: ``(...,)``, integers. One outside ``0 … V - 1`` (padding, -100) has no target: its
            loss is the z-loss term alone. Multiply by your weights to leave a token out.
        z_loss: coefficient of the squared log-sum-exp, known at trace time.

    Returns:
        ``(loss, z_loss_term)``, both ``(...,)`` in float32 (float64 for float64 logits); the
        z-loss term is contained in the loss and is also returned, for logging. Both outputs are
        differentiable.

    Raises:
        ValueError: shapes do not fit, or ``z_loss`` is negative or not finite.
        TypeError: labels are not integers or logits not floating.
    """
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits must be floating, got {logits.dtype}")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have a vocabulary axis, got shape {logits.shape}")
    labels = checked_labels(labels, logits.shape[:-1])
    return _sparse(checked_z_loss(z_loss), logits, labels)


def target_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The logit of each label, ``(...,)``; that of the nearest entry if there is no such label."""
    index = jnp.clip(labels, 0, logits.shape[-1] - 1)[..., None]
    return jnp.take_along_axis(logits, index, axis=-1, mode="promise_in_bounds")[..., 0]


def target_then_logits(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """:func:`target_logits`, and the logits for what comes after.

    On a CPU exponentials take the place of the logits (``LogSumExp.kept``). In the same memory
    they can only be if nothing reads the logits later, which XLA does not see to by itself.
    """
    target = target_logits(logits, labels)
    after: jax.Array = lax.platform_dependent(
        logits, target, cpu=_first_after_both, default=lambda logits, _: logits
    )
    return target, after


def _first_after_both(first: jax.Array, second: jax.Array) -> jax.Array:
    kept: jax.Array
    # jax ships this function without types.
    kept, _ = lax.optimization_barrier((first, second))  # type: ignore[no-untyped-call]
    return kept


type _Residuals = tuple[jax.Array, jax.Array, LogSumExp]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sparse(z_loss: float, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _sparse_fwd(z_loss, logits, labels)[0]


def _sparse_fwd(
    z_loss: float, logits: jax.Array, labels: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    target, logits = target_then_logits(logits, labels)
    lse = LogSumExp.of(logits)
    valid = label_mask(labels, logits.shape[-1])
    losses = token_losses(lse, target, valid, z_loss)
    return losses, (lse.kept(logits), labels, lse)


def _sparse_bwd(
    z_loss: float, residuals: _Residuals, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    kept, labels, lse = residuals
    valid = label_mask(labels, kept.shape[-1])
    softmax = lse.softmax_of_kept(kept)
    cotangent = logit_cotangent(softmax, lse, labels, valid, *cotangents, z_loss)
    return cotangent.astype(kept.dtype), None


_sparse.defvjp(_sparse_fwd, _sparse_bwd)
