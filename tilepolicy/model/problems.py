"""What pydantic says of a document to problems with a place, a code and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tilepolicy.errors import Problem
from tilepolicy.model.factnames import closest
from tilepolicy.model.validators import describe
from tilepolicy.source import Document

__all__ = ["problems_of"]

_EXPECTED: Final[dict[str, tuple[str, str]]] = {
    "int_type": ("a whole number", "write a number without quotes, such as 512"),
    "float_type": ("a number", "write a number without quotes, such as 2.0"),
    "bool_type": ("true or false", "write true or false without quotes"),
    "string_type": ("text", "quote the value"),
    "tuple_type": ("a list", "write [] or one '- ' line per item"),
    "list_type": ("a list", "write [] or one '- ' line per item"),
    "model_type": ("a mapping", "write NAME: VALUE lines"),
    "model_attributes_type": ("a mapping", "write NAME: VALUE lines"),
    "mapping_type": ("a mapping", "write NAME: VALUE lines"),
    "dict_type": ("a mapping", "write NAME: VALUE lines"),
}
_NAMES: Final = {
    "name": "begin with a letter or digit; no line breaks, no spaces in the name of a policy",
    "op": "write the name of the op's class in snake_case",
}
# Kernel names of tile axes flip between backends, so a policy refuses them.
_KERNEL_AXES: Final = frozenset({"tile_m", "tile_k", "tile_n", "m", "k", "n"})


def problems_of(
    error: ValidationError, document: Document, model: type[BaseModel]
) -> list[Problem]:
    """Every error as a problem at its place in the document.

    Args:
        error: what validating ``document.value`` raised.
        document: the document.
        model: the model that was asked for.
    """
    found = error.errors(include_url=False)
    return [_problem(details, document, model) for details in found if not _echo(details)]


def _echo(details: ErrorDetails) -> bool:
    """Whether pydantic only says that nothing is left of a list whose items it refused."""
    return details["type"] == "too_short" and bool(details["input"])


def _problem(details: ErrorDetails, document: Document, model: type[BaseModel]) -> Problem:
    loc = tuple(part for part in details["loc"] if part != "[key]")
    code, message, remedy = _words(details, loc, model)
    names_key = code in ("unknown-key", "unknown-fact", "unknown-setting", "old-key", "missing-key")
    place = document.key_place(loc) if names_key or not document.has(loc) else document.place(loc)
    if code == "missing-key":
        place = document.place(loc[:-1])
    return Problem(code, message, place, remedy, path=show_path(loc))


def show_path(loc: tuple[str | int, ...]) -> str:
    """A path as a reader of the file would write it: ``gmm.rules[0].tile.embed_dim``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".")


def _words(
    details: ErrorDetails, loc: tuple[str | int, ...], model: type[BaseModel]
) -> tuple[str, str, str | None]:
    """Code, message and remedy of one error."""
    kind, context, raw = details["type"], details.get("ctx", {}), details["input"]
    if "what" in context:
        return kind, str(context["what"]), str(context["remedy"])
    name = str(loc[-1]) if loc else ""
    if kind in _EXPECTED:
        expected, remedy = _EXPECTED[kind]
        if raw is None:
            remedy = "write a value or delete the key"
        elif kind == "int_type" and isinstance(raw, float):
            remedy = "write it without a fraction"
        return "wrong-type", f"{expected} belongs here, not {describe(raw)}", remedy
    if kind == "extra_forbidden":
        return "unknown-key", f"there is no key {name!r} here", _key_remedy(name, loc, model)
    if kind == "missing":
        return "missing-key", f"the key {name!r} is missing", f"add {name}: …"
    return _value_words(details, name)


def _value_words(details: ErrorDetails, name: str) -> tuple[str, str, str | None]:
    """Code, message and remedy of a value of the right type that is not allowed."""
    context, raw = details.get("ctx", {}), details["input"]
    match details["type"]:
        case "greater_than_equal":
            message = f"{name} must be at least {context['ge']:g}, not {raw}"
            return "impossible-value", message, f"write {context['ge']:g} or more"
        case "finite_number":
            return "impossible-value", f"{name} must be finite", "write a finite number"
        case "literal_error":
            return "unknown-value", *_literal(str(context["expected"]), raw)
        case "too_short":
            return "empty", f"{name} is empty", "write at least one"
        case "string_too_short":
            return "empty", f"{name or 'the text'} is empty", "write a name"
        case "string_pattern_mismatch":
            return "bad-name", f"{describe(raw)} is no {name or 'name'}", _NAMES.get(name)
    return "bad-value", details["msg"], None


def _literal(expected: str, raw: object) -> tuple[str, str]:
    choices = expected.replace("'", "").replace(" or ", ", ")
    near = closest(raw, choices.split(", ")) if isinstance(raw, str) else None
    remedy = f"did you mean {near}?" if near else f"write one of {choices}"
    return f"{describe(raw)} is no choice here", remedy


def _key_remedy(name: str, loc: tuple[str | int, ...], model: type[BaseModel]) -> str:
    owner = _model_at(loc[:-1], model)
    known = [field.alias or key for key, field in owner.model_fields.items()]
    if name in _KERNEL_AXES:
        return "name the axis of the layer: batch_seq, embed_dim or mlp_dim (m, k and n flip)"
    near = closest(name, known)
    return f"did you mean {near}?" if near else f"known keys: {', '.join(known)}"


def _model_at(loc: tuple[str | int, ...], model: type[BaseModel]) -> type[BaseModel]:
    """The model of the part at ``loc``: list steps are passed over."""
    for step in loc:
        fields = {field.alias or key: field for key, field in model.model_fields.items()}
        if isinstance(step, str) and step in fields:
            model = next(_models_in(fields[step].annotation), model)
    return model


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """The models that an annotation mentions, whatever wraps them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
