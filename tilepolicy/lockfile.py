"""``tiles.lock.yml``: every resolved value of some configs, with policy digest and versions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tilepolicy import __version__
from tilepolicy.errors import ConfigError, Problem
from tilepolicy.files import write_atomically
from tilepolicy.resolution import SettingValue
from tilepolicy.resolve.snapshot import Recorded, Snapshot
from tilepolicy.source import Document, parse

__all__ = ["KEY", "VERSION", "LockedConfig", "Request", "is_lock", "read_lock", "write_lock"]

KEY: Final = "tiles_lock"
"""The key that makes a YAML file a lock; its value is the version of the format."""

VERSION: Final = 1

_HEADER: Final = "# Written by `tilepolicy lock`. Compare with today: tilepolicy diff {name}\n"


@dataclass(frozen=True, slots=True)
class Request:
    """What was resolved: the arguments of ``resolve``.

    Attributes:
        config: path of the config, as the user named it.
        overrides: ``KEY=VALUE`` arguments.
        policies: policies as the user named them; empty for the default.
        device: device as the user named it, or None.
    """

    config: str
    overrides: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    device: str | None = None


@dataclass(frozen=True, slots=True)
class LockedConfig:
    """One config of a lock: what was asked, and what came out."""

    request: Request
    snapshot: Snapshot


def write_lock(path: str | os.PathLike[str], locked: Sequence[LockedConfig]) -> None:
    """Writes a lock in one step. Paths in it are relative to its own folder.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path)
    document = {
        KEY: VERSION,
        "tilepolicy": __version__,
        "configs": [_entry(one, target.parent) for one in locked],
    }
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    write_atomically(target, _HEADER.format(name=target.name) + text)


def _entry(one: LockedConfig, folder: Path) -> dict[str, Any]:
    request, snapshot = one.request, one.snapshot
    entry: dict[str, Any] = {"config": _relative(request.config, folder)}
    if request.overrides:
        entry["overrides"] = list(request.overrides)
    if request.policies:
        entry["policies"] = [_relative_if_file(name, folder) for name in request.policies]
    if request.device is not None:
        entry["device"] = request.device
    entry["resolved"] = {
        "policy": snapshot.policy,
        "digest": snapshot.digest,
        "device": snapshot.device,
        "backend": snapshot.backend,
        "versions": dict(snapshot.versions),
        "settings": {
            name: {"value": recorded.value, "by": recorded.by}
            for name, recorded in snapshot.settings.items()
        },
    }
    return entry


def _relative(path: str, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _relative_if_file(name: str, folder: Path) -> str:
    return _relative(name, folder) if Path(name).is_file() else name


def is_lock(document: Document) -> bool:
    """Whether a YAML document is a lock."""
    return isinstance(document.value, dict) and KEY in document.value


def read_lock(path: str | os.PathLike[str]) -> tuple[LockedConfig, ...]:
    """The configs of a lock, with paths as seen from the working directory.

    Raises:
        OSError: the file cannot be read.
        ConfigError: it is no lock, or not one of this version.
    """
    file = os.fspath(path)
    document = parse(Path(path).read_bytes(), file)
    if document.problems:
        raise ConfigError(document.problems)
    folder = Path(path).parent
    try:
        value = _versioned(document)
        return tuple(_locked(entry, folder) for entry in value["configs"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            Problem(
                "broken-lock",
                f"not a lock that this version can read ({type(error).__name__}: {error})",
                document.place(),
                "write it again with `tilepolicy lock`",
            )
        ) from error


def _versioned(document: Document) -> Mapping[str, Any]:
    value = document.value
    if not isinstance(value, dict) or value.get(KEY) != VERSION:
        raise ValueError(f"{KEY}: {VERSION} is missing")
    return value


def _locked(entry: Mapping[str, Any], folder: Path) -> LockedConfig:
    resolved = entry["resolved"]
    settings: Mapping[str, Mapping[str, SettingValue]] = resolved["settings"]
    return LockedConfig(
        Request(
            config=_seen_from_here(entry["config"], folder),
            overrides=tuple(entry.get("overrides", ())),
            policies=tuple(
                _seen_from_here_if_file(name, folder) for name in entry.get("policies", ())
            ),
            device=entry.get("device"),
        ),
        Snapshot(
            policy=resolved["policy"],
            digest=resolved["digest"],
            device=resolved["device"],
            backend=resolved["backend"],
            versions=dict(resolved["versions"]),
            settings={
                name: Recorded(one["value"], _text_or_none(one["by"]))
                for name, one in settings.items()
            },
        ),
    )


def _text_or_none(value: SettingValue) -> str | None:
    return None if value is None else str(value)


def _seen_from_here(path: str, folder: Path) -> str:
    return os.path.normpath(folder / path)


def _seen_from_here_if_file(name: str, folder: Path) -> str:
    return _seen_from_here(name, folder) if (folder / name).is_file() else name
