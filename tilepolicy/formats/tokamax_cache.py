"""Tokamax's autotuning caches: a directory ``<device>/<op>.json``, or one such file.

Both levels of keys of a cache file are JSON text inside a JSON string: the outer key is the op's
arguments, the inner one the kernel's configuration (read in tokamax 0.0.17, ``cache.py``).
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

from tilepolicy.errors import Place, Problem
from tilepolicy.formats.devices import device_of_kind
from tilepolicy.formats.jsontext import members, parse, parse_inner, read
from tilepolicy.formats.records import FormatError, ImportReport, MeasuredEntry, Unusable, merge
from tilepolicy.formats.tokamax_entries import (
    DlhsNames,
    EntryContext,
    exchange_names,
    fits_only_exchanged,
    is_v1_dlhs,
    read_entry,
)
from tilepolicy.source.text import SourceText

__all__ = [
    "is_cache",
    "name_dlhs_axes",
    "read_cache_directory",
    "read_cache_file",
    "shipped_caches",
]


def shipped_caches() -> Path:
    """``tokamax/data/autotuning`` of the installed Tokamax, found without importing it.

    Raises:
        FormatError: Tokamax is not installed.
    """
    spec = find_spec("tokamax")
    if spec is None or not spec.submodule_search_locations:
        remedy = "pip install 'tilepolicy[tokamax]'"
        raise FormatError(Problem("no-tokamax", "tokamax is not installed", remedy=remedy))
    return Path(spec.submodule_search_locations[0]) / "data" / "autotuning"


def is_cache(value: object) -> bool:
    """Whether a parsed JSON value looks like a cache file: objects keyed by JSON text."""
    return isinstance(value, dict) and all(key.lstrip().startswith("{") for key in value)


def read_cache_directory(
    directory: Path, *, op: str = "*", device: str | None = None, dlhs_names: DlhsNames = "auto"
) -> ImportReport:
    """Read every ``<device>/<op>.json`` below a directory, or ``<op>.json`` inside it.

    Args:
        directory: ``tokamax/data/autotuning``, or one device's directory in it.
        op: glob for the names of ops: ``*ragged_dot``.
        device: policy name; only this device's directories are read, and files that stand in no
            device's directory are taken to be this device's.
        dlhs_names: see :data:`~tilepolicy.formats.tokamax_entries.DlhsNames`.

    Raises:
        FormatError: there is no such file below the directory.
    """
    files = sorted(directory.glob(f"*/{op}.json")) or sorted(directory.glob(f"{op}.json"))
    chosen = [
        path
        for path in files
        if device is None or device_of_kind(path.parent.name) in (device, None)
    ]
    if not chosen:
        where = f" for the device {device}" if device else ""
        message = f"no cache file <device>/{op}.json{where} in this directory"
        raise FormatError(Problem("no-entries", message, Place(str(directory))))
    return merge(read_cache_file(path, device=device, dlhs_names=dlhs_names) for path in chosen)


def read_cache_file(
    path: Path,
    *,
    device: str | None = None,
    dlhs_names: DlhsNames = "auto",
    source: SourceText | None = None,
) -> ImportReport:
    """Read one cache file; its name gives the op, its directory the device.

    Problems do not stop the reading: the report has all of them.

    Args:
        path: the file.
        device: policy name, where the directory does not name a device.
        dlhs_names: see :data:`~tilepolicy.formats.tokamax_entries.DlhsNames`.
        source: its text, if it has been read already.
    """
    try:
        text = source or read(path)
        value = parse(text)
    except FormatError as error:
        return ImportReport(problems=error.problems)
    if not is_cache(value):
        message = "not a Tokamax cache: its keys are not the JSON text of an op's arguments"
        return ImportReport(problems=(Problem("bad-format", message, Place(str(path))),))
    named = device_of_kind(path.parent.name)
    if named is None and device is None:
        message = f"the directory {path.parent.name!r} does not name a device"
        remedy = "name it with --device"
        return ImportReport(problems=(Problem("no-device", message, Place(str(path)), remedy),))
    kind = path.parent.name if named else ""
    words = f"{kind}/{path.stem}" if kind else path.stem
    context = EntryContext(path.stem, named or device, kind, words)
    return name_dlhs_axes(_read_entries(text, context), dlhs_names, str(path))


def _read_entries(text: SourceText, context: EntryContext) -> ImportReport:
    entries: list[MeasuredEntry] = []
    unusable: list[Unusable] = []
    problems: list[Problem] = []
    for member in members(text):
        try:
            arguments = parse_inner(member.key, "arguments", member.place)
            found = read_entry(arguments, member.value, member.place, context)
        except FormatError as error:
            problems.extend(error.problems)
            continue
        if isinstance(found, MeasuredEntry):
            entries.append(found)
        else:
            unusable.append(found)
    return ImportReport(tuple(entries), tuple(unusable), tuple(problems))


def name_dlhs_axes(report: ImportReport, names: DlhsNames, file: str) -> ImportReport:
    """Give the v1 dlhs entries of one file forward names.

    With ``auto``, all of them are exchanged if at least one makes sense only exchanged; a warning
    says so.
    """
    odd = [entry for entry in report.entries if fits_only_exchanged(entry)]
    if names == "forward" or (names == "auto" and not odd):
        return report
    entries = tuple(
        dataclasses.replace(entry, config=exchange_names(entry.config))
        if is_v1_dlhs(entry)
        else entry
        for entry in report.entries
    )
    if names == "contracting-first":
        return dataclasses.replace(report, entries=entries)
    message = (
        f"{len(odd)} dlhs entries have a tile_k or tile_n beyond its dimension and fit with the two"
        " exchanged, as Tokamax named them up to 0.0.12; all dlhs entries of the file are exchanged"
    )
    warning = Problem(
        "dlhs-names",
        message,
        odd[0].place if odd else Place(file),
        "say --dlhs-names forward or contracting-first to decide it yourself",
        severity="warning",
    )
    return dataclasses.replace(report, entries=entries, problems=(*report.problems, warning))
