"""How tokens and head lie on a device mesh, and how tokens are cut so that they stay there.

A chunk takes every ``num_tiles``-th token of every sequence, not a run of neighbours: splitting an
axis of ``n`` tokens into ``(n / num_tiles, num_tiles)`` leaves a sharding of that axis on its first
factor, so that each device finds its own share of every chunk in its own memory. Runs of
neighbours would put one chunk on one device; MaxText 0.2.5 cuts so and moves the hidden states
there and back with an all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tilepolicy.losses.pytrees import Index, PyTree

__all__ = [
    "LossSharding",
    "for_tiles",
    "merge_tokens",
    "split_factors",
    "split_tokens",
    "write_chunk",
]


@dataclass(frozen=True)
class LossSharding:
    """Where tokens and head lie on a mesh, for losses under ``jax.jit`` with automatic sharding.

    Attributes:
        mesh: the mesh; its axes are automatic (``AxisType.Auto``).
        tokens: spec of the token axes of ``hidden``, ``P(("data", "fsdp", "expert"))``.
        head: spec of the head as it is stored, ``P("fsdp", "tensor")``; for
            ``chunked_sparse_cross_entropy_fn`` a pytree of specs that fits ``params``.

    The gathered head keeps the axes that no token lies on (tensor parallelism) and drops those
    that also shard the tokens (data, fsdp, expert), as ``vocab_tiling_ag_once`` does in MaxText.

    Raises:
        TypeError: ``tokens`` or a leaf of ``head`` is no ``PartitionSpec``.
        ValueError: a spec names an axis that the mesh does not have, or that is explicit.
    """

    mesh: Mesh
    tokens: PartitionSpec
    head: PyTree

    def __post_init__(self) -> None:
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        for spec in (self.tokens, *jax.tree.leaves(self.head, is_leaf=_is_spec)):
            if not _is_spec(spec):
                raise TypeError(f"tokens and head are PartitionSpecs, got {spec!r}")
            if unknown := [name for name in _axes(spec) if name not in kinds]:
                raise ValueError(f"{spec} names {unknown}, the mesh has {list(kinds)}")
            if explicit := [name for name in _axes(spec) if kinds[name] == AxisType.Explicit]:
                raise ValueError(
                    f"{spec} names the explicit axes {explicit}: make the mesh with axis_types="
                    "(jax.sharding.AxisType.Auto,) * number of axes"
                )

    def __hash__(self) -> int:
        specs = jax.tree.leaves(self.head, is_leaf=_is_spec)
        return hash((self.mesh, self.tokens, tuple(specs)))

    @property
    def token_shards(self) -> int:
        """Number of devices among which the tokens are divided."""
        return self._size(_axes(self.tokens))

    @property
    def head_shards(self) -> int:
        """Number of devices from which a head (one array) is gathered."""
        return self._size(_axes(self.head)) // self._size(
            _axes(self._without_token_axes(self.head))
        )

    def vocab_shards(self, vocab_axis: int) -> int:
        """Number of devices among which the gathered head's vocabulary is divided."""
        gathered = self._without_token_axes(self.head)
        names = _names(gathered[vocab_axis]) if vocab_axis < len(gathered) else ()
        return self._size(names)

    def with_bias(self, vocab_axis: int) -> LossSharding:
        """The same for parameters ``(head, bias)``: a bias lies as the vocabulary does."""
        of_vocab = _names(self.head[vocab_axis]) if vocab_axis < len(self.head) else ()
        return LossSharding(self.mesh, self.tokens, (self.head, _spec([of_vocab or None])))

    def stored(self, params: PyTree) -> PyTree:
        """Constrains a head, or gradients of one, to the sharding it is stored in."""
        return self._constrain(params, gathered=False)

    def gathered(self, params: PyTree) -> PyTree:
        """Constrains a head to be whole on every device that holds different tokens."""
        return self._constrain(params, gathered=True)

    def of_shares(self, shares: jax.Array, vocab_axis: int) -> jax.Array:
        """Constrains a stored head whose vocabulary axis is split into ``(shards, entries)``."""
        entries = [_names(entry) for entry in (*self.head, None, None)[:2]]
        kept = self._without_token_axes(self.head)
        entries[vocab_axis] = _names((*kept, None, None)[vocab_axis])
        entries.insert(vocab_axis + 1, ())
        return self._place(shares, _spec(names or None for names in entries))

    def of_tokens(self, values: jax.Array) -> jax.Array:
        """Constrains an array whose first axes are the token axes."""
        return self._place(values, self.tokens)

    def _constrain(self, params: PyTree, *, gathered: bool) -> PyTree:
        def one(spec: PartitionSpec, leaf: jax.Array | None) -> jax.Array | None:
            if leaf is None:
                return None
            return self._place(leaf, self._without_token_axes(spec) if gathered else spec)

        return jax.tree.map(one, self.head, params, is_leaf=_is_spec)

    def _place(self, values: jax.Array, spec: PartitionSpec) -> jax.Array:
        place = NamedSharding(self.mesh, spec)
        placed: jax.Array = lax.with_sharding_constraint(values, place)  # type: ignore[no-untyped-call]
        return placed

    def _without_token_axes(self, spec: PartitionSpec) -> PartitionSpec:
        of_tokens = set(_axes(self.tokens))
        kept = [tuple(name for name in _names(entry) if name not in of_tokens) for entry in spec]
        return _spec(names or None for names in kept)

    def _size(self, names: Iterable[str]) -> int:
        sizes: Mapping[str, int] = self.mesh.shape
        return math.prod(sizes[name] for name in names)


