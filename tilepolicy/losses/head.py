"""From hidden states to logits and back: the output head as the losses see it.

``pullback`` is written out instead of left to ``jax.vjp`` for one reason: the gradient of a
bfloat16 head comes out of the matmul in float32, so that summing it over chunks rounds once, at
the end. ``jax.vjp`` would hand out bfloat16 for each chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilepolicy.losses.arithmetic import accumulation_dtype
from tilepolicy.losses.pytrees import PyTree

__all__ = ["FunctionHead", "HeadModel", "LinearHead", "Pullback"]

type Pullback = Callable[[jax.Array], tuple[PyTree, jax.Array | None]]


class HeadModel(Protocol):
    """What a chunked loss needs of a head; static, hence hashable."""

    def bind(self, constants: PyTree) -> HeadModel:
        """The model with the constants of one call."""

    def prepare(self, params: PyTree, hidden: jax.Array) -> PyTree:
        """Casts the parameters once, before the loop over chunks."""

    def logits(self, params: PyTree, hidden: jax.Array) -> jax.Array:
        """Logits ``(..., V)`` of hidden states ``(..., D)``."""

    def vjp(
        self, params: PyTree, hidden: jax.Array, *, of_params: bool, of_hidden: bool
    ) -> tuple[jax.Array, Pullback]:
        """Logits and the function from their cotangent to those of parameters and hidden."""


@dataclass(frozen=True)
class LinearHead:
    """``soft_cap · tanh((hidden · head + bias) / soft_cap)`` with parameters ``(head, bias)``.

    Attributes:
        tied: the head is an embedding table ``(V, D)`` instead of ``(D, V)``.
        soft_cap: MaxText's ``final_logits_soft_cap``; None or 0 for none.
        logits_dtype: dtype the logits are rounded to; float32 keeps the matmul's accumulator,
            the hidden states' dtype rounds as MaxText does without ``logits_dot_in_fp32``.

    Matmuls run in the hidden states' dtype, as MaxText's, and accumulate in float32.
    """

    tied: bool = False
    soft_cap: float | None = None
    logits_dtype: DTypeLike = "float32"

    def __post_init__(self) -> None:
        if self.soft_cap is not None and not (math.isfinite(self.soft_cap) and self.soft_cap >= 0):
            raise ValueError(f"soft_cap must be a finite number >= 0 or None, got {self.soft_cap}")
        object.__setattr__(self, "logits_dtype", jnp.dtype(self.logits_dtype).name)

    @property
    def vocab_axis(self) -> int:
        """Axis of the vocabulary in the head."""
        return 0 if self.tied else 1

    def check(self, hidden: jax.Array, head: jax.Array, bias: jax.Array | None) -> int:
        """The vocabulary size, after a check of the shapes.

        Raises:
            ValueError: the head does not fit the hidden states, or the bias not the head.
            TypeError: hidden states or head are not floating.
        """
        for name, array in {"hidden": hidden, "head": head}.items():
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise TypeError(f"{name} must be floating, got {array.dtype}")
        layout = "(V, D)" if self.tied else "(D, V)"
        if (
            head.ndim != 2
            or hidden.ndim == 0
            or head.shape[1 - self.vocab_axis] != hidden.shape[-1]
        ):
            raise ValueError(
                f"a{' tied' if self.tied else 'n untied'} head has shape {layout} with D = "
                f"{hidden.shape[-1:]} of hidden {hidden.shape}, got {head.shape}"
            )
        vocab: int = head.shape[self.vocab_axis]
        if vocab < 1:
            raise ValueError("the head has no vocabulary entry")
        if bias is not None and bias.shape != (vocab,):
            raise ValueError(f"bias must have shape ({vocab},), got {bias.shape}")
        return vocab

    def bind(self, constants: PyTree) -> LinearHead:  # noqa: ARG002  (a linear head has none)
        """Itself."""
        return self

    def prepare(self, params: PyTree, hidden: jax.Array) -> PyTree:
        """Casts the head to the hidden states' dtype; the bias is added in float32."""
        head, bias = params
        if bias is not None:
            bias = bias.astype(accumulation_dtype(hidden.dtype))
        return head.astype(hidden.dtype), bias

    def logits(self, params: PyTree, hidden: jax.Array) -> jax.Array:
        """Logits ``(..., V)``, rounded to ``logits_dtype``, in the accumulation dtype."""
        head, bias = params
        logits = _dot(hidden, head, hidden.ndim - 1, 1 - self.vocab_axis)
        if bias is not None:
            logits = logits + bias
        if self.soft_cap:
            logits = jnp.tanh(logits / self.soft_cap) * self.soft_cap
        if self.logits_dtype == "float32":
            return logits
        return logits.astype(self.logits_dtype).astype(logits.dtype)

    def vjp(
        self, params: PyTree, hidden: jax.Array, *, of_params: bool, of_hidden: bool
    ) -> tuple[jax.Array, Pullback]:
        """See ``HeadModel``; cotangents of the parameters are in the accumulation dtype."""
        logits = self.logits(params, hidden)

        def pullback(cotangent: jax.Array) -> tuple[PyTree, jax.Array | None]:
            return self.pullback(
                params, hidden, logits, cotangent, of_params=of_params, of_hidden=of_hidden
            )

        return logits, pullback

    def pullback(
        self,
        params: PyTree,
        hidden: jax.Array,
        logits: jax.Array,
        cotangent: jax.Array,
        *,
        of_params: bool,
        of_hidden: bool,
    ) -> tuple[PyTree, jax.Array | None]:
        """Cotangents of ``(head, bias)`` and of ``hidden`` from that of the logits.

        Both are in the accumulation dtype; what is not asked for is None.
        """
        head, bias = params
        if self.soft_cap:
            cotangent = cotangent * (1 - jnp.square(logits / self.soft_cap))
        rounded = cotangent.astype(hidden.dtype)
        of_hidden_states = None
        if of_hidden:
            of_hidden_states = _dot(rounded, head, rounded.ndim - 1, self.vocab_axis)
        if not of_params:
            return None, of_hidden_states
        tokens = tuple(range(hidden.ndim - 1))
        pair = (rounded, hidden) if self.tied else (hidden, rounded)
        of_bias = None if bias is None else jnp.sum(cotangent, axis=tokens)
        return (_dot(*pair, tokens, tokens), of_bias), of_hidden_states


