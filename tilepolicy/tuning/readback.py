"""What the compiler really got: grouped-matmul kernels read back from optimized HLO text.

Every Pallas kernel is one ``tpu_custom_call`` in ``compiled.as_text()``. It carries, as data:

- ``kernel_metadata``: tokamax v1 and megablox write ``xprof_metadata`` (JSON text inside JSON)
  with ``tiling``; the v2 kernels write flat keys (``tiles.tile_m``, ``dims.size_m``, …);
- ``cost_estimate``: the kernel's own flops and bytes;
- ``used_scoped_memory_configs``: bytes of VMEM that the compiler allocated for the kernel;
- for tokamax, ``metadata_payload``: the op with its config.

Read in HLO of jax 0.12.0.1 with libtpu 0.0.52. This module imports neither jax nor anything that
starts processes, so that it can check the text of any compiled program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tilepolicy.axes import GmmShape
from tilepolicy.settings import Pass
from tilepolicy.tuning.sites import GmmTile

__all__ = [
    "KernelReadback",
    "VmemExhausted",
    "find_tile",
    "parse_vmem_error",
    "read_kernels",
]

_TARGET: Final = 'custom_call_target="tpu_custom_call"'
_VMEM_SPACE: Final = "1"
_SHAPE: Final = re.compile(r"\b(?:bf16|f16|f32|f8e\w+|[su]\d+)\[([\d,]*)\]")
_NEXT: Final = re.compile(r"\n(?:  (?:ROOT )?%|\}\n)")
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE: Final = r"([\d.]+)([KMG]?)"
_USED_OF: Final = re.compile(rf"Used {_SIZE} of {_SIZE} vmem")
_SCOPED: Final = re.compile(rf"Scoped allocation with size {_SIZE} and limit {_SIZE}")


@dataclass(frozen=True, slots=True)
class KernelReadback:
    """One grouped-matmul kernel of a compiled program.

    Attributes:
        kernel: ``v1`` (tokamax v1), ``megablox`` or ``v2`` (MaxText's vendored one or tokamax's).
        pass_: ``fwd``, ``dlhs`` or ``drhs``. None for a v2 kernel that is fwd or dlhs: v2 has no
            transposed form, dlhs is a forward product with weights transposed before the call.
        tile: tile by forward axes; for a v2 kernel whose pass is None as if it were fwd.
        shape: the forward problem; for a v2 kernel whose pass is None as if it were fwd.
        flops: the kernel's own estimate.
        bytes_accessed: the kernel's own estimate.
        vmem_bytes: VMEM that the compiler allocated; None if the text does not say.
        vmem_limit_bytes: the limit that the kernel sets itself; None where XLA's own applies.
        input_buffer_count: buffers per input of a v1 kernel; None elsewhere.
        instruction: name of the HLO instruction.
        op_name: the path of jax transformations and scopes that led to the call.
    """

    kernel: str
    pass_: Pass | None
    tile: GmmTile
    shape: GmmShape
    flops: int
    bytes_accessed: int
    vmem_bytes: int | None
    vmem_limit_bytes: int | None
    input_buffer_count: int | None
    instruction: str
    op_name: str


@dataclass(frozen=True, slots=True)
class VmemExhausted:
    """The compiler's verdict that a kernel does not fit.

    Attributes:
        used_bytes: VMEM the kernel asked for, as far as the compiler got.
        available_bytes: the limit it ran into.
        sentence: the compiler's words that say so.
    """

    used_bytes: int
    available_bytes: int
    sentence: str


def read_kernels(hlo_text: str) -> tuple[KernelReadback, ...]:
    """Every grouped-matmul kernel in the text of an optimized HLO module, in order.

    Other TPU custom calls (attention, user kernels) are passed over.

    Raises:
        ValueError: a call looks like a grouped matmul, but its metadata lacks what the kernels of
            the supported releases write.
    """
    kernels = []
    for head, call in _custom_calls(hlo_text):
        metadata = _metadata(call)
        try:
            if "xprof_metadata" in metadata:
                profile = json.loads(metadata["xprof_metadata"])
                if "tiling" in profile:
                    kernels.append(_first_generation(head, call, profile))
            elif "tiles.tile_m" in metadata and "dims.size_group" in metadata:
                kernels.append(_second_generation(head, call, metadata))
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"kernel metadata of an unknown form in {head}: {error!r}") from error
    return tuple(kernels)


def parse_vmem_error(message: str) -> VmemExhausted | None:
    """Used and available bytes of a compile error that says VMEM ran out; None for any other.

    Understands ``Scoped allocation with size 20.00M and limit 16.00M`` (a kernel under the scoped
    limit) and ``Used 65.96M of 63.94M vmem`` (a kernel under the physical size).
    """
    if "memory space vmem" not in message:
        return None
    found = _USED_OF.search(message) or _SCOPED.search(message)
    if found is None:
        return None
    used, used_unit, limit, limit_unit = found.groups()
    return VmemExhausted(_bytes(used, used_unit), _bytes(limit, limit_unit), found.group(0))


def find_tile(message: str, pass_: Pass) -> GmmTile | None:
    """The tile of the kernel that a compile error quotes, by forward axes; None without one.

    Args:
        message: text of the error, which holds the kernel's metadata.
        pass_: the pass that was compiled, which a v2 kernel does not say.
    """
    found = [re.search(rf'tile_{axis}\\*": *(\d+)', message) for axis in "mkn"]
    sizes = tuple(int(match[1]) for match in found if match is not None)
    return _from_walk(sizes, pass_) if len(sizes) == 3 else None


def _custom_calls(text: str) -> Iterator[tuple[str, str]]:
    """(instruction name, text of the instruction) of each TPU custom call."""
    position = text.find(_TARGET)
    while position >= 0:
        following = text.find(_TARGET, position + len(_TARGET))
        start = text.rfind("\n  ", 0, position) + 1
        # The metadata spans lines; the instruction ends where the next one begins.
        end = _NEXT.search(text, position)
        call = text[start : end.start() if end else len(text)]
        name = call.split(" = ", 1)[0].strip().removeprefix("ROOT ").lstrip("%")
        yield name, call
        position = following


def _metadata(call: str) -> Mapping[str, Any]:
    start = call.find("kernel_metadata={")
    if start < 0:
        return {}
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(call, start + len("kernel_metadata="))
    except json.JSONDecodeError:
        # Not JSON: not written by one of the kernels this module knows.
        return {}
    return value if isinstance(value, dict) else {}


def _first_generation(head: str, call: str, profile: Mapping[str, Any]) -> KernelReadback:
    """Of tokamax v1 and megablox: tiling in contraction order, shapes in the operand layouts."""
    walk = tuple(profile["tiling"][f"tile_{axis}"] for axis in "mkn")
    lhs, rhs = _operand_shapes(call)[-2:]
    buffers = profile.get("input_buffer_count")
    if "num_actual_groups" in profile:
        shape = GmmShape(lhs[0], lhs[1], rhs[1], profile["num_actual_groups"])
        pass_: Pass = "drhs"
    else:
        pass_ = "dlhs" if profile["transpose_rhs"] else "fwd"
        contracted = rhs[2] if pass_ == "dlhs" else rhs[1]
        if lhs[1] != contracted:
            # A contracted tile without whole lanes: the compiler hands the lhs over transposed.
            lhs = lhs[::-1]
        shape = GmmShape.of_operands(pass_, lhs, rhs, rhs[0])
    return KernelReadback(
        kernel="v1" if buffers is not None else "megablox",
        pass_=pass_,
        tile=_from_walk(walk, pass_),
        shape=shape,
        input_buffer_count=buffers,
        instruction=head,
        **_common(call),
    )


def _second_generation(head: str, call: str, metadata: Mapping[str, Any]) -> KernelReadback:
    """v2: shapes and tiles as flat keys; tgmm (drhs) never zero-initialises and has no k block."""
    m, k, n, g = (metadata[f"dims.size_{axis}"] for axis in ("m", "k", "n", "group"))
    walk = tuple(metadata[f"tiles.tile_{axis}"] for axis in "mkn")
    pass_: Pass | None = "drhs" if metadata["lhs_cfgs.quant_block_size"] == -1 else None
    return KernelReadback(
        kernel="v2",
        pass_=pass_,
        tile=_from_walk(walk, pass_),
        shape=GmmShape(m, k, n, g),
        input_buffer_count=None,
        instruction=head,
        **_common(call),
    )


def _common(call: str) -> dict[str, Any]:
    cost = _object_after(call, '"cost_estimate":')
    op_name = re.search(r'op_name="([^"]*)"', call)
    return {
        "flops": int(cost["flops"]),
        "bytes_accessed": int(cost["bytes_accessed"]),
        "vmem_bytes": _vmem(call, '"used_scoped_memory_configs":'),
        "vmem_limit_bytes": _vmem(call, '"scoped_memory_configs":'),
        "op_name": op_name.group(1) if op_name else "",
    }


def _vmem(call: str, key: str) -> int | None:
    configs = _object_after(call, key) or ()
    sizes = [int(entry["size"]) for entry in configs if entry["memory_space"] == _VMEM_SPACE]
    return sum(sizes) if sizes else None


def _object_after(call: str, key: str) -> Any:  # noqa: ANN401 - JSON of either form
    start = call.rfind(key)
    if start < 0:
        return None
    value, _ = json.JSONDecoder(strict=False).raw_decode(call, start + len(key))
    return value


def _operand_shapes(call: str) -> list[tuple[int, ...]]:
    start = call.index("operand_layout_constraints={")
    end = call.index("}}", start)
    return [
        tuple(int(size) for size in sizes.split(",") if size)
        for sizes in _SHAPE.findall(call[start:end])
    ]


def _from_walk(walk: tuple[int, ...], pass_: Pass | None) -> GmmTile:
    m, second, third = walk
    return GmmTile(m, third, second) if pass_ == "dlhs" else GmmTile(m, second, third)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
