"""Everything of Tokamax that is not public, in one place, with the versions it was read in.

Read in 0.0.14, 0.0.15, 0.0.16 and 0.0.17. Tokamax looks a config up in this order: ``op.config``;
the heuristic is *evaluated*; the overlays of ``AUTOTUNING_CACHE_OVERLAY_STACK``; the shipped
cache; the heuristic is used. Each name below is looked up when the adapter first attaches, and a
missing one is an error that names it and the installed version.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import cache
from types import CodeType, FrameType, ModuleType
from typing import Any, Final

from tilepolicy.axes import Kernel
from tilepolicy.context.callstack import CallOrigin, CallStack
from tilepolicy.errors import AdapterError, MissingLibraryError, Problem
from tilepolicy.installed import installed_version
from tilepolicy.settings import Pass

__all__ = ["LAYERED", "LIBRARY", "OLDEST", "READ_IN", "Upstream", "load"]

LIBRARY: Final = "tokamax"
OLDEST: Final = "0.0.14"
READ_IN: Final = ("0.0.14", "0.0.15", "0.0.16", "0.0.17")

_OP: Final = "tokamax._src.ops.op"
_BATCHING: Final = "tokamax._src.batching"
_BASE: Final = "tokamax._src.ops.ragged_dot.base"
_V1: Final = "tokamax._src.ops.ragged_dot.pallas_mosaic_tpu"
_V2: Final = "tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_v2"
_HLO: Final = "tokamax._src.hlo_utils"
_CONFIG: Final = "tokamax._src.config"
_MOST_ORIGINS: Final = 4096
_PAYLOAD: Final = "tokamax:"
_STACK: Final = "AUTOTUNING_CACHE_OVERLAY_STACK"

LAYERED: Final[Mapping[Kernel, str]] = {
    "tokamax_v1": "tilepolicy.adapters.tokamax_op.LayeredRaggedDot",
    "tokamax_v2": "tilepolicy.adapters.tokamax_op.LayeredRaggedDotV2",
}
"""Import paths of our ops that carry their layer, as payloads name them."""

# (module, attribute) of all that is attached to or called.
_NEEDED: Final = (
    (_OP, _STACK),
    (_OP, "BoundArguments.cached_autotuning_data"),
    (_OP, "BoundArguments.default_config"),
    (_OP, "Op.__call__"),
    (_OP, "Op._get_autotuning_cache_key"),
    (_OP, "Op._get_heuristics_config"),
    (_OP, "Op.get_autotuning_cache"),
    (_BATCHING, "BatchedShapeDtype.vmap_axes"),
    (_BASE, "GroupSizes.repr_value_or_total_size"),
    (_BASE, "GroupSizes.value"),
    (_BASE, "DEFAULT_RAGGED_DOT_DIM_NUMS"),
    (_BASE, "TRANS_RHS_RAGGED_DOT_DIM_NUMS"),
    (_BASE, "RAGGED_CONTRACTING_DOT_DIM_NUMS"),
    (_V1, "PallasMosaicTpuRaggedDot"),
    (_V1, "Config"),
    (_V2, "PallasMosaicTpuV2RaggedDot"),
    (_V2, "Config"),
    (_HLO, "get_kernel_info"),
    (_CONFIG, "ignore_autotuning_cache.config"),
    (_CONFIG, "ignore_autotuning_cache.flag"),
)


@dataclass(frozen=True, slots=True)
class Upstream:
    """The private parts of the installed release.

    Attributes:
        version: the release.
        op_module: module whose global :data:`STACK` lookups read.
        kernels: class of each grouped-matmul op to our name of its kernel.
        passes: dimension numbers of each pass, by the triple that identifies them.
        op_call: code of ``Op.__call__``: frames inside of it are the library's.
        current_source: jax's public function that says which operation it is tracing; it captures
            the running stack where jax is tracing Python code for the first time.
        array: class that stands for an array in lookup keys.
        group_sizes: class that stands for group sizes in lookup keys.
        shipped: shipped caches that were looked up before.
        origins: call origins that were read before, by jax's traceback (compared by its frames).
    """

    version: str
    op_module: ModuleType
    kernels: Mapping[type, Kernel]
    passes: Mapping[object, Pass]
    op_call: CodeType
    current_source: Any
    array: type
    group_sizes: type
    shipped: dict[tuple[object, ...], Mapping[Any, Any]] = field(default_factory=dict)
    origins: dict[object, CallOrigin] = field(default_factory=dict)

    @property
    def stack(self) -> ContextVar[tuple[Any, ...]]:
        """The variable (or what stands in for it) that lookups read now."""
        found: ContextVar[tuple[Any, ...]] = getattr(self.op_module, _STACK)
        return found

    def replace_stack(self, stack: object) -> None:
        """Make lookups read ``stack`` instead."""
        setattr(self.op_module, _STACK, stack)

    def kernel_of(self, op: object) -> Kernel | None:
        """Our name of the kernel behind a grouped-matmul op; None for any other op."""
        if (kernel := self.kernels.get(type(op))) is not None:
            return kernel
        for known, kernel in self.kernels.items():
            if isinstance(op, known):
                return kernel
        return None

    def op_class(self, kernel: Kernel) -> type:
        """Class of the grouped-matmul op behind a kernel."""
        return next(known for known, name in self.kernels.items() if name == kernel)

    def pass_of(self, dimension_numbers: object) -> Pass | None:
        """The pass that dimension numbers stand for."""
        for known, pass_ in self.passes.items():
            if dimension_numbers is known:
                return pass_
        return self.passes.get(dimension_numbers)

    def cached(self, op: Any, device_kind: str, key: Any) -> Any:  # noqa: ANN401 - upstream types
        """The shipped cache's best config for a call, or None."""
        data = self._shipped(op, device_kind).get(key)
        return data.fastest_config if data else None

    def _shipped(self, op: Any, device_kind: str) -> Mapping[Any, Any]:  # noqa: ANN401
        """The shipped cache of an op. Tokamax finds it by a copy of the op: slow, so kept here.

        What distinguishes ops there, besides class and config, is what their fields say.
        """
        names = (f.name for f in fields(op) if f.name not in ("config", "vjp"))
        which = (type(op), device_kind, *(str(getattr(op, name)) for name in names))
        known = self.shipped.get(which)
        if known is None:
            known = self.shipped[which] = op.get_autotuning_cache(device_kind)
        return known

    def heuristic(self, op: Any, key: Any) -> Any:  # noqa: ANN401 - upstream types
        """What the op's heuristic says of a call, or None where the key does not show the call.

        The key of an op that does not override ``_get_autotuning_cache_key`` holds exactly its
        arguments, arrays as ``ShapeDtypeStruct``: enough to bind them again.
        """
        base: Any = self.op_module
        if type(op)._get_autotuning_cache_key is not base.Op._get_autotuning_cache_key:
            return None
        return op._get_heuristics_config(base.BoundArguments(op, key))

    def ignores_cache(self) -> bool:
        """Whether Tokamax is told to skip cache and overlays, and so would skip a policy."""
        option: Any = importlib.import_module(_CONFIG).ignore_autotuning_cache
        scoped = option.config.value
        if isinstance(scoped, bool):
            return scoped
        flags = importlib.import_module("absl.flags").FLAGS
        return bool(flags.is_parsed() and option.flag.value)

    def call_origin(self) -> CallOrigin:
        """Where the operation comes from that jax is tracing."""
        traceback = self.current_source().traceback
        known = self.origins.get(traceback)
        if known is None:
            if len(self.origins) >= _MOST_ORIGINS:
                self.origins.clear()
            known = self.origins[traceback] = self._origin(*traceback.raw_frames())
        return known

    def _origin(self, codes: list[CodeType], offsets: list[int]) -> CallOrigin:
        if any(code is _CALL_ORIGIN for code in codes[:4]):
            # The running stack: jax has nothing of its own to say.
            return CallOrigin(None, remembers_op=False)
        start = next((i + 1 for i, code in enumerate(codes) if code is self.op_call), 0)
        return CallOrigin(CallStack(codes[start:], offsets[start:]), remembers_op=start > 0)

    def running_call(self, op: object) -> FrameType | None:
        """The frame of the op's own ``__call__``, if that is on the Python stack."""
        # Most frames are passed by their globals: f_code raises an audit event, and where a library
        # listens (filelock does) that costs as much as all the rest of a lookup.
        of_module = vars(self.op_module)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if (
                frame.f_globals is of_module
                and frame.f_code is self.op_call
                and frame.f_locals.get("self") is op
            ):
                return frame
            frame = frame.f_back
        return None

    def call_key(self, op: object, pass_: Pass, key: Mapping[str, Any]) -> tuple[object, ...]:
        """What the answer to a lookup of a grouped matmul depends on, equal for equal keys.

        Hashing and comparing Tokamax's own key runs a dozen Python functions. This one is made of
        what those functions compare.
        """
        parts: list[object] = [
            type(op),
            pass_,
            getattr(op, "qdtype", None),
            getattr(op, "num_actual_groups", None),
        ]
        for name, value in key.items():
            kind = type(value)
            if kind is self.array:
                parts += (value.shape, value.dtype, value.vmap_axes)
            elif kind is self.group_sizes:
                parts += (value.value.shape, value.repr_value_or_total_size)
            elif name != "ragged_dot_dimension_numbers":  # The pass stands for these.
                parts.append(value)
        return tuple(parts)

    def op_payloads(self, lowered: object) -> Iterator[Mapping[str, Any]]:
        """Op (with config) and arguments of each Tokamax kernel in a lowered module, as JSON.

        Tokamax's own ``get_opspecs`` builds a validator per op and takes minutes for one step.
        """
        read: Any = importlib.import_module(_HLO)
        for kernel in read.get_kernel_info(lowered, include_xla_kernels=False):
            text = kernel.metadata_payload or kernel.op_name
            # Ops that call ops stack their payloads; the innermost made the kernel.
            start = text.rfind(_PAYLOAD)
            if start >= 0:
                payload, _ = json.JSONDecoder().raw_decode(text, start + len(_PAYLOAD))
                yield payload

    def payload_kernel(self, op: Mapping[str, Any]) -> Kernel | None:
        """Our name of the kernel behind a grouped-matmul op in a payload."""
        for known, kernel in self.kernels.items():
            if op["__type"] in (f"{known.__module__}.{known.__qualname__}", LAYERED[kernel]):
                return kernel
        return None


