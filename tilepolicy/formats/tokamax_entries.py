"""One benchmark entry of Tokamax to a record: shared by cache files and result files.

An entry is the arguments of a call and, for each configuration that was tried, its benchmark
record ``{compile_time_ms, lower_time_ms, evaluation_times_ms[], metadata{}, peak_memory_mb}``.
The winner is the configuration with the lowest median of ``evaluation_times_ms``, as Tokamax
itself chooses. The outcomes without a tile (no configuration, only a failed one, a kernel that
computes its own tiles) are reported, not dropped.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tilepolicy.axes import KERNEL_EXTRA_FIELDS, Kernel
from tilepolicy.errors import Place, Problem
from tilepolicy.formats.jsontext import parse_inner
from tilepolicy.formats.records import FormatError, GmmCall, MeasuredEntry, Unusable
from tilepolicy.formats.tokamax_arguments import RaggedDotCall, parse_ragged_dot
from tilepolicy.resolution import SettingValue

__all__ = [
    "OP_KERNELS",
    "RAGGED_DOT_OPS",
    "UNMEASURED_MS",
    "DlhsNames",
    "EntryContext",
    "exchange_names",
    "fits_only_exchanged",
    "is_v1_dlhs",
    "op_file_name",
    "read_entry",
]

DlhsNames = Literal["auto", "forward", "contracting-first"]
"""What ``tile_k`` and ``tile_n`` of a v1 dlhs entry mean.

Up to 0.0.12 Tokamax's v1 kernel took ``tile_k`` of the dlhs pass for the contracting axis
(n of the forward problem); from 0.0.13 on it is k of the forward problem. The caches of TPU7x and
TPU v5 lite that 0.0.17 ships still have dlhs entries of the first kind.
"""

OP_KERNELS: Final[Mapping[str, Kernel]] = {
    "pallas_mosaic_tpu_ragged_dot": "tokamax_v1",
    "pallas_mosaic_tpu_v2_ragged_dot": "tokamax_v2",
}
"""Ops whose tiles the ``gmm`` part of a policy says."""

RAGGED_DOT_OPS: Final = frozenset(
    {
        *OP_KERNELS,
        "pallas_mosaic_gpu_ragged_dot",
        "pallas_triton_ragged_dot",
        "ragged_dot",
        "triton_ragged_dot",
    }
)
"""Ops whose calls are grouped matmuls."""

UNMEASURED_MS: Final = 1e9
"""What an exported entry has in place of a time that nobody measured: slower than any real one.

Tokamax's files have no word for "not measured"; an empty list of times makes it divide by zero.
"""

_TILES: Final = ("tile_m", "tile_k", "tile_n")
_LANES: Final = 128


@dataclass(frozen=True, slots=True)
class EntryContext:
    """What all entries of one file share.

    Attributes:
        op: the op's class name in snake case.
        device: policy name of the device.
        kind: the device as the file names it, in the form of a cache directory.
        source: the origin's words.
    """

    op: str
    device: str | None
    kind: str
    source: str


def op_file_name(class_name: str) -> str:
    """Tokamax's file name of an op class: ``_`` before each capital but the first, lower case."""
    return re.sub(r"(?!^)([A-Z])", r"_\1", class_name).lower()


def read_entry(
    arguments: object, configs: object, place: Place, context: EntryContext
) -> MeasuredEntry | Unusable:
    """Make a record of one entry.

    Args:
        arguments: the parsed arguments of the call.
        configs: configuration (JSON text) to benchmark record.
        place: where the entry stands.
        context: what the file says of all of its entries.

    Raises:
        FormatError: the entry is malformed.
    """
    if not isinstance(arguments, dict):
        raise FormatError(Problem("bad-entry", "the arguments are not an object", place))
    if not isinstance(configs, dict):
        raise FormatError(Problem("bad-entry", "the configurations are not an object", place))
    if context.op not in RAGGED_DOT_OPS:
        return _unusable("policies have no facts for the calls of this op", place, context)
    call = _call(arguments, place)
    if not configs:
        return _unusable("no usable configuration was found when it was tuned", place, context)
    config, record, median = _winner(configs, place)
    if config is None:
        return _unusable("every configuration that was tried failed", place, context)
    fields = _tile_fields(context.op, config, place)
    if reason := _no_tile(context.op, fields, call):
        return _unusable(reason, place, context)
    kernel = OP_KERNELS.get(context.op)
    return MeasuredEntry(
        op=context.op,
        device=context.device,
        facts=call.argument_facts if kernel is None else call.facts,
        config=fields,
        place=place,
        source=context.source,
        kind=context.kind,
        gmm=None if kernel is None else GmmCall(kernel, call.pass_, call.shape),
        median_ms=None if median >= UNMEASURED_MS else median,
        arguments=arguments,
        record=record,
    )


