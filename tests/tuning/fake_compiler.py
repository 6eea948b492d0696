"""A stand-in for the TPU compiler: decides by the middle of the VMEM bounds, and keeps count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tilepolicy.tuning.compiler import CompileRequest, CompileVerdict
from tilepolicy.tuning.cost import kernel_cost, roofline_seconds
from tilepolicy.tuning.sites import GmmTile
from tilepolicy.tuning.tpus import tpu
from tilepolicy.tuning.vmem import vmem_bounds, vmem_limit

STOCK = GmmTile(128, 128, 128)


class FakeTpuCompiler:
    """Callable in the place of ``compile_many``.

    Attributes:
        requests: everything that was compiled, in order.
        verdicts: verdicts for particular tiles, instead of the rule.
        interrupt_after: raise KeyboardInterrupt after this many verdicts.
    """

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.requests: list[CompileRequest] = []
        self.statuses: dict[GmmTile, str] = {}
        self.interrupt_after = interrupt_after

    def __call__(
        self,
        requests: Iterable[CompileRequest],
        *,
        jobs: int,
        timeout_seconds: float,
        backend: str,
    ) -> Iterator[CompileVerdict]:
        """One verdict for each request, in order."""
        del jobs, timeout_seconds, backend
        for request in requests:
            if self.interrupt_after is not None and len(self.requests) >= self.interrupt_after:
                raise KeyboardInterrupt
            self.requests.append(request)
            yield self.verdict(request)

    def verdict(self, request: CompileRequest) -> CompileVerdict:
        """Fits when the middle of the bounds does; a library's own tile is 128x128x128."""
        tile = request.tile or STOCK
        site, chip = request.site, tpu(request.device)
        limit = vmem_limit(site.backend, chip, request.scoped_vmem_limit_kib)
        used = sum(vmem_bounds(site, tile, request.options)) // 2
        if (status := self.statuses.get(tile)) is not None:
            return CompileVerdict(request, status, "as the test says", compile_seconds=1.0)  # type: ignore[arg-type]  # the test knows the words
        if used > limit:
            return CompileVerdict(
                request,
                "does-not-fit",
                f"Scoped allocation with size {used} and limit {limit}",
                used_bytes=used,
                available_bytes=limit,
                compile_seconds=2.0,
                tile=tile,
            )
        cost = kernel_cost(site.shape, site.pass_, tile)
        return CompileVerdict(
            request,
            "fits",
            used_bytes=used,
            available_bytes=limit,
            compile_seconds=1.0,
            temp_bytes=4096,
            bytes_accessed=cost.bytes_accessed + 1024,
            roofline_seconds=roofline_seconds(cost, chip),
            tile=tile,
            kernel_flops=cost.flops,
            kernel_bytes=cost.bytes_accessed,
            input_buffer_count=2 if site.backend == "tokamax_v1" else None,
        )
