"""Child processes with the compiler: killed at their limit, replaced, and spread by joblib."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import joblib
import pytest
from joblib.parallel import ThreadingBackend

from tilepolicy.errors import MissingLibraryError, VerifyError
from tilepolicy.tuning import kernels, pool
from tilepolicy.tuning.compiler import CompileRequest
from tilepolicy.tuning.pool import CompilerProcess, close_compilers, compile_many
from tilepolicy.tuning.sites import GmmTile, Site

SITE = Site("wi", "fwd", 1024, 512, 256, 4)
REQUEST = CompileRequest(SITE, "v6e", GmmTile(256, 512, 256))

ECHO = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    rows = request["tile"][0]
    if rows == 111:
        time.sleep(600)
    if rows == 222:
        sys.stderr.write("first\\nterminate called without an active exception\\n")
        os._exit(7)
    fields = ("message used_bytes available_bytes temp_bytes bytes_accessed roofline_seconds "
              "kernel_flops kernel_bytes input_buffer_count").split()
    verdict = dict.fromkeys(fields) | {"message": str(os.getpid()), "compile_seconds": 0.0}
    verdict |= {"request": request, "status": "fits", "tile": request["tile"]}
    print(json.dumps(verdict), flush=True)
"""


def asked(rows: int) -> CompileRequest:
    """A request that the stand-in answers, sleeps on (111 rows) or dies of (222 rows)."""
    return CompileRequest(SITE, "v6e", GmmTile(rows, 128, 128))


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Children that run a stand-in instead of the compiler."""
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    monkeypatch.setattr(pool, "WORKER", (str(script),))
    close_compilers()
    yield
    close_compilers()


@pytest.mark.usefixtures("echo")
def test_a_child_stays_warm() -> None:
    """Two requests of one thread go to one process."""
    first, second = compile_many([asked(1), asked(2)])
    assert first.message == second.message


@pytest.mark.usefixtures("echo")
def test_a_child_is_killed_at_its_limit() -> None:
    """The verdict comes in time, the process is gone, and the next request gets a new one."""
    process = CompilerProcess()
    before = process.compile(asked(1), 60)
    started = time.monotonic()
    verdict = process.compile(asked(111), 1)
    assert time.monotonic() - started < 20
    assert (verdict.status, verdict.message) == ("timeout", "no verdict within 1 s")
    with pytest.raises(ProcessLookupError):
        os.kill(int(before.message), 0)
    after = process.compile(asked(2), 60)
    assert after.status == "fits"
    assert after.message != before.message
    process.close()


@pytest.mark.usefixtures("echo")
def test_a_crash_is_a_verdict() -> None:
    """The status and the last words of a child that dies; the next request gets a new one."""
    process = CompilerProcess()
    verdict = process.compile(asked(222), 60)
    assert verdict.status == "crashed"
    assert verdict.message == (
        "the compiler's process ended with status 7: terminate called without an active exception"
    )
    assert process.compile(asked(1), 60).status == "fits"
    process.close()


@pytest.mark.usefixtures("echo")
def test_a_killed_child_is_replaced() -> None:
    """Closing all compilers does not spoil the next compile."""
    (first,) = compile_many([asked(1)])
    close_compilers()
    (second,) = compile_many([asked(1)])
    assert second.status == "fits"
    assert first.message != second.message


@pytest.mark.usefixtures("echo")
def test_jobs_run_at_the_same_time() -> None:
    """Each thread has its own child; verdicts come as they are ready."""
    verdicts = list(compile_many([asked(rows) for rows in range(1, 9)], jobs=3))
    assert len({verdict.message for verdict in verdicts}) <= 3
    assert {verdict.request.tile for verdict in verdicts} == {asked(r).tile for r in range(1, 9)}


@pytest.mark.usefixtures("echo")
def test_any_registered_backend_spreads_them() -> None:
    """A backend that somebody registered under a name, as Ray and Dask do."""

    class Mine(ThreadingBackend):
        jobs: ClassVar[list[int]] = []

        def configure(self, n_jobs: int = 1, **how: Any) -> int:
            self.jobs.append(n_jobs)
            return int(super().configure(n_jobs=n_jobs, **how))

    joblib.register_parallel_backend("mine", Mine)
    verdicts = list(compile_many([asked(1), asked(2)], jobs=2, backend="mine"))
    assert [verdict.status for verdict in verdicts] == ["fits", "fits"]
    assert 2 in Mine.jobs


@pytest.mark.usefixtures("echo")
def test_an_unknown_backend_is_an_error() -> None:
    """The message says how to register one."""
    with pytest.raises(VerifyError, match=r"joblib does not know the backend 'nope'") as error:
        list(compile_many([asked(1)], jobs=2, backend="nope"))
    assert "ray.util.joblib.register_ray()" in str(error.value)


@pytest.mark.usefixtures("echo")
def test_nothing_runs_on_when_nobody_wants_the_rest() -> None:
    """A caller that stops early, by an interrupt for one, leaves no child behind."""
    verdicts = compile_many([asked(1), asked(2)])
    pid = int(next(verdicts).message)
    verdicts.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_child_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last words are in the error."""
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no compiler today')")
    monkeypatch.setattr(pool, "WORKER", (str(script),))
    with pytest.raises(VerifyError, match="process does not start: no compiler today"):
        CompilerProcess().compile(asked(1), 60)


@pytest.mark.usefixtures("echo")
def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    """Standard input closes with the parent, whatever ended it."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, sys\n"
        "from tilepolicy.tuning import pool\n"
        f"pool.WORKER = ({str(tmp_path / 'echo.py')!r},)\n"
        "from test_pool import asked\n"
        "print(pool.CompilerProcess().compile(asked(1), 60).message, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    parent = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=120,
    )
    child = int(parent.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize("library", ["jax", "tokamax", "libtpu"])
def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """Before any process starts, with the line that installs it."""
    find_spec = kernels.importlib.util.find_spec
    monkeypatch.setattr(
        kernels.importlib.util, "find_spec", lambda n: None if n == library else find_spec(n)
    )
    with pytest.raises(
        MissingLibraryError, match=f"kernels needs {library}, which is not inst"
    ) as e:
        list(compile_many([REQUEST]))
    assert "pip install 'tilepolicy[verify]'" in str(e.value)


def test_only_megablox_needs_maxtext(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MaxText tokamax's own v2 is compiled in its place."""
    find_spec = kernels.importlib.util.find_spec
    monkeypatch.setattr(
        kernels.importlib.util, "find_spec", lambda n: None if n == "maxtext" else find_spec(n)
    )
    assert kernels.missing_libraries("tokamax_v2") == ()
    (problem,) = kernels.missing_libraries("megablox")
    assert problem.remedy == "pip install 'tilepolicy[maxtext]'"
