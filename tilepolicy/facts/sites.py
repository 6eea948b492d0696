"""Sizes of MaxText's grouped matmuls on one device, as ``layers/moe.py`` makes them.

Rows ``m`` of a call, with b × s the tokens that a device routes and k ``num_experts_per_tok``:

=====================================  =========================================================
no expert parallelism                  b·s·k
expert parallelism, all-to-all         int(b·s·k · f) with f = ``ragged_buffer_factor`` if that is
                                       positive, else the worst case min(EP, ``num_experts`` / k)
``use_ring_of_experts``                EP·b·s·k (all tokens of the expert group), s divided by
                                       ``num_moe_token_chunks``; with ``use_ragged_sort`` and a
                                       factor f > 0 at most int(b·s·k · f)
=====================================  =========================================================

Before every call the rows are padded to a multiple of ``wi_tile_fwd_batch_seq``.
The weights of a call are ``[experts / EP, embed, mlp / tensor shards]`` (wi) or the reverse (wo);
``prefuse_moe_weights`` doubles the mlp of wi, ``num_moe_emb_chunks`` divides the embed of wi.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from tilepolicy.configs.values import ConfigValues
from tilepolicy.facts.layout import Layout, Unknown, batch_of
from tilepolicy.settings import Layer, Phase

__all__ = ["SiteSizes", "eval_has_own_rules", "expert_axes", "padded_rows", "site_sizes"]


class SiteSizes(NamedTuple):
    """Sizes of one layer's grouped matmul on one device.

    Attributes:
        rows: rows before padding.
        embed_dim: embedding dimension of the weights.
        mlp_dim: MLP dimension of the weights, both halves of prefused weights counted.
        num_groups: experts of the weights.
        dtype: type of the activations.
        weight_dtype: type of the weights as they enter the call.
        pad_to: the config's ``wi_tile_fwd_batch_seq``, or the evaluation's.
    """

    rows: int | Unknown
    embed_dim: int | Unknown
    mlp_dim: int | Unknown
    num_groups: int | Unknown
    dtype: str | Unknown
    weight_dtype: str | Unknown
    pad_to: object

    def sizes(self) -> Mapping[str, int | str | Unknown]:
        """Fact to size, those that padding does not change."""
        return {
            "rows": self.rows,
            "embed_dim": self.embed_dim,
            "mlp_dim": self.mlp_dim,
            "num_groups": self.num_groups,
            "dtype": self.dtype,
            "weight_dtype": self.weight_dtype,
        }


def padded_rows(rows: int, tile: int) -> int:
    """Rows rounded up to a multiple of the tile (MaxText's ``max_utils.maybe_pad``)."""
    return -(-rows // tile) * tile


def expert_axes(values: ConfigValues) -> tuple[str, ...]:
    """The mesh axes over which MaxText spreads experts (``RoutedMoE.__init__``)."""
    return (
        ("context", "expert") if values.get("custom_mesh_and_rule") == "cp-as-ep" else ("expert",)
    )


def eval_has_own_rules(layout: Layout) -> bool:
    """Whether evaluation runs under axis rules of its own.

    Only then does MaxText read the ``eval_*`` tiles and ``eval_ragged_buffer_factor``
    (``max_utils.is_eval``).
    """
    rules = layout.rules
    return bool(rules["eval"]) and list(rules["eval"]) != list(rules["train"])


def site_sizes(values: ConfigValues, layout: Layout, layer: Layer, phase: Phase) -> SiteSizes:
    """Sizes of a layer's grouped matmul; for experts that are not batch-split or dense.

    Args:
        values: the config.
        layout: the config's devices, mesh and rules.
        layer: ``wi`` or ``wo``.
        phase: ``train`` or ``eval``.
    """
    own = phase == "eval" and eval_has_own_rules(layout)
    dtype = _operand_dtype(values)
    return SiteSizes(
        rows=_rows(values, layout, phase, own_factor=own),
        embed_dim=_embed_dim(values, layout, layer, phase),
        mlp_dim=_mlp_dim(values, layout, layer, phase),
        num_groups=_groups(values, layout, phase),
        dtype=dtype,
        weight_dtype=dtype,
        pad_to=values.get("eval_wi_tile_fwd_batch_seq" if own else "wi_tile_fwd_batch_seq"),
    )


def _operand_dtype(values: ConfigValues) -> str | Unknown:
    """Both operands are cast to ``dtype``; under quantization its rule decides."""
    if values.get("quantization"):
        return Unknown(("quantization",))
    dtype = values.get("dtype")
    return dtype if isinstance(dtype, str) else Unknown(("dtype",))


def _scale(values: ConfigValues, part: str) -> int:
    """The factor that ``global_parameter_scale`` (a power of two) gives a dimension."""
    scale = values.get("global_parameter_scale")
    log = scale.bit_length() - 1 if isinstance(scale, int) and scale > 0 else 0
    base, rest = divmod(log, 3)
    return 1 << (base + int(rest > (1 if part == "emb" else 0)))


def _count(values: ConfigValues, key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _weight_axes(values: ConfigValues, layout: Layout, phase: Phase) -> tuple[tuple[str, ...], ...]:
    """Mesh axes that cut (experts, embed, mlp) of wi inside the call; wo is the same, reversed.

    ``get_routed_moe_shardings``: weights that are gathered within the call end up whole.
    """
    if values.get("shard_exp_on_fsdp"):
        return layout.axes_of((None, None, "mlp_no_fsdp"), phase)
    if values.get("use_2d_fsdp_sharding"):
        return layout.axes_of((None, "mlp_no_fsdp", None), phase)
    axes = layout.axes_of(("exp", None, "mlp_no_fsdp"), phase)
    return tuple(tuple(axis for axis in names if axis != "fsdp") for names in axes)


def _cut(size: int | None, key: str, axes: tuple[str, ...], layout: Layout) -> int | Unknown:
    shards = layout.shards(axes)
    if size is None:
        return Unknown((key,))
    if isinstance(shards, Unknown):
        return shards
    return size // shards if size % shards == 0 else Unknown((key,))


def _groups(values: ConfigValues, layout: Layout, phase: Phase) -> int | Unknown:
    axes = _weight_axes(values, layout, phase)[0]
    return _cut(_count(values, "num_experts"), "num_experts", axes, layout)


def _embed_dim(values: ConfigValues, layout: Layout, layer: Layer, phase: Phase) -> int | Unknown:
    size = _count(values, "moe_expert_input_dim")
    key = "moe_expert_input_dim"
    if size is None:
        key = "base_emb_dim"
        base = _count(values, key)
        size = base * _scale(values, "emb") if base is not None else None
    chunks = _count(values, "num_moe_emb_chunks")
    if chunks is not None and layer == "wi" and size is not None:
        size //= chunks
    # With 2d fsdp, wo is cut along its first dimension, mlp; wi along embed.
    axes = _weight_axes(values, layout, phase)[1] if layer == "wi" else ()
    return _cut(size, key, axes, layout)


def _mlp_dim(values: ConfigValues, layout: Layout, layer: Layer, phase: Phase) -> int | Unknown:
    size = _count(values, "padded_base_moe_mlp_dim")
    key = "padded_base_moe_mlp_dim"
    if size is None:
        key = "base_moe_mlp_dim" if _count(values, "base_moe_mlp_dim") else "base_mlp_dim"
        base = _count(values, key)
        size = base * _scale(values, "mlp") if base is not None else None
    position = 1 if values.get("use_2d_fsdp_sharding") and layer == "wo" else 2
    local = _cut(size, key, _weight_axes(values, layout, phase)[position], layout)
    prefused = layer == "wi" and values.get("prefuse_moe_weights")
    return local if isinstance(local, Unknown) or not prefused else 2 * local


def _rows(values: ConfigValues, layout: Layout, phase: Phase, *, own_factor: bool) -> int | Unknown:
    per_token = _count(values, "num_experts_per_tok")
    experts = _count(values, "num_experts")
    parallelism = layout.shards(expert_axes(values))
    if isinstance(parallelism, Unknown):
        return parallelism
    tokens = _routed_tokens(values, layout, phase, replicate=parallelism == 1)
    if isinstance(tokens, Unknown):
        return tokens
    if per_token is None or experts is None:
        return Unknown(("num_experts_per_tok",))
    factor = values.get("eval_ragged_buffer_factor" if own_factor else "ragged_buffer_factor")
    factor = factor if isinstance(factor, int | float) else -1.0
    local = tokens * per_token
    if values.get("use_ring_of_experts"):
        return _ring_rows(values, local, parallelism, factor)
    if parallelism == 1:
        return local
    if factor > 0:
        return int(local * factor)
    return int(local * min(parallelism, experts / per_token))


def _ring_rows(values: ConfigValues, local: int, parallelism: int, factor: float) -> int:
    chunks = _count(values, "num_moe_token_chunks") or 1
    local //= chunks
    if values.get("use_ragged_sort") and factor > 0:
        return min(int(local * factor), local * parallelism)
    return local * parallelism


def _routed_tokens(
    values: ConfigValues, layout: Layout, phase: Phase, *, replicate: bool
) -> int | Unknown:
    """Tokens that a device hands to its router: its share of the batch times of the sequence."""
    batch_axes, length_axes, _ = layout.axes_of(
        ("activation_batch", "activation_norm_length", None), phase
    )
    batch = _local_batch(values, layout, phase, batch_axes, replicate=replicate)
    length = _count(values, "max_target_length")
    sequence = _cut(length, "max_target_length", length_axes, layout)
    if isinstance(batch, Unknown):
        return batch
    return sequence if isinstance(sequence, Unknown) else batch * sequence


def _local_batch(
    values: ConfigValues,
    layout: Layout,
    phase: Phase,
    axes: tuple[str, ...],
    *,
    replicate: bool,
) -> int | Unknown:
    per_device = batch_of(values, phase)
    if per_device is None:
        return Unknown(("per_device_batch_size",))
    # Each replica of diloco has its own part of the batch, whatever the rules say.
    local = layout.share(per_device, (*axes, "diloco"))
    devices = layout.num_devices
    if isinstance(devices, int) and not isinstance(local, Unknown):
        local = _known_batch(int(devices * per_device), devices, local, per_device, replicate)
    if isinstance(local, Unknown):
        return local
    local = local / _pipeline_microbatches(values, layout)
    if local.denominator == 1 and local >= 1:
        return int(local)
    if isinstance(devices, Unknown) and per_device < 1:
        return devices
    return Unknown(("per_device_batch_size",))


def _known_batch(
    batch: int, devices: int, local: Fraction, per_device: Fraction, replicate: bool
) -> Fraction:
    """The local batch when the global batch is known, which MaxText rounds down to an integer.

    A batch that its mesh axes do not divide is not cut at all, where experts are not parallel.
    """
    shards = devices * per_device / local
    cut = batch / shards
    return Fraction(batch) if cut.denominator != 1 and replicate else cut


def _pipeline_microbatches(values: ConfigValues, layout: Layout) -> int:
    """Into how many parts a pipeline cuts the batch; 1 without a pipeline."""
    stages = layout.mesh.size(("stage",)) or 1
    if stages == 1:
        return 1
    delay = 2 if values.get("pipeline_delay_activation_forwarding") else 1
    return _count(values, "num_pipeline_microbatches") or stages * delay
