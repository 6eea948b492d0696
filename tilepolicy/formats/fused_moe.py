"""vLLM's and SGLang's fused-MoE configuration files, as starting points for Tokamax on a GPU.

*Name*: ``E={E},N={N},device_name={D}[,dtype={T}][,block_shape=[n,k]].json``; SGLang puts a space
into ``block_shape`` and may add ``,per_channel_quant=True`` and the suffix ``_down``. E counts the
local experts, N is the intermediate size after tensor parallelism (doubled for ``int4_w4a16``).
*Body*: tokens M as text, to ``BLOCK_SIZE_M BLOCK_SIZE_N BLOCK_SIZE_K GROUP_SIZE_M num_warps
num_stages``. The nearest M by absolute distance is used, the one that comes first in the file on
a tie, so an entry is a range between midpoints.

M counts tokens; Tokamax's rows are tokens times the experts of a token, which the file does not
say and the reader must be told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tilepolicy.errors import Place, Problem
from tilepolicy.facts.devices import normalize_device
from tilepolicy.formats.jsontext import members, parse, read
from tilepolicy.formats.records import FormatError, ImportReport, MeasuredEntry, Unusable, merge
from tilepolicy.resolution import FactValue, SettingValue
from tilepolicy.source.text import SourceText

__all__ = ["FIELDS", "TRITON_OP", "Dialect", "FileName", "parse_name", "read_fused_moe"]

Dialect = Literal["vllm", "sglang"]

TRITON_OP: Final = "triton_ragged_dot"
"""The Tokamax op (0.0.17: ``TritonRaggedDot``) that the entries are starting points for."""

FIELDS: Final[Mapping[str, str]] = {
    "BLOCK_SIZE_M": "block_m",
    "BLOCK_SIZE_N": "block_n",
    "BLOCK_SIZE_K": "block_k",
    "SPLIT_K": "split_k",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
"""Fields that Tokamax's kernel has too. ``GROUP_SIZE_M`` and unknown fields have no counterpart."""

_REQUIRED: Final = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")

_NAME: Final = re.compile(
    r"E=(?P<experts>[1-9]\d*),N=(?P<size>[1-9]\d*),device_name=(?P<device>[^,]+?)"
    r"(?:,dtype=(?P<dtype>[a-z0-9_]+))?"
    r"(?:,block_shape=\[(?P<block>\d+,(?P<space> ?)\d+)\])?"
    r"(?P<channel>,per_channel_quant=True)?(?P<down>_down)?\.json",
    re.ASCII,
)

# dtype in the name to (activations, weights); absent means bfloat16 or float16.
_DTYPES: Final[Mapping[str, tuple[str, str]]] = {
    "fp8_w8a8": ("float8_e4m3fn", "float8_e4m3fn"),
    "int8_w8a8": ("int8", "int8"),
    "int8_w8a16": ("bfloat16", "int8"),
    "int4_w4a16": ("bfloat16", "int4"),
    "float32": ("float32", "float32"),
}


@dataclass(frozen=True, slots=True)
class FileName:
    """What the name of a file says.

    Attributes:
        experts: experts on one device.
        intermediate: MLP size on one device.
        device: the GPU's name.
        dtype: vLLM's word for the element types; None for bfloat16 and float16.
        block_shape: quantization block ``n,k``; None without block quantization.
        down: whether the file is for the second matmul only (SGLang).
    """

    experts: int
    intermediate: int
    device: str
    dtype: str | None
    block_shape: str | None
    down: bool


