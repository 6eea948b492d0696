"""What one token's loss and its logit cotangent are, shared by every loss of this package.

With logits ``x`` of one token, its label ``y`` and ``log_z = log Σ exp(x)``::

    z_loss_term = z_loss · log_z²
    loss        = log_z - x[y] + z_loss_term            (the second sum is MaxText's)
    d loss / d x_v = (1 + 2 · z_loss · log_z) · p_v - [v = y],      p = softmax(x)

as in ``maxtext.utils.max_utils.cross_entropy_with_logits`` (MaxText 0.2.5, after T5X's
``losses.py``). Two differences, both tested: the second output has its true gradient here, while
MaxText ignores its cotangent; and a label outside ``0 … V - 1`` has no target, so that only
``z_loss_term`` and its gradient remain (MaxText's zero one-hot row loses the loss but keeps
``p`` in the gradient).

All arithmetic is in float32, or in float64 if the logits are.
"""

from __future__ import annotations

import math
import operator
from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

__all__ = [
    "LogSumExp",
    "accumulation_dtype",
    "checked_count",
    "checked_labels",
    "checked_weights",
    "checked_z_loss",
    "label_mask",
    "logit_cotangent",
    "token_losses",
    "weighted_sum",
]


class LogSumExp(NamedTuple):
    """``log Σ exp(x)`` of each token, as a finite shift and the rest.

    Attributes:
        shift: largest logit, or 0 where there is no finite one; shape ``(..., 1)``.
        log_sum: ``log Σ exp(x - shift)``; shape ``(..., 1)``.

    The two are kept apart because ``x - shift - log_sum`` is exact where ``x - (shift + log_sum)``
    has lost its low bits: float32 numbers near 1e4 are 1e-3 apart.
    """

    shift: jax.Array
    log_sum: jax.Array

    @classmethod
    def of(cls, logits: jax.Array) -> LogSumExp:
        """The log-sum-exp over the last axis of ``logits``, shape ``(..., V)``."""
        dtype = accumulation_dtype(logits.dtype)
        shift = finite_or_zero(jnp.max(logits, axis=-1, keepdims=True).astype(dtype))
        total = jnp.sum(_exponentials(logits, shift), axis=-1, keepdims=True)
        return cls(shift, jnp.log(total))

    @property
    def value(self) -> jax.Array:
        """``log Σ exp(x)``, shape ``(..., 1)``."""
        return self.shift + self.log_sum

    def softmax(self, logits: jax.Array) -> jax.Array:
        """The softmax of ``logits``, or of a tile of them, in the accumulation dtype."""
        return jnp.exp(logits.astype(self.shift.dtype) - self.shift - self._scale)

    def kept(self, logits: jax.Array) -> jax.Array:
        """What of ``logits`` to keep until their cotangent is formed; shape and dtype of them.

        On a CPU the exponential is what an entry costs, and those of the sum are kept in place of
        the logits, if they are no larger. Elsewhere memory traffic is, and one write less counts.
        """
        if logits.dtype != self.shift.dtype:
            return logits
        kept: jax.Array = lax.platform_dependent(
            logits, self.shift, cpu=_exponentials, default=lambda logits, _: logits
        )
        return kept

    def softmax_of_kept(self, kept: jax.Array) -> jax.Array:
        """:meth:`softmax` from what :meth:`kept` gave."""
        if kept.dtype != self.shift.dtype:
            return self.softmax(kept)
        softmax: jax.Array = lax.platform_dependent(
            kept, cpu=lambda exps: exps * jnp.exp(-self._scale), default=self.softmax
        )
        return softmax

    @property
    def _scale(self) -> jax.Array:
        """``log_sum``, or 0 where no logit was finite and every exponential is 0."""
        return finite_or_zero(self.log_sum)


def _exponentials(logits: jax.Array, shift: jax.Array) -> jax.Array:
    return jnp.exp(logits.astype(shift.dtype) - shift)


def finite_or_zero(values: jax.Array) -> jax.Array:
    """``values`` with zero where they are infinite, so that subtracting them makes no NaN."""
    return jnp.where(jnp.isinf(values), jnp.zeros_like(values), values)


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def checked_z_loss(z_loss: float) -> float:
    """The z-loss coefficient as a Python float.

    Raises:
        ValueError: it is negative or not finite.
        jax.errors.ConcretizationTypeError: it is traced; it has to be known at trace time.
    """
    value = float(z_loss)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"z_loss must be a finite number >= 0, got {z_loss!r}")
    return value


