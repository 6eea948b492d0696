"""What MaxText's own programs do under ``tilepolicy run``: losses, tiles, gathers, memory.

    python benchmarks/maxtext_programs.py [losses] [tiles] [head]     # all three by default

``losses`` trains five steps on this CPU, plain and with each loss, and prints the largest
difference. ``tiles`` compiles train steps for v6e-4 and prints, for each layer and pass, the tile
that the compiled kernels carry, how many kernels those are, and how many lookups the report counts.
``head`` compiles a train step for v6e-8 (FSDP 8, 8 tiles, V = 131072, D = 1024) with MaxText's
own loss and with tilepolicy's, and prints all-gathers of the output head and temporary memory.
Needs the extras ``maxtext`` and ``verify``; no TPU. The command lines are those of the tests
(``tests/maxtext/jobs.py``). Losses takes minutes, the others a quarter of an hour or more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "maxtext"))

import jobs
import programs

HEAD_VARIANTS = [
    ("upstream", False),
    ("upstream", True),
    ("sparse", True),
    ("chunked", True),
    ("online", True),
]
MIB = 2**20


def show_losses(folder: Path) -> None:
    """The largest difference of a loss from plain MaxText's, over five steps."""
    jobs.run(folder, jobs.train_jobs(folder))
    plain = jobs.losses(folder / "plain.txt")
    print(f"plain MaxText: {' '.join(f'{loss:.6f}' for loss in plain)}")
    for name in jobs.LOSSES:
        found = jobs.losses(folder / f"{name}.txt")
        largest = max(abs(a - b) for a, b in zip(plain, found, strict=True))
        print(f"{name:9} largest difference {largest:.1e}")


def show_tiles(folder: Path) -> None:
    """Tiles in compiled train steps, with the lookups of the report."""
    six = jobs.policy(folder, "six", jobs.six_rules(jobs.SIX))
    small = jobs.policy(folder, "small", jobs.six_rules(jobs.SIX_SMALL))
    planned = [
        jobs.compile_job(folder, "deepseek3-671b", "deepseek3-671b-v6e", jobs.DEEPSEEK3),
        jobs.compile_job(folder, "gpt-oss-20b", six, jobs.GPT_OSS),
        *(
            jobs.compile_job(folder, name, small, f"{jobs.MIXTRAL} {more}")
            for name, more in jobs.KERNELS.items()
        ),
    ]
    jobs.run(folder, planned)
    for job in planned:
        name = job["name"]
        print(name)
        for (layer, step, tile), count in sorted(
            jobs.compiled_kernels(folder / f"{name}.hlo").items()
        ):
            print(f"  {layer:3} {step:9} {'×'.join(map(str, tile)):13} in {count} kernels")
        report = folder / f"{name}.json"
        handed = json.loads(report.read_text())["run"]["handed_over"]
        print(f"  lookups decided by a rule: {jobs.hits(report) or 'none'}")
        print(f"  tile knobs handed to MaxText: {sum('_tile_' in key for key in handed)}")


def show_head(folder: Path) -> None:
    """All-gathers of the output head and temporary memory for each loss."""
    results = jobs.run(folder, jobs.head_jobs(folder, jobs.LARGE_HEAD, HEAD_VARIANTS))
    for name, found in results.items():
        loss, once = name.split("-")
        hlo = (folder / f"{name}.hlo").read_text()
        gathers = jobs.head_gathers(hlo, jobs.LARGE_EMBED, jobs.LARGE_VOCAB, 8)
        memory = f"{found['temp_bytes'] / MIB:.0f} MiB temporary"
        print(f"{loss:9} ag_once={once:5} {gathers:2} head gathers a step, {memory}")


SHOWN: dict[str, Callable[[Path], None]] = {
    "losses": show_losses,
    "tiles": show_tiles,
    "head": show_head,
}


def main() -> int:
    """Run and print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="|".join(SHOWN), help="default: all")
    chosen = parser.parse_args().what or list(SHOWN)
    if unknown := [name for name in chosen if name not in SHOWN]:
        parser.error(f"unknown: {' '.join(unknown)}")
    os.environ.update(programs.ENVIRONMENT)
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            SHOWN[name](Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
