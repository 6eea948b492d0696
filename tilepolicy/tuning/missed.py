"""The file of sites that missed: written while a job runs, read by ``tilepolicy tune``.

One YAML document (written as JSON, which is YAML), one entry for each distinct site::

    version: 1
    missed:
      - layer: wi            # null where nothing told the layer
        pass: fwd
        phase: train
        facts: {device: v6e, backend: tokamax_v1, batch_seq: 8192, embed_dim: 7168, …}
        count: 12            # lookups that missed
        instead: "tokamax's heuristic: 128x128x128"

``facts`` are those that the call showed. This module imports nothing but the core, so that a
training process can write the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from tilepolicy.errors import Place, Problem, TilepolicyError
from tilepolicy.files import write_atomically
from tilepolicy.resolution import FactValue
from tilepolicy.settings import LAYERS, PASSES, Layer, Pass, Phase
from tilepolicy.source import Document, parse

__all__ = ["MissedFileError", "MissedSite", "read_missed", "write_missed"]

_VERSION: Final = 1
_KEYS: Final = {"layer", "pass", "phase", "facts", "count", "instead"}


class MissedFileError(TilepolicyError):
    """A file of missed sites is malformed."""


@dataclass(frozen=True, slots=True)
class MissedSite:
    """One grouped matmul for which no policy said anything.

    Attributes:
        layer: ``wi`` or ``wo``; None where nothing told the layer.
        pass_: ``fwd``, ``dlhs`` or ``drhs``.
        facts: the facts that the call showed.
        phase: ``train`` or ``eval``.
        count: lookups that missed, 1 or more.
        instead: what was used instead, in words.
    """

    layer: Layer | None
    pass_: Pass
    facts: Mapping[str, FactValue] = field(default_factory=dict)
    phase: Phase = "train"
    count: int = 1
    instead: str = ""


def write_missed(path: str | os.PathLike[str], sites: Iterable[MissedSite]) -> None:
    """Write the file in one step; the same site given twice becomes one entry with both counts.

    An empty list is written too: it says that nothing missed.

    Raises:
        OSError: the folder does not exist or cannot be written to.
    """
    merged: dict[str, dict[str, Any]] = {}
    for site in sites:
        entry = {
            "layer": site.layer,
            "pass": site.pass_,
            "phase": site.phase,
            "facts": dict(sorted(site.facts.items())),
        }
        known = merged.setdefault(json.dumps(entry), entry | {"count": 0, "instead": site.instead})
        known["count"] += site.count
    lines = ",\n    ".join(json.dumps(entry) for entry in merged.values())
    body = f"\n    {lines}\n  " if lines else ""
    write_atomically(path, f'{{\n  "version": {_VERSION},\n  "missed": [{body}]\n}}\n')


def read_missed(path: str | os.PathLike[str]) -> tuple[MissedSite, ...]:
    """Read a file of missed sites.

    Raises:
        MissedFileError: with every problem of the file, each with its place.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise MissedFileError(
            Problem("unreadable", f"cannot be read: {error.strerror}", Place(name))
        ) from error
    document = parse(text, name)
    problems = list(document.problems)
    sites = _sites(document, problems) if document.readable and not problems else ()
    if problems:
        raise MissedFileError(problems)
    return sites


def _sites(document: Document, problems: list[Problem]) -> tuple[MissedSite, ...]:
    value = document.value
    if not isinstance(value, dict) or not isinstance(value.get("missed"), list):
        problems.append(_problem(document, (), "this is not a file of missed sites"))
        return ()
    if value.get("version") != _VERSION:
        message = f"version {value.get('version')!r} of the file is not known"
        problems.append(_problem(document, ("version",), message))
    found = []
    for number, entry in enumerate(cast("list[object]", value["missed"])):
        before = len(problems)
        _check(document, number, entry, problems)
        if len(problems) == before:
            found.append(_site(cast("Mapping[str, Any]", entry)))
    return tuple(found)


def _check(document: Document, number: int, entry: object, problems: list[Problem]) -> None:
    """Add a problem for everything that is wrong with one entry."""
    base = ("missed", number)
    if not isinstance(entry, dict):
        problems.append(_problem(document, base, "an entry is a mapping"))
        return
    for key in sorted(entry.keys() - _KEYS):
        message = f"unknown key {key!r}; known are {', '.join(sorted(_KEYS))}"
        problems.append(_problem(document, (*base, key), message))
    checks = {
        "layer": (entry.get("layer") in (*LAYERS, None), "wi, wo or null"),
        "pass": (entry.get("pass") in PASSES, "fwd, dlhs or drhs"),
        "phase": (entry.get("phase", "train") in ("train", "eval"), "train or eval"),
        "facts": (_are_facts(entry.get("facts")), "a mapping of names to plain values"),
        "count": (_is_count(entry.get("count", 1)), "an integer of 1 or more"),
        "instead": (isinstance(entry.get("instead", ""), str), "text"),
    }
    for key, (fine, wanted) in checks.items():
        if not fine:
            message = f"{key} is {entry.get(key)!r}, not {wanted}"
            problems.append(_problem(document, (*base, key), message))


def _site(entry: Mapping[str, Any]) -> MissedSite:
    return MissedSite(
        layer=entry.get("layer"),
        pass_=entry["pass"],
        facts=entry["facts"],
        phase=entry.get("phase", "train"),
        count=entry.get("count", 1),
        instead=entry.get("instead", ""),
    )


def _are_facts(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(item, bool | int | float | str) for item in value.values()
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _problem(document: Document, path: tuple[str | int, ...], message: str) -> Problem:
    place = document.place(path)
    dotted = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return Problem("missed-file", message, place, path=dotted.lstrip("."))