@dataclass(frozen=True)
class FunctionHead:
    """PyTree differentiable function ``(params, hidden chunk[, constants]) -> logits chunk``."""

    function: Callable[..., jax.Array]

    def bind(self, constants: PyTree) -> FunctionHead:
        """The function of parameters and hidden states only."""
        if constants is None:
            return self
        return FunctionHead(lambda params, hidden: self.function(params, hidden, constants))

    def prepare(self, params: PyTree, hidden: jax.Array) -> PyTree:  # noqa: ARG002  (protocol)
        """The function casts its own parameters."""
        return params

    def logits(self, params: PyTree, hidden: jax.Array) -> jax.Array:
        """What the function returns."""
        return self.function(params, hidden)

    def vjp(
        self, params: PyTree, hidden: jax.Array, *, of_params: bool, of_hidden: bool
    ) -> tuple[jax.Array, Pullback]:
        """See ``HeadModel``; differentiates only with respect to what is asked for."""
        if of_params and of_hidden:
            logits, transpose = jax.vjp(self.function, params, hidden)
            return logits, transpose
        if of_params:
            logits, transpose = jax.vjp(lambda p: self.function(p, hidden), params)
            return logits, lambda cotangent: (*transpose(cotangent), None)
        logits, transpose = jax.vjp(lambda h: self.function(params, h), hidden)
        return logits, lambda cotangent: (None, *transpose(cotangent))


def _dot(
    left: jax.Array,
    right: jax.Array,
    left_axes: int | tuple[int, ...],
    right_axes: int | tuple[int, ...],
) -> jax.Array:
    """Contracts the given axes, accumulating in float32 (float64 for float64)."""

    def tupled(axes: int | tuple[int, ...]) -> tuple[int, ...]:
        return (axes,) if isinstance(axes, int) else axes

    return lax.dot_general(
        left,
        right,
        ((tupled(left_axes), tupled(right_axes)), ((), ())),
        preferred_element_type=accumulation_dtype(left.dtype),
    )
