"""What is installed, what works with it, and what to do about the rest. Imports no foreign code."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from tilepolicy import __version__
from tilepolicy.errors import TilepolicyError

__all__ = ["Finding", "State", "examine"]

State = Literal["ok", "missing", "problem"]

_LIBRARIES: Final = ("maxtext", "tokamax", "jax", "libtpu", "joblib")
_INSTALL: Final = "pip install 'tilepolicy[{}]'"
_OLDEST_TOKAMAX: Final = (0, 0, 13)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: ``version``, ``works``, ``policies`` or ``config``.
        name: what was looked at.
        state: ``ok``, ``missing`` (not installed) or ``problem`` (installed, but does not work).
        text: what was found.
        remedy: what to do; empty when it is fine.
    """

    topic: str
    name: str
    state: State
    text: str
    remedy: str = ""


def examine() -> tuple[Finding, ...]:
    """Look at everything, in the order in which it is shown."""
    return (*_versions(), *_capabilities(), *_policies(), _configs())


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def _versions() -> Iterator[Finding]:
    yield Finding("version", "tilepolicy", "ok", __version__)
    yield Finding("version", "python", "ok", platform.python_version())
    for library in _LIBRARIES:
        version = _version(library)
        state: State = "missing" if version is None else "ok"
        yield Finding("version", library, state, version or "not installed")


def _capabilities() -> Iterator[Finding]:
    """What works: each names the extra that it needs."""
    yield Finding("works", "resolve, validate, lock, diff", "ok", "needs nothing more")
    yield _needing("apply", "tokamax", ("jax", "tokamax"), _attaches_to_tokamax)
    yield _needing("verify, tune", "verify", ("jax", "tokamax", "libtpu", "joblib"), None)
    yield _needing("run", "maxtext", ("maxtext",), _attaches_to_maxtext)
    yield _needing("engine cache", "maxtext", ("maxtext",), _engine_cache)


def _needing(
    name: str, extra: str, libraries: tuple[str, ...], check: Callable[[], Finding] | None
) -> Finding:
    missing = [library for library in libraries if _version(library) is None]
    if missing:
        text = f"{', '.join(missing)} not installed"
        return Finding("works", name, "missing", text, _INSTALL.format(extra))
    return check() if check is not None else Finding("works", name, "ok", "libraries are there")


def _attaches_to_tokamax() -> Finding:
    version = _version("tokamax") or ""
    if _release(version) < _OLDEST_TOKAMAX:
        text = f"tokamax {version} has no overlays of its config lookup"
        return Finding("works", "apply", "problem", text, "pip install 'tokamax>=0.0.14'")
    return Finding("works", "apply", "ok", f"attaches to tokamax {version}'s config lookup")


def _attaches_to_maxtext() -> Finding:
    from tilepolicy.adapters import maxtext_api

    version = _version("maxtext") or ""
    try:
        maxtext_api.require(tuple(maxtext_api.verified(version)), version)
    except TilepolicyError as error:
        first = error.problems[0]
        return Finding("works", "run", "problem", first.message, first.remedy or "")
    return Finding("works", "run", "ok", f"attaches to the losses and the engine of {version}")


def _engine_cache() -> Finding:
    from tilepolicy.adapters import maxtext_api

    version = _version("maxtext") or ""
    if maxtext_api.own_cache(version):
        text = f"MaxText {version}'s training engine keeps its split state by itself"
    elif maxtext_api.ENGINE["fwd_bwd"] in maxtext_api.verified(version):
        text = f"tilepolicy run keeps the split state for MaxText {version}'s training engine"
    else:
        text = f"MaxText {version} has no training engine to cache for"
    return Finding("works", "engine cache", "ok", text)


def _policies() -> Iterator[Finding]:
    from tilepolicy.policy.packs import named_policies

    try:
        named = named_policies()
    except TilepolicyError as error:
        for problem in error.problems:
            yield Finding("policies", "packs", "problem", problem.message, problem.remedy or "")
        return
    packs: dict[str, list[str]] = {}
    for one in named:
        packs.setdefault(one.pack, []).append(one.name)
    for pack, names in packs.items():
        yield Finding("policies", pack, "ok", ", ".join(names))


def _configs() -> Finding:
    from tilepolicy.configs.files import find_maxtext_configs

    folder = find_maxtext_configs()
    if folder is None:
        return Finding(
            "config",
            "MaxText's configs",
            "missing",
            "not found: a config must name its model's sizes itself",
            "install MaxText, or set TILEPOLICY_MAXTEXT_CONFIGS to a checkout's configs folder",
        )
    return Finding("config", "MaxText's configs", "ok", str(folder))
