"""Installed releases by distribution name, read once: reading metadata costs milliseconds."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

__all__ = ["installed_version"]


@cache
def installed_version(distribution: str) -> str | None:
    """The installed release, without importing the library; None when it is not installed.

    What is installed while the process runs is not seen: a library that is imported already
    would not change either.
    """
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
