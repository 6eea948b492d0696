"""What a rule asks of all facts together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from tilepolicy.model.condition_text import ConditionError, parse_condition
from tilepolicy.model.conditions import Condition
from tilepolicy.model.factnames import FACTS, Fact, find_fact, suggest_fact

__all__ = ["CallWhen", "When"]

_MAX_REMEMBERED: Final = 10_000


@dataclass(frozen=True, slots=True)
class When:
    """Conditions by fact; all must hold. Equal when they ask the same, in whatever order.

    Attributes:
        items: fact and condition, sorted by fact.
        text: ``str()`` of it, where a reader that knows the texts of its conditions made it.
    """

    items: tuple[tuple[str, Condition], ...] = ()
    text: str = field(default="", compare=False, repr=False)

    @classmethod
    def of(cls, conditions: Mapping[str, Condition]) -> When:
        """The conditions of a mapping."""
        return cls(tuple(sorted(conditions.items(), key=lambda item: item[0])))

    def __iter__(self) -> Iterator[tuple[str, Condition]]:
        return iter(self.items)

    def __str__(self) -> str:
        return self.text or ", ".join(f"{fact}: {condition}" for fact, condition in self.items)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Read a plain mapping; every wrong condition of it becomes an error of its own."""
        return _schema(arguments=False)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """JSON Schema of the plain mapping."""
        return _json_schema("Conditions on facts; all must hold.")


class CallWhen:
    """A :class:`When` that may also name arguments of an op's call (``arg.q.dim0``)."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Read a plain mapping into a :class:`When`."""
        return _schema(arguments=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """JSON Schema of the plain mapping."""
        return _json_schema("Conditions on facts and on arguments of the call; all must hold.")


def _schema(*, arguments: bool) -> core_schema.CoreSchema:
    reader = _Reader(arguments=arguments)
    name = "CallWhen" if arguments else "When"
    return core_schema.no_info_plain_validator_function(reader.read, ref=name)


class _Reader:
    """Parses conditions, remembering those it has seen: large policies repeat them."""

    def __init__(self, *, arguments: bool) -> None:
        self._arguments = arguments
        self._seen: dict[tuple[str, str], tuple[Condition, str]] = {}

    def read(self, raw: object) -> When:
        """The conditions of a plain mapping.

        Raises:
            ValidationError: one error for each wrong key or condition.
            PydanticCustomError: it is no mapping.
        """
        if isinstance(raw, When):
            return raw
        if not isinstance(raw, dict):
            message = "a mapping of facts to conditions belongs here"
            remedy = "write when: {layer: wi}"
            raise PydanticCustomError("wrong-type", "{what}", {"what": message, "remedy": remedy})
        conditions: dict[str, tuple[Condition, str]] = {}
        errors: list[InitErrorDetails] = []
        for name, value in raw.items():
            try:
                conditions[name] = self._condition(name, value)
            except ConditionError as error:
                loc = (name,) if error.index is None else (name, error.index)
                errors.append(_details(error, loc, value))
        if errors:
            raise ValidationError.from_exception_data("when", errors)
        found = sorted(conditions.items(), key=lambda item: item[0])
        items = tuple((name, condition) for name, (condition, _) in found)
        return When(items, ", ".join(text for _, (_, text) in found))

    def _condition(self, name: str, value: object) -> tuple[Condition, str]:
        """A condition, and how a reason names it."""
        key = (name, repr(value))
        known = self._seen.get(key)
        if known is None:
            condition = parse_condition(self._fact(name), value)
            if len(self._seen) >= _MAX_REMEMBERED:
                self._seen.clear()
            known = self._seen[key] = (condition, f"{name}: {condition}")
        return known

    def _fact(self, name: str) -> Fact:
        fact = find_fact(name, arguments=self._arguments)
        if fact is not None:
            return fact
        near = suggest_fact(name)
        remedy = f"did you mean {near}?" if near else "name a fact or a key of MaxText's config"
        raise ConditionError("unknown-fact", f"there is no fact {name!r}", remedy)


def _details(error: ConditionError, loc: tuple[str | int, ...], value: object) -> InitErrorDetails:
    context = {"what": error.message, "remedy": error.remedy}
    custom = PydanticCustomError(error.code, "{what}", context)
    return InitErrorDetails(type=custom, loc=loc, input=value)


_NUMBER_CONDITION: Final = {
    "anyOf": [
        {"type": "number"},
        {
            "type": "string",
            "pattern": r"(^\s*(>=|<=|==|!=|>|<|%)\s*-?[0-9])|(^\s*-?[0-9.]+\s*\.\.)",
        },
    ]
}


def _scalar_schema(fact: Fact) -> dict[str, Any]:
    match fact.kind:
        case "count" | "number":
            return _NUMBER_CONDITION
        case "name" if fact.choices and fact.name != "device":
            glob = {"type": "string", "pattern": r"[*?\[]"}
            return {"anyOf": [{"enum": list(fact.choices)}, glob]}
        case "name" | "version":
            return {"type": "string", "minLength": 1}
        case _:
            return {"type": ["string", "number", "boolean"]}


def _json_schema(description: str) -> dict[str, Any]:
    def condition(scalar: dict[str, Any]) -> dict[str, Any]:
        return {"anyOf": [scalar, {"type": "array", "items": scalar, "minItems": 1}]}

    return {
        "type": "object",
        "description": description,
        "properties": {
            fact.name: {"description": fact.summary, **condition(_scalar_schema(fact))}
            for fact in FACTS.values()
        },
        "additionalProperties": condition({"type": ["string", "number", "boolean"]}),
    }
