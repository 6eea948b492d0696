"""Files: writing so that nobody ever reads half of one, and asking about names made up by users."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["is_file", "write_atomically"]


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes ``text`` (UTF-8) to ``path`` in one step; an existing file is replaced whole.

    An interruption leaves the old file, or none. A symbolic link is followed, so that what it
    points to is replaced and the link stays.

    Raises:
        OSError: the folder does not exist or cannot be written to.
    """
    target = Path(os.path.realpath(path))
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(mode)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The process's file mode mask; reading it means setting it for a moment."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def is_file(path: Path) -> bool:
    """Whether there is a regular file, links followed.

    Unlike :meth:`pathlib.Path.is_file`, False for a name that the system refuses to look up: one
    that is too long, or below a folder that may not be searched.
    """
    try:
        return path.is_file()
    except OSError:
        return False
