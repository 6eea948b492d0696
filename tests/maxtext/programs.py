"""Runs command lines of ``tilepolicy run`` in one process and writes down what they compiled.

MaxText takes most of a minute to import, so that tests and benchmarks run several of its programs
in one process: ``python programs.py JOBS RESULTS`` with two JSON files. A job is
``{"name", "arguments": [what follows tilepolicy], "hlo": FILE or null}``, or has ``"plain"`` (a
module and its arguments) instead of ``"arguments"``; its result has the exit code, and of the
largest program that was compiled its temp bytes and, where asked for, its text.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "DECOUPLE_GCLOUD": "TRUE",
}


def main(jobs: Path, results: Path) -> None:
    """Run every job, writing the results after each."""
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore")
    compiled = _watch_compiles()
    done: list[dict[str, Any]] = []
    for job in json.loads(jobs.read_text()):
        compiled.clear()
        start = time.perf_counter()
        code = _plain(job["plain"]) if "plain" in job else _run(job["arguments"])
        result = {"name": job["name"], "exit": code}
        result["seconds"] = round(time.perf_counter() - start, 1)
        if compiled:
            largest = max(compiled, key=lambda program: len(program.as_text()))
            result["temp_bytes"] = int(largest.memory_analysis().temp_size_in_bytes)
            if job.get("hlo"):
                Path(job["hlo"]).write_text(largest.as_text())
        done.append(result)
        results.write_text(json.dumps(done))


def _run(arguments: list[str]) -> int:
    from tilepolicy.cli import main as tilepolicy

    try:
        tilepolicy(arguments)
    except SystemExit as leaving:
        return _code(leaving)
    return 0


def _code(leaving: SystemExit) -> int:
    """The exit code; absl leaves with None after a program that ended well."""
    return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)


def _plain(command: list[str]) -> int:
    """As ``python -m`` would run it."""
    sys.argv = list(command)
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        return _code(leaving)
    return 0


def _watch_compiles() -> list[Any]:
    import jax

    compile_program = jax.stages.Lowered.compile
    seen: list[Any] = []

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        program = compile_program(self, *args, **kwargs)
        seen.append(program)
        return program

    jax.stages.Lowered.compile = watched
    return seen


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
