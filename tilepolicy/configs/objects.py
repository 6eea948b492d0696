"""Values of a MaxText config object, recognised by its shape: MaxText is not imported."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Protocol, cast

from tilepolicy.configs.files import Locator
from tilepolicy.configs.keys import COMPUTED
from tilepolicy.configs.values import ConfigValue, ConfigValues, Entries

__all__ = ["is_config_object", "object_values"]


class _Model(Protocol):
    """What is used of a pydantic model."""

    model_fields_set: set[str]

    def model_dump(self) -> dict[str, Any]: ...


def is_config_object(config: object) -> bool:
    """Whether this is MaxText's ``HyperParameters`` or its pydantic model."""
    if isinstance(config, Mapping):
        return False
    return hasattr(config, "_pydantic_config") or hasattr(type(config), "model_fields")


def object_values(config: object, locator: Locator) -> ConfigValues:
    """The values of a config object; see :func:`tilepolicy.configs.read` for what is explicit."""
    model = cast(_Model, getattr(config, "_pydantic_config", config))
    set_by_user = model.model_fields_set
    base = dict(locator.keys.fields) | dict(locator.keys.base)
    entries: Entries = {}
    for key, raw in model.model_dump().items():
        value = _plain(raw)
        default = base.get(key, COMPUTED)
        is_default = value == _plain(default) or (default == COMPUTED and key not in set_by_user)
        chosen = key in set_by_user or not is_default
        entries[key] = ConfigValue(value, "object" if chosen else "default")
    return ConfigValues(entries, (), locator.keys.release, locator.folder)


def _plain(value: object) -> object:
    """Enumerations by value, dtypes by name, tuples as lists."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str | dict):
        return value
    return str(value)
