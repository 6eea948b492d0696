"""MaxText's output head as tilepolicy's losses take it: parameters, function, places on the mesh.

``HeadCall`` wraps the model's own method, whatever is in it, for losses over chunks of tokens. The
parameters that no head uses are replaced by a value that fails when it is touched: a custom
gradient can neither close over them (their tracers belong to the outer trace) nor should it carry
the whole model through its loop, as MaxText's own does.

:func:`recognise` gives the head's weights, for losses over tiles of the vocabulary; only for heads
whose arithmetic it knows (read in ``apply_output_head``, ``attend_on_embedding`` and
``DenseGeneral`` of MaxText 0.2.3 to 0.2.5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tilepolicy.adapters import maxtext_api as api
from tilepolicy.adapters.maxtext_types import Foreign
from tilepolicy.losses import LossSharding

__all__ = [
    "HeadCall",
    "HeadWeights",
    "has_explicit_axes",
    "linen_head",
    "nnx_head",
    "recognise",
    "token_axes",
]

_TOKEN_AXES: Final = ("activation_embed_and_logits_batch", "activation_length")
_TRAIN: Final = "train"


class _NotOfTheHead:
    """Stands for a parameter that the output head does not use; any use of it is a TypeError."""

    def __repr__(self) -> str:
        return "<a parameter outside of MaxText's output head>"


@dataclass(frozen=True)
class HeadCall:
    """The model's method from hidden states to logits.

    Attributes:
        params: the head's parameters, a list of arrays.
        constants: what else the method needs and nothing differentiates; None for nothing.
        logits: ``(params, hidden chunk, constants) -> logits chunk``; without constants
            ``(params, hidden chunk)``.
        specs: where each of ``params`` lies on the mesh, by mesh axes.
    """

    params: list[jax.Array]
    constants: list[jax.Array] | None
    logits: Callable[..., jax.Array]
    specs: list[PartitionSpec]

    def sharding(self, mesh: Mesh, tokens: PartitionSpec) -> LossSharding | None:
        """For a chunked loss; None on one device."""
        return None if mesh.size == 1 else LossSharding(mesh, tokens, self.specs)


@dataclass(frozen=True)
class HeadWeights:
    """A head of one matmul.

    Attributes:
        hidden: hidden states as the matmul takes them, ``(*tokens, D)``.
        weights: ``(D, V)``, or ``(V, D)`` if ``tied``.
        tied: the head is the embedding table.
        soft_cap: ``soft_cap · tanh(logits / soft_cap)``; None for none.
        logits_dtype: dtype of the logits before they are cast to float32.
        spec: where the weights lie on the mesh.
    """

    hidden: jax.Array
    weights: jax.Array
    tied: bool
    soft_cap: float | None
    logits_dtype: Foreign
    spec: PartitionSpec

    def sharding(self, mesh: Mesh, tokens: PartitionSpec) -> LossSharding | None:
        """For a loss over vocabulary tiles; None on one device."""
        return None if mesh.size == 1 else LossSharding(mesh, tokens, self.spec)


def has_explicit_axes(mesh: Mesh) -> bool:
    """Whether MaxText runs with ``shard_mode: explicit``; tilepolicy's losses cannot."""
    return any(kind != AxisType.Auto for kind in mesh.axis_types)


def token_axes(mesh: Mesh, shape: tuple[int, ...]) -> PartitionSpec:
    """Mesh axes of the batch and length axes of hidden states of this shape."""
    return _divisible(api.physical_spec(mesh, _TOKEN_AXES), shape, mesh)


def nnx_head(model: Foreign, version: str, *, deterministic: bool) -> HeadCall:
    """The head of an NNX model.

    Args:
        model: MaxText's ``Transformer``.
        version: MaxText release.
        deterministic: whether dropout is off.
    """

    def of_head(path: tuple[object, ...], _value: object) -> bool:
        return api.is_output_head(path)

    graphdef, head, others, rest = nnx.split(model, of_head, nnx.Param, ...)
    leaves, tree = jax.tree.flatten(head)
    absent = jax.tree.map(lambda _: _NotOfTheHead(), others)
    rest_leaves, rest_tree = jax.tree.flatten(rest)
    unused = [_NotOfTheHead() for _ in rest_leaves]
    method = api.head_method(version)

    def logits(params: list[jax.Array], hidden: jax.Array, *constants: Foreign) -> jax.Array:
        own_rest = jax.tree.unflatten(rest_tree, constants[0] if constants else unused)
        local = nnx.merge(graphdef, jax.tree.unflatten(tree, params), absent, own_rest, copy=True)
        result: jax.Array = getattr(local, method)(hidden, deterministic, _TRAIN)
        return result

    specs = api.physical_specs(model.mesh, nnx.get_partition_spec(head))
    return HeadCall(
        params=leaves,
        constants=None if deterministic else rest_leaves,
        logits=logits,
        specs=_all_divisible(specs, leaves, model.mesh),
    )


