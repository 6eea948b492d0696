"""A policy reference to the layers it stands for: itself and everything it extends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pydantic import ValidationError

from tilepolicy.errors import Place, PolicyError, Problem
from tilepolicy.match import RuleIndex
from tilepolicy.model import PolicyDocument
from tilepolicy.model.problems import problems_of
from tilepolicy.policy.compile import Sections, compile_document
from tilepolicy.policy.lint import lint
from tilepolicy.policy.references import Reference, follow
from tilepolicy.source import Document, parse

__all__ = ["Layer", "check_text", "in_order", "read_layers"]

_MAX_DEPTH = 16


class Layer(NamedTuple):
    """One policy file, on its own.

    Attributes:
        reference: where it was found.
        source: its text.
        document: its content, ``extends`` not followed.
        sections: its rules.
        indexes: an index of each section, in the order of ``sections.all()``.
    """

    reference: Reference
    source: Document
    document: PolicyDocument
    sections: Sections
    indexes: list[RuleIndex]


def in_order(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Layers in which each file stands once: where it was last, behind all that extend it."""
    last = {layer.reference.identity: layer for layer in layers}
    kept: dict[str, Layer] = {}
    for layer in reversed(list(layers)):
        kept.setdefault(layer.reference.identity, last[layer.reference.identity])
    return tuple(reversed(kept.values()))


def read_layers(reference: Reference, *, allow_outside: bool) -> tuple[Layer, ...]:
    """A policy and those it extends, in the order in which their rules are tried.

    Raises:
        PolicyError: with every problem of every file.
    """
    reader = _Reader(allow_outside=allow_outside)
    layers = reader.read(reference, Place(reference.shown), ())
    if reader.problems:
        raise PolicyError(sorted(reader.problems, key=reader.position))
    return layers


def check_text(text: str | bytes, file: str) -> tuple[Problem, ...]:
    """Every problem of a policy's own text; what it extends is not followed.

    Args:
        text: the text of the policy, for example of an editor's buffer.
        file: name for places.
    """
    reader = _Reader([file], allow_outside=False)
    reader.layer(Reference(file, file), parse(text, file))
    return tuple(sorted(reader.problems, key=reader.position))


class _Reader:
    """Reads files once each and collects their problems."""

    def __init__(self, files: Iterable[str] = (), *, allow_outside: bool) -> None:
        self.allow_outside = allow_outside
        self.problems: list[Problem] = []
        self.files = list(files)
        self._read: dict[str, tuple[Layer, ...]] = {}

    def position(self, problem: Problem) -> tuple[int, int, int]:
        """Order of problems: files as they were read, then lines and columns."""
        place = problem.place
        if place is None or place.file not in self.files:
            return (-1, 0, 0)
        return (self.files.index(place.file), place.line or 0, place.column or 0)

    def read(
        self, reference: Reference, place: Place, path: tuple[Reference, ...]
    ) -> tuple[Layer, ...]:
        """The layers of one policy.

        Args:
            reference: the policy.
            place: where it is named.
            path: the policies that extend it, outermost first.
        """
        identities = [parent.identity for parent in path]
        if reference.identity in identities:
            chain = [*path[identities.index(reference.identity) :], reference]
            message = f"extends goes in a circle: {' extends '.join(r.shown for r in chain)}"
            self.problems.append(Problem("extends-cycle", message, place, "remove one of them"))
            return ()
        if len(path) == _MAX_DEPTH:
            message = f"policies extend each other more than {_MAX_DEPTH} levels deep"
            self.problems.append(Problem("too-deep", message, place, "merge some of them"))
            return ()
        if reference.identity not in self._read:
            self._read[reference.identity] = self._read_new(reference, place, path)
        return self._read[reference.identity]

    def _read_new(
        self, reference: Reference, place: Place, path: tuple[Reference, ...]
    ) -> tuple[Layer, ...]:
        self.files.append(reference.shown)
        try:
            source = parse(reference.read(), reference.shown)
        except OSError as error:
            message = f"{reference.shown} cannot be read: {error.strerror or error}"
            self.problems.append(Problem("unreadable", message, place, "check the file"))
            return ()
        layer = self.layer(reference, source)
        below: list[Layer] = []
        for at, name in _extended(source):
            where = source.place(at)
            try:
                target = follow(name, reference, where, allow_outside=self.allow_outside)
            except PolicyError as error:
                self.problems += error.problems
            else:
                below += self.read(target, where, (*path, reference))
        return in_order([*([layer] if layer is not None else []), *below])

    def layer(self, reference: Reference, source: Document) -> Layer | None:
        """The content of one file; None after recording why it has none."""
        found = list(source.problems)
        if not source.readable:
            self.problems += found
            return None
        try:
            document = PolicyDocument.model_validate(source.value)
        except ValidationError as error:
            known = {problem.place for problem in found}
            later = problems_of(error, source, PolicyDocument)
            self.problems += found + [p for p in later if p.place not in known]
            return None
        sections = compile_document(document, source)
        indexes = [RuleIndex(section.rules) for section in sections.all()]
        self.problems += found + lint(sections, indexes, source)
        return Layer(reference, source, document, sections, indexes)


def _extended(source: Document) -> list[tuple[tuple[str | int, ...], str]]:
    """The names under ``extends`` with their paths; wrong ones are the model's to report."""
    value = source.value.get("extends") if isinstance(source.value, dict) else None
    if isinstance(value, list):
        return [(("extends", i), v) for i, v in enumerate(value) if isinstance(v, str) and v]
    return []
