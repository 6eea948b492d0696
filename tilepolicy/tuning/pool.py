"""Compiles in child processes that can be killed, spread by joblib.

A compile may take minutes or never end, and XLA cannot be interrupted, so that each compile runs
in a child process that is killed at its time limit. joblib's own process pool has no such kill
(its ``timeout`` gives up on the whole pool), hence the split: joblib spreads the requests (over
threads here, or over the workers of any registered backend), and each of its workers keeps one
warm child, because importing jax and tokamax takes seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import batched
from typing import IO, Any, Final, cast

from tilepolicy.errors import MissingLibraryError, Problem, VerifyError
from tilepolicy.tuning.compiler import OFFLINE_ENVIRONMENT, CompileRequest, CompileVerdict
from tilepolicy.tuning.kernels import missing_libraries

__all__ = ["WORKER", "CompilerProcess", "close_compilers", "compile_many", "compile_one"]

WORKER: tuple[str, ...] = ("-m", "tilepolicy.tuning.worker")
"""Arguments of the interpreter that start a child."""

_START_SECONDS: Final = 300.0
_LOCAL: Final = "threading"


class CompilerProcess:
    """One warm child process with the TPU compiler. Not for use by several threads at once."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._pending = b""

    def compile(self, request: CompileRequest, timeout_seconds: float) -> CompileVerdict:
        """Compile, and kill the child if it takes longer than ``timeout_seconds``.

        A killed or crashed child is replaced at the next call. Starting one is not counted.

        Raises:
            VerifyError: the child cannot be started.
        """
        child = self._started()
        started = time.monotonic()
        try:
            _pipe(child.stdin).write(json.dumps(request.to_json()).encode() + b"\n")
            _pipe(child.stdin).flush()
            answer = self._line(started + timeout_seconds)
        except (BrokenPipeError, EOFError):
            seconds = time.monotonic() - started
            status, tail = child.wait(), self._error_tail()
            self.close()
            message = f"the compiler's process ended with status {status}{tail}"
            return CompileVerdict(request, "crashed", message, compile_seconds=seconds)
        except TimeoutError:
            seconds = time.monotonic() - started
            self.close()
            message = f"no verdict within {timeout_seconds:g} s"
            return CompileVerdict(request, "timeout", message, compile_seconds=seconds)
        except BaseException:
            # An interrupt in between: the next answer would be for this request.
            self.close()
            raise
        return CompileVerdict.from_json(json.loads(answer))

    def kill(self) -> None:
        """Kill the child. Unlike :meth:`close` this may be called from any thread."""
        if (child := self._child) is not None:
            child.kill()
            child.wait()

    def close(self) -> None:
        """Kill the child, if there is one, and wait for it."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            _pipe(child.stdout).close()
            with contextlib.suppress(BrokenPipeError):  # a request that the child never read
                _pipe(child.stdin).close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        self._pending = b""

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.close()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._child = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
            [sys.executable, *WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **OFFLINE_ENVIRONMENT},
            start_new_session=True,  # Ctrl-C reaches the parent only, which closes its children.
        )
        try:
            self._line(time.monotonic() + _START_SECONDS)
        except (EOFError, TimeoutError):
            tail = self._error_tail()
            self.close()
            raise VerifyError(
                Problem(
                    code="compiler-start",
                    message=f"the TPU compiler's process does not start{tail}",
                    remedy="run `tilepolicy doctor`",
                )
            ) from None
        return self._child

    def _line(self, deadline: float) -> bytes:
        """The next line of the child's answers.

        Raises:
            EOFError: the child closed its output.
            TimeoutError: the deadline (of the monotonic clock) has passed.
        """
        child = cast("subprocess.Popen[bytes]", self._child)
        descriptor = _pipe(child.stdout).fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not selector.select(remaining):
                    raise TimeoutError
                if not (chunk := os.read(descriptor, 65536)):
                    raise EOFError
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _error_tail(self) -> str:
        """The last line that the child wrote to stderr, for a message."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()[:300]}" if lines else ""


_local = threading.local()
_open: set[CompilerProcess] = set()
_open_lock = threading.Lock()


def compile_one(request: CompileRequest, timeout_seconds: float) -> CompileVerdict:
    """Compile with the calling thread's own warm child process."""
    process: CompilerProcess | None = getattr(_local, "process", None)
    if process is None:
        process = _local.process = CompilerProcess()
        with _open_lock:
            _open.add(process)
    return process.compile(request, timeout_seconds)


def close_compilers() -> None:
    """Kill every child process that :func:`compile_one` keeps warm in this process.

    A later compile starts a new one. Children also end with this process, however it ends.
    """
    with _open_lock:
        processes = tuple(_open)
    for process in processes:
        process.kill()


def _close_all() -> None:
    """At the end of the process, when no other thread uses a child any more."""
    for process in _open:
        process.close()


atexit.register(_close_all)


def compile_many(
    requests: Iterable[CompileRequest],
    *,
    jobs: int = 1,
    timeout_seconds: float = 300.0,
    backend: str = _LOCAL,
) -> Iterator[CompileVerdict]:
    """Compile each request; verdicts come as they are ready, in no particular order.

    Args:
        requests: what to compile.
        jobs: compiles at a time.
        timeout_seconds: limit of each compile.
        backend: a registered joblib backend. The default runs the children of this process's
            threads; with ``ray`` or ``dask``, each worker of the cluster keeps its own child.

    Raises:
        MissingLibraryError: jax, tokamax, libtpu or MaxText is not installed here.
        VerifyError: joblib does not know the backend, or a child cannot be started.
    """
    waiting = tuple(requests)
    missing: dict[str, Problem] = {}
    for request in waiting:
        missing |= {p.message: p for p in missing_libraries(request.site.backend)}
    if missing:
        raise MissingLibraryError(missing.values())
    try:
        if backend == _LOCAL and jobs == 1:
            yield from (compile_one(request, timeout_seconds) for request in waiting)
        else:
            yield from _spread(waiting, jobs, timeout_seconds, backend)
    except BaseException:
        # Interrupted, or nobody wants the rest: threads that await a child must not keep on.
        close_compilers()
        raise


def _spread(
    requests: Sequence[CompileRequest], jobs: int, timeout_seconds: float, backend: str
) -> Iterator[CompileVerdict]:
    import joblib

    try:
        parallel = joblib.Parallel(n_jobs=jobs, backend=backend, return_as="list")
    except ValueError as error:
        raise VerifyError(
            Problem(
                code="unknown-backend",
                message=f"joblib does not know the backend {backend!r}",
                remedy=(
                    "register it before (ray: `ray.util.joblib.register_ray()`), "
                    "or use threading, loky or dask"
                ),
            )
        ) from error
    call = joblib.delayed(compile_one)
    if getattr(parallel._backend, "supports_return_generator", False):
        parallel = joblib.Parallel(n_jobs=jobs, backend=backend, return_as="generator_unordered")
        yield from parallel(call(request, timeout_seconds) for request in requests)
        return
    # Backends without generators answer a batch at a time; progress is as coarse as a batch.
    for batch in batched(requests, max(1, parallel.n_jobs) * 4):
        yield from parallel(call(request, timeout_seconds) for request in batch)


def _pipe(pipe: IO[Any] | None) -> IO[Any]:
    if pipe is None:
        raise RuntimeError("the child was started without pipes")
    return pipe
