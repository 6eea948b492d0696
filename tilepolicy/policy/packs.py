"""Named policies: the shipped ones and those of other packages, through one door.

A package offers policies with an entry point in the group ``tilepolicy.policies`` that names a
callable without arguments. It gives a mapping of policy name to the file that holds it
(:class:`pathlib.Path` or any ``importlib.resources`` traversable).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final, NamedTuple

from tilepolicy.errors import PolicyError, Problem

__all__ = ["GROUP", "Named", "builtin_policies", "find_named", "named_policies"]

GROUP: Final = "tilepolicy.policies"
_OWN: Final = "tilepolicy"


class Named(NamedTuple):
    """A policy that is known by name.

    Attributes:
        name: its name.
        file: the file that holds it.
        pack: name of the entry point that offers it.
    """

    name: str
    file: Traversable
    pack: str


def builtin_policies() -> Mapping[str, Traversable]:
    """The shipped policies by name: inside a wheel, or beside the package in a source tree."""
    package = resources.files("tilepolicy")
    folder: Traversable = package.joinpath("_data", "policies")
    if not folder.is_dir():
        folder = Path(str(package)).parent / "policies"
    files = {item.name: item for item in folder.iterdir()} if folder.is_dir() else {}
    return {
        name.removesuffix(".yml"): files[name] for name in sorted(files) if name.endswith(".yml")
    }


def find_named(name: str) -> Named | None:
    """The policy of that name; the shipped ones are looked at before any other package is loaded.

    Raises:
        PolicyError: a package's entry point does not work, or two packages offer the name.
    """
    for entries in (_own_entries, _foreign_entries):
        found = [named for entry in entries() for named in _offered(entry) if named.name == name]
        if len(found) > 1:
            raise PolicyError(_clash(found))
        if found:
            return found[0]
    return None


def _own_entries() -> Iterable[metadata.EntryPoint]:
    """The entry points of this package; asking for all packages takes longer than a resolution."""
    try:
        return metadata.distribution(_OWN).entry_points.select(group=GROUP)
    except metadata.PackageNotFoundError:
        return ()


@cache
def _foreign_entries() -> tuple[metadata.EntryPoint, ...]:
    """Those of all other packages; looked up once, since it reads the metadata of each of them."""
    own = {entry.value for entry in _own_entries()}
    entries = metadata.entry_points(group=GROUP)
    return tuple(entry for entry in entries if entry.value not in own)


def named_policies() -> tuple[Named, ...]:
    """Every named policy, sorted by name.

    Raises:
        PolicyError: an entry point does not work, or two packages offer one name.
    """
    by_name: dict[str, list[Named]] = {}
    for entry in (*_own_entries(), *_foreign_entries()):
        for named in _offered(entry):
            by_name.setdefault(named.name, []).append(named)
    clashes = [_clash(found) for found in by_name.values() if len(found) > 1]
    if clashes:
        raise PolicyError(clashes)
    return tuple(by_name[name][0] for name in sorted(by_name))


def _clash(found: list[Named]) -> Problem:
    packs = " and ".join(named.pack for named in found)
    message = f"the policy {found[0].name!r} is offered by {packs}"
    return Problem("pack", message, remedy="uninstall one of the packages, or name a file")


def _offered(entry: metadata.EntryPoint) -> list[Named]:
    try:
        policies = entry.load()()
        items = sorted(policies.items())
    except Exception as error:  # a foreign package may raise anything
        message = f"the policy pack {entry.name!r} ({entry.value}) fails: {error!r}"
        raise PolicyError(Problem("pack", message, remedy="repair or uninstall it")) from error
    return [Named(name, file, entry.name) for name, file in items]
