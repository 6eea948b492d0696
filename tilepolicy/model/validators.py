"""Readers of single values in a policy document, with errors that carry a remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from tilepolicy.configs.keys import OLD_KEYS
from tilepolicy.model.bytesize import UNITS, BytesError, parse_bytes
from tilepolicy.model.factnames import closest
from tilepolicy.resolution import SettingValue
from tilepolicy.settings import SETTINGS, Setting

__all__ = [
    "AUTO",
    "BYTES_SCHEMA",
    "LOSSES",
    "SETTINGS_SCHEMA",
    "describe",
    "problem",
    "read_auto_or_bool",
    "read_bytes",
    "read_fields",
    "read_settings",
    "read_tiling",
    "read_version",
    "refuse_nothing",
]

AUTO: Final = "auto"
LOSSES: Final = ("auto", "upstream", "sparse", "chunked", "online")

BYTES_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": rf"^[0-9]+(\.[0-9]+)? ?({'|'.join(UNITS)})$"},
    ]
}


def problem(code: str, message: str, remedy: str) -> PydanticCustomError:
    """A validation error that carries a problem's code and remedy."""
    return PydanticCustomError(code, "{what}", {"what": message, "remedy": remedy})


def refuse_nothing(value: object) -> object:
    """Refuse a key with nothing behind it, which YAML reads as null."""
    if value is None:
        raise problem("wrong-type", "nothing is written here", "write a value or delete the key")
    return value


def read_version(raw: object) -> object:
    """Refuse another version of the policy language, and what merely equals 1."""
    if type(raw) is not int:
        raise problem("wrong-type", f"the version is a number, not {describe(raw)}", "write 1")
    if raw != 1:
        message = f"version {raw} of the policy language is not known here"
        raise problem("version", message, "write version: 1, or upgrade tilepolicy")
    return raw


def read_bytes(raw: object) -> int:
    """A size: a whole number of bytes, or text with a unit."""
    if isinstance(raw, str):
        try:
            size = parse_bytes(raw)
        except BytesError as error:
            raise problem("bytes", str(error), error.remedy) from None
    elif isinstance(raw, int) and not isinstance(raw, bool):
        size = raw
    else:
        message = f"a size in bytes belongs here, not {describe(raw)}"
        raise problem("wrong-type", message, "write a number, or text such as 128MiB")
    if size < 1:
        raise problem("impossible-value", f"a size must be at least 1 byte, not {raw}", "raise it")
    return size


def read_tiling(raw: object) -> int | str:
    """``num_vocab_tiling``: auto, -1 for the same, or a whole number of at least 1."""
    if raw == AUTO or (type(raw) is int and raw == -1):
        return AUTO
    if type(raw) is not int:
        message = f"a whole number or auto belongs here, not {describe(raw)}"
        raise problem("wrong-type", message, "write auto, or a number of tiles such as 8")
    if raw < 1:
        message = f"the number of vocabulary tiles must be at least 1, not {raw}"
        raise problem("impossible-value", message, "write 1 for no tiling, or auto")
    return raw


def read_auto_or_bool(raw: object) -> bool | str:
    """``auto``, true or false."""
    if isinstance(raw, bool) or raw == AUTO:
        return AUTO if raw == AUTO else bool(raw)
    message = f"true, false or auto belongs here, not {describe(raw)}"
    raise problem("wrong-type", message, "write true, false or auto")


def describe(raw: object) -> str:
    """A plain value in words: ``the text 'on'``, ``true``, ``a list``."""
    if raw is None:
        return "nothing"
    if isinstance(raw, bool):
        return "true" if raw else "false"
    if isinstance(raw, str):
        return f"the text {raw[:40]!r}"
    if isinstance(raw, int | float):
        return f"the number {raw}"
    return "a list" if isinstance(raw, list | tuple) else "a mapping"


type _Check = Callable[[str, object], SettingValue]


def _read_mapping(raw: object, check: _Check, what: str) -> Mapping[str, SettingValue]:
    """Check each entry of a mapping; every wrong one becomes an error of its own."""
    if not isinstance(raw, Mapping):
        message = f"{what} belongs here, not {describe(raw)}"
        raise problem("wrong-type", message, "write NAME: VALUE lines")
    if not raw:
        raise problem("empty", f"{what} is empty and decides nothing", "name at least one")
    values: dict[str, SettingValue] = {}
    errors: list[InitErrorDetails] = []
    for name, value in raw.items():
        try:
            values[name] = check(name, value)
        except PydanticCustomError as error:
            errors.append(InitErrorDetails(type=error, loc=(name,), input=value))
    if errors:
        raise ValidationError.from_exception_data("mapping", errors)
    return values


def read_settings(raw: object) -> Mapping[str, SettingValue]:
    """``set``: MaxText settings by their own names, each with a value it can have."""
    return _read_mapping(raw, _setting, "a mapping of settings")


def read_fields(raw: object) -> Mapping[str, SettingValue]:
    """``config`` of an op: fields of its config class, which only its adapter can check."""
    return _read_mapping(raw, _field, "a mapping of config fields")


def _field(name: str, raw: object) -> SettingValue:
    if isinstance(raw, bool | int | float | str):
        return raw
    message = f"{name} is {describe(raw)}; a config field is a number, text, true or false"
    raise problem("wrong-type", message, "write one value")


def _setting(name: str, raw: object) -> SettingValue:
    setting = SETTINGS.get(name)
    if setting is None:
        if name in OLD_KEYS:
            message = f"{name} is a setting of before November 2025"
            raise problem("old-key", message, f"set {OLD_KEYS[name]}")
        near = closest(name, SETTINGS)
        remedy = f"did you mean {near}?" if near else "see the list of settings in docs/policy.md"
        raise problem("unknown-setting", f"there is no setting {name!r}", remedy)
    if name == "loss":
        if raw in LOSSES:
            return str(raw)
        message = f"there is no loss {raw!r}"
        raise problem("unknown-value", message, f"write one of {', '.join(LOSSES)}")
    if name == "engine.cache_pure_state":
        return read_auto_or_bool(raw)
    return _typed(setting, raw)


def _typed(setting: Setting, raw: object) -> SettingValue:
    if type(raw) is not setting.kind or not isinstance(raw, bool | int | str):
        word = {int: "a whole number", bool: "true or false"}.get(setting.kind, "text")
        message = f"{setting.name} is {word}, not {describe(raw)}"
        raise problem("wrong-type", message, f"write {word} without quotes")
    if setting.minimum is not None and isinstance(raw, int) and raw < setting.minimum:
        message = f"{setting.name} must be at least {setting.minimum}, not {raw}"
        raise problem("impossible-value", message, f"write {setting.minimum} or more")
    return raw


def _setting_schema(setting: Setting) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": setting.summary}
    if setting.name == "loss":
        return {**schema, "enum": list(LOSSES)}
    if setting.name == "engine.cache_pure_state":
        return {**schema, "enum": [AUTO, True, False]}
    if setting.kind is bool:
        return {**schema, "type": "boolean"}
    return {**schema, "type": "integer", "minimum": setting.minimum}


SETTINGS_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {name: _setting_schema(setting) for name, setting in SETTINGS.items()},
    "additionalProperties": False,
    "minProperties": 1,
}
