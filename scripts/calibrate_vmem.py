"""Compile a sample of tiles and record how much VMEM each kernel really takes.

    python scripts/calibrate_vmem.py tests/tuning/vmem_calibration.json [--add N]

The tiles of an existing file are compiled again, say after an update of libtpu; ``--add`` draws
N more at random, every other one near the limit. Compiles are kept in FILE.journal, so that an
interrupted run goes on. ``tests/tuning/test_vmem.py`` holds the bounds of
``tilepolicy.tuning.vmem`` against the result.
"""

from __future__ import annotations

import argparse
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
_BACKENDS: Final[tuple[Backend, ...]] = ("tokamax_v1", "tokamax_v1", "megablox", "tokamax_v2")
_FREE_LIMIT_KIB: Final = 57344
_LARGEST_BYTES: Final = 44 * 2**20
"""Larger tiles take minutes to compile and tell nothing new."""


def sample(count: int) -> Iterator[CompileRequest]:
    """Requests at random; other kernels, candidates or bounds draw others."""
    rng = random.Random(_SEED)  # noqa: S311 - a sample, not a secret
    for number in range(count):
        device, backend = rng.choice(tuple(TPUS)), rng.choice(_BACKENDS)
        yield _request(rng, device, backend, rng.choice(PASSES), near_the_limit=number % 2 == 0)


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


def request_of(data: dict[str, Any]) -> CompileRequest:
    """The request of a row: the inverse of :func:`row`."""
    site = Site("wi", data["pass"], *data["shape"], dtype=data["dtype"], backend=data["backend"])
    options = KernelOptions(input_buffer_count=data["input_buffer_count"])
    limit = data["scoped_vmem_limit_kib"]
    return CompileRequest(site, data["device"], GmmTile(*data["tile"]), options, limit)


def main() -> None:
    """Compile what is missing and write the file."""
    parser = argparse.ArgumentParser(description="VMEM that kernels really take.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--add", type=int, default=0)
    arguments = parser.parse_args()
    output: Path = arguments.file
    requests = list(sample(arguments.add))
    if output.exists():
        requests += [request_of(data) for data in json.loads(output.read_text())["compiles"]]

    def tell(verdict: CompileVerdict, done: int, total: int, *, known: bool) -> None:
        del known
        print(f"[{done}/{total}] {row(verdict)}", file=sys.stderr, flush=True)

    with Journal(output.with_name(output.name + ".journal")) as journal:
        verdicts = Compiler(timeout_seconds=240, journal=journal, progress=tell).verdicts(requests)
        lines = ",\n".join(sorted(json.dumps(row(verdict)) for verdict in verdicts.values()))
        head = json.dumps(library_versions())
        write_atomically(output, f'{{"libraries": {head},\n"compiles": [\n{lines}\n]}}\n')
        journal.discard()


if __name__ == "__main__":
    main()
