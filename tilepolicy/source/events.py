"""The events of a YAML text, from libyaml where PyYAML has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import yaml

__all__ = ["Event", "events"]


class _Mark(Protocol):
    """Where an event starts."""

    index: int


class Event(Protocol):
    """What the events that PyYAML gives have, as far as their kind has it."""

    anchor: str | None
    implicit: tuple[bool, bool]
    start_mark: _Mark
    tag: str | None
    value: str


def events(text: str, *, pure: bool) -> Iterator[Any]:
    """The YAML events of a text, from libyaml where PyYAML has it.

    Raises:
        yaml.YAMLError: the text is not YAML.
    """
    loader = yaml.SafeLoader if pure or not yaml.__with_libyaml__ else yaml.CSafeLoader
    parser = loader(text)
    try:
        yield from iter(parser.get_event, None)
    finally:
        parser.dispose()
