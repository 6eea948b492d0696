"""Whether there is a program of some name, asked before it is started."""

from __future__ import annotations

import difflib
import importlib.util
import pkgutil
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

from tilepolicy.errors import MissingLibraryError, Problem

__all__ = ["require_program"]


def require_program(module: str) -> None:
    """Refuse a program that ``python -m`` would not find.

    Packages are looked into without importing them, which may take long; only where that finds
    nothing they are imported, for those that change their ``__path__``.

    Raises:
        MissingLibraryError: there is no such module, or it is a package without ``__main__``.
    """
    if not all(part.isidentifier() for part in module.split(".")):
        raise _missing(module)
    name, _, rest = module.partition(".")
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise _missing(name, 'pip install "tilepolicy[maxtext]"' if name == "maxtext" else None)
    while rest:
        part, _, rest = rest.partition(".")
        inside = spec.submodule_search_locations
        if inside is None:
            raise _missing(f"{name}.{part}", f"{name} is a module; name it without .{part}")
        name = f"{name}.{part}"
        spec = _find(name, inside) or _find_by_import(name)
        if spec is None:
            raise _missing(name, _similar(part, inside))
    inside = spec.submodule_search_locations
    if inside is not None and _find(f"{name}.__main__", inside) is None:
        raise _missing(f"{name}.__main__", f"{name} is a package; name the program in it")


def _missing(name: str, remedy: str | None = None) -> MissingLibraryError:
    return MissingLibraryError(
        Problem(code="no-module", message=f"there is no module named {name!r}", remedy=remedy)
    )


def _find(name: str, inside: Sequence[str]) -> ModuleSpec | None:
    """A submodule in the folders of its package.

    Not through ``sys.meta_path``: a folder without ``__init__.py`` is found there only when what
    it lies in has been imported.
    """
    importers = (pkgutil.get_importer(folder) for folder in inside)
    found = [importer.find_spec(name) for importer in importers if importer is not None]
    specs = [spec for spec in found if spec is not None]
    return next((spec for spec in specs if spec.loader is not None), None) or _joined(name, specs)


def _joined(name: str, portions: list[ModuleSpec]) -> ModuleSpec | None:
    """A package without ``__init__.py``, which may lie in several folders."""
    if not portions:
        return None
    whole = ModuleSpec(name, None, is_package=True)
    whole.submodule_search_locations = [
        folder for portion in portions for folder in portion.submodule_search_locations or ()
    ]
    return whole


def _find_by_import(name: str) -> ModuleSpec | None:
    """A submodule where its imported package says that it is."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


def _similar(part: str, inside: Sequence[str]) -> str | None:
    known = [found.name for found in pkgutil.iter_modules(list(inside))]
    near = difflib.get_close_matches(part, known, n=1)
    return f"did you mean {near[0]}?" if near else None
