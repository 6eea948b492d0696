"""tpu-inference's tuned tables: Python dicts, told apart by the shape of their keys.

==============================  ===================================================  ============
table                           key                                                  value
==============================  ===================================================  ============
megablox tuned_block_sizes      (m, k, n, groups, local groups, lhs dtype, rhs       (tm, tk, tn)
                                dtype, quant block size); no device
ragged paged attention v3       device > page size > dtypes > heads > length         (pages, rows)
ragged paged attention v2       device > (q dtype, kv dtype, heads, kv heads,        (pages, rows)
                                head dim, page size, tokens, length)
quantized_matmul                (TPU generation, rows, out, in, dtypes)              3 or 4 blocks
fused_moe v1                    (hidden, intermediate, experts, top k, packings,     8 blocks
                                tokens, expert shards); no device
==============================  ===================================================  ============

Megablox tiles become rules for the forward pass: their axes are m, k, n of the forward problem.
The attention and matmul kernels are tpu-inference's own, no Tokamax op takes their blocks as they
stand; RPA's pair is expressed as a starting point for Tokamax's batched RPA, whose blocks count
tokens instead of pages. What no policy field can say is listed as unusable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tilepolicy.axes import GmmShape
from tilepolicy.errors import Place, Problem
from tilepolicy.formats.devices import device_of_kind
from tilepolicy.formats.pytable import Entry, Record, Table, Value, read_tables
from tilepolicy.formats.records import (
    FormatError,
    GmmCall,
    ImportReport,
    MeasuredEntry,
    Unusable,
    merge,
)
from tilepolicy.model.factnames import DTYPES
from tilepolicy.resolution import FactValue

__all__ = ["GMM_OP", "RPA_OP", "read_tpu_inference"]

GMM_OP: Final = "tpu_inference_megablox_gmm"
"""How entries of the megablox table are named; their tiles go to the ``gmm`` part of a policy."""
RPA_OP: Final = "pallas_tpu_batched_rpa"
"""The Tokamax op that RPA entries are starting points for."""

_BLOCK_ROWS: Final = 16
"""Tokamax 0.0.17 takes ``prefill_bq_sz`` in multiples of 16, ``bkv_sz`` in multiples of 128."""
_BLOCK_KV: Final = 128

_HEADS: Final = re.compile(r"q_head-(\d+)_kv_head-(\d+)_head-(\d+)", re.ASCII)
_DTYPES: Final = re.compile(r"q_(\w+?)_kv_(\w+)", re.ASCII)
_LENGTH: Final = re.compile(r"max_model_len-(\d+)-sw-(\w+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Context:
    file: str
    device: str | None

    @property
    def source(self) -> str:
        return f"tpu-inference {self.file}"


def read_tpu_inference(path: Path, *, device: str | None = None) -> ImportReport:
    """Read one table file, or every ``tuned*.py`` below a directory.

    Args:
        path: file or directory.
        device: policy name of the device of tables that name none (megablox, fused MoE).

    Raises:
        FormatError: there is no such file below the directory.
    """
    if not path.is_dir():
        return _read_file(path, device)
    files = sorted(path.rglob("tuned*.py"))
    if not files:
        message = "no file tuned*.py in this directory"
        raise FormatError(Problem("no-entries", message, Place(str(path))))
    return merge(_read_file(file, device) for file in files)


def _read_file(path: Path, device: str | None) -> ImportReport:
    try:
        tables = read_tables(path)
    except FormatError as error:
        return ImportReport(problems=error.problems)
    context = _Context(f"{path.parent.name}/{path.name}", device)
    reports = [_read_table(table, context) for table in tables.values() if table.entries]
    if not any(report.entries or report.unusable for report in reports):
        broken = tuple(problem for table in tables.values() for problem in table.problems)
        message = "no table of a known shape in this file"
        return ImportReport(problems=broken or (Problem("no-entries", message, Place(str(path))),))
    return merge(reports)


def _read_table(table: Table, context: _Context) -> ImportReport:
    entries: list[MeasuredEntry] = []
    unusable: list[Unusable] = []
    problems = list(table.problems)
    for key, value, place in _leaves(table):
        try:
            found = _read_leaf(key, value, place, context)
        except FormatError as error:
            problems.extend(error.problems)
            continue
        if isinstance(found, MeasuredEntry):
            entries.append(found)
        elif found is not None:
            unusable.append(found)
    if not entries and not unusable:
        return ImportReport()
    return ImportReport(tuple(entries), tuple(unusable), tuple(problems))


def _leaves(
    table: Table, above: tuple[Value, ...] = ()
) -> Iterator[tuple[tuple[Value, ...], Value, Place]]:
    """Each innermost entry with the keys that lead to it; a tuple key counts as its parts."""
    for entry in table.entries:
        key = (*above, *_parts(entry))
        if isinstance(entry.value, Table):
            yield from _leaves(entry.value, key)
        else:
            yield key, entry.value, entry.place


def _parts(entry: Entry) -> tuple[Value, ...]:
    if isinstance(entry.key, Record):
        return entry.key.fields
    return entry.key if isinstance(entry.key, tuple) else (entry.key,)


def _read_leaf(
    key: tuple[Value, ...], value: Value, place: Place, context: _Context
) -> MeasuredEntry | Unusable | None:
    blocks = value.fields if isinstance(value, Record) else value
    match key:
        case (int(), int(), int(), int(), int(), str(), str(), int() | None):
            return _megablox(key, blocks, place, context)
        case (str(kind), int(page), str(dtypes), str(heads), str(length)):
            return _rpa_v3(kind, page, (dtypes, heads, length), blocks, place, context)
        case (str(kind), str(), str(), int(), int(), int(), int(), int(), int()):
            return _rpa_v2(kind, key[1:], blocks, place, context)
        case (int(), int(), int(), int(), str(), str()):
            reason = "no Tokamax op multiplies a quantized matrix in these blocks"
            return Unusable("quantized_matmul", f"v{key[0]}", reason, place)
        case (int(), int(), int(), int(), int(), int(), int(), int()):
            reason = "no Tokamax op has the eight blocks of this fused MoE kernel"
            return Unusable("fused_moe", context.device, reason, place)
        case _ if isinstance(value, Record):
            reason = f"policies have no facts for {value.name} of this kernel"
            return Unusable("unknown", context.device, reason, place)
        case _:
            return None


def _blocks(value: object, count: int, place: Place) -> tuple[int, ...]:
    if (
        isinstance(value, tuple)
        and len(value) == count
        and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value)
    ):
        return value
    message = f"the value is not {count} positive whole numbers: {value!r:.80}"
    raise FormatError(Problem("bad-entry", message, place))


def _dtype(name: object, place: Place) -> str:
    if name not in DTYPES:
        raise FormatError(Problem("bad-entry", f"{name!r} is not a known dtype", place))
    return str(name)


def _megablox(
    key: tuple[Value, ...], value: object, place: Place, context: _Context
) -> MeasuredEntry | Unusable:
    m, k, n, groups, local, lhs, rhs, quant_block = key
    tile = _blocks(value, 3, place)
    sizes = _blocks((m, k, n, groups, local), 5, place)
    facts: dict[str, FactValue] = {
        "dtype": _dtype(lhs, place),
        "weight_dtype": _dtype(rhs, place),
    }
    if quant_block not in (k, None):
        reason = "quantized in blocks along k, which policies have no facts for"
        return Unusable(GMM_OP, context.device, reason, place)
    return MeasuredEntry(
        op=GMM_OP,
        device=context.device,
        facts=facts,
        config=dict(zip(("tile_m", "tile_k", "tile_n"), tile, strict=True)),
        place=place,
        source=context.source,
        gmm=GmmCall("megablox", "fwd", GmmShape(m=sizes[0], k=sizes[1], n=sizes[2], g=sizes[4])),
    )


def _rpa_v3(
    kind: str,
    page: int,
    names: tuple[str, str, str],
    value: object,
    place: Place,
    context: _Context,
) -> MeasuredEntry | Unusable:
    dtypes, heads, length = (
        pattern.fullmatch(name)
        for pattern, name in zip((_DTYPES, _HEADS, _LENGTH), names, strict=True)
    )
    if dtypes is None or heads is None or length is None:
        message = f"the keys {', '.join(names)} are not of the form of RPA v3"
        raise FormatError(Problem("bad-entry", message, place))
    q_heads, kv_heads, head_dim = (int(part) for part in heads.groups())
    facts: dict[str, FactValue] = {
        "arg.queries.dtype": _dtype(dtypes[1], place),
        "arg.queries.dim1": q_heads,
        "arg.queries.dim2": head_dim,
        "arg.keys.dim1": kv_heads,
        "arg.kv_cache.dtype": _dtype(dtypes[2], place),
        "arg.kv_cache.dim1": page,
    }
    if length[2].isdigit():
        facts["arg.sliding_window"] = int(length[2])
    return _rpa(kind, page, facts, value, place, context)


def _rpa_v2(
    kind: str, key: tuple[Value, ...], value: object, place: Place, context: _Context
) -> MeasuredEntry | Unusable:
    q_dtype, kv_dtype, q_heads, kv_heads, head_dim, page, tokens, _length = key
    counts = _blocks((q_heads, kv_heads, head_dim, page, tokens), 5, place)
    facts: dict[str, FactValue] = {
        "arg.queries.dtype": _dtype(q_dtype, place),
        "arg.queries.dim0": counts[4],
        "arg.queries.dim1": counts[0],
        "arg.queries.dim2": counts[2],
        "arg.keys.dim1": counts[1],
        "arg.kv_cache.dtype": _dtype(kv_dtype, place),
        "arg.kv_cache.dim1": counts[3],
    }
    return _rpa(kind, counts[3], facts, value, place, context)


def _rpa(
    kind: str,
    page: int,
    facts: dict[str, FactValue],
    value: object,
    place: Place,
    context: _Context,
) -> MeasuredEntry | Unusable:
    """RPA's pair (KV pages, query rows of a block) as Tokamax's blocks, which count tokens."""
    pages, rows = _blocks(value, 2, place)
    device = device_of_kind(kind)
    if device is None:
        raise FormatError(Problem("foreign-device", f"{kind!r} is not a known device", place))
    if rows % _BLOCK_ROWS or pages * page % _BLOCK_KV:
        reason = (
            f"Tokamax's batched RPA takes query blocks in multiples of {_BLOCK_ROWS} "
            f"and KV blocks in multiples of {_BLOCK_KV}"
        )
        return Unusable(RPA_OP, device, reason, place)
    return MeasuredEntry(
        op=RPA_OP,
        device=device,
        facts=facts,
        config={"prefill_bq_sz": rows, "bkv_sz": pages * page},
        place=place,
        source=context.source,
    )
