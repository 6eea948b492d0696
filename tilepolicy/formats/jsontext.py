"""JSON text with places: strict, bounded, and able to say where each member stands.

``json`` alone keeps the last of two equal keys, reads ``NaN``, and forgets offsets. Formats that
put JSON text inside JSON strings (Tokamax's caches) also need a place for what is inside: the
place of the string that holds it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Never

from tilepolicy.errors import Place, Problem
from tilepolicy.formats.records import FormatError
from tilepolicy.source.text import SourceText

__all__ = ["MAX_BYTES", "MAX_DEPTH", "Member", "items", "members", "parse", "parse_inner", "read"]

MAX_BYTES: Final = 64 * 2**20
"""Largest file that is read; Tokamax's largest shipped cache is 0.2 MB."""
MAX_DEPTH: Final = 32
"""Deepest nesting that is read; Tokamax's caches have 5, its results 8."""

_SPACE: Final = re.compile(r"[ \t\n\r]*")


class _RefusedError(ValueError):
    """Something that ``json`` would let pass."""


class _RepeatedKeyError(_RefusedError):
    """One key twice in one object."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an object, or one item of an array (then ``key`` is its index as text).

    Attributes:
        key: the key, unescaped.
        value: the parsed value.
        place: where the key (for an item, the value) starts.
        value_offset: offset of the value in the text, for :func:`members` and :func:`items`.
    """

    key: str
    value: object
    place: Place
    value_offset: int


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _RepeatedKeyError(f"the key {_short(key)!r} appears twice in one object")
        found[key] = value
    return found


def _refuse_constant(name: str) -> Never:
    raise _RefusedError(f"{name} is not a JSON number")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


def read(path: Path, shown: str | None = None) -> SourceText:
    """The text of a file.

    Args:
        path: the file.
        shown: its name in places; the path when None.

    Raises:
        FormatError: it cannot be read, is too large, or is not UTF-8.
    """
    name = shown or str(path)
    try:
        with path.open("rb") as stream:
            body = stream.read(MAX_BYTES + 1)
    except OSError as error:
        message = f"the file cannot be read: {error.strerror or error}"
        raise FormatError(Problem("unreadable", message, Place(name))) from error
    if len(body) > MAX_BYTES:
        message = f"the file is larger than {MAX_BYTES} bytes"
        raise FormatError(Problem("too-large", message, Place(name), "split the file"))
    try:
        return SourceText(name, body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        message = f"the byte 0x{body[error.start]:02x} is not UTF-8"
        raise FormatError(Problem("bad-encoding", message, Place(name, line))) from error


def parse(source: SourceText) -> object:
    """The value of the whole text.

    Raises:
        FormatError: not JSON, a key twice in one object, ``NaN``, or nested too deeply.
    """
    try:
        value = _DECODER.decode(source.text)
    except json.JSONDecodeError as error:
        problem = Problem("bad-json", f"not JSON: {error.msg}", source.place(error.pos))
        raise FormatError(problem) from error
    except (_RefusedError, RecursionError, ValueError) as error:
        raise FormatError(_whole(source, error)) from error
    _check_depth(value, source.place(0))
    return value


def parse_inner(text: str, what: str, place: Place) -> object:
    """The value of JSON text that stood inside a string.

    Args:
        text: the unescaped text.
        what: what it should be, for the message: ``arguments``.
        place: where the string stands.

    Raises:
        FormatError: as for :func:`parse`; the place is that of the string.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        message = f"the {what} are not JSON: {error.msg} at character {error.pos + 1} of the string"
        raise FormatError(Problem("bad-json", message, place)) from error
    except (_RefusedError, RecursionError, ValueError) as error:
        raise FormatError(Problem("bad-json", f"the {what}: {_reason(error)}", place)) from error
    _check_depth(value, place)
    return value


def members(source: SourceText, offset: int = 0) -> Iterator[Member]:
    """The members of the object at ``offset`` of a text that :func:`parse` accepts."""
    text = source.text
    at = _skip(text, _skip(text, offset) + 1)
    while text[at] != "}":
        key, end = _DECODER.raw_decode(text, at)
        value_at = _skip(text, _skip(text, end) + 1)
        value, end = _DECODER.raw_decode(text, value_at)
        yield Member(str(key), value, source.place(at), value_at)
        at = _after_comma(text, end)


def items(source: SourceText, offset: int = 0) -> Iterator[Member]:
    """The items of the array at ``offset`` of a text that :func:`parse` accepts."""
    text = source.text
    at = _skip(text, _skip(text, offset) + 1)
    index = 0
    while text[at] != "]":
        value, end = _DECODER.raw_decode(text, at)
        yield Member(str(index), value, source.place(at), at)
        at = _after_comma(text, end)
        index += 1


def _skip(text: str, offset: int) -> int:
    match = _SPACE.match(text, offset)
    return offset if match is None else match.end()


def _after_comma(text: str, offset: int) -> int:
    at = _skip(text, offset)
    return _skip(text, at + 1) if text[at] == "," else at


def _whole(source: SourceText, error: Exception) -> Problem:
    place = Place(source.file)
    if isinstance(error, _RepeatedKeyError):
        place = _repeated_key(source)
    elif isinstance(error, _RefusedError):
        found = re.search(r"(?<![\w\"])-?(?:NaN|Infinity)(?![\w\"])", source.text)
        place = source.place(found.start()) if found else place
    return Problem("bad-json", _reason(error), place)


def _repeated_key(source: SourceText) -> Place:
    """Where a key stands for the second time, or the outermost member that holds such a key."""
    seen: set[str] = set()
    lenient = json.JSONDecoder()
    text = source.text
    at = _skip(text, _skip(text, 0) + 1) if text.lstrip().startswith("{") else len(text)
    while at < len(text) and text[at] == '"':
        key, end = lenient.raw_decode(text, at)
        if key in seen:
            return source.place(at)
        seen.add(key)
        try:
            _, end = _DECODER.raw_decode(text, _skip(text, _skip(text, end) + 1))
        except _RefusedError:
            return source.place(at)
        at = _after_comma(text, end)
    return Place(source.file)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"nested more than {MAX_DEPTH} deep"
    return str(error)


def _check_depth(value: object, place: Place) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return
    raise FormatError(Problem("bad-json", f"nested more than {MAX_DEPTH} deep", place))


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
