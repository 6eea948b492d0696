"""Which grouped-matmul path MaxText takes, which settings it reads there, which tiles are legal.

The paths are those of ``RoutedMoE.__call__`` and ``sparse_matmul`` in MaxText's ``layers/moe.py``
and of ``kernels/megablox/ops.py``; read in 0.2.0 to 0.2.5, where a test holds the table against
calls that were really made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

from tilepolicy.axes import kernel_axes
from tilepolicy.resolution import Honoured
from tilepolicy.settings import AXES, SETTINGS, Axis, Layer, Pass, Setting

__all__ = [
    "BACKENDS",
    "Backend",
    "TileFault",
    "backend_of",
    "honoured",
    "illegal_tile",
    "oversized_tile",
    "padding",
]

LANES: Final = 128
SUBLANES: Final = 8
"""The compiler lays arrays out in tiles of 8 rows and 128 columns."""

Backend = Literal[
    "batch_split",
    "dense_moe",
    "megablox",
    "none",
    "ragged_dot",
    "te_moe_block",
    "tokamax_v1",
    "tokamax_v2",
    "tokamax_v2_heuristic",
    "vllm",
]
BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)

_VLLM_ATTENTION: Final = ("vllm_rpa", "vllm_batched_rpa")


def backend_of(values: Mapping[str, object]) -> Backend:
    """The path that MaxText takes for the grouped matmuls of a config.

    Args:
        values: the config; absent keys count as MaxText's defaults.
    """
    if _number(values.get("num_experts")) <= 1:
        return "none"
    if values.get("use_batch_split_schedule") and values.get("decoder_block") == "deepseek":
        return "batch_split"
    if values.get("te_moe_block"):
        return "te_moe_block"
    if values.get("attention") in _VLLM_ATTENTION:
        return "vllm"
    if values.get("sparse_matmul") is False:
        return "dense_moe"
    if values.get("use_tokamax_gmm"):
        if not values.get("use_gmm_v2"):
            return "tokamax_v1"
        heuristic = values.get("use_gmm_v2_heuristic_tiling")
        return "tokamax_v2_heuristic" if heuristic else "tokamax_v2"
    return "ragged_dot" if values.get("megablox") is False else "megablox"


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 1


_NO_KNOBS: Final[Mapping[str, str]] = {
    "batch_split": "the batch-split schedule calls its kernels with fixed tiles",
    "dense_moe": "sparse_matmul is false: the experts are dense einsums without tiles",
    "none": "the model has no mixture of experts (num_experts is 1)",
    "te_moe_block": "TransformerEngine's MoE block brings its own grouped matmul",
    "tokamax_v2_heuristic": "use_gmm_v2_heuristic_tiling lets the kernel calculate its tiles",
    "vllm": "the vLLM attention path uses tpu-inference's fused MoE kernel",
}


def honoured(setting: str, backend: str, facts: Mapping[str, object]) -> Honoured:
    """Who makes a setting take effect on a backend, for the MaxText release in the facts.

    Args:
        setting: name of a setting.
        backend: one of :data:`BACKENDS`.
        facts: facts of the config; ``maxtext``, ``training_objective``, ``num_vocab_tiling``,
            ``custom_mesh_and_rule_for_eval`` and ``eval_tiles_read`` are looked at.
    """
    row = SETTINGS[setting]
    if row.is_tile:
        return _honoured_tile(row, backend, facts)
    if row.since is None:
        return Honoured("apply", "inside tilepolicy.apply or tilepolicy run")
    missing = _not_in_release(row, facts)
    if missing is not None:
        return missing
    if setting == "vocab_tiling_ag_once" and facts.get("num_vocab_tiling") == 1:
        return Honoured(None, "with one vocabulary tile there is nothing to gather once")
    return Honoured("maxtext", "MaxText reads it")


def _not_in_release(row: Setting, facts: Mapping[str, object]) -> Honoured | None:
    release = facts.get("maxtext")
    if row.since is None or not isinstance(release, str):
        return None
    if _release(release) >= _release(row.since):
        return None
    return Honoured(None, f"MaxText {release} has no such key; it came with {row.since}")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


_PADS: Final = "every row count is padded to a multiple of it, whatever the backend"


def _honoured_tile(row: Setting, backend: str, facts: Mapping[str, object]) -> Honoured:
    missing = _not_in_release(row, facts)
    if missing is not None:
        return missing
    if row.phase == "eval" and not facts.get("eval_tiles_read"):
        return Honoured(
            None,
            "evaluation uses the train knobs: custom_mesh_and_rule_for_eval sets no rules that "
            "differ from those of training",
        )
    pads = row.layer == "wi" and row.pass_ == "fwd" and row.axis == "batch_seq"
    if backend in _NO_KNOBS:
        sparse = backend == "tokamax_v2_heuristic"
        why = _NO_KNOBS[backend]
        return (
            Honoured("maxtext", f"only as padding: {_PADS}; {why}")
            if (pads and sparse)
            else Honoured(None, why)
        )
    if backend == "tokamax_v1":
        why = "tokamax chooses the tiles of this call; only tilepolicy's scope reaches them"
        return Honoured("apply", f"{why} ({_PADS})" if pads else why)
    if backend == "ragged_dot":
        return _honoured_ragged_dot(row, facts)
    return Honoured("maxtext", f"{backend} takes it as the tile of this pass")


def _honoured_ragged_dot(row: Setting, facts: Mapping[str, object]) -> Honoured:
    if row.pass_ != "fwd":
        return Honoured(None, "jax.lax.ragged_dot derives its own backward; MaxText tiles only fwd")
    contracts = "embed_dim" if row.layer == "wi" else "mlp_dim"
    if row.axis == contracts and facts.get("quantization") and facts.get("use_qwix_quantization"):
        return Honoured(None, "with qwix quantization the contracted axis is one whole tile")
    return Honoured("maxtext", "a hint to jax.lax.ragged_dot, clamped to the dimension")


class TileFault(NamedTuple):
    """What is wrong with the size of a tile along one axis.

    Attributes:
        axis: the axis.
        message: one sentence without a trailing period.
        remedy: what would be right.
    """

    axis: Axis
    message: str
    remedy: str


def illegal_tile(
    tile: Mapping[str, object],
    backend: str,
    layer: Layer,
    pass_: Pass,
    sizes: Mapping[str, object],
) -> tuple[TileFault, ...]:
    """Why the kernel of a backend refuses a tile; empty if it does not.

    Measured with the v6e compiler (jax 0.12.0, tokamax 0.0.17, MaxText 0.2.5):

    ==================  =====================================  ================================
    backend             batch_seq                              embed_dim, mlp_dim
    ==================  =====================================  ================================
    megablox            divides the padded rows, multiple of   multiple of 128 or the whole
                        8                                      dimension, for the output axis
    tokamax_v1          divides the rows                       multiple of 128 or the whole
                                                               dimension
    tokamax_v2          multiple of 8                          multiple of 128
    ==================  =====================================  ================================

    ``jax.lax.ragged_dot`` clamps what MaxText hints; other paths read no tile.

    Args:
        tile: axis to tile size; fields that are no axes are ignored.
        backend: one of :data:`BACKENDS`.
        layer: layer of the grouped matmul.
        pass_: pass of the grouped matmul.
        sizes: axis to dimension; what depends on a dimension that is not known is not checked.
    """
    faults = [_illegal_axis(axis, tile, backend, layer, pass_, sizes) for axis in AXES]
    return tuple(fault for fault in faults if fault is not None)


def oversized_tile(
    tile: Mapping[str, object], layer: Layer, pass_: Pass, sizes: Mapping[str, object]
) -> tuple[TileFault, ...]:
    """Axes where a tile exceeds its dimension beyond the next multiple of 128.

    The kernels take such a tile and compute on padding: it costs VMEM and time, and is a mistake
    wherever somebody chose it. Up to the next multiple of 128 a tile may exceed its dimension:
    winners that tokamax's maintainers shipped do.

    Args:
        tile: axis to tile size.
        layer: layer of the grouped matmul.
        pass_: pass of the grouped matmul.
        sizes: axis to dimension.
    """
    faults = []
    for axis in AXES:
        size, dimension = tile.get(axis), sizes.get(axis)
        if isinstance(size, int) and isinstance(dimension, int) and size > _round_up(dimension):
            message = (
                f"{axis} tile {size} exceeds the {dimension} of {layer} {pass_} beyond the next "
                "multiple of 128"
            )
            faults.append(TileFault(axis, message, f"use at most {_round_up(dimension)}"))
    return tuple(faults)


def _illegal_axis(
    axis: Axis,
    tile: Mapping[str, object],
    backend: str,
    layer: Layer,
    pass_: Pass,
    sizes: Mapping[str, object],
) -> TileFault | None:
    size, dimension = tile.get(axis), sizes.get(axis)
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return TileFault(axis, f"{axis} tile {size!r} is not a positive integer", "use 1 or more")
    if axis == "batch_seq":
        return _illegal_rows(size, backend, layer, pass_, dimension)
    whole = dimension == size and backend != "tokamax_v2"
    lanes = backend in ("tokamax_v1", "tokamax_v2") or (
        backend == "megablox" and axis == _output_axis(layer, pass_)
    )
    if not lanes or size % LANES == 0 or whole or (dimension is None and backend != "tokamax_v2"):
        return None
    alternative = "" if backend == "tokamax_v2" else f" or the whole dimension {dimension}"
    return TileFault(
        axis,
        f"{backend} takes {axis} tiles of {layer} {pass_} in multiples of 128{alternative}, "
        f"not {size}",
        f"use {_round_up(size)}",
    )


def _output_axis(layer: Layer, pass_: Pass) -> Axis:
    """The axis that is last in the output of a pass, which megablox cuts into whole lanes."""
    return kernel_axes("megablox", layer, pass_)[2]


def _illegal_rows(
    size: int, backend: str, layer: Layer, pass_: Pass, rows: object
) -> TileFault | None:
    """What a kernel has against the batch_seq tile."""
    divides = not isinstance(rows, int) or rows % size == 0
    if backend in ("megablox", "tokamax_v1") and not divides:
        return TileFault(
            "batch_seq",
            f"{backend} needs a batch_seq tile that divides the {rows} padded rows of "
            f"{layer} {pass_}; {size} does not",
            f"use a divisor of {rows}",
        )
    whole = size == rows and backend == "megablox"
    if backend in ("megablox", "tokamax_v2") and size % SUBLANES and not whole:
        return TileFault(
            "batch_seq",
            f"{backend} takes batch_seq tiles of {layer} {pass_} in multiples of 8, not {size}",
            f"use {-(-size // SUBLANES) * SUBLANES}",
        )
    return None


def _round_up(size: int) -> int:
    return -(-size // LANES) * LANES


def padding(rows: int, tile: int) -> tuple[int, float]:
    """Rows that padding to a multiple of the tile adds, and their share of the padded rows.

    Returns:
        Added rows, and per cent of the padded rows: 0.0 when the tile divides the rows.

    Raises:
        ValueError: ``rows`` or ``tile`` is not positive.
    """
    if min(rows, tile) < 1:
        raise ValueError(f"rows and tile must be positive: {rows=}, {tile=}")
    added = -rows % tile
    return added, 100 * added / (rows + added)
