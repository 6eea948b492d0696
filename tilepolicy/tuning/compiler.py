"""Ask the real TPU compiler about one grouped matmul, on a machine without a TPU.

:class:`CompileRequest` says what to compile, :class:`CompileVerdict` what came of it; both are
plain data with a JSON form, so that they can cross processes and rest in a journal.
:func:`compile_here` compiles in the calling process, which must have been started with
:data:`OFFLINE_ENVIRONMENT`; everything else goes through :mod:`tilepolicy.tuning.pool`, whose
child processes can be killed when a compile does not end.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from tilepolicy.tuning.kernels import KernelOptions, build_kernel
from tilepolicy.tuning.readback import KernelReadback, find_tile, parse_vmem_error, read_kernels
from tilepolicy.tuning.sites import ITEMSIZES, GmmTile, Site
from tilepolicy.tuning.tpus import tpu

__all__ = [
    "OFFLINE_ENVIRONMENT",
    "CompileRequest",
    "CompileVerdict",
    "Status",
    "compile_here",
]

Status = Literal["fits", "does-not-fit", "rejected", "timeout", "crashed", "failed"]
"""``rejected``: the kernel refuses the tile before compiling. ``failed``: any other error."""

OFFLINE_ENVIRONMENT: Final[Mapping[str, str]] = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "DECOUPLE_GCLOUD": "TRUE",
}
"""Keeps libtpu from looking for a TPU or a metadata server, and MaxText from Google Cloud.

The accelerator type may be any valid one: it does not limit what is compiled for.
"""

type _Traced = Any
"""A traced array, lowered or compiled program of jax, which is imported on demand."""

_VMEM_FLAG: Final = "xla_tpu_scoped_vmem_limit_kib"


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """One kernel to compile.

    Attributes:
        site: the grouped matmul.
        device: normalised name of the TPU, ``v6e``.
        tile: tile by forward axes; None for what the library chooses by itself.
        options: further fields of the kernel's config.
        scoped_vmem_limit_kib: ``--xla_tpu_scoped_vmem_limit_kib``; None for the device's
            default. v2 kernels set their own limit and do not look at it.
    """

    site: Site
    device: str
    tile: GmmTile | None
    options: KernelOptions = field(default_factory=KernelOptions)
    scoped_vmem_limit_kib: int | None = None

    @property
    def identity(self) -> str:
        """Equal for requests that compile the same kernel, whatever layer or phase it serves."""
        site = self.site
        what = [*site.shape, site.pass_, site.dtype, site.weights, site.backend]
        how = [self.device, self.tile, asdict(self.options), self.scoped_vmem_limit_kib]
        return json.dumps([*what, *how])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; :meth:`from_json` is the inverse."""
        return {
            "site": asdict(self.site),
            "device": self.device,
            "tile": list(self.tile) if self.tile is not None else None,
            "options": asdict(self.options),
            "scoped_vmem_limit_kib": self.scoped_vmem_limit_kib,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CompileRequest:
        """The inverse of :meth:`to_json`.

        Raises:
            KeyError, TypeError: the data is not of that form.
        """
        tile = data["tile"]
        return cls(
            site=Site(**data["site"]),
            device=data["device"],
            tile=GmmTile(*tile) if tile is not None else None,
            options=KernelOptions(**data["options"]),
            scoped_vmem_limit_kib=data["scoped_vmem_limit_kib"],
        )


@dataclass(frozen=True, slots=True)
class CompileVerdict:
    """What the compiler said.

    Attributes:
        request: what was asked.
        status: see :data:`Status`.
        message: the library's own words for anything but ``fits``, shortened.
        used_bytes: VMEM of the kernel. For a kernel that does not fit: what it asked for until
            the compiler gave up, which may be less than it needs.
        available_bytes: the VMEM limit that applied.
        compile_seconds: wall time of lowering and compiling; until the kill for a timeout.
        temp_bytes: HBM scratch of the compiled program.
        bytes_accessed: of the whole program: the kernel, the computation of its grid from the
            group sizes, and copies of operands that the kernel wants in another layout.
        roofline_seconds: of the whole program, XLA's ``optimal_seconds``.
        tile: the tile that the kernel carries, by forward axes, as read back from the compiled
            program or from the compiler's error.
        kernel_flops: of the kernel's own estimate.
        kernel_bytes: of the kernel's own estimate.
        input_buffer_count: buffers per input that a v1 kernel carries.
    """

    request: CompileRequest
    status: Status
    message: str = ""
    used_bytes: int | None = None
    available_bytes: int | None = None
    compile_seconds: float = 0.0
    temp_bytes: int | None = None
    bytes_accessed: int | None = None
    roofline_seconds: float | None = None
    tile: GmmTile | None = None
    kernel_flops: int | None = None
    kernel_bytes: int | None = None
    input_buffer_count: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the kernel compiled."""
        return self.status == "fits"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; :meth:`from_json` is the inverse."""
        data = {name: getattr(self, name) for name in self.__slots__}
        data["request"] = self.request.to_json()
        data["tile"] = list(self.tile) if self.tile is not None else None
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CompileVerdict:
        """The inverse of :meth:`to_json`.

        Raises:
            KeyError, TypeError: the data is not of that form.
        """
        values = dict(data)
        values["request"] = CompileRequest.from_json(data["request"])
        values["tile"] = GmmTile(*data["tile"]) if data["tile"] is not None else None
        return cls(**values)


def compile_here(request: CompileRequest) -> CompileVerdict:
    """Compile in this process. Imports jax, tokamax and, for megablox and v2, MaxText.

    Whatever the libraries raise becomes a verdict: a tile that makes a kernel fail is what this
    is asked to find.

    Raises:
        MissingLibraryError: a library that the backend needs is not installed.
        VerifyError: no TPU of that name can be compiled for.
    """
    started = time.perf_counter()
    chip = tpu(request.device)
    site = request.site
    if refusal := _unsupported(site):
        return CompileVerdict(request, "rejected", refusal)
    kernel = build_kernel(site.backend, site.pass_, request.tile, request.options)
    try:
        lowered = _lower(kernel, site, chip.topology)
    except Exception as error:  # noqa: BLE001 - any exception is the kernel's refusal
        return CompileVerdict(
            request, "rejected", _words(error), compile_seconds=time.perf_counter() - started
        )
    try:
        compiled = lowered.compile(compiler_options=_compiler_options(request))
    except Exception as error:  # noqa: BLE001 - any exception is the compiler's verdict
        return _failure(request, error, time.perf_counter() - started)
    return _success(request, compiled, time.perf_counter() - started)


def _unsupported(site: Site) -> str:
    unknown = [name for name in (site.dtype, site.weights) if name not in ITEMSIZES]
    if unknown:
        return (
            f"operands of type {' and '.join(unknown)} are not compiled here: quantised operands "
            "carry scales that the site does not describe"
        )
    return ""


def _lower(kernel: Callable[..., _Traced], site: Site, topology: str) -> _Traced:
    """Trace and lower for one device of the topology, without a backend for it."""
    import numpy as np
    import tokamax
    from jax.experimental import topologies

    jax: Any = importlib.import_module("jax")  # much of it is untyped
    sharding = jax.sharding
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    mesh = sharding.Mesh(np.array(chips.devices[:1]), ("x",))
    whole = sharding.NamedSharding(mesh, sharding.PartitionSpec())
    m, k, n, g = site.shape.m, site.shape.k, site.shape.n, site.shape.g
    operands = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
        for shape, dtype in (
            ((m, k), site.dtype),
            ((g, k, n), site.weights),
            ((g,), "int32"),
            ((m, n), site.dtype),
        )
    ]
    # Without cross_compile tokamax refuses the backward ops: "Not supported on cpu".
    with sharding.use_abstract_mesh(mesh.abstract_mesh), tokamax.config.cross_compile(True):
        traced = jax.jit(kernel).trace(*operands)
        return traced.lower(lowering_platforms=("tpu",))


