"""Tokamax's ``AutotuningResult`` files, as its ``dumps()`` writes them.

``{"device_kind": "TPU v6 lite", "data": [[{"op": {"__type": "<module.Class>", …}, "arguments":
{…}}, {"<configuration as JSON text>": {record}}]], "tokamax_version": "0.0.17"}``. Unlike in a
cache only the configuration is JSON inside a string. A list of ``{"op", "arguments"}`` is
Tokamax's other file (``bound_args_to_json``): calls without timings, recognised and refused.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tilepolicy.errors import Place, Problem
from tilepolicy.formats.devices import device_directory, device_of_kind
from tilepolicy.formats.jsontext import Member, items, members, parse, read
from tilepolicy.formats.records import FormatError, ImportReport, MeasuredEntry, Unusable
from tilepolicy.formats.tokamax_cache import name_dlhs_axes
from tilepolicy.formats.tokamax_entries import DlhsNames, EntryContext, op_file_name, read_entry
from tilepolicy.source.text import SourceText

__all__ = ["is_result", "read_result"]

_KEYS = ("device_kind", "data")


def is_result(value: object) -> bool:
    """Whether a parsed JSON value looks like an ``AutotuningResult`` or a list of calls."""
    return isinstance(value, list) or (isinstance(value, dict) and any(k in value for k in _KEYS))


def read_result(
    path: Path, *, dlhs_names: DlhsNames = "auto", source: SourceText | None = None
) -> ImportReport:
    """Read one ``AutotuningResult`` file; problems do not stop the reading.

    Args:
        path: the file.
        dlhs_names: see :data:`~tilepolicy.formats.tokamax_entries.DlhsNames`.
        source: its text, if it has been read already.
    """
    try:
        text = source or read(path)
        value = parse(text)
    except FormatError as error:
        return ImportReport(problems=error.problems)
    if problem := _refusal(value, text):
        return ImportReport(problems=(problem,))
    parts = {member.key: member for member in members(text)}
    kind = parts["device_kind"]
    device = device_of_kind(str(kind.value)) if isinstance(kind.value, str) else None
    if device is None:
        message = f"{kind.value!r} is not the kind of a device that policies know"
        return ImportReport(problems=(Problem("foreign-device", message, kind.place),))
    version = parts["tokamax_version"].value if "tokamax_version" in parts else "of unknown release"
    words = f"tokamax {version} {kind.value}"
    shared = EntryContext("", device, device_directory(str(kind.value)), words)
    report = _read_pairs(text, parts["data"], shared)
    return name_dlhs_axes(report, dlhs_names, text.file)


def _refusal(value: object, text: SourceText) -> Problem | None:
    """Why the file as a whole is no result."""
    if isinstance(value, list):
        message = "a list of calls without timings (bound_args_to_json), not an AutotuningResult"
        remedy = "tune the calls with tokamax.autotune and import what it gives"
        return Problem("no-timings", message, text.place(0), remedy)
    if not isinstance(value, dict) or any(key not in value for key in _KEYS):
        message = "not an AutotuningResult: it has device_kind and data"
        return Problem("bad-format", message, text.place(0))
    if not isinstance(value["data"], list):
        return Problem("bad-format", "data is not a list", text.place(0), path="data")
    if not value["data"]:
        return Problem("no-entries", "the AutotuningResult is empty", text.place(0), path="data")
    return None


def _read_pairs(text: SourceText, data: Member, shared: EntryContext) -> ImportReport:
    entries: list[MeasuredEntry] = []
    unusable: list[Unusable] = []
    problems: list[Problem] = []
    for item in items(text, data.value_offset):
        try:
            found = _read_pair(item.value, item.place, shared)
        except FormatError as error:
            problems.extend(error.problems)
            continue
        if isinstance(found, MeasuredEntry):
            entries.append(found)
        else:
            unusable.append(found)
    return ImportReport(tuple(entries), tuple(unusable), tuple(problems))


def _read_pair(pair: object, place: Place, shared: EntryContext) -> MeasuredEntry | Unusable:
    match pair:
        case [{"op": {"__type": str(class_path)}, "arguments": arguments}, configs]:
            op = op_file_name(class_path.rpartition(".")[2])
            return read_entry(arguments, configs, place, dataclasses.replace(shared, op=op))
        case _:
            message = 'an item of data is not [{"op": {"__type": …}, "arguments": …}, {…}]'
            raise FormatError(Problem("bad-entry", message, place))
