"""YAML events to a plain value and, beside it, the offset of each part.

Written for speed, because a policy may hold ten thousand rules: no object per scalar, one pass,
no recursion (so that nesting cannot exhaust the stack).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import yaml

from tilepolicy.errors import Problem
from tilepolicy.scalars import Atom, Dialect, Odd, ScalarReader

if TYPE_CHECKING:
    from tilepolicy.sourcetext import SourceText

__all__ = [
    "Composer",
    "Limits",
    "MappingMarks",
    "Marks",
    "Plain",
    "SequenceMarks",
    "Stop",
    "events",
]

type Plain = Atom | list["Plain"] | dict[str, "Plain"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a text may be before it is refused; a refusal is a problem with a place.

    Attributes:
        max_bytes: bytes of the text in UTF-8.
        max_depth: nested mappings and sequences, aliases expanded.
        max_nodes: scalars, mappings and sequences that are written out.
        max_alias_nodes: nodes that aliases add to them.
        max_problems: problems after which reading stops.
    """

    max_bytes: int = 16 * 2**20
    max_depth: int = 64
    max_nodes: int = 1_000_000
    max_alias_nodes: int = 50_000
    max_problems: int = 100


@dataclass(slots=True)
class SequenceMarks:
    """Offsets of a sequence and of its items."""

    offset: int
    items: list[Marks] = field(default_factory=list)


@dataclass(slots=True)
class MappingMarks:
    """Offsets of a mapping, of its keys and of its values."""

    offset: int
    keys: dict[str, int] = field(default_factory=dict)
    values: dict[str, Marks] = field(default_factory=dict)


type Marks = int | SequenceMarks | MappingMarks
"""The offsets of a value: a bare offset for a scalar, to keep ten thousand rules small."""


class Stop(Exception):  # noqa: N818  # not an error: reading ends, the problem is recorded
    """Reading cannot go on; the reason is among the problems."""


