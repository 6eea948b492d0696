"""Verdicts on disk, so that an interrupted command goes on where it stopped.

A file of JSON lines: a head with the versions of the libraries, then one verdict per line, each
flushed to the disk before the next compile is waited for. A line that a kill cut short is dropped
when the file is read. Verdicts of other library versions are not used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Final, Self

from tilepolicy.files import write_atomically
from tilepolicy.tuning.compiler import CompileRequest, CompileVerdict

__all__ = ["Journal", "library_versions"]

_FORMAT: Final = 1
_LIBRARIES: Final = ("jax", "jaxlib", "libtpu", "tokamax", "maxtext")


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that a verdict depends on."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class Journal:
    """Verdicts by the identity of their request; a context manager that closes the file.

    Args:
        path: the file; it is made when the first verdict comes. None keeps verdicts in memory.
        versions: versions of the libraries; verdicts of any other are left out, and the file is
            written anew.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, versions: Mapping[str, str] | None = None
    ) -> None:
        self.path = Path(path) if path is not None else None
        self._versions = dict(versions if versions is not None else library_versions())
        self._known: dict[str, CompileVerdict] = {}
        self._stream: IO[str] | None = None
        if self.path is not None and self.path.exists():
            self._read(self.path.read_bytes())

    def __len__(self) -> int:
        return len(self._known)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, request: CompileRequest, timeout_seconds: float) -> CompileVerdict | None:
        """The verdict of a request; None when it has to be compiled.

        A crash is tried again, and so is a timeout when the limit is longer now.
        """
        verdict = self._known.get(request.identity)
        if verdict is None or verdict.status == "crashed":
            return None
        if verdict.status == "timeout" and timeout_seconds > verdict.compile_seconds + 1:
            return None
        return verdict

    def add(self, verdict: CompileVerdict) -> None:
        """Remember a verdict, on disk too."""
        self._known[verdict.request.identity] = verdict
        if self.path is None:
            return
        if self._stream is None:
            self._open(self.path)
        else:
            self._write(verdict.to_json())

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def discard(self) -> None:
        """Close and delete the file."""
        self.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _open(self, path: Path) -> None:
        """Write all that is known anew, without cut or foreign lines, then append to it."""
        head = {"format": _FORMAT, "libraries": self._versions}
        lines: Iterable[Any] = (head, *(verdict.to_json() for verdict in self._known.values()))
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._stream = path.open("a", encoding="utf-8")

    def _write(self, data: object) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps(data) + "\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def _read(self, content: bytes) -> None:
        lines = _whole_lines(content)
        head = next(lines, None)
        if head != {"format": _FORMAT, "libraries": self._versions}:
            return
        for line in lines:
            try:
                verdict = CompileVerdict.from_json(line)
            except (KeyError, TypeError):
                continue  # Not a verdict of this release: it will be compiled again.
            self._known[verdict.request.identity] = verdict


def _whole_lines(content: bytes) -> Iterator[Any]:
    """The JSON of each line; what a kill cut short, or a disk filled with zeroes, is left out."""
    for line in content.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
