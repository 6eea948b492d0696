"""YAML events to a plain value and, beside it, the offset of each part.

Written for speed, because a policy may hold ten thousand rules: no object per scalar, one pass,
no recursion (so that nesting cannot exhaust the stack).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import yaml

from tilepolicy.errors import Problem
from tilepolicy.source.events import Event
from tilepolicy.source.marks import Limits, MappingMarks, Marks, Plain, SequenceMarks
from tilepolicy.source.scalars import Atom, Dialect, Odd, ScalarReader

if TYPE_CHECKING:
    from tilepolicy.source.text import SourceText

__all__ = ["Composer", "Stop"]


class Stop(Exception):  # noqa: N818  # not an error: reading ends, the problem is recorded
    """Reading cannot go on; the reason is among the problems."""


_MERGE: Final = "<<"
_NO_KEY: Final = -1


@dataclass(slots=True)
class _Frame:
    """A mapping or a sequence that is still open.

    Attributes:
        value: the list or dict that is being filled.
        marks: the offsets of the same kind of thing.
        anchor: its anchor, if it has one.
        key: the key that waits for its value, in a mapping.
        key_offset: where that key stands; ``_NO_KEY`` when a key is expected next.
        merges: the values of its ``<<`` keys with their offsets.
        nodes: nodes inside, aliases expanded.
        height: levels inside, aliases expanded.
    """

    value: Any
    marks: Any
    anchor: str | None
    key: str | None = None
    key_offset: int = _NO_KEY
    merges: tuple[tuple[Plain, Marks, int], ...] = ()
    nodes: int = 1
    height: int = 1


class _Anchor(NamedTuple):
    """A finished node that aliases may name."""

    value: Plain
    marks: Marks
    nodes: int
    height: int


class Composer:
    """Builds the value and the marks of one document from its events.

    Attributes:
        value: the plain value so far.
        marks: its offsets.
        problems: what was wrong and could be passed over.
    """

    def __init__(self, source: SourceText, dialect: Dialect, limits: Limits) -> None:
        self.value: Plain = None
        self.marks: Marks = 0
        self.problems: list[Problem] = []
        self._source = source
        self._strict = dialect == "policy"
        self._limits = limits
        self._scalars = ScalarReader(dialect)
        self._open: list[_Frame] = []
        self._anchors: dict[str, _Anchor | None] = {}
        self._written = 0
        self._expanded = 0
        self._documents = 0

    def run(self, stream: Iterator[Any]) -> None:
        """Read all events.

        Raises:
            Stop: reading cannot go on.
            yaml.YAMLError: the text is not YAML.
        """
        handlers: dict[type, Callable[[Any], None]] = {
            yaml.ScalarEvent: self._scalar,
            yaml.MappingStartEvent: self._start,
            yaml.SequenceStartEvent: self._start,
            yaml.MappingEndEvent: self._end,
            yaml.SequenceEndEvent: self._end,
            yaml.AliasEvent: self._alias,
            yaml.DocumentStartEvent: self._document,
        }
        scalar = yaml.ScalarEvent
        for event in stream:
            kind = type(event)
            if kind is scalar and self._quick(event):
                continue
            handler = handlers.get(kind)
            if handler is not None:
                handler(event)

    def _quick(self, event: Event) -> bool:
        """Take a scalar that needs no care: nine of ten events, so this is kept short of calls.

        Returns:
            False when :meth:`_scalar` has to look at it, and nothing has been done.
        """
        if event.tag is not None or event.anchor is not None or not self._open:
            return False
        text = event.value
        value: Atom | Odd = self._scalars.read(text) if event.implicit[0] else text
        frame = self._open[-1]
        target, marks = frame.value, frame.marks
        if type(value) is Odd or self._written >= self._limits.max_nodes:
            return False
        if type(target) is list:
            target.append(value)
            marks.items.append(event.start_mark.index)
        elif frame.key_offset == _NO_KEY:
            if type(value) is not str or text == _MERGE:
                return False
            frame.key, frame.key_offset = text, event.start_mark.index
        else:
            key = frame.key
            if key is None or key in target:
                return False
            target[key] = value
            marks.keys[key] = frame.key_offset
            marks.values[key] = event.start_mark.index
            frame.key_offset = _NO_KEY
        frame.nodes += 1
        self._written += 1
        return True

    def _report(
        self, code: str, message: str, offset: int, remedy: str | None = None, *, stop: bool = False
    ) -> None:
        self.problems.append(Problem(code, message, self._source.place(offset), remedy))
        if len(self.problems) >= self._limits.max_problems:
            text = f"reading stopped after {len(self.problems)} problems"
            self.problems.append(Problem("too-many-problems", text, self._source.place(offset)))
            stop = True
        if stop:
            raise Stop

    def _document(self, event: Event) -> None:
        self._documents += 1
        if self._documents > 1:
            remedy = "keep one document in a file"
            offset = event.start_mark.index
            self._report("two-documents", "a second document starts", offset, remedy, stop=True)

    def _count(self, offset: int) -> None:
        self._written += 1
        if self._written > self._limits.max_nodes:
            message = f"the file has more than {self._limits.max_nodes} values"
            self._report("too-large", message, offset, "split the file", stop=True)

    def _scalar(self, event: Event) -> None:
        offset = event.start_mark.index
        self._count(offset)
        frame = self._open[-1] if self._open else None
        is_key = frame is not None and type(frame.value) is dict and frame.key_offset == _NO_KEY
        plain = event.implicit[0]
        if frame is not None and is_key and plain and event.value == _MERGE:
            frame.key = None
            frame.key_offset = offset
            return
        value: Atom = event.value
        if event.tag is not None:
            value = self._tagged(event, offset)
        elif plain:
            read = self._scalars.read(event.value)
            if type(read) is Odd:
                self._report(read.code, read.message, offset, read.remedy)
            else:
                value = read  # type: ignore[assignment]  # Odd was taken out above
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchor(value, offset, 1, 0)
        if frame is not None and is_key:
            self._set_key(frame, value, event.value, offset)
        else:
            self._add(value, offset, offset)

    def _tagged(self, event: Event, offset: int) -> Atom:
        """The value of a scalar with an explicit tag; only ``!!str`` says something useful."""
        if event.tag != "tag:yaml.org,2002:str":
            self._refuse_tag(str(event.tag), offset)
        return event.value

    def _refuse_tag(self, tag: str, offset: int) -> None:
        shown = tag.replace("tag:yaml.org,2002:", "!!")
        message = f"the tag {shown} is not allowed: a file holds plain values only"
        remedy = "delete the tag; quote the value if it starts with '!'"
        self._report("tag", message, offset, remedy)

    def _set_key(self, frame: _Frame, key: Atom, text: str, offset: int) -> None:
        if type(key) is not str:
            message = f"the key {text or 'null'} is not text"
            self._report("key-not-text", message, offset, f'write a name, or quote it: "{text}"')
        frame.key, frame.key_offset = text, offset

    def _start(self, event: Event) -> None:
        offset = event.start_mark.index
        self._count(offset)
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        frame = self._open[-1] if self._open else None
        if frame is not None and type(frame.value) is dict and frame.key_offset == _NO_KEY:
            message = "a key is a mapping or a list"
            self._report("key-not-text", message, offset, "write a name as the key", stop=True)
        core = "tag:yaml.org,2002:map" if is_mapping else "tag:yaml.org,2002:seq"
        if event.tag is not None and event.tag != core:
            self._refuse_tag(event.tag, offset)
        self._check_depth(1, offset)
        if is_mapping:
            self._open.append(_Frame({}, MappingMarks(offset), event.anchor))
        else:
            self._open.append(_Frame([], SequenceMarks(offset), event.anchor))
        if event.anchor is not None:
            self._anchors[event.anchor] = None

    def _check_depth(self, height: int, offset: int) -> None:
        if len(self._open) + height > self._limits.max_depth:
            message = f"values are nested more than {self._limits.max_depth} levels deep"
            self._report("too-deep", message, offset, "flatten the file", stop=True)

    def _end(self, event: Event) -> None:  # noqa: ARG002  # one signature for all handlers
        frame = self._open.pop()
        if frame.merges:
            self._merge(frame)
        if frame.anchor is not None:
            self._anchors[frame.anchor] = _Anchor(
                frame.value, frame.marks, frame.nodes, frame.height
            )
        self._add(frame.value, frame.marks, frame.marks.offset, frame.nodes, frame.height)

    def _alias(self, event: Event) -> None:
        offset = event.start_mark.index
        name = event.anchor
        if name not in self._anchors:
            message = f"the alias *{name} has no anchor &{name} before it"
            self._report("no-anchor", message, offset, f'quote it if it is a pattern: "*{name}"')
            anchor = _Anchor(None, offset, 1, 0)
        elif (found := self._anchors[name]) is None:
            message = f"the alias *{name} stands inside the value that it names"
            self._report("recursive-alias", message, offset, "write the value out", stop=True)
            return
        else:
            anchor = found
        self._expanded += anchor.nodes
        if self._expanded > self._limits.max_alias_nodes:
            message = f"aliases expand to more than {self._limits.max_alias_nodes} values"
            self._report("alias-bomb", message, offset, "write the values out", stop=True)
        self._check_depth(anchor.height, offset)
        frame = self._open[-1] if self._open else None
        if frame is not None and type(frame.value) is dict and frame.key_offset == _NO_KEY:
            self._set_key(
                frame, anchor.value if isinstance(anchor.value, str) else None, "", offset
            )
        else:
            self._add(anchor.value, anchor.marks, offset, anchor.nodes, anchor.height)

    def _add(
        self, value: Plain, marks: Marks, offset: int, nodes: int = 1, height: int = 0
    ) -> None:
        """Put a finished value where it belongs.

        Args:
            value: the value.
            marks: its offsets.
            offset: where it is used; differs from its own offset for an alias.
            nodes: nodes in it, aliases expanded.
            height: levels in it, aliases expanded.
        """
        if not self._open:
            self.value, self.marks = value, marks
            return
        frame = self._open[-1]
        frame.nodes += nodes
        if height >= frame.height:
            frame.height = height + 1
        target = frame.value
        if type(target) is list:
            target.append(value)
            frame.marks.items.append(marks)
        else:
            self._add_to_mapping(frame, value, marks, offset)

    def _add_to_mapping(self, frame: _Frame, value: Plain, marks: Marks, offset: int) -> None:
        key, key_offset = frame.key, frame.key_offset
        target, own = frame.value, frame.marks
        frame.key = None
        frame.key_offset = _NO_KEY
        if key is None:
            if frame.merges and self._strict:
                self._report(
                    "duplicate-key",
                    "the key << is given twice",
                    key_offset,
                    "merge a list: <<: [*first, *second]",
                )
            frame.merges = (*frame.merges, (value, marks, offset))
        elif key in target:
            line = self._source.line(own.keys[key])
            message = f"the key {key!r} is given twice, first on line {line}"
            self._report("duplicate-key", message, key_offset, "delete one of the two")
        else:
            target[key] = value
            own.keys[key] = key_offset
            own.values[key] = marks

    def _merge(self, frame: _Frame) -> None:
        """Resolve ``<<``: the mapping's own keys win, then earlier items of a list.

        Of several ``<<``, which only MaxText's dialect allows, the last wins: as in OmegaConf.
        """
        own = set(frame.value)
        for value, marks, offset in reversed(frame.merges):
            given = value if isinstance(value, list) else [value]
            for position, part in enumerate(given):
                inner = marks.items[position] if type(marks) is SequenceMarks else marks
                if isinstance(part, dict) and type(inner) is MappingMarks:
                    self._merge_one(frame, own, part, inner, offset)
                else:
                    message = "<< merges mappings only"
                    self._report(
                        "merge", message, offset, "name the anchor of a mapping: <<: *name"
                    )

    def _merge_one(
        self, frame: _Frame, own: set[str], part: dict[str, Plain], inner: MappingMarks, offset: int
    ) -> None:
        target, marks = frame.value, frame.marks
        for key, value in part.items():
            if key in own:
                continue
            if key not in target:
                target[key] = value
                marks.keys[key] = inner.keys[key]
                marks.values[key] = inner.values[key]
            elif self._strict:
                first, second = (self._source.line(m.keys[key]) for m in (marks, inner))
                message = f"two merged mappings give {key!r}: on line {first} and on line {second}"
                self._report("duplicate-key", message, offset, f"give {key!r} here as well")
