"""Tables in Python source, read with ``ast``: constants are folded, nothing is executed.

Understood are literals, tuples, lists, dicts, arithmetic on numbers (``256 * 5``), text put
together, names of constants of the same module, dotted names (``jnp.bfloat16`` gives
``bfloat16``) and calls of a named record (``TuningKey(bq=1)``), which are kept as a record, not
called. Anything else is a located problem.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tilepolicy.errors import Place, Problem
from tilepolicy.formats.jsontext import read
from tilepolicy.formats.records import FormatError
from tilepolicy.source.text import SourceText

__all__ = ["Entry", "Record", "Table", "Value", "read_tables"]

MAX_BYTES: Final = 8 * 2**20
"""Largest source that is parsed; tpu-inference's largest table has 0.3 MB."""
_MAX_NUMBER: Final = 2**63
_MAX_DEPTH: Final = 32

type Value = int | float | str | bool | tuple[Value, ...] | Table | Record | None


@dataclass(frozen=True, slots=True)
class Record:
    """A call of a named record: positional and keyword values in their order."""

    name: str
    values: tuple[Value, ...]
    keywords: Mapping[str, Value]

    @property
    def fields(self) -> tuple[Value, ...]:
        """All values, positional ones first."""
        return (*self.values, *self.keywords.values())


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a dict display.

    Attributes:
        key: the folded key.
        value: the folded value.
        place: where the key stands.
    """

    key: Value
    value: Value
    place: Place


@dataclass(frozen=True, slots=True)
class Table:
    """A dict display.

    Attributes:
        entries: its entries that are constants, in the order of the source.
        problems: one for each entry of a module-level table that is no constant.
    """

    entries: tuple[Entry, ...]
    problems: tuple[Problem, ...] = ()


class _UnfoldableError(ValueError):
    """A part of the source is no constant."""

    def __init__(self, node: ast.AST, message: str) -> None:
        super().__init__(message)
        self.node = node


_BINARY: Final[Mapping[type[ast.operator], Callable[[int, int], int | float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.LShift: lambda left, right: left << min(right, 64),
}


def read_tables(path: Path) -> dict[str, Table]:
    """Every module-level dict of a source file, by the name it is assigned to.

    Raises:
        FormatError: the file cannot be read, is too large, or is not Python.
    """
    source = read(path)
    if len(source.text) > MAX_BYTES:
        message = f"the file is larger than {MAX_BYTES} bytes"
        raise FormatError(Problem("too-large", message, Place(source.file)))
    folder = _Folder(source)
    tables: dict[str, Table] = {}
    for statement in _parse(source).body:
        target, node = _assignment(statement)
        if target is None or node is None:
            continue
        if isinstance(node, ast.Dict):
            tables[target] = folder.table(node)
        else:
            folder.remember(target, node)
    return tables


def _parse(source: SourceText) -> ast.Module:
    try:
        with warnings.catch_warnings():
            # An odd escape in a docstring is not our business.
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(source.text)
    except SyntaxError as error:
        line = error.lineno or 1
        place = Place(source.file, line, error.offset, (error.text or "").rstrip("\n"))
        raise FormatError(Problem("bad-python", f"not Python: {error.msg}", place)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        message = f"not Python that can be parsed: {error or 'nested too deeply'}"
        raise FormatError(Problem("bad-python", message, Place(source.file))) from error


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=node):
            return name, node
        case ast.AnnAssign(target=ast.Name(id=name), value=node):
            return name, node
        case _:
            return None, None


class _Folder:
    """Folds constant expressions of one source."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self._constants: dict[str, Value] = {}
        self._lines = source.text.splitlines()

    def remember(self, name: str, node: ast.expr) -> None:
        """Keep a module constant for later use; what is no constant is simply not known."""
        try:
            self._constants[name] = self._fold(node, 0)
        except _UnfoldableError:
            self._constants.pop(name, None)

    def table(self, node: ast.Dict) -> Table:
        """A module-level table; an entry that is no constant becomes a problem."""
        entries: list[Entry] = []
        problems: list[Problem] = []
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            try:
                entries.append(self._entry(node, key_node, value_node, 0))
            except _UnfoldableError as error:
                problems.append(Problem("not-constant", str(error), self._place(error.node)))
        return Table(tuple(entries), tuple(problems))

    def _entry(
        self, node: ast.Dict, key_node: ast.expr | None, value_node: ast.expr, depth: int
    ) -> Entry:
        if key_node is None:
            raise _UnfoldableError(node, "a table that unpacks another (**) is not read")
        key = self._fold(key_node, depth + 1)
        value = self._fold(value_node, depth + 1)
        return Entry(key, value, self._place(key_node))

    def _fold(self, node: ast.expr, depth: int) -> Value:
        if depth > _MAX_DEPTH:
            raise _UnfoldableError(node, f"nested more than {_MAX_DEPTH} deep")
        match node:
            case ast.Constant(value=int() | float() | str() | bool() | None as value):
                return value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return tuple(self._fold(part, depth + 1) for part in parts)
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                return Table(tuple(self._entry(node, key, value, depth) for key, value in pairs))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._arithmetic(node, operator.sub, 0, self._fold(operand, depth + 1))
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(
                    node, op, self._fold(left, depth + 1), self._fold(right, depth + 1)
                )
            case ast.Name(id=name) if name in self._constants:
                return self._constants[name]
            case ast.Attribute(attr=name):
                return name
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                return self._record(node, name, depth)
            case _:
                raise _UnfoldableError(node, f"{ast.unparse(node)[:60]} is not a constant")

    def _record(self, node: ast.Call, name: str, depth: int) -> Record:
        if any(keyword.arg is None for keyword in node.keywords):
            raise _UnfoldableError(node, f"{name}(**…) is not a constant")
        values = tuple(self._fold(value, depth + 1) for value in node.args)
        keywords = {str(k.arg): self._fold(k.value, depth + 1) for k in node.keywords}
        return Record(name, values, keywords)

    def _binary(self, node: ast.expr, op: ast.operator, left: Value, right: Value) -> Value:
        if isinstance(op, ast.Add) and isinstance(left, str) and isinstance(right, str):
            return left + right
        function = _BINARY.get(type(op))
        if function is None:
            raise _UnfoldableError(node, f"{ast.unparse(node)[:60]} is not folded")
        return self._arithmetic(node, function, left, right)

    def _arithmetic(
        self,
        node: ast.expr,
        function: Callable[[int, int], int | float],
        left: Value,
        right: Value,
    ) -> int | float:
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            raise _UnfoldableError(node, f"{ast.unparse(node)[:60]} is not arithmetic on numbers")
        try:
            result = function(left, right)  # type: ignore[arg-type]  # floats are fine for most
        except (ArithmeticError, TypeError, ValueError) as error:
            raise _UnfoldableError(node, f"{ast.unparse(node)[:60]}: {error}") from error
        if abs(result) > _MAX_NUMBER:
            raise _UnfoldableError(node, f"{ast.unparse(node)[:60]} is beyond 2**63")
        return result

    def _place(self, node: ast.AST) -> Place:
        line = getattr(node, "lineno", None)
        if line is None:
            return Place(self.source.file)
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        # ast counts columns in UTF-8 bytes.
        before = text.encode("utf-8")[: getattr(node, "col_offset", 0)].decode("utf-8", "ignore")
        return Place(self.source.file, line, len(before) + 1, text)
