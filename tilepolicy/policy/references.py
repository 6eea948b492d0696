"""What a policy reference names, and its bytes: a path, a known name, or a URL.

A file may only name files below its own folder; what the user names is not limited.
"""

from __future__ import annotations

import os
import posixpath
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, NamedTuple

from tilepolicy.errors import MissingLibraryError, Place, PolicyError, Problem
from tilepolicy.files import is_file
from tilepolicy.model.factnames import closest
from tilepolicy.policy.packs import find_named, named_policies
from tilepolicy.source import LIMITS

__all__ = ["Reference", "follow", "locate"]

_SUFFIXES: Final = (".yml", ".yaml")


class Reference(NamedTuple):
    """A policy that has been found.

    Attributes:
        shown: the name for people: as the user wrote it, or put together from that.
        identity: equal for two references to one policy.
        path: the file, if it is one of the file system.
        resource: the file of a named policy.
        url: the address, if it is one.
    """

    shown: str
    identity: str
    path: Path | None = None
    resource: Traversable | None = None
    url: str | None = None

    def read(self) -> bytes:
        """The bytes, at most one more than a policy may have.

        Raises:
            OSError: it cannot be read.
            MissingLibraryError: a URL, and fsspec is not installed.
        """
        if self.url is not None:
            return _read_url(self.url)
        source = self.path if self.path is not None else self.resource
        if source is None:
            raise FileNotFoundError(self.shown)
        with source.open("rb") as stream:
            return stream.read(LIMITS.max_bytes + 1)


def locate(text: str) -> Reference:
    """What the user named.

    Raises:
        PolicyError: no such file or name.
    """
    if "://" in text:
        return Reference(text, text, url=text)
    if _is_path(text) or is_file(Path(text)):
        return _file(Path(text), text, Place(text))
    named = find_named(text)
    if named is None:
        raise PolicyError(_unknown_name(text, None))
    return Reference(text, f"name:{named.pack}:{text}", resource=named.file)


def follow(text: str, parent: Reference, place: Place, *, allow_outside: bool) -> Reference:
    """What a policy names in ``extends``.

    Args:
        text: a known name, or a path relative to the folder of ``parent``.
        parent: the policy that says it.
        place: where it says it.
        allow_outside: accept paths outside that folder, and URLs.

    Raises:
        PolicyError: no such file or name, or a file outside the folder.
    """
    if "://" in text:
        if not allow_outside:
            raise PolicyError(_outside(text, place))
        return Reference(text, text, url=text)
    if not _is_path(text):
        named = find_named(text)
        if named is None:
            raise PolicyError(_unknown_name(text, place))
        return Reference(text, f"name:{named.pack}:{text}", resource=named.file)
    if parent.url is not None:
        return _below_url(text, parent.url, place)
    if parent.path is None:
        raise PolicyError(_outside(text, place))
    folder = parent.path.parent
    target = folder / text
    if "\0" in text:  # an escape in double quotes; no file is named so
        raise PolicyError(_missing(text, place))
    if not allow_outside and not target.resolve().is_relative_to(folder.resolve()):
        raise PolicyError(_outside(text, place))
    shown = os.path.normpath(os.path.join(os.path.dirname(parent.shown), text))  # noqa: PTH118, PTH120  # text, not paths
    if not is_file(target):  # a pipe or a device is no policy either
        raise PolicyError(_missing(shown, place))
    return _file(target, shown, place)


def _is_path(text: str) -> bool:
    return "/" in text or os.sep in text or text.endswith(_SUFFIXES)


def _file(path: Path, shown: str, place: Place) -> Reference:
    try:
        resolved = path.resolve(strict=True)
        usable = not resolved.is_dir()
    except (OSError, RuntimeError, ValueError):
        usable = False
    if not usable:
        raise PolicyError(_missing(shown, place))
    return Reference(shown, str(resolved), path=path)


def _missing(shown: str, place: Place) -> Problem:
    return Problem("not-found", f"there is no file {shown}", place, "name an existing policy file")


def _below_url(text: str, parent: str, place: Place) -> Reference:
    joined = posixpath.normpath(text)
    if joined.startswith(("/", "..")):
        raise PolicyError(_outside(text, place))
    url = f"{parent.rsplit('/', 1)[0]}/{joined}"
    return Reference(url, url, url=url)


def _outside(text: str, place: Place) -> Problem:
    message = f"{text!r} lies outside the folder of the policy that extends it"
    remedy = "move it below that folder, or allow it with --allow-outside (allow_outside=True)"
    return Problem("outside", message, place, remedy)


def _unknown_name(text: str, place: Place | None) -> Problem:
    known = [named.name for named in named_policies()]
    near = closest(text, known)
    remedy = f"known names: {', '.join(known)}; the name of a file ends in .yml"
    message = f"there is no policy named {text!r}"
    remedy = f"did you mean {near}?" if near else remedy
    return Problem("not-found", message, place or Place(text), remedy)


def _read_url(url: str) -> bytes:
    try:
        import fsspec
    except ImportError as error:
        raise MissingLibraryError(
            Problem(
                "missing-library",
                f"reading {url} needs fsspec, which is not installed",
                remedy="pip install fsspec, and what its protocol needs (gcsfs, s3fs, aiohttp)",
            )
        ) from error
    try:
        with fsspec.open(url, "rb") as stream:
            content: Any = stream.read(LIMITS.max_bytes + 1)
    except ImportError as error:
        raise MissingLibraryError(
            Problem("missing-library", f"reading {url} needs more: {error}", remedy=str(error))
        ) from error
    return bytes(content)