def parse_name(name: str, dialect: Dialect) -> FileName:
    """Read a file's name.

    Raises:
        FormatError: the name is not one of the dialect's.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        message = f"the name {name!r} is not E=…,N=…,device_name=….json"
        raise FormatError(Problem("bad-name", message, Place(name)))
    if dialect == "vllm" and (match["space"] or match["channel"] or match["down"]):
        message = f"the name {name!r} is SGLang's: a space in block_shape, or its suffixes"
        remedy = "import it with: tilepolicy import sglang"
        raise FormatError(Problem("bad-name", message, Place(name), remedy))
    halves = 2 if match["dtype"] == "int4_w4a16" else 1
    return FileName(
        experts=int(match["experts"]),
        intermediate=int(match["size"]) // halves,
        device=match["device"],
        dtype=match["dtype"],
        block_shape=match["block"],
        down=match["down"] is not None,
    )


def read_fused_moe(path: Path, dialect: Dialect, *, top_k: int) -> ImportReport:
    """Read one file, or every ``E=*.json`` below a directory.

    Args:
        path: file or directory.
        dialect: ``vllm`` or ``sglang``.
        top_k: experts of a token; rows are tokens times this.

    Raises:
        FormatError: there is no such file below the directory.
        ValueError: ``top_k`` is not positive.
    """
    if top_k < 1:
        raise ValueError(f"top_k must be 1 or more, not {top_k}")
    if not path.is_dir():
        return _read_file(path, dialect, top_k)
    # Files for the second matmul only come first: their rules must be tried before the others'.
    files = sorted(path.rglob("E=*.json"), key=lambda file: ("_down" not in file.name, file))
    if not files:
        raise FormatError(
            Problem("no-entries", "no file E=….json in this directory", Place(str(path)))
        )
    return merge(_read_file(file, dialect, top_k) for file in files)


def _read_file(path: Path, dialect: Dialect, top_k: int) -> ImportReport:
    try:
        name = parse_name(path.name, dialect)
        source = read(path)
        value = parse(source)
    except FormatError as error:
        return ImportReport(problems=error.problems)
    if not isinstance(value, dict):
        problem = Problem("bad-format", "the file is not an object", source.place(0))
        return ImportReport(problems=(problem,))
    rows, problems = _rows(source, dialect)
    if problems:
        return ImportReport(problems=tuple(problems))
    if not rows:
        problem = Problem("no-entries", "the file has no entries", source.place(0))
        return ImportReport(problems=(problem,))
    if reason := _no_counterpart(name):
        unusable = tuple(Unusable(TRITON_OP, "gpu", reason, place) for _, _, place in rows)
        return ImportReport(unusable=unusable)
    source_words = f"{dialect} {path.name}"
    return ImportReport(entries=tuple(_entries(rows, name, source_words, top_k)))


type _Row = tuple[int, dict[str, int], Place]
"""Tokens, fields as the file names them, and where the entry stands."""


def _rows(source: SourceText, dialect: Dialect) -> tuple[list[_Row], list[Problem]]:
    rows: list[_Row] = []
    problems: list[Problem] = []
    for member in members(source):
        if member.key == "triton_version" and dialect == "vllm":
            continue
        if not re.fullmatch(r"[1-9]\d{0,9}", member.key, re.ASCII):
            message = f"the key {member.key!r:.40} is not a number of tokens"
            problems.append(Problem("bad-entry", message, member.place))
            continue
        try:
            fields = _fields(member.value, member.place)
        except FormatError as error:
            problems.extend(error.problems)
            continue
        rows.append((int(member.key), fields, member.place))
    return rows, problems


def _fields(value: object, place: Place) -> dict[str, int]:
    if not isinstance(value, dict):
        raise FormatError(Problem("bad-entry", "the entry is not an object", place))
    missing = [name for name in _REQUIRED if name not in value]
    if missing:
        message = f"the entry has no {', '.join(missing)}"
        raise FormatError(Problem("bad-entry", message, place))
    for name in FIELDS:
        number = value.get(name, 1)
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            message = f"{name} is {number!r:.40}, not a positive whole number"
            raise FormatError(Problem("bad-entry", message, place))
    return value


def _no_counterpart(name: FileName) -> str:
    if normalize_device(name.device.replace("_", " ")) != "gpu":
        return f"{name.device} is not a GPU that policies know"
    if name.block_shape is not None:
        return "quantized in blocks, which policies have no facts for"
    if name.dtype is not None and name.dtype not in _DTYPES:
        return f"the element types {name.dtype} have no counterpart in Tokamax's kernel"
    return ""


def _entries(rows: list[_Row], name: FileName, source: str, top_k: int) -> list[MeasuredEntry]:
    """Records of both matmuls of the layer, or of the second only, by ascending tokens.

    The weights of the first are ``[E, hidden, 2 N]`` (gate and up side by side), of the second
    ``[E, N, hidden]``.
    """
    dtype, weight_dtype = _DTYPES.get(name.dtype or "", ("bfloat16", "bfloat16"))
    first = {"arg.rhs.dim2": 2 * name.intermediate}
    second = {"arg.rhs.dim1": name.intermediate}
    in_file_order = [row[0] for row in rows]
    entries = []
    for matmul in (second,) if name.down else (first, second):
        for tokens, fields, place in sorted(rows, key=lambda row: row[0]):
            facts: dict[str, FactValue] = {
                "arg.lhs.dtype": dtype,
                "arg.rhs.dtype": weight_dtype,
                "arg.rhs.dim0": name.experts,
                **matmul,
                "arg.lhs.dim0": _rows_condition(tokens, in_file_order, top_k),
            }
            config: dict[str, SettingValue] = {
                ours: fields[theirs] for theirs, ours in FIELDS.items() if theirs in fields
            }
            entries.append(
                MeasuredEntry(
                    op=TRITON_OP,
                    device="gpu",
                    facts=facts,
                    config=config,
                    place=place,
                    source=f"{source}, {tokens} tokens",
                    kind=name.device.lower(),
                )
            )
    return entries


def _rows_condition(tokens: int, in_file_order: list[int], top_k: int) -> str:
    """The rows for which an entry is the nearest: a condition such as ``"49..192"``."""
    ordered = sorted(in_file_order)
    at = ordered.index(tokens)
    low = _boundary(ordered[at - 1], tokens, in_file_order, top_k) + 1 if at else None
    high = (
        _boundary(tokens, ordered[at + 1], in_file_order, top_k) if at + 1 < len(ordered) else None
    )
    if low is None and high is None:
        return ">=1"
    if low is None:
        return f"<={high}"
    return f">={low}" if high is None else f"{low}..{high}"


def _boundary(left: int, right: int, in_file_order: list[int], top_k: int) -> int:
    """The last row that belongs to the left one of two neighbouring token counts."""
    twice = (left + right) * top_k
    tie_goes_right = in_file_order.index(right) < in_file_order.index(left)
    return (twice - 1) // 2 if tie_goes_right else twice // 2
