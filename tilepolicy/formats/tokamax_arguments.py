"""The argument grammar of Tokamax's caches: arrays, quantized arrays, group sizes, passes.

Read in tokamax 0.0.17 (``_src/pydantic.py``, ``ops/ragged_dot/base.py``). An array is
``bf16[4096,7168]``; a quantized one ``{"qvalue", "scale", "zero_point", "qtype"}``; one that is
quantized on the fly ``{"value", "qtype", …}``. Group sizes are a list, or their number and sum.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tilepolicy.axes import GmmShape
from tilepolicy.settings import Pass

__all__ = [
    "DTYPES",
    "PASS_DIMENSIONS",
    "Array",
    "GroupSizes",
    "RaggedDotCall",
    "parse_array",
    "parse_group_sizes",
    "parse_ragged_dot",
    "short_dtype",
]

DTYPES: Final[Mapping[str, str]] = {
    "bool": "bool",
    "i2": "int2",
    "i4": "int4",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u2": "uint2",
    "u4": "uint4",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "bf16": "bfloat16",
    "f4_e2m1fn": "float4_e2m1fn",
    "f6_e2m3fn": "float6_e2m3fn",
    "f6_e3m2fn": "float6_e3m2fn",
    "f8_e3m4": "float8_e3m4",
    "f8_e4m3": "float8_e4m3",
    "f8_e8m0fnu": "float8_e8m0fnu",
    "f8_e4m3b11fnuz": "float8_e4m3b11fnuz",
    "f8_e4m3fn": "float8_e4m3fn",
    "f8_e4m3fnuz": "float8_e4m3fnuz",
    "f8_e5m2": "float8_e5m2",
    "f8_e5m2fnuz": "float8_e5m2fnuz",
    "c64": "complex64",
    "c128": "complex128",
}
"""Tokamax's short dtype names to numpy's (``SHORT_DTYPE_NAMES_MAP``)."""

_SHORT: Final = {name: short for short, name in DTYPES.items()}

PASS_DIMENSIONS: Final[Mapping[Pass, Mapping[str, object]]] = {
    "fwd": {
        "dot_dimension_numbers": [[[1], [1]], [[], []]],
        "lhs_ragged_dimensions": [0],
        "rhs_group_dimensions": [0],
    },
    "dlhs": {
        "dot_dimension_numbers": [[[1], [2]], [[], []]],
        "lhs_ragged_dimensions": [0],
        "rhs_group_dimensions": [0],
    },
    "drhs": {
        "dot_dimension_numbers": [[[0], [0]], [[], []]],
        "lhs_ragged_dimensions": [0],
        "rhs_group_dimensions": [],
    },
}
"""``ragged_dot_dimension_numbers`` of each pass."""

_ARRAY: Final = re.compile(r"(\w+)\[((?:\d+(?:,\d+)*)?)\](\{vmap_axes=\[.*\]\})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Array:
    """An array, as a policy sees it.

    Attributes:
        shape: sizes.
        dtype: numpy's name of the element type; of a quantized array, that of its values.
        quantized_to: for an array that is quantized on the fly, the type it becomes.
        batched: whether a ``vmap`` surrounded the call.
    """

    shape: tuple[int, ...]
    dtype: str
    quantized_to: str | None = None
    batched: bool = False


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Group sizes: how many groups, how many rows, and the rows of each group if listed."""

    count: int
    total: int
    listed: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class RaggedDotCall:
    """One call of a grouped matmul.

    Attributes:
        pass_: which pass its dimension numbers are.
        shape: the forward problem behind its operands.
        lhs: left operand of the pass.
        rhs: right operand of the pass.
        group_sizes: its groups.
    """

    pass_: Pass
    shape: GmmShape
    lhs: Array
    rhs: Array
    group_sizes: GroupSizes

    @property
    def argument_facts(self) -> dict[str, str | int]:
        """Dimensions and types of both operands, as a rule of ``ops`` names them."""
        facts: dict[str, str | int] = {}
        for name, array in (("lhs", self.lhs), ("rhs", self.rhs)):
            facts[f"arg.{name}.dtype"] = array.dtype
            facts |= {f"arg.{name}.dim{axis}": size for axis, size in enumerate(array.shape)}
        return facts

    @property
    def facts(self) -> dict[str, str]:
        """``dtype`` (lhs) and ``weight_dtype`` (rhs), as a policy names them."""
        return {"dtype": self.lhs.dtype, "weight_dtype": self.rhs.dtype}