_CALL_ORIGIN: Final = Upstream.call_origin.__code__


@cache
def load() -> Upstream:
    """Import Tokamax and look everything up.

    Raises:
        MissingLibraryError: Tokamax is not installed.
        AdapterError: the installed release lacks something; the text names it and the release.
    """
    release = installed_version(LIBRARY)
    if release is None:
        raise MissingLibraryError(
            Problem(
                code="missing-library",
                message="tokamax is not installed",
                remedy='pip install "tilepolicy[tokamax]"',
            )
        )
    for module, attribute in _NEEDED:
        _look_up(module, attribute, release)
    op: Any = importlib.import_module(_OP)
    _require_global(op, release)
    base: Any = importlib.import_module(_BASE)
    v1: Any = importlib.import_module(_V1)
    v2: Any = importlib.import_module(_V2)
    return Upstream(
        version=release,
        op_module=op,
        kernels={
            v1.PallasMosaicTpuRaggedDot: "tokamax_v1",
            v2.PallasMosaicTpuV2RaggedDot: "tokamax_v2",
        },
        passes={
            base.DEFAULT_RAGGED_DOT_DIM_NUMS: "fwd",
            base.TRANS_RHS_RAGGED_DOT_DIM_NUMS: "dlhs",
            base.RAGGED_CONTRACTING_DOT_DIM_NUMS: "drhs",
        },
        op_call=op.Op.__call__.__code__,
        current_source=importlib.import_module("jax.extend.source_info_util").current,
        array=importlib.import_module(_BATCHING).BatchedShapeDtype,
        group_sizes=base.GroupSizes,
    )


def _look_up(module: str, attribute: str, release: str) -> None:
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _changed(f"{module}.{attribute}", release) from error


def _require_global(op: Any, release: str) -> None:  # noqa: ANN401 - upstream module
    """Lookups must read the stack as a global of their module: that is what is replaced."""
    code = op.BoundArguments.cached_autotuning_data.fget.__code__
    if _STACK not in code.co_names:
        raise _changed(f"{_OP}.BoundArguments.cached_autotuning_data reading {_STACK}", release)


def _changed(what: str, release: str) -> AdapterError:
    return AdapterError(
        Problem(
            code="tokamax-changed",
            message=f"tokamax {release} has no {what}",
            remedy=f"install a release that this adapter knows: {', '.join(READ_IN)}",
        )
    )