def linen_head(
    model: Foreign, variables: Foreign, version: str, *, deterministic: bool
) -> HeadCall:
    """The head of a Linen model (MaxText 0.2.0 to 0.2.4).

    Args:
        model: MaxText's Linen ``Transformer``.
        variables: ``{"params": …}``.
        version: MaxText release.
        deterministic: whether dropout is off.
    """
    from flax import linen

    paths, tree = jax.tree_util.tree_flatten_with_path({"params": variables["params"]})
    is_head = [api.is_output_head(path) for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    head = [leaf for leaf, own in zip(leaves, is_head, strict=True) if own]
    others = [leaf for leaf, own in zip(leaves, is_head, strict=True) if not own]
    method = api.head_method(version)

    def logits(params: list[jax.Array], hidden: jax.Array, constants: Foreign) -> jax.Array:
        own, other = iter(params), iter(constants)
        merged = jax.tree.unflatten(tree, [next(own if head else other) for head in is_head])
        result: jax.Array = model.apply(
            merged, hidden, deterministic=deterministic, model_mode=_TRAIN, method=method
        )
        return result

    specs = jax.tree.leaves(
        linen.get_partition_spec({"params": variables["params"]}), is_leaf=_is_spec
    )
    own_specs = [spec for spec, own in zip(specs, is_head, strict=True) if own]
    physical = [api.physical_spec(model.mesh, tuple(spec)) for spec in own_specs]
    return HeadCall(head, others, logits, _all_divisible(physical, head, model.mesh))


def recognise(
    model: Foreign, hidden: jax.Array, config: Foreign, version: str, *, deterministic: bool
) -> HeadWeights | str:
    """The weights of an NNX model's head, or why they cannot be told.

    Args:
        model: MaxText's ``Transformer``.
        hidden: hidden states before the final norm, ``(*tokens, D)``.
        config: MaxText's config.
        version: MaxText release.
        deterministic: whether dropout is off.
    """
    if version not in api.SIGNATURES:
        return f"the output head of MaxText {version} is not known here"
    if not deterministic and config.dropout_rate > 0:
        return "there is dropout before the output head"
    if config.parameter_memory_host_offload:
        return "parameters are offloaded to the host"
    normed = model.decoder.decoder_norm(hidden)
    if config.logits_via_embedding:
        return _tied(model, normed, config)
    return _dense(model, normed, config)


def _tied(model: Foreign, normed: jax.Array, config: Foreign) -> HeadWeights:
    """``attend_on_embedding``: the table is rounded to bfloat16, whatever the model's dtype."""
    if config.normalize_embedding_logits:
        normed = normed / jnp.sqrt(normed.shape[-1]).astype(normed.dtype)
    table = model.token_embedder.embedding
    return HeadWeights(
        hidden=normed,
        weights=table.get_value().astype(jnp.bfloat16),
        tied=True,
        soft_cap=config.final_logits_soft_cap or None,
        logits_dtype=jnp.float32 if config.logits_dot_in_fp32 else config.dtype,
        spec=_spec_of(model.mesh, table),
    )


def _dense(model: Foreign, normed: jax.Array, config: Foreign) -> HeadWeights | str:
    dense = model.decoder.logits_dense
    for attribute in ("quant", "bias", "kernel_scale", "weight_quant"):
        if getattr(dense, attribute, None) is not None:
            return f"the output head has {attribute}"
    if config.matmul_precision != "default":
        return f"matmul_precision is {config.matmul_precision}"
    return HeadWeights(
        hidden=normed.astype(dense.dtype),
        weights=dense.kernel.get_value(),
        tied=False,
        soft_cap=None,
        logits_dtype=dense.dtype,
        spec=_spec_of(model.mesh, dense.kernel),
    )


def _spec_of(mesh: Mesh, variable: Foreign) -> PartitionSpec:
    names = nnx.get_partition_spec(nnx.State({"weights": variable}))
    (spec,) = api.physical_specs(mesh, names)
    return _divisible(spec, variable.get_value().shape, mesh)


def _all_divisible(
    specs: list[PartitionSpec], leaves: list[jax.Array], mesh: Mesh
) -> list[PartitionSpec]:
    return [_divisible(spec, leaf.shape, mesh) for spec, leaf in zip(specs, leaves, strict=True)]


def _divisible(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The spec without the axes that do not divide their dimension, as MaxText places arrays."""

    def kept(entry: Foreign, size: int) -> Foreign:
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        shards = 1
        for name in names:
            shards *= mesh.shape[name]
        return entry if size % shards == 0 else None

    entries = [*spec, *[None] * (len(shape) - len(spec))][: len(shape)]
    fitting = [kept(entry, size) for entry, size in zip(entries, shape, strict=True)]
    return PartitionSpec(*fitting)  # type: ignore[no-untyped-call]  # jax leaves it untyped


def _is_spec(node: object) -> bool:
    return node is None or isinstance(node, PartitionSpec | NamedSharding)
