"""Many verdicts at once: each kernel compiled once, with a journal, and word of the progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from tilepolicy.tuning.compiler import CompileRequest, CompileVerdict
from tilepolicy.tuning.journal import Journal
from tilepolicy.tuning.pool import compile_many

__all__ = ["Compiler", "Progress", "silent"]


class Progress(Protocol):
    """Told after each verdict."""

    def __call__(self, verdict: CompileVerdict, done: int, total: int, *, known: bool) -> None:
        """``done`` of ``total`` requests of this batch have a verdict.

        Args:
            verdict: the newest.
            done: verdicts so far.
            total: requests of the batch.
            known: whether it came from the journal.
        """


def silent(verdict: CompileVerdict, done: int, total: int, *, known: bool) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """How to compile: limits, parallelism, journal, progress.

    Attributes:
        jobs: compiles at a time.
        timeout_seconds: limit of each compile.
        backend: registered joblib backend that spreads them.
        journal: where verdicts are kept; one in memory by default.
        progress: told after each verdict.
        run: what compiles many requests; :func:`tilepolicy.tuning.pool.compile_many` by default.
    """

    jobs: int = 1
    timeout_seconds: float = 300.0
    backend: str = "threading"
    journal: Journal = field(default_factory=lambda: Journal(None, {}))
    progress: Progress = silent
    run: Callable[..., Iterable[CompileVerdict]] | None = None

    def verdicts(self, requests: Iterable[CompileRequest]) -> Mapping[str, CompileVerdict]:
        """A verdict for each request, by :attr:`CompileRequest.identity`.

        Requests of one identity are compiled once.

        Raises:
            MissingLibraryError: a library is not installed.
            VerifyError: the compiler does not start, or joblib does not know the backend.
        """
        wanted: dict[str, CompileRequest] = {}
        for request in requests:
            wanted.setdefault(request.identity, request)
        found: dict[str, CompileVerdict] = {}
        for identity, request in wanted.items():
            known = self.journal.get(request, self.timeout_seconds)
            if known is not None:
                found[identity] = known
                self.progress(known, len(found), len(wanted), known=True)
        rest = [request for identity, request in wanted.items() if identity not in found]
        if not rest:
            return found
        run = self.run if self.run is not None else compile_many
        for verdict in run(
            rest, jobs=self.jobs, timeout_seconds=self.timeout_seconds, backend=self.backend
        ):
            self.journal.add(verdict)
            found[verdict.request.identity] = verdict
            self.progress(verdict, len(found), len(wanted), known=False)
        return found

    def verdict(self, request: CompileRequest) -> CompileVerdict:
        """The verdict of one request, under the request as it was given.

        Raises:
            MissingLibraryError: a library is not installed.
            VerifyError: the compiler does not start.
        """
        return replace(self.verdicts([request])[request.identity], request=request)