def _compiler_options(request: CompileRequest) -> dict[str, str | bool] | None:
    if request.scoped_vmem_limit_kib is None:
        return None
    return {_VMEM_FLAG: str(request.scoped_vmem_limit_kib)}


def _failure(request: CompileRequest, error: Exception, seconds: float) -> CompileVerdict:
    exhausted = parse_vmem_error(str(error))
    if exhausted is None:
        return CompileVerdict(request, "failed", _words(error), compile_seconds=seconds)
    return CompileVerdict(
        request,
        "does-not-fit",
        exhausted.sentence,
        used_bytes=exhausted.used_bytes,
        available_bytes=exhausted.available_bytes,
        compile_seconds=seconds,
        tile=find_tile(str(error), request.site.pass_),
    )


def _success(request: CompileRequest, compiled: _Traced, seconds: float) -> CompileVerdict:
    kernels = read_kernels(compiled.as_text())
    if len(kernels) != 1:
        return CompileVerdict(
            request,
            "failed",
            f"the compiled program holds {len(kernels)} grouped-matmul kernels instead of one",
            compile_seconds=seconds,
        )
    kernel = kernels[0]
    costs = compiled.cost_analysis()
    memory = compiled.memory_analysis()
    return CompileVerdict(
        request,
        "fits",
        used_bytes=kernel.vmem_bytes,
        available_bytes=_limit(request, kernel),
        compile_seconds=seconds,
        temp_bytes=int(memory.temp_size_in_bytes),
        bytes_accessed=int(costs["bytes accessed"]),
        roofline_seconds=float(costs["optimal_seconds"]),
        tile=_tile_of(kernel, request),
        kernel_flops=kernel.flops,
        kernel_bytes=kernel.bytes_accessed,
        input_buffer_count=kernel.input_buffer_count,
    )


def _limit(request: CompileRequest, kernel: KernelReadback) -> int:
    if kernel.vmem_limit_bytes is not None:
        return kernel.vmem_limit_bytes
    limit = request.scoped_vmem_limit_kib
    return (limit if limit is not None else tpu(request.device).scoped_vmem_limit_kib) * 1024


def _tile_of(kernel: KernelReadback, request: CompileRequest) -> GmmTile:
    """The tile by forward axes; a v2 kernel does not say that it is dlhs, the request does."""
    if kernel.pass_ is None and request.site.pass_ == "dlhs":
        return GmmTile(kernel.tile.m, kernel.tile.n, kernel.tile.k)
    return kernel.tile


def _words(error: Exception) -> str:
    """What a library said, on one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:299] + "…"
