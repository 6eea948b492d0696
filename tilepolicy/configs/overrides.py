"""Values of a MaxText config that stand in no file: ``KEY=VALUE`` arguments and ``M_KEY``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from tilepolicy.configs.files import parse_value
from tilepolicy.configs.values import ConfigValue, Draft, Entries
from tilepolicy.errors import Place, Problem

__all__ = ["parse_arguments", "parse_environment"]

_PREFIX: Final = "M_"
_ASSIGNMENT: Final = re.compile(r"(?P<key>(?:\\.|[^=\\])+)=(?P<value>.*)", re.DOTALL)


def parse_arguments(arguments: Iterable[str], problems: list[Problem]) -> Entries:
    """``KEY=VALUE`` arguments as ``OmegaConf.from_cli`` takes them.

    The first ``=`` ends the key, the value is YAML, a dotted key sets one entry of a mapping, and
    of several arguments with one key the last counts.
    """
    entries: Entries = {}
    for number, argument in enumerate(arguments, 1):
        place = Place("<command line>", number, 1, argument)
        match = _ASSIGNMENT.fullmatch(argument)
        if match is None:
            problems.append(
                Problem(
                    "no-value",
                    f"argument {argument!r} has no '='",
                    place,
                    "write it as KEY=VALUE",
                )
            )
            continue
        value = parse_value(match["value"], place, problems)
        head, *inner = match["key"].split(".")
        for name in reversed(inner):
            value = {name: value}
        below = entries.get(head)
        if below is not None and isinstance(below.value, dict) and isinstance(value, dict):
            value = below.value | value
        entries[head] = ConfigValue(value, "command line", place)
    return entries


def parse_environment(
    environment: Mapping[str, str], draft: Draft, arguments: Mapping[str, ConfigValue]
) -> Entries:
    """``M_KEY`` variables of keys that the draft has, by the rules of ``pyconfig``.

    A variable may repeat neither an argument nor (without ``override_model_config``) a key of the
    model's file, and takes the type of the value that it replaces.
    """
    entries: Entries = {}
    for name, text in environment.items():
        key = name.removeprefix(_PREFIX).lower()
        if not name.startswith(_PREFIX) or name != _PREFIX + key.upper():
            continue
        place = Place("<environment>", 1, 1, f"{name}={text}")
        old = draft.entries.get(key)
        if old is None:
            if draft.keys.knows(key):
                draft.problems.append(_ignored(name, place))
            continue
        problem = _refusal(name, key, old, arguments, draft, place)
        if problem is None and (value := _typed(text, old.value)) is not None:
            entries[key] = ConfigValue(value, "environment", place)
            if key == "model_name":
                draft.problems.append(_late_model(name, place))
            continue
        draft.problems.append(problem or _unparsable(name, old, place))
    return entries


def _refusal(
    name: str,
    key: str,
    old: ConfigValue,
    arguments: Mapping[str, ConfigValue],
    draft: Draft,
    place: Place,
) -> Problem | None:
    if key in arguments:
        return Problem(
            "set-twice",
            f"{key} is set by {name} and at {arguments[key].place}, which MaxText refuses",
            place,
            "keep one of the two",
            path=key,
        )
    override = draft.entries.get("override_model_config")
    from_model = old.source == "model"
    if from_model and not (override is not None and override.value):
        return Problem(
            "contradicts-model",
            f"{key} is set by {name} and by the model's file {old.place}, which MaxText refuses",
            place,
            "add override_model_config=True to the command line",
            path=key,
        )
    return None


def _typed(text: str, old: object) -> bool | int | float | str | None:
    """The text as the type of the value that it replaces; None if it is not of that type."""
    if isinstance(old, bool):
        lowered = text.lower()
        if lowered in ("y", "yes", "t", "true", "1"):
            return True
        return False if lowered in ("n", "no", "f", "false", "0") else None
    if isinstance(old, str):
        return text
    try:
        return type(old)(text) if isinstance(old, int | float) else None
    except ValueError:
        return None


def _unparsable(name: str, old: ConfigValue, place: Place) -> Problem:
    if old.value is None or isinstance(old.value, list | dict):
        return Problem(
            "no-environment",
            f"MaxText cannot take {name}: the value it would replace is {old.value!r}",
            place,
            "pass it as KEY=VALUE",
        )
    kind = {bool: "a boolean", int: "an integer", float: "a number"}[type(old.value)]
    return Problem("wrong-type", f"{name} must be {kind}", place)


def _ignored(name: str, place: Place) -> Problem:
    return Problem(
        "environment-ignored",
        f"MaxText ignores {name}: the config does not build on base.yml and lacks the key",
        place,
        "pass it as KEY=VALUE",
        severity="warning",
    )


def _late_model(name: str, place: Place) -> Problem:
    return Problem(
        "environment-ignored",
        f"{name} changes the name only: MaxText chooses the model's file before it reads the "
        "environment",
        place,
        "pass model_name=NAME on the command line",
        severity="warning",
    )
