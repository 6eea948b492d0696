"""YAML text to plain values with places: safe types only, nothing lost or guessed in silence.

:func:`parse` never raises for the content of a text. It gives a :class:`Document` with the plain
value (``str``, ``int``, ``float``, ``bool``, ``None``, ``list``, ``dict``), the place of every
part of it, and every problem. Two dialects:

``policy``
    YAML as both of its versions read it. A scalar that YAML 1.1 and 1.2 read differently
    (``0512``, ``1_024``, ``12:30``, ``on``, ``1e3``) is a problem, and so is a key that two merged
    mappings both give.
``maxtext``
    What MaxText gets from the same text, which it reads with OmegaConf (see ``scalars``).

libyaml does the scanning where PyYAML has it, PyYAML's own scanner otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import yaml

from tilepolicy.errors import Place, Problem
from tilepolicy.source.composer import Composer, Stop
from tilepolicy.source.events import events
from tilepolicy.source.marks import Limits, MappingMarks, Marks, Plain, SequenceMarks
from tilepolicy.source.scalars import Dialect
from tilepolicy.source.text import SourceText, decode

__all__ = ["LIMITS", "Dialect", "Document", "Limits", "Path", "Plain", "parse"]

type Path = Sequence[str | int]

LIMITS: Final = Limits()


class Document(NamedTuple):
    """One YAML document.

    Attributes:
        source: the text that was read.
        value: the plain value; None when the text is empty or could not be read. Not to be
            changed: parts of it are shared where the text has aliases.
        readable: whether the text is YAML at all; if not, ``value`` means nothing.
        problems: everything that is wrong with the text, in the order of lines.
        marks: offsets of all parts; ask :meth:`place` instead.
    """

    source: SourceText
    value: Plain
    readable: bool
    problems: tuple[Problem, ...]
    marks: Marks = 0

    @property
    def file(self) -> str:
        """The file as the user named it."""
        return self.source.file

    def has(self, path: Path) -> bool:
        """Whether the document has a value at ``path``."""
        return self.readable and len(self._walk(path)) == len(path) + 1

    def place(self, path: Path = ()) -> Place:
        """Where the value at ``path`` starts; its nearest existing parent if it does not exist."""
        return self.source.place(_offset(self._walk(path)[-1]))

    def key_place(self, path: Path) -> Place:
        """Where the key of the last step of ``path`` stands; the item itself in a list.

        The nearest existing parent if there is no such key.
        """
        found = self._walk(path)
        if path and len(found) == len(path) + 1:
            parent, step = found[-2], path[-1]
            if isinstance(parent, MappingMarks) and isinstance(step, str):
                return self.source.place(parent.keys[step])
        return self.source.place(_offset(found[-1]))

    def line(self, path: Path) -> int:
        """1-based line of the value at ``path``; cheaper than its whole place."""
        return self.source.line(_offset(self._walk(path)[-1]))

    def _walk(self, path: Path) -> list[Marks]:
        """The marks along ``path``, the root first, as far as it exists."""
        found = [self.marks]
        for step in path:
            parent = found[-1]
            if isinstance(parent, MappingMarks) and step in parent.values:
                found.append(parent.values[str(step)])
            elif isinstance(parent, SequenceMarks) and step in range(len(parent.items)):
                found.append(parent.items[int(step)])
            else:
                break
        return found


def parse(
    text: str | bytes,
    file: str,
    dialect: Dialect = "policy",
    *,
    limits: Limits = LIMITS,
    pure: bool = False,
) -> Document:
    """Read one YAML document.

    Args:
        text: the text, or its bytes (UTF-8, with or without a byte order mark).
        file: name of the file in places, as the user named it.
        dialect: ``policy`` or ``maxtext``, see the module.
        limits: sizes beyond which the text is refused.
        pure: use PyYAML's scanner even where libyaml is at hand.

    Returns:
        The document; look at its ``problems`` before using its ``value``.
    """
    source, refused = decode(text, file, limits.max_bytes)
    if refused is not None:
        return Document(source, None, readable=False, problems=(refused,))
    composer = Composer(source, dialect, limits)
    readable = False
    try:
        composer.run(events(source.text, pure=pure))
        readable = True
    except Stop:
        pass  # the reason is the last of the problems
    except yaml.YAMLError as error:
        composer.problems.append(_syntax_problem(source, error))
    problems = tuple(sorted(composer.problems, key=_position))
    if not readable:
        return Document(source, None, readable=False, problems=problems)
    return Document(source, composer.value, True, problems, composer.marks)


def _offset(marks: Marks) -> int:
    return marks if isinstance(marks, int) else marks.offset


def _position(problem: Problem) -> tuple[int, int]:
    place = problem.place
    return (0, 0) if place is None else (place.line or 0, place.column or 0)


_RESERVED: Final = ("%", "@", "`", "*", "!", ">", "|", "&")
_QUOTE: Final = (
    "quote a value that starts with a sign YAML reserves, such as "
    '">=4096", "%128", "*name" or "@name"'
)


def _syntax_problem(source: SourceText, error: yaml.YAMLError) -> Problem:
    """The problem of a text that is not YAML; the two scanners word theirs differently."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    offset = len(source.text) if mark is None else mark.index
    what = getattr(error, "problem", None) or str(error)
    place = source.place(offset)
    remedy = None
    column = (place.column or 1) - 1
    rest, before = (place.text or "")[column:], (place.text or "")[:column]
    if rest.startswith("\t"):
        remedy = "indent with spaces, not with tabs"
    elif rest.startswith(_RESERVED) or before.endswith((": >", "- >")):
        remedy = _QUOTE
    elif ": " in rest or rest.startswith(":"):
        remedy = "quote a value that holds ': '"
    return Problem("syntax", f"this is not YAML: {what}", place, remedy)