def exchange_names(config: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
    """A v1 dlhs configuration with ``tile_k`` and ``tile_n`` exchanged."""
    other = {"tile_k": "tile_n", "tile_n": "tile_k"}
    exchanged = {other.get(name, name): value for name, value in config.items()}
    return {name: exchanged[name] for name in config}


def is_v1_dlhs(entry: MeasuredEntry) -> bool:
    """Whether an entry is one whose field names changed their meaning with 0.0.13."""
    gmm = entry.gmm
    return gmm is not None and gmm.kernel == "tokamax_v1" and gmm.pass_ == "dlhs"


def fits_only_exchanged(entry: MeasuredEntry) -> bool:
    """Whether a v1 dlhs entry makes sense only if ``tile_k`` is the contracting axis.

    A tile never exceeds its dimension rounded up to 128 lanes; where the names as they stand
    break this and the exchanged ones do not, the entry is from a release up to 0.0.12.
    """
    if not is_v1_dlhs(entry) or entry.gmm is None:
        return False
    tile_k, tile_n = entry.config.get("tile_k"), entry.config.get("tile_n")
    if not isinstance(tile_k, int) or not isinstance(tile_n, int):
        return False
    most_k, most_n = _rounded_up(entry.gmm.shape.k), _rounded_up(entry.gmm.shape.n)
    as_named = tile_k <= most_k and tile_n <= most_n
    return not as_named and tile_n <= most_k and tile_k <= most_n


def _rounded_up(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _unusable(reason: str, place: Place, context: EntryContext) -> Unusable:
    return Unusable(context.op, context.device, reason, place)


def _call(arguments: dict[str, object], place: Place) -> RaggedDotCall:
    try:
        return parse_ragged_dot(arguments)
    except ValueError as error:
        raise FormatError(Problem("bad-entry", str(error), place)) from error


def _winner(
    configs: dict[str, object], place: Place
) -> tuple[dict[str, object] | None, dict[str, object], float]:
    """The configuration with the lowest median, its record, and the median in milliseconds."""
    best: tuple[dict[str, object] | None, dict[str, object], float] = (None, {}, math.inf)
    for text, record in configs.items():
        config = parse_inner(text, "fields of the configuration", place)
        if not isinstance(config, dict):
            raise FormatError(Problem("bad-entry", "a configuration is not an object", place))
        if not isinstance(record, dict):
            raise FormatError(Problem("bad-entry", "a benchmark record is not an object", place))
        median = _median(record, place)
        if median is not None and median < best[2]:
            best = (config, record, median)
    return best


def _median(record: dict[str, object], place: Place) -> float | None:
    times = record.get("evaluation_times_ms")
    if not isinstance(times, list) or not all(
        isinstance(time, int | float) and not isinstance(time, bool) and time >= 0 for time in times
    ):
        message = "a benchmark record has no evaluation_times_ms, a list of milliseconds"
        raise FormatError(Problem("bad-entry", message, place))
    return float(statistics.median(times)) if times else None


def _no_tile(op: str, fields: Mapping[str, SettingValue], call: RaggedDotCall) -> str:
    """Why this winner gives no tile; empty when it gives one."""
    if op == "ragged_dot":
        return "measured XLA's own ragged_dot, which has no tiles"
    if op in OP_KERNELS and any(name not in fields for name in _TILES):
        return "the winner is the kernel's own heuristic (tiles are null)"
    if call.lhs.batched or call.rhs.batched:
        return "measured inside vmap, which policies have no facts for"
    if call.lhs.quantized_to is not None:
        return f"the rows are quantized on the fly to {call.lhs.quantized_to}"
    if op not in OP_KERNELS and call.pass_ == "dlhs" and call.shape.k == call.shape.n:
        return "k equals n, so that the arguments of dlhs look like those of fwd"
    return ""


def _tile_fields(op: str, config: dict[str, object], place: Place) -> dict[str, SettingValue]:
    kernel = OP_KERNELS.get(op)
    known = None if kernel is None else {*_TILES, *KERNEL_EXTRA_FIELDS[kernel]}
    fields: dict[str, SettingValue] = {}
    for name, value in config.items():
        if known is not None and name not in known:
            message = f"{op} has no field {name}; its fields are {', '.join(sorted(known))}"
            raise FormatError(Problem("bad-entry", message, place))
        if value is None:
            continue
        if not isinstance(value, bool | int | float | str):
            message = f"the field {name} of a configuration is not a plain value"
            raise FormatError(Problem("bad-entry", message, place))
        if name.startswith("tile_") and (isinstance(value, bool) or not _is_positive(value)):
            message = f"{name} is {value!r}, not a positive whole number"
            raise FormatError(Problem("bad-entry", message, place))
        fields[name] = value
    if kernel == "tokamax_v1":
        # Its tiles cannot be null: an absent one is the default of its config class.
        return {**dict.fromkeys(_TILES, _LANES), **fields}
    return fields


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and value > 0
