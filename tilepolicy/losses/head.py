"""From hidden states to logits and back: the output head as the losses see it.

``pullback`` is written out instead of left to ``jax.vjp`` for one reason: the gradient of a
bfloat16 head comes out of the matmul in float32, so that summing it over chunks rounds once, at
the end. ``jax.vjp`` would hand out bfloat16 for each chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilepolicy.losses.arithmetic import accumulation_dtype
from tilepolicy.losses.layout import for_tiles
from tilepolicy.losses.pytrees import Index, PyTree

__all__ = ["FunctionHead", "HeadModel", "LinearHead", "Pullback"]

type Pullback = Callable[[jax.Array, PyTree], tuple[PyTree, jax.Array | None]]
"""``(cotangent of the logits, sums)`` to ``(sums + gradients of the parameters, of hidden)``.

Without sums (None) the first result is the gradients alone. What is not asked for is None.
"""

_SLAB_ENTRIES: Final = 2**22


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
        """Logits, and the function from their cotangent to the gradients."""


@dataclass(frozen=True)
class LinearHead:
    """``soft_cap · tanh((hidden · head + bias) / soft_cap)`` with parameters ``(head, bias)``.

    Attributes:
        tied: the head is an embedding table ``(V, D)`` instead of ``(D, V)``.
        soft_cap: MaxText's ``final_logits_soft_cap``; None or 0 for none.
        logits_dtype: dtype the logits are rounded to; float32 keeps the matmul's accumulator,
            the hidden states' dtype rounds as MaxText does without ``logits_dot_in_fp32``.
        in_slabs: on a CPU, add to sums of gradients slab by slab of the vocabulary; for a head
            that is not divided among devices.

    Matmuls run in the hidden states' dtype, as MaxText's, and accumulate in float32.
    """

    tied: bool = False
    soft_cap: float | None = None
    logits_dtype: DTypeLike = "float32"
    in_slabs: bool = False

    def __post_init__(self) -> None:
        if self.soft_cap is not None and not (math.isfinite(self.soft_cap) and self.soft_cap >= 0):
            raise ValueError(f"soft_cap must be a finite number >= 0 or None, got {self.soft_cap}")
        dtype = jnp.dtype(self.logits_dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"logits_dtype must be floating, got {dtype}")
        object.__setattr__(self, "logits_dtype", dtype.name)

    @property
    def vocab_axis(self) -> int:
        """Axis of the vocabulary in the head."""
        return 0 if self.tied else 1

    def check(self, hidden: jax.Array, head: jax.Array, bias: jax.Array | None) -> int:
        """The vocabulary size, after a check of the shapes.

        Raises:
            ValueError: the head does not fit the hidden states, or the bias not the head.
            TypeError: hidden states, head or bias are not floating.
        """
        for name, array in {"hidden": hidden, "head": head, "bias": bias}.items():
            if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
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

        def pullback(cotangent: jax.Array, sums: PyTree) -> tuple[PyTree, jax.Array | None]:
            if self.soft_cap:
                cotangent = cotangent * (1 - jnp.square(logits / self.soft_cap))
            rounded = cotangent.astype(hidden.dtype)
            of_states = None
            if of_hidden:
                of_states = _dot(rounded, params[0], rounded.ndim - 1, self.vocab_axis)
            if not of_params:
                return None, of_states
            of_head = self._of_head(hidden, rounded, None if sums is None else sums[0])
            of_bias = None
            if params[1] is not None:
                of_bias = jnp.sum(cotangent, axis=tuple(range(cotangent.ndim - 1)))
                of_bias = of_bias if sums is None else sums[1] + of_bias
            return (of_head, of_bias), of_states

        return logits, pullback

    def _of_head(
        self, hidden: jax.Array, cotangent: jax.Array, total: jax.Array | None
    ) -> jax.Array:
        """``total`` plus the gradient of the head, ``(D, V)`` or ``(V, D)``."""

        def whole(hidden: jax.Array, cotangent: jax.Array) -> jax.Array:
            tokens = tuple(range(hidden.ndim - 1))
            pair = (cotangent, hidden) if self.tied else (hidden, cotangent)
            return _dot(*pair, tokens, tokens)

        def added(total: jax.Array, hidden: jax.Array, cotangent: jax.Array) -> jax.Array:
            return total + whole(hidden, cotangent)

        def added_by_slabs(total: jax.Array, hidden: jax.Array, cotangent: jax.Array) -> jax.Array:
            def add(total: jax.Array, start: Index, size: int) -> jax.Array:
                columns = lax.dynamic_slice_in_dim(cotangent, start, size, cotangent.ndim - 1)
                slab = lax.dynamic_slice_in_dim(total, start, size, self.vocab_axis)
                slab = slab + whole(hidden, columns)
                return lax.dynamic_update_slice_in_dim(total, slab, start, self.vocab_axis)

            slab = max(1, _SLAB_ENTRIES // hidden.shape[-1])
            return for_tiles(cotangent.shape[-1], slab, add, total)

        if total is None:
            return whole(hidden, cotangent)
        if not self.in_slabs:
            return added(total, hidden, cotangent)
        # XLA fuses the sum into the matmul on a TPU. On a CPU it writes the product to memory
        # first, twice the size of everything else: by slabs it stays in the cache.
        summed: jax.Array = lax.platform_dependent(
            total, hidden, cotangent, cpu=added_by_slabs, default=added
        )
        return summed


@dataclass(frozen=True)
class FunctionHead:
    """Any differentiable function ``(params, hidden chunk[, constants]) -> logits chunk``."""

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
        """What the function returns, if it has one row of logits for each token."""
        logits = self.function(params, hidden)
        if logits.ndim != hidden.ndim or logits.shape[:-1] != hidden.shape[:-1]:
            raise ValueError(
                f"logits_fn must return (*tokens, V) with the tokens {hidden.shape[:-1]} of its "
                f"chunk {hidden.shape}, got {logits.shape}"
            )
        return logits

    def vjp(
        self, params: PyTree, hidden: jax.Array, *, of_params: bool, of_hidden: bool
    ) -> tuple[jax.Array, Pullback]:
        """See ``HeadModel``; differentiates only with respect to what is asked for."""
        asked = (params if of_params else None, hidden if of_hidden else None)

        def function(asked: PyTree) -> jax.Array:
            return self.logits(asked[0] if of_params else params, asked[1] if of_hidden else hidden)

        logits, transpose = jax.vjp(function, asked)

        def pullback(cotangent: jax.Array, sums: PyTree) -> tuple[PyTree, jax.Array | None]:
            ((of_parameters, of_states),) = transpose(cotangent)
            if of_params:
                of_parameters = jax.tree.map(
                    lambda leaf: leaf.astype(accumulation_dtype(leaf.dtype)), of_parameters
                )
            if sums is not None:
                of_parameters = jax.tree.map(jnp.add, sums, of_parameters)
            return of_parameters, of_states

        return logits, pullback


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