@dataclass(slots=True)
class _Frame:
    """A mapping or a sequence that is still open.

    Attributes:
        value: the list or dict that is being filled.
        marks: its offsets.
        anchor: its anchor, if it has one.
        key: the key that waits for its value, in a mapping.
        key_offset: where that key stands; None when a key is expected next.
        merges: the values of its ``<<`` keys with their offsets.
        nodes: nodes inside, aliases expanded.
        height: levels inside, aliases expanded.
    """

    value: list[Plain] | dict[str, Plain]
    marks: SequenceMarks | MappingMarks
    anchor: str | None
    key: str | None = None
    key_offset: int | None = None
    merges: list[tuple[Plain, Marks, int]] = field(default_factory=list)
    nodes: int = 1
    height: int = 1


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A finished node that aliases may name."""

    value: Plain
    marks: Marks
    nodes: int
    height: int


def events(text: str, *, pure: bool) -> Iterator[yaml.Event]:
    """The YAML events of a text, from libyaml where PyYAML has it.

    Raises:
        yaml.YAMLError: the text is not YAML.
    """
    loader = yaml.SafeLoader if pure or not yaml.__with_libyaml__ else yaml.CSafeLoader
    parser = loader(text)
    try:
        while (event := parser.get_event()) is not None:
            yield event
            if type(event) is yaml.StreamEndEvent:
                return
    finally:
        parser.dispose()


_MERGE: Final = "<<"


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

    def run(self, stream: Iterator[yaml.Event]) -> None:
        """Read all events.

        Raises:
            Stop: reading cannot go on.
            yaml.YAMLError: the text is not YAML.
        """
        handlers = {
            yaml.ScalarEvent: self._scalar,
            yaml.MappingStartEvent: self._start,
            yaml.SequenceStartEvent: self._start,
            yaml.MappingEndEvent: self._end,
            yaml.SequenceEndEvent: self._end,
            yaml.AliasEvent: self._alias,
            yaml.DocumentStartEvent: self._document,
        }
        for event in stream:
            handler = handlers.get(type(event))
            if handler is not None:
                handler(event)

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

    def _document(self, event: yaml.Event) -> None:
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

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        offset = event.start_mark.index
        self._count(offset)
        frame = self._open[-1] if self._open else None
        is_key = frame is not None and type(frame.value) is dict and frame.key_offset is None
        plain = event.implicit[0]
        if frame is not None and is_key and plain and event.value == _MERGE:
            frame.key, frame.key_offset = None, offset
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

    def _tagged(self, event: yaml.ScalarEvent, offset: int) -> Atom:
        """The value of a scalar with an explicit tag; only ``!!str`` says something useful."""
        if event.tag != "tag:yaml.org,2002:str":
            self._refuse_tag(event, offset)
        text: str = event.value
        return text

    def _refuse_tag(self, event: yaml.Event, offset: int) -> None:
        shown = event.tag.replace("tag:yaml.org,2002:", "!!")
        message = f"the tag {shown} is not allowed: a file holds plain values only"
        remedy = "delete the tag; quote the value if it starts with '!'"
        self._report("tag", message, offset, remedy)

    def _set_key(self, frame: _Frame, key: Atom, text: str, offset: int) -> None:
        if type(key) is not str:
            message = f"the key {text or 'null'} is not text"
            self._report("key-not-text", message, offset, f'write a name, or quote it: "{text}"')
        frame.key, frame.key_offset = text, offset

    def _start(self, event: yaml.CollectionStartEvent) -> None:
        offset = event.start_mark.index
        self._count(offset)
        is_mapping = type(event) is yaml.MappingStartEvent
        frame = self._open[-1] if self._open else None
        if frame is not None and type(frame.value) is dict and frame.key_offset is None:
            message = "a key is a mapping or a list"
            self._report("key-not-text", message, offset, "write a name as the key", stop=True)
        core = "tag:yaml.org,2002:map" if is_mapping else "tag:yaml.org,2002:seq"
        if event.tag is not None and event.tag != core:
            self._refuse_tag(event, offset)
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

    def _end(self, event: yaml.Event) -> None:  # noqa: ARG002  # one signature for all handlers
        frame = self._open.pop()
        if frame.merges:
            self._merge(frame)
        if frame.anchor is not None:
            self._anchors[frame.anchor] = _Anchor(
                frame.value, frame.marks, frame.nodes, frame.height
            )
        self._add(frame.value, frame.marks, frame.marks.offset, frame.nodes, frame.height)

    def _alias(self, event: yaml.AliasEvent) -> None:
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
        if frame is not None and type(frame.value) is dict and frame.key_offset is None:
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
            frame.marks.items.append(marks)  # type: ignore[union-attr]  # a list has sequence marks
        else:
            self._add_to_mapping(frame, value, marks, offset)

    def _add_to_mapping(self, frame: _Frame, value: Plain, marks: Marks, offset: int) -> None:
        key, key_offset = frame.key, frame.key_offset
        target, own = frame.value, frame.marks
        if type(target) is not dict or type(own) is not MappingMarks or key_offset is None:
            raise TypeError("a mapping frame without a key")
        frame.key = frame.key_offset = None
        if key is None:
            if frame.merges and self._strict:
                self._report(
                    "duplicate-key",
                    "the key << is given twice",
                    key_offset,
                    "merge a list: <<: [*first, *second]",
                )
            frame.merges.append((value, marks, offset))
        elif key in target:
            line = self._source.line(own.keys[key])
            message = f"the key {key!r} is given twice, first on line {line}"
            self._report("duplicate-key", message, key_offset, "delete one of the two")
        else:
            target[key] = value
            own.keys[key] = key_offset
            own.values[key] = marks

    def _merge(self, frame: _Frame) -> None:
        """Resolve ``<<``: the mapping's own keys win, then earlier items of a list."""
        own = set(frame.value)
        for value, marks, offset in frame.merges:
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
        if type(target) is not dict or type(marks) is not MappingMarks:
            raise TypeError("only a mapping merges")
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
