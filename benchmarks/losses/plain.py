"""The online loss as anyone would write it first: a scan over tiles of the vocabulary, no options.

The target for the online loss on a CPU was set from one like it, on another machine. What it takes
here says how much of a ratio is the machine's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["TILE", "plain_scan"]

TILE = 1024
"""Vocabulary entries of a tile; divides V."""

type _Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _tile(head: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(head, index * TILE, TILE, 1)


@jax.custom_vjp
def plain_scan(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of each token: ``hidden (N, D)``, ``head (D, V)``, ``labels (N,)``, float32."""
    return _forward(hidden, head, labels)[0]


def _forward(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> tuple[jax.Array, _Residuals]:
    def body(carry: tuple[jax.Array, ...], index: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        largest, total, target = carry
        logits = hidden @ _tile(head, index)
        new = jnp.maximum(largest, logits.max(-1))
        total = total * jnp.exp(largest - new) + jnp.exp(logits - new[:, None]).sum(-1)
        place = labels - index * TILE
        own = jnp.take_along_axis(logits, jnp.clip(place, 0, TILE - 1)[:, None], 1)[:, 0]
        return (new, total, target + jnp.where((place >= 0) & (place < TILE), own, 0)), None

    zeros = jnp.zeros(len(hidden))
    tiles = jnp.arange(head.shape[1] // TILE)
    start = (jnp.full_like(zeros, -jnp.inf), zeros, zeros)
    largest, total, target = lax.scan(body, start, tiles)[0]
    log_z = largest + jnp.log(total)
    return log_z - target, (hidden, head, labels, log_z)


def _backward(residuals: _Residuals, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    hidden, head, labels, log_z = residuals

    def body(
        carry: tuple[jax.Array, jax.Array], index: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        of_hidden, of_head = carry
        tile = _tile(head, index)
        is_label = labels[:, None] - index * TILE == jnp.arange(TILE)
        of_logits = (jnp.exp(hidden @ tile - log_z[:, None]) - is_label) * cotangent[:, None]
        of_tile = hidden.T @ of_logits
        of_head = lax.dynamic_update_slice_in_dim(of_head, of_tile, index * TILE, 1)
        return (of_hidden + of_logits @ tile.T, of_head), None

    tiles = jnp.arange(head.shape[1] // TILE)
    start = (jnp.zeros_like(hidden), jnp.zeros_like(head))
    of_hidden, of_head = lax.scan(body, start, tiles)[0]
    return of_hidden, of_head, None


plain_scan.defvjp(_forward, _backward)
