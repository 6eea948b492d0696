"""Compile a fixed sample of tiles and record how much VMEM each kernel really takes.

    python scripts/calibrate_vmem.py tests/tuning/vmem_calibration.json

The sample covers every device, kernel and pass; half of it lies near the limit. Compiles are kept
in FILE.journal, so that an interrupted run goes on. ``tests/tuning/test_vmem.py`` holds the bounds
of ``tilepolicy.tuning.vmem`` against the result.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tilepolicy.files import write_atomically
from tilepolicy.settings import PASSES, Pass
from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.candidates import candidate_tiles
from tilepolicy.tuning.compiler import CompileRequest, CompileVerdict
from tilepolicy.tuning.journal import Journal, library_versions
from tilepolicy.tuning.kernels import KernelOptions
from tilepolicy.tuning.sites import Backend, GmmTile, Site
from tilepolicy.tuning.tpus import TPUS
from tilepolicy.tuning.vmem import vmem_bounds, vmem_limit

_SEED: Final = 20261130
_SHAPES: Final = (
    (8192, 2048, 1024, 8),
    (8192, 7168, 2048, 16),
    (16384, 2880, 2880, 8),
    (8192, 4096, 1536, 16),
    (4096, 768, 2048, 32),
    (8192, 1024, 7168, 8),
)
_PER_PASS: Final[dict[Backend, int]] = {"tokamax_v1": 6, "megablox": 3, "tokamax_v2": 3}
_FREE_LIMIT_KIB: Final = 57344
_LARGEST_BYTES: Final = 44 * 2**20
"""Larger tiles take minutes to compile and tell nothing new."""


def sample() -> Iterator[CompileRequest]:
    """The requests, in a mixed order, so that an interrupted run has some of each kind."""
    rng = random.Random(_SEED)  # noqa: S311 - a sample, not a secret
    requests = [
        _request(rng, device, backend, pass_, near_the_limit=number % 2 == 0)
        for device in TPUS
        for backend, count in _PER_PASS.items()
        for pass_ in PASSES
        for number in range(count)
    ]
    rng.shuffle(requests)
    yield from requests


def _request(
    rng: random.Random, device: str, backend: Backend, pass_: Pass, *, near_the_limit: bool
) -> CompileRequest:
    m, k, n, g = rng.choice(_SHAPES)
    dtype = "float32" if backend != "tokamax_v2" and rng.random() < 0.15 else "bfloat16"
    site = Site("wi", pass_, m, k, n, g, dtype=dtype, backend=backend)
    buffers = rng.choice((None, None, 3, 4)) if backend == "tokamax_v1" else None
    options = KernelOptions(input_buffer_count=buffers)
    tiles = [tile for tile in candidate_tiles(site) if _wanted(site, tile, options)]
    if near_the_limit and backend != "tokamax_v2":
        limit = vmem_limit(backend, TPUS[device])
        tiles.sort(key=lambda tile: abs(vmem_bounds(site, tile, options)[0] - limit))
        return CompileRequest(site, device, rng.choice(tiles[:12]), options)
    limit_kib = None if backend == "tokamax_v2" else _FREE_LIMIT_KIB
    return CompileRequest(site, device, rng.choice(tiles), options, limit_kib)


def _wanted(site: Site, tile: GmmTile, options: KernelOptions) -> bool:
    return 2 * 2**20 < vmem_bounds(site, tile, options)[0] < _LARGEST_BYTES


def row(verdict: CompileVerdict) -> dict[str, Any]:
    """One compile, as the test reads it."""
    request = verdict.request
    site = request.site
    return {
        "device": request.device,
        "backend": site.backend,
        "pass": site.pass_,
        "dtype": site.dtype,
        "shape": [site.batch_seq, site.embed_dim, site.mlp_dim, site.num_groups],
        "tile": list(request.tile or ()),
        "input_buffer_count": request.options.input_buffer_count,
        "scoped_vmem_limit_kib": request.scoped_vmem_limit_kib,
        "status": verdict.status,
        "used_bytes": verdict.used_bytes,
    }


def main() -> None:
    """Compile what is missing and write the file."""
    output = Path(sys.argv[1])
    requests = list(sample())

    def tell(verdict: CompileVerdict, done: int, total: int, *, known: bool) -> None:
        del known
        print(f"[{done}/{total}] {row(verdict)}", file=sys.stderr, flush=True)

    with Journal(output.with_name(output.name + ".journal")) as journal:
        verdicts = Compiler(timeout_seconds=240, journal=journal, progress=tell).verdicts(requests)
        rows = [row(verdicts[request.identity]) for request in requests]
        rows.sort(key=json.dumps)
        lines = ",\n".join(json.dumps(r) for r in rows)
        head = json.dumps(library_versions())
        write_atomically(output, f'{{"libraries": {head},\n"compiles": [\n{lines}\n]}}\n')
        journal.discard()


if __name__ == "__main__":
    main()
