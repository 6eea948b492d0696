"""What a policy writes in ``when`` to conditions, normalised while parsing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tilepolicy.facts.devices import parse_device
from tilepolicy.model.conditions import (
    AllOf,
    AnyOf,
    Condition,
    Equals,
    Glob,
    Interval,
    Multiple,
    NotEqual,
    Value,
    show,
)
from tilepolicy.model.factnames import DTYPES, Fact, closest
from tilepolicy.versions import Version

__all__ = ["ConditionError", "normalize_value", "parse_condition"]


@dataclass(eq=False)
class ConditionError(Exception):
    """A condition that means nothing or can never hold.

    Attributes:
        code: problem code.
        message: what is wrong.
        remedy: what to write instead.
        index: which item of a list is meant; None for the whole condition.
    """

    code: str
    message: str
    remedy: str
    index: int | None = None


type _Ordered = int | float | Version

_OPERATOR: Final = re.compile(r"(>=|<=|==|!=|>|<)\s*([^=<>!].*)")
_RANGE: Final = re.compile(r"(.+?)\s*\.\.\s*(.+)")
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_MULTIPLE: Final = re.compile(r"%\s*([0-9]{1,18})")
_GLOB: Final = re.compile(r"[*?\[]")
_MAX_LENGTH: Final = 200
_HOW: Final = 'write a number, ">=4096", "1024..8192", "%128", or a list of these'


def normalize_value(fact: Fact | None, value: bool | int | float | str) -> Value:
    """The value of a fact as conditions compare it: devices by one name, versions in order."""
    if fact is not None and isinstance(value, str):
        if fact.kind == "version":
            return Version.parse(value) or value
        if fact.name == "device" and (spec := parse_device(value)) is not None:
            return spec.device
    return value


def parse_condition(fact: Fact, raw: object) -> Condition:
    """The condition that a policy asks of a fact.

    Args:
        fact: the fact, whose kind says what may be written.
        raw: plain YAML value: a scalar or a list of scalars.

    Raises:
        ConditionError: the text means nothing for this fact, or no value could satisfy it.
    """
    if not isinstance(raw, list):
        return _one(fact, raw)
    if not raw:
        message = f"an empty list of {fact.name} can never match"
        raise ConditionError("unreachable", message, "name at least one value")
    parts: set[Condition] = set()
    for index, item in enumerate(raw):
        try:
            parts.add(_one(fact, item))
        except ConditionError as error:
            error.index = index
            raise
    return AnyOf.of(parts)


def _one(fact: Fact, raw: object) -> Condition:
    if raw is None or isinstance(raw, list | Mapping):
        what = {type(None): "nothing", list: "a list in a list"}.get(type(raw), "a mapping")
        message = f"{fact.name} needs a value, not {what}"
        raise ConditionError("condition", message, "write a scalar or a list of scalars")
    if isinstance(raw, str):
        text = raw.strip()
        if not text or len(text) > _MAX_LENGTH:
            message = f"the condition on {fact.name} is {'empty' if not text else 'too long'}"
            raise ConditionError("condition", message, "write a value")
        return _text(fact, text)
    return _scalar(fact, raw)


def _scalar(fact: Fact, raw: object) -> Condition:
    """A condition that is a bare number or truth value."""
    if fact.kind == "version" and not isinstance(raw, bool):
        message = f"{fact.name} is a version, which YAML would read as the number {raw}"
        raise ConditionError("condition", message, f'quote it: "{raw}"')
    if isinstance(raw, bool):
        if fact.kind not in ("flag", "any"):
            message = f"{fact.name} is {_NOUNS[fact.kind]}, not {show(raw)}"
            raise ConditionError("condition", message, _hint(fact))
        return Equals.of(raw)
    if not isinstance(raw, int | float) or fact.kind in ("flag", "name"):
        message = f"{fact.name} is {_NOUNS[fact.kind]}, not the number {raw}"
        raise ConditionError("condition", message, _hint(fact))
    if isinstance(raw, float) and not math.isfinite(raw):
        raise ConditionError("condition", f"{fact.name} is never {raw}", "write a finite number")
    return _within(fact, Equals.of(_whole(fact, raw)))


_NOUNS: Final = {
    "count": "a whole number",
    "number": "a number",
    "name": "a name",
    "flag": "true or false",
    "any": "a value",
    "version": "a version",
}


def _hint(fact: Fact) -> str:
    if fact.choices == DTYPES:
        return "write a name of jax.numpy, such as bfloat16, float32 or float8_e4m3fn"
    if fact.choices:
        return f"write one of {', '.join(fact.choices)}"
    if fact.kind == "flag":
        return "write true or false without quotes"
    if fact.kind == "version":
        return f'write {fact.name}: ">=0.0.14"'
    return _HOW if fact.kind in ("count", "number") else "write a name"


def _text(fact: Fact, text: str) -> Condition:
    if fact.kind == "flag":
        message = f"{fact.name} is true or false, not the text {text!r}"
        raise ConditionError("condition", message, "write true or false without quotes")
    if fact.kind == "name":
        return _name(fact, text)
    numeric = _comparison(fact, text)
    if numeric is not None:
        return numeric
    if fact.kind == "version":
        return _version(fact, text)
    if fact.kind == "any":
        return Glob(text) if _GLOB.search(text) else Equals.of(text)
    quoted = _NUMBER.fullmatch(text)
    message = f"{fact.name} is {_NOUNS[fact.kind]}, not the text {text!r}"
    raise ConditionError("condition", message, "remove the quotes" if quoted else _HOW)


def _version(fact: Fact, text: str) -> Condition:
    if (version := Version.parse(text)) is not None:
        return Equals.of(version)
    if _GLOB.search(text):
        return Glob(text)
    message = f"{text!r} is not a version"
    raise ConditionError("condition", message, f'write {fact.name}: ">=0.0.14", or "0.0.*"')


def _name(fact: Fact, text: str) -> Condition:
    if text[0] in "<>=!%":
        message = f"{fact.name} is a name: comparisons are for numbers and versions"
        raise ConditionError("condition", message, _hint(fact))
    if fact.name == "device" and not _GLOB.search(text):
        spec = parse_device(text)
        if spec is not None and spec.devices is None:
            return Equals.of(spec.device)
    elif not fact.choices:
        return Glob(text) if _GLOB.search(text) else Equals.of(text)
    if _GLOB.search(text):
        glob = Glob(text)
        named: set[Condition] = {Equals.of(name) for name in fact.choices if glob.holds(name)}
        if named:
            return AnyOf.of(named)
    elif text in fact.choices:
        return Equals.of(text)
    near = closest(text, fact.choices)
    remedy = f"did you mean {near}?" if near else _hint(fact)
    raise ConditionError("unknown-value", f"{fact.name} is never {text!r}", remedy)


def _comparison(fact: Fact, text: str) -> Condition | None:
    """A comparison, range or multiple, or several joined by commas; None if it is none."""
    if text[0] not in "<>=!%" and not (
        _RANGE.fullmatch(text) and (fact.kind != "any" or text[0].isdigit() or text[0] == "-")
    ):
        return None
    parts: set[Condition] = set()
    interval = Interval("version" if fact.kind == "version" else "number")
    for piece in text.split(","):
        part = _piece(fact, piece.strip())
        if isinstance(part, Interval):
            interval = interval.meet(part)
        else:
            parts.add(part)
    if interval.low is not None or interval.high is not None:
        parts.add(_closed(fact, interval, text))
    _check_possible(parts, text)
    return AllOf.of(parts)


def _piece(fact: Fact, text: str) -> Condition:
    if (match := _MULTIPLE.fullmatch(text)) is not None and fact.kind != "version":
        if int(match[1]) == 0:
            raise ConditionError("condition", "nothing is a multiple of 0", 'write "%128"')
        return Multiple(int(match[1]))
    if (match := _OPERATOR.fullmatch(text)) is not None:
        return _operator(fact, match[1], _number(fact, match[2]))
    if (match := _RANGE.fullmatch(text)) is not None:
        low, high = _number(fact, match[1]), _number(fact, match[2])
        kind = "version" if isinstance(low, Version) else "number"
        interval = Interval(kind, low, high)
        if interval.empty:
            message = f"the range {text} is empty"
            raise ConditionError("unreachable", message, f'write "{match[2]}..{match[1]}"')
        return interval
    how = '">=0.0.14" or "0.0.14..0.0.17"' if fact.kind == "version" else _HOW
    raise ConditionError("condition", f"{text!r} is no comparison", how)


def _operator(fact: Fact, sign: str, bound: _Ordered) -> Condition:
    kind = "version" if isinstance(bound, Version) else "number"
    match sign:
        case "==":
            return _within(fact, Equals(kind, bound))
        case "!=":
            return NotEqual(kind, bound)
        case ">=" | ">":
            return Interval(kind, low=bound, low_open=sign == ">")
        case _:
            return Interval(kind, high=bound, high_open=sign == "<")


def _number(fact: Fact, text: str) -> _Ordered:
    if fact.kind == "version":
        if (version := Version.parse(text)) is not None:
            return version
        raise ConditionError("condition", f"{text!r} is not a version", 'write ">=0.0.14"')
    match = _NUMBER.fullmatch(text)
    if match is None:
        message = f"{text!r} is not a number"
        raise ConditionError("condition", message, _HOW)
    return _whole(fact, float(text) if match[1] else int(text))


def _whole(fact: Fact, number: int | float) -> int | float:
    """A number as an int where it is whole, which it has to be for a count."""
    if isinstance(number, int) or number.is_integer():
        return int(number)
    if fact.kind == "count":
        message = f"{fact.name} is a whole number, never {number}"
        raise ConditionError("unreachable", message, "write a whole number")
    return number


def _within(fact: Fact, condition: Equals) -> Condition:
    if fact.kind == "count" and isinstance(condition.value, int) and condition.value < 0:
        message = f"{fact.name} is never {condition.value}"
        raise ConditionError("unreachable", message, "write a number of at least 0")
    return condition


def _closed(fact: Fact, interval: Interval, text: str) -> Condition:
    """An interval in its normal form: whole-number bounds closed, one value as an equality."""
    if fact.kind == "count":
        low, high = interval.low, interval.high
        low = low + 1 if interval.low_open and isinstance(low, int) else low
        high = high - 1 if interval.high_open and isinstance(high, int) else high
        interval = Interval("number", low, high)
        if isinstance(high, int) and high < 0:
            message = f"{fact.name} is never {text}"
            raise ConditionError("unreachable", message, "write a bound of at least 0")
    if interval.empty:
        message = f"nothing is {text}"
        raise ConditionError("unreachable", message, "the two bounds exclude each other")
    if interval.low is not None and interval.low == interval.high:
        return Equals(interval.kind, interval.low)
    return interval


def _check_possible(parts: set[Condition], text: str) -> None:
    """Refuse a conjunction that contradicts itself."""
    equal = [part for part in parts if isinstance(part, Equals)]
    contradicts = any(not part.holds(one.value) for one in equal for part in parts)
    for interval in (part for part in parts if isinstance(part, Interval)):
        for multiple in (part for part in parts if isinstance(part, Multiple)):
            low, high = interval.low, interval.high
            if isinstance(low, int) and isinstance(high, int):
                contradicts |= -(-low // multiple.of) * multiple.of > high
    if contradicts:
        raise ConditionError("unreachable", f"nothing is {text}", "remove one of the conditions")