def _spec(entries: Iterable[tuple[str, ...] | None]) -> PartitionSpec:
    return PartitionSpec(*entries)  # type: ignore[no-untyped-call]


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec: None, a name, or a tuple of names."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _axes(spec: PartitionSpec) -> Iterator[str]:
    for entry in spec:
        yield from _names(entry)


def split_factors(tokens: tuple[int, ...], num_tiles: int) -> tuple[int, ...]:
    """How many ways each token axis is cut, last axis first, for ``num_tiles`` equal chunks.

    Raises:
        ValueError: ``num_tiles`` does not divide the number of tokens.
    """
    total = math.prod(tokens)
    if total % num_tiles:
        raise ValueError(
            f"num_tiles={num_tiles} must divide the {total} tokens of shape {tokens}; pad the "
            "tokens with weight 0 or choose a divisor"
        )
    factors: list[int] = []
    for size in reversed(tokens):
        factors.insert(0, math.gcd(num_tiles, size))
        num_tiles //= factors[0]
    return tuple(factors)


def split_tokens(values: jax.Array, factors: tuple[int, ...]) -> jax.Array:
    """Cuts the token axes: ``(*tokens, …)`` to ``(num_tiles, *tokens of a chunk, …)``."""
    lead = len(factors)
    if math.prod(factors) == 1:
        return values[None]
    cut = _cut(values, factors)
    order = [*range(1, 2 * lead, 2), *range(0, 2 * lead, 2), *range(2 * lead, cut.ndim)]
    chunks = cut.transpose(order)
    return chunks.reshape(math.prod(factors), *chunks.shape[lead:])


def write_chunk(
    values: jax.Array, chunk: jax.Array, index: jax.Array, factors: tuple[int, ...]
) -> jax.Array:
    """``values`` of shape ``(*tokens, …)`` with chunk number ``index`` overwritten, in place.

    Stacking the chunks and merging them afterwards would hold all of them a second time.
    """
    lead = len(factors)
    cut = _cut(values, factors)
    shape, start = list(chunk.shape), [jnp.zeros((), jnp.int32)] * cut.ndim
    numbers = _numbers(index, factors)
    for axis in range(lead):
        shape.insert(2 * axis + 1, 1)
        start[2 * axis + 1] = numbers[axis]
    return lax.dynamic_update_slice(cut, chunk.reshape(shape), start).reshape(values.shape)


def _numbers(index: jax.Array, factors: tuple[int, ...]) -> list[jax.Array]:
    """The number of a chunk along each token axis."""
    numbers: list[jax.Array] = []
    for factor in reversed(factors):
        numbers.insert(0, jnp.zeros_like(index) if factor == 1 else index % factor)
        index = index // factor if factor > 1 else index
    return numbers


def _cut(values: jax.Array, factors: tuple[int, ...]) -> jax.Array:
    """``(n₀, n₁, …)`` as ``(n₀ / f₀, f₀, n₁ / f₁, f₁, …)``."""
    lead = len(factors)
    shape: list[int] = []
    for size, factor in zip(values.shape[:lead], factors, strict=True):
        shape += [size // factor, factor]
    return values.reshape(*shape, *values.shape[lead:])


def merge_tokens(chunks: jax.Array, factors: tuple[int, ...]) -> jax.Array:
    """The inverse of ``split_tokens``."""
    lead = len(factors)
    if math.prod(factors) == 1:
        return chunks[0]
    cut = chunks.reshape(*factors, *chunks.shape[1:])
    order = [axis for pair in zip(range(lead, 2 * lead), range(lead), strict=True) for axis in pair]
    joined = cut.transpose(*order, *range(2 * lead, cut.ndim))
    sizes = [
        size * factor for size, factor in zip(chunks.shape[1 : lead + 1], factors, strict=True)
    ]
    return joined.reshape(*sizes, *chunks.shape[lead + 1 :])


def for_tiles[T](total: int, tile: int, step: Callable[[T, Index, int], T], carry: T) -> T:
    """Runs ``step(carry, start, size)`` over tiles of ``total``, with a smaller last one."""
    full, rest = divmod(total, tile)
    if full:
        carry = lax.fori_loop(0, full, lambda i, carry: step(carry, i * tile, tile), carry)
    return step(carry, full * tile, rest) if rest else carry
