"""Adapters: one per foreign library, found by entry point, imported on demand.

An adapter makes the choices of a policy take effect in one library while a scope is active.
The built-in ones use the same door as any other: the entry point group ``tilepolicy.adapters``,
whose entries name an object with the attributes of :class:`Adapter`::

    [project.entry-points."tilepolicy.adapters"]
    mylib = "mypackage.tilepolicy_adapter:adapter"
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from tilepolicy.errors import AdapterError, MissingLibraryError, Problem

if TYPE_CHECKING:
    from tilepolicy.resolve import Resolver
    from tilepolicy.session import Session

__all__ = ["ENTRY_POINT_GROUP", "Adapter", "ScopeRequest", "discover", "select"]

ENTRY_POINT_GROUP: Final = "tilepolicy.adapters"


@dataclass(frozen=True, slots=True)
class ScopeRequest:
    """What an adapter is given when a scope is entered.

    Attributes:
        resolver: answers ``tile`` and ``op`` for the policy and config of the scope.
        session: where the adapter records lookups and notes.
        digest: content digest (hex SHA-256) of policy, config and facts; equal content, equal
            digest. Anything an adapter keeps or caches must be keyed by it, never by ``id()``.
        options: this adapter's entry of ``apply(..., options={name: {...}})``.
    """

    resolver: Resolver
    session: Session
    digest: str
    options: Mapping[str, object] = field(default_factory=dict)


@runtime_checkable
class Adapter(Protocol):
    """Makes a policy take effect in one library for the time of a scope."""

    @property
    def name(self) -> str:
        """Short name, unique among the installed adapters: ``tokamax``."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Installed versions of the libraries it attaches to, without importing them.

        Empty when the library is not installed: the adapter is then passed over, unless the
        caller asked for it by name.
        """
        ...

    def enter(self, request: ScopeRequest) -> AbstractContextManager[None]:
        """Return a context manager that attaches on entry and leaves no residue on exit.

        Importing a slow library here is paid by every scope; an adapter should wait until the
        program itself uses the library, where it can.

        Raises:
            AdapterError: the installed library lacks what the adapter attaches to; the text
                names the attribute and the version.
        """
        ...


def discover() -> dict[str, EntryPoint]:
    """The installed adapters by entry point name, sorted, none of them imported.

    Raises:
        AdapterError: two distributions declare the same name for different objects.
    """
    return dict(_discover(tuple(sys.path)))


@cache
def _discover(search_path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Read once for each search path: it opens a file of every installed distribution."""
    del search_path
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        known = found.setdefault(entry.name, entry)
        if known.value != entry.value:
            raise AdapterError(
                Problem(
                    code="adapter-declared-twice",
                    message=f"two adapters are named {entry.name!r}: {known.value} and "
                    f"{entry.value}",
                    remedy="uninstall one of the two distributions",
                )
            )
    return dict(sorted(found.items()))


def select(names: Iterable[str] | None = None) -> tuple[Adapter, ...]:
    """Load the adapters to enter, in the order of their names.

    Args:
        names: adapters that must be there; None takes every adapter whose library is installed.

    Raises:
        AdapterError: a name is not installed, or an entry point names no adapter.
        MissingLibraryError: a named adapter's library is not installed.
    """
    installed = discover()
    if names is None:
        loaded = (_load(entry) for entry in installed.values())
        return tuple(adapter for adapter in loaded if adapter.versions())
    chosen = []
    for name in sorted(set(names)):
        if name not in installed:
            raise AdapterError(
                Problem(
                    code="unknown-adapter",
                    message=f"no adapter is named {name!r}",
                    remedy=f"installed adapters: {', '.join(installed) or 'none'}",
                )
            )
        adapter = _load(installed[name])
        if not adapter.versions():
            raise MissingLibraryError(
                Problem(
                    code="missing-library",
                    message=f"the library of adapter {name!r} is not installed",
                    remedy=f'pip install "tilepolicy[{name}]"',
                )
            )
        chosen.append(adapter)
    return tuple(chosen)


def _load(entry: EntryPoint) -> Adapter:
    adapter = entry.load()
    if not isinstance(adapter, Adapter):
        raise AdapterError(
            Problem(
                code="not-an-adapter",
                message=f"entry point {entry.name} = {entry.value} is no adapter: it needs name, "
                "versions() and enter()",
            )
        )
    return adapter