def short_dtype(name: str) -> str:
    """Tokamax's short name of a numpy dtype name: ``bfloat16`` gives ``bf16``.

    Raises:
        ValueError: Tokamax has no short name for it.
    """
    try:
        return _SHORT[name]
    except KeyError:
        raise ValueError(f"Tokamax has no short name for the dtype {name}") from None


def parse_array(value: object) -> Array:
    """Read an array, a quantized array, or one that is quantized on the fly.

    Raises:
        ValueError: not of Tokamax's grammar; the text says what was found.
    """
    if isinstance(value, str):
        return _plain_array(value)
    if isinstance(value, Mapping):
        if "qvalue" in value:
            return parse_array(value["qvalue"])
        if "value" in value:
            array = parse_array(value["value"])
            quantized_to = str(value.get("qtype")).rpartition(".")[2]
            return Array(array.shape, array.dtype, quantized_to, array.batched)
    raise ValueError(f"{_shown(value)} is not an array of the form bf16[4096,7168]")


def _plain_array(text: str) -> Array:
    match = _ARRAY.fullmatch(text)
    if match is None:
        raise ValueError(f"{_shown(text)} is not an array of the form bf16[4096,7168]")
    short, sizes, batched = match.groups()
    if short not in DTYPES:
        raise ValueError(f"{_shown(text)} has the unknown dtype {_shown(short)}")
    shape = tuple(int(size) for size in sizes.split(",") if size)
    return Array(shape, DTYPES[short], batched=batched is not None)


def parse_group_sizes(value: object) -> GroupSizes:
    """Read group sizes: a list of rows, or ``{"num_groups", "total_size"}``.

    Raises:
        ValueError: neither of the two, or not whole numbers.
    """
    if isinstance(value, list) and value and all(_is_count(size) for size in value):
        return GroupSizes(len(value), sum(value), tuple(value))
    if isinstance(value, Mapping) and set(value) == {"num_groups", "total_size"}:
        count, total = value["num_groups"], value["total_size"]
        if _is_count(count) and _is_count(total) and count > 0:
            return GroupSizes(count, total)
    raise ValueError(f"{_shown(value)} is neither a list of group sizes nor their number and sum")


def parse_ragged_dot(arguments: Mapping[str, object]) -> RaggedDotCall:
    """Read the arguments of a grouped matmul; absent fields have Tokamax's defaults.

    Raises:
        ValueError: an operand is missing or malformed, the operands do not fit the pass, or the
            dimension numbers are none of the three passes.
    """
    missing = [name for name in ("lhs", "rhs", "group_sizes") if name not in arguments]
    if missing:
        raise ValueError(f"the arguments have no {' and no '.join(missing)}")
    lhs = parse_array(arguments["lhs"])
    rhs = parse_array(arguments["rhs"])
    groups = parse_group_sizes(arguments["group_sizes"])
    pass_ = _pass(arguments.get("ragged_dot_dimension_numbers"))
    shape = GmmShape.of_operands(pass_, lhs.shape, rhs.shape, groups.count)
    return RaggedDotCall(pass_, shape, lhs, rhs, groups)


def _pass(dimensions: object) -> Pass:
    if dimensions is None:
        return "fwd"
    for pass_, known in PASS_DIMENSIONS.items():
        if dimensions == known:
            return pass_
    raise ValueError(f"the dimension numbers {_shown(dimensions)} are none of fwd, dlhs, drhs")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
