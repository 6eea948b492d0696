"""Configs of Tokamax ops: built from decided fields, and checked against what was asked for.

Tokamax's config classes convert what they are given (``True`` to 1, ``"512"`` to 512), and from
JSON they pass over unknown keys. A config that does not say exactly what the policy said is an
error here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tilepolicy.errors import AdapterError, Problem
from tilepolicy.resolution import SettingValue

__all__ = ["build_config", "config_fields"]


def config_fields(config: Any) -> tuple[tuple[str, SettingValue], ...]:  # noqa: ANN401
    """Fields of a config object with their values, in the order of the class."""
    return tuple((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))


def build_config(op: Any, base: Any, fields: Mapping[str, object], site: str) -> Any:  # noqa: ANN401
    """The op's config with the given fields; the others are those of ``base``.

    Args:
        op: the op that asks.
        base: what Tokamax would have used for the call; None for the class's defaults.
        fields: decided fields by the config class's own names.
        site: the call, for messages.

    Raises:
        AdapterError: the class has no such field, refuses a value, or converts it.
    """
    known = [field.name for field in dataclasses.fields(op.config_cls)]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise _refused(
            site, f"{_name(op)} has no field {', '.join(unknown)}", f"its fields: {known}"
        )
    try:
        config = op.config_cls(**fields) if base is None else dataclasses.replace(base, **fields)
    except (TypeError, ValueError) as error:
        raise _refused(site, f"{_name(op)} refuses {dict(fields)}: {error}", None) from error
    for name, wanted in fields.items():
        got = getattr(config, name)
        if type(got) is not type(wanted) or got != wanted:
            raise _refused(
                site,
                f"{_name(op)} turned {name}={wanted!r} into {got!r}",
                f"write the value as {got!r}",
            )
    return config


def _name(op: Any) -> str:  # noqa: ANN401 - upstream op
    return f"{type(op).__name__}'s config"


def _refused(site: str, message: str, remedy: str | None) -> AdapterError:
    return AdapterError(Problem(code="config-refused", message=f"{site}: {message}", remedy=remedy))
