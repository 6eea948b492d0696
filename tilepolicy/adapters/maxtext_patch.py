"""Functions of a library replaced while at least one scope wants it, whenever they are imported.

A replacement consults the scopes in force where it is called, so that threads and tasks without a
scope get the original. It is installed by the first scope of the process and removed by the last;
what was there before is put back, unless somebody else has replaced it meanwhile.

A module that is not imported yet is patched right after its import: a scope must not pay for
importing a library that its program may never use.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Final

from tilepolicy.adapters.maxtext_types import Foreign

__all__ = ["Patch", "installed"]


@dataclass(frozen=True, slots=True)
class Patch:
    """One replacement.

    Attributes:
        module: dotted name of the module.
        attribute: name in it, or ``Class.method``.
        replace: makes the replacement of what is there.
        imported_by_name: whether other modules may hold it through ``from module import name``;
            those names are replaced too.
    """

    module: str
    attribute: str
    replace: Callable[[Foreign], Foreign]
    imported_by_name: bool = False


@dataclass
class _Active:
    """One patch in force: how many scopes want it, and what it put where."""

    patch: Patch
    scopes: int = 0
    original: Foreign = None
    replacement: Foreign = None


_LOCK: Final = threading.RLock()
_ACTIVE: Final[dict[tuple[str, str], _Active]] = {}
_HOLDERS: Final[dict[str, tuple[tuple[int, str], list[weakref.ref[ModuleType]]]]] = {}


@contextmanager
def installed(patches: Sequence[Patch]) -> Iterator[None]:
    """Have the patches in force until exit.

    A patch that another scope has put in force is shared: the first one's replacement stays.
    """
    with _LOCK:
        for patch in patches:
            active = _ACTIVE.setdefault((patch.module, patch.attribute), _Active(patch))
            active.scopes += 1
            if active.scopes == 1:
                _put(active)
        _watch_imports()
    try:
        yield
    finally:
        with _LOCK:
            for patch in reversed(patches):
                active = _ACTIVE[patch.module, patch.attribute]
                active.scopes -= 1
                if active.scopes == 0:
                    del _ACTIVE[patch.module, patch.attribute]
                    _take_back(active)
            _watch_imports()


def _put(active: _Active) -> None:
    """Replace, if the function is there yet; the caller holds the lock."""
    module = sys.modules.get(active.patch.module)
    if module is None:
        return
    holder, name = _holder(module, active.patch.attribute)
    if not hasattr(holder, name):  # its module is still running
        return
    active.original = getattr(holder, name)
    active.replacement = active.patch.replace(active.original)
    setattr(holder, name, active.replacement)
    if active.patch.imported_by_name:
        _rebind(name, active.original, active.replacement)


def _take_back(active: _Active) -> None:
    module = sys.modules.get(active.patch.module)
    if module is None or active.replacement is None:
        return
    holder, name = _holder(module, active.patch.attribute)
    if getattr(holder, name, None) is active.replacement:
        setattr(holder, name, active.original)
    if active.patch.imported_by_name:
        _rebind(name, active.replacement, active.original)


def _holder(module: ModuleType, attribute: str) -> tuple[Foreign, str]:
    *path, name = attribute.split(".")
    holder: Foreign = module
    for step in path:
        holder = getattr(holder, step, None)
    return holder, name


def _rebind(name: str, old: Foreign, new: Foreign) -> None:
    """Point every module's global of this name from the old object to the new one."""
    for holder in _holders(name):
        module = holder()
        if module is not None and (names := _names(module)).get(name) is old:
            names[name] = new


def _holders(name: str) -> list[weakref.ref[ModuleType]]:
    """The modules with a global of this name; found again only after an import.

    A program may enter a scope for each step, and walking thousands of modules takes milliseconds.
    """
    stamp = (len(sys.modules), next(reversed(sys.modules), ""))
    known = _HOLDERS.get(name)
    if known is None or known[0] != stamp:
        # By their true type: what cffi puts into sys.modules only claims to be a module.
        modules = [m for m in tuple(sys.modules.values()) if issubclass(type(m), ModuleType)]
        found = [weakref.ref(module) for module in modules if name in _names(module)]
        known = _HOLDERS[name] = (stamp, found)
    return known[1]


def _names(module: ModuleType) -> dict[str, Foreign]:
    """A module's globals, read through ``object``: touching a lazy module would import it."""
    names: dict[str, Foreign] = object.__getattribute__(module, "__dict__")
    return names


class _AfterImport(importlib.abc.MetaPathFinder):
    """Patches a module right after whoever finds and loads it has done so."""

    def __init__(self) -> None:
        self._searching = threading.local()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if not _wanted(fullname) or getattr(self._searching, "now", False):
            return None
        self._searching.now = True
        try:
            for finder in tuple(sys.meta_path):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    break
            else:
                return None
        finally:
            self._searching.now = False
        if spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads like the loader it stands in for, gives it its place back, then patches."""

    def __init__(self, loader: Foreign) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Foreign:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with _LOCK:
            for active in _ACTIVE.values():
                if active.patch.module == module.__name__ and active.replacement is None:
                    _put(active)
            _watch_imports()


_FINDER: Final = _AfterImport()


def _wanted(module: str) -> bool:
    return any(module == name for name, _ in tuple(_ACTIVE))


def _watch_imports() -> None:
    """Keep the finder on ``sys.meta_path`` exactly while a patch waits for its module."""
    waiting = any(active.replacement is None for active in _ACTIVE.values())
    if waiting and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    elif not waiting and _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