def checked_count(name: str, value: SupportsIndex) -> int:
    """A number of tiles, or of entries of a tile, as a Python integer.

    Raises:
        TypeError: it is not an integer that is known at trace time.
        ValueError: it is below 1.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}")
    return count


def checked_labels(labels: ArrayLike, tokens: tuple[int, ...]) -> jax.Array:
    """One integer label for each token, in a signed dtype of at least 32 bits.

    Labels are compared with column numbers and shifted by the starts of tiles: in int8 both would
    wrap around.

    Raises:
        ValueError: the shape is not ``tokens``.
        TypeError: the labels are not integers.
    """
    labels = jnp.asarray(labels)
    if labels.shape != tokens:
        raise ValueError(f"labels must have the shape of the tokens {tokens}, got {labels.shape}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    wide = jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32
    return labels.astype(wide)


def checked_weights(
    weights: ArrayLike | None, tokens: tuple[int, ...], dtype: DTypeLike
) -> jax.Array:
    """One weight for each token; ones of ``dtype`` if there are none.

    Raises:
        ValueError: the shape is not ``tokens``.
        TypeError: the weights are complex.
    """
    weights = jnp.ones(tokens, dtype) if weights is None else jnp.asarray(weights)
    if weights.shape != tokens:
        raise ValueError(f"weights must have the shape of the tokens {tokens}, got {weights.shape}")
    if jnp.iscomplexobj(weights):
        raise TypeError(f"weights must be real numbers or a mask, got {weights.dtype}")
    return weights


def label_mask(labels: jax.Array, vocab: int) -> jax.Array:
    """Where a label has a target: 1 for ``0 … vocab - 1``, else 0; shape of ``labels``, bool."""
    return (labels >= 0) & (labels < vocab)


def token_losses(
    lse: LogSumExp, target: jax.Array, valid: jax.Array, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    """The loss (z-loss included) and the z-loss term of each token.

    Args:
        lse: log-sum-exp of each token.
        target: logit of the label; shape ``(...,)``; any finite number where not ``valid``.
        valid: whether the label is a vocabulary entry; shape ``(...,)``.
        z_loss: coefficient of the squared log-sum-exp.

    Returns:
        ``loss`` and ``z_loss_term``, both ``(...,)`` in the accumulation dtype.
    """
    shift, log_sum = lse.shift[..., 0], lse.log_sum[..., 0]
    loss = jnp.where(valid, log_sum - (target.astype(shift.dtype) - shift), 0)
    if z_loss == 0.0:
        return loss, jnp.zeros_like(loss)
    z_term = z_loss * jnp.square(shift + log_sum)
    return loss + z_term, z_term


def logit_cotangent(
    softmax: jax.Array,
    lse: LogSumExp,
    labels: jax.Array,
    valid: jax.Array,
    loss_cotangent: jax.Array,
    z_cotangent: jax.Array | None,
    z_loss: float,
) -> jax.Array:
    """The cotangent of ``logits``: one elementwise expression, nothing of its size is held.

    Args:
        softmax: ``(..., V)``, or a tile of the vocabulary.
        lse: log-sum-exp of each token over the whole vocabulary.
        labels: ``(...,)``, relative to the first column of ``softmax``.
        valid: whether the label is an entry of the whole vocabulary; shape ``(...,)``.
        loss_cotangent: of each token's loss; shape ``(...,)``.
        z_cotangent: of each token's z-loss term, or None for zero.
        z_loss: coefficient of the squared log-sum-exp.

    Returns:
        ``(..., V)`` in the accumulation dtype.
    """
    dtype = lse.shift.dtype
    of_label = (loss_cotangent * valid).astype(dtype)[..., None]
    of_softmax = of_label
    if z_loss != 0.0:
        both = loss_cotangent if z_cotangent is None else loss_cotangent + z_cotangent
        of_softmax = of_label + both[..., None] * (2 * z_loss) * finite_or_zero(lse.value)
    columns = lax.broadcasted_iota(labels.dtype, softmax.shape, softmax.ndim - 1)
    return of_softmax * softmax - jnp.where(columns == labels[..., None], of_label, 0)


def weighted_sum(values: jax.Array, weights: jax.Array) -> jax.Array:
    """``Σ values · weights`` in which a weight of zero hides even an infinite value."""
    weights = weights.astype(values.dtype)
    return jnp.sum(jnp.where(weights == 0, 0, values * weights))
