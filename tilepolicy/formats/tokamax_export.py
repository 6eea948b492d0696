"""Tokamax files from concrete tiles: an ``AutotuningResult``, or a directory of caches.

A tile is written under every key with which Tokamax 0.0.17 really looks such a call up: the
forward pass with ``preferred_element_type`` null and given, alone and under autodiff
(``return_residuals``); the backward passes as its VJP makes them, with an empty
``manual_axis_type``, and as a plain call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from tilepolicy.axes import Kernel
from tilepolicy.errors import Problem
from tilepolicy.formats.concrete import ConcreteTile
from tilepolicy.formats.devices import TPU_KINDS, device_directory
from tilepolicy.formats.records import FormatError
from tilepolicy.formats.tokamax_arguments import PASS_DIMENSIONS, short_dtype
from tilepolicy.formats.tokamax_entries import OP_KERNELS, UNMEASURED_MS

__all__ = ["OP_CLASSES", "cache_files", "result_text"]

OP_CLASSES: Final[Mapping[Kernel, str]] = {
    "tokamax_v1": "tokamax._src.ops.ragged_dot.pallas_mosaic_tpu.PallasMosaicTpuRaggedDot",
    "tokamax_v2": "tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_v2.PallasMosaicTpuV2RaggedDot",
}
"""The classes that a result file names; read in 0.0.17."""

_FILES: Final = {kernel: op for op, kernel in OP_KERNELS.items()}
_NO_MANUAL_AXES: Final[Mapping[str, list[str]]] = {"varying": [], "unreduced": [], "reduced": []}


def result_text(tiles: Iterable[ConcreteTile], tokamax_version: str) -> str:
    """The text of an ``AutotuningResult`` file.

    Args:
        tiles: concrete tiles of one device.
        tokamax_version: the release that the file is for.

    Raises:
        FormatError: there is no tile, they are of several devices, or a type has no short name.
    """
    held = list(tiles)
    devices = sorted({tile.device for tile in held})
    if not held:
        raise FormatError(Problem("no-entries", "there is no concrete tile to export"))
    if len(devices) > 1:
        message = f"an AutotuningResult is for one device; the policy has {', '.join(devices)}"
        raise FormatError(Problem("several-devices", message, None, "choose one with --device"))
    data = [
        [{"op": {"__type": OP_CLASSES[tile.kernel]}, "arguments": arguments}, _configs(tile)]
        for tile in held
        for arguments in _arguments(tile)
    ]
    result = {
        "device_kind": TPU_KINDS[devices[0]],
        "data": data,
        "tokamax_version": tokamax_version,
    }
    return json.dumps(result, indent=1) + "\n"


def cache_files(tiles: Iterable[ConcreteTile]) -> dict[str, str]:
    """Cache files: path below the cache's directory to text.

    Raises:
        FormatError: there is no tile, or a type has no short name.
    """
    files: dict[str, dict[str, dict[str, object]]] = {}
    for tile in tiles:
        directory = device_directory(TPU_KINDS[tile.device])
        entries = files.setdefault(f"{directory}/{_FILES[tile.kernel]}.json", {})
        for arguments in _arguments(tile):
            entries[json.dumps(arguments, separators=(",", ":"))] = _configs(tile)
    if not files:
        raise FormatError(Problem("no-entries", "there is no concrete tile to export"))
    return {path: json.dumps(entries, indent=2) + "\n" for path, entries in files.items()}


def _configs(tile: ConcreteTile) -> dict[str, object]:
    """Configuration (JSON text) to a benchmark record; times that nobody measured are huge."""
    median = tile.median_ms
    record = {
        "compile_time_ms": 0.0,
        "lower_time_ms": 0.0,
        "evaluation_times_ms": [UNMEASURED_MS if median is None else median],
        "metadata": {"tilepolicy": f"{'not measured; ' if median is None else ''}{tile.origin}"},
        "peak_memory_mb": None,
    }
    return {json.dumps(dict(tile.config), separators=(",", ":")): record}


def _arguments(tile: ConcreteTile) -> Iterator[dict[str, object]]:
    """The arguments of the calls that a tile is for."""
    lhs_shape, rhs_shape = tile.shape.operands(tile.pass_)
    # Both operands of drhs are activations: the rows and the gradient of the result.
    types = (tile.dtype, tile.weight_dtype if len(rhs_shape) == 3 else tile.dtype)
    try:
        lhs, rhs = (
            f"{short_dtype(name)}[{','.join(map(str, shape))}]"
            for name, shape in zip(types, (lhs_shape, rhs_shape), strict=True)
        )
    except ValueError as error:
        raise FormatError(Problem("bad-dtype", str(error))) from error
    for preferred, residuals, manual in _variants(tile):
        yield {
            "lhs": lhs,
            "rhs": rhs,
            "group_sizes": {"num_groups": tile.shape.g, "total_size": tile.shape.m},
            "ragged_dot_dimension_numbers": PASS_DIMENSIONS[tile.pass_],
            "precision": ["DEFAULT", "DEFAULT"],
            "preferred_element_type": preferred,
            "return_residuals": residuals,
            "activation": None,
            "manual_axis_type": manual,
            "group_offset": None,
            "zero_initialize": False,
            "fuse_gateup_activation": None,
        }


def _variants(tile: ConcreteTile) -> list[tuple[str | None, bool, Mapping[str, object] | None]]:
    """``(preferred_element_type, return_residuals, manual_axis_type)`` of real lookups."""
    match tile.pass_:
        case "fwd":
            return [(p, r, None) for p in (None, tile.dtype) for r in (False, True)]
        case _:
            return [(tile.dtype, False, None), (tile.dtype, False, _NO_MANUAL_AXES)]
