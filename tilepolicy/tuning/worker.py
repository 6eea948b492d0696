"""The compiler's child process: JSON requests on stdin, one JSON verdict per line on stdout.

Started by :mod:`tilepolicy.tuning.pool` as ``python -m tilepolicy.tuning.worker``. It ends when
stdin closes, even in the middle of a compile, so that no child outlives a killed parent.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import IO

from tilepolicy.tuning.compiler import CompileRequest, CompileVerdict, compile_here

__all__ = ["main"]


def main() -> None:
    """Announce readiness once jax and tokamax are imported, then answer until stdin closes."""
    answers = _keep_stdout_for_answers()
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    import jax  # noqa: F401 - warmed up before the first time limit starts
    import tokamax  # noqa: F401

    _say(answers, {"ready": True})
    while True:
        request = CompileRequest.from_json(json.loads(requests.get()))
        _say(answers, _answer(request).to_json())


def _answer(request: CompileRequest) -> CompileVerdict:
    try:
        return compile_here(request)
    except Exception as error:  # noqa: BLE001 - the parent reports it; the child goes on
        return CompileVerdict(request, "failed", f"{type(error).__name__}: {error}"[:400])


def _keep_stdout_for_answers() -> IO[str]:
    """Libraries print to stdout: give them stderr, and keep the real stdout for answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _read(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    # The parent is gone, or wants this process gone; a compile in progress cannot be awaited.
    os._exit(0)


def _say(answers: IO[str], data: object) -> None:
    answers.write(json.dumps(data) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
