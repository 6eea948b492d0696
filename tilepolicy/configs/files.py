"""MaxText's config files: where they are, and how they build on each other."""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Final, NamedTuple

from tilepolicy import source
from tilepolicy.configs.keys import ReleaseKeys, release_keys
from tilepolicy.configs.values import ConfigValue, Draft, Entries, Source
from tilepolicy.errors import Place, Problem
from tilepolicy.files import is_file
from tilepolicy.settings import MAXTEXT_RELEASES

__all__ = [
    "Chain",
    "Locator",
    "find_maxtext_configs",
    "parse_value",
    "read_chain",
    "read_entries",
    "read_model",
]

_IN_CHECKOUT: Final = ("src/maxtext/configs/", "maxtext/configs/")
_BASE: Final = "base.yml"


def find_maxtext_configs() -> Path | None:
    """The ``configs`` folder of the installed MaxText, found without executing its code."""
    spec = importlib.util.find_spec("maxtext")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(root) / "configs"
        if (folder / _BASE).is_file():
            return folder
    return None


class Locator(NamedTuple):
    """Where MaxText's files are, and which release they are of.

    Attributes:
        folder: MaxText's ``configs`` folder; None where there is none.
        keys: the keys of the release.
        base_is_known: whether the folder's ``base.yml`` is that of the release, byte for byte;
            then the shipped table stands for it, which spares parsing it.
    """

    folder: Path | None
    keys: ReleaseKeys
    base_is_known: bool = True

    @classmethod
    def find(cls, folder: str | os.PathLike[str] | None, release: str | None) -> Locator:
        """Look at the named folder, else at the installed MaxText.

        The release is the named one, else the one whose ``base.yml`` the folder has, else the
        installed version, else the latest known.
        """
        found = Path(folder) if folder else find_maxtext_configs()
        if found is None or not (found / _BASE).is_file():
            return cls(found if folder else None, release_keys(release))
        digest = hashlib.sha256((found / _BASE).read_bytes()).hexdigest()
        known = next((r for r in MAXTEXT_RELEASES if release_keys(r).base_sha256 == digest), None)
        if release is None:
            release = known if folder or known else importlib.metadata.version("maxtext")
        keys = release_keys(release)
        return cls(found, keys, base_is_known=keys.base_sha256 == digest)

    def resolve_argument(self, name: str) -> Path:
        """The config file that a user names; paths of a checkout lead into MaxText's folder."""
        path = Path(name)
        if is_file(path) or self.folder is None:
            return path
        for prefix in _IN_CHECKOUT:
            if is_file(inside := self.folder / name.removeprefix(prefix)):
                return inside
        return path

    def is_base(self, path: Path) -> bool:
        """Whether this is MaxText's own ``base.yml``, present or not."""
        if path.name != _BASE:
            return False
        if self.folder is None:
            return not is_file(path)
        return path.resolve() == (self.folder / _BASE).resolve()

    def resolve_base_config(self, name: str, user: Path) -> Path:
        """The file that ``base_config: name`` of a file means: beside it, else in the folder."""
        beside = user.parent / name
        if Path(name).is_absolute() or is_file(beside):
            return Path(name) if Path(name).is_absolute() else beside
        return self.folder / name if self.folder is not None else Path(name)

    def suggest_model(self, name: str) -> str:
        """A remedy for a model name that MaxText has no file of."""
        near = difflib.get_close_matches(name, self.keys.models, n=1)
        return f"did you mean {near[0]}?" if near else "write the model's keys into the config"


class Chain:
    """A config file and the files that it builds on.

    Attributes:
        layers: the values of each file, weakest first.
        files: the files, the user's first.
        builds_on_base: whether the chain ends in MaxText's ``base.yml``.
    """

    def __init__(self) -> None:
        self.layers: list[Entries] = []
        self.files: list[str] = []
        self.builds_on_base = False


def read_chain(path: Path, locator: Locator, draft: Draft) -> Chain:
    """Read a config file and follow its ``base_config``, as ``pyconfig._load_config`` does."""
    chain = Chain()
    named_at: Place | None = None
    seen: list[Path] = []
    while True:
        if "\0" in str(path):  # an escape in double quotes; no file is named so
            draft.problems.append(_missing_file(path, named_at))
            return chain
        if locator.is_base(path):
            chain.builds_on_base = True
            if not locator.base_is_known:
                chain.layers.insert(0, read_entries(path, draft, "default"))
            return chain
        if path.resolve() in seen:
            draft.problems.append(_cycle(path, named_at))
            return chain
        seen.append(path.resolve())
        if not is_file(path):
            draft.problems.append(_missing_file(path, named_at))
            return chain
        entries = read_entries(path, draft, "file")
        if path.name == _BASE:
            entries = _own_copy_of_base(entries, locator.keys)
        chain.layers.insert(0, entries)
        chain.files.append(str(path))
        base = entries.get("base_config")
        if base is None or not base.value:
            return chain
        if not isinstance(base.value, str):
            draft.problems.append(
                Problem("wrong-type", "base_config takes the name of a file", base.place)
            )
            return chain
        named_at = base.place
        path = locator.resolve_base_config(base.value, path)


def _own_copy_of_base(entries: Entries, keys: ReleaseKeys) -> Entries:
    """A user's copy of ``base.yml``: what it leaves as MaxText has it was not chosen."""
    return {
        key: ConfigValue(entry.value, "default", entry.place)
        if key in keys.base and keys.base[key] == entry.value
        else entry
        for key, entry in entries.items()
    }


def _missing_file(path: Path, named_at: Place | None) -> Problem:
    remedy = None
    if named_at is not None:
        remedy = "base_config is looked up beside the file, then in MaxText's configs folder"
    return Problem("no-such-file", f"there is no file {path}", named_at or Place(str(path)), remedy)


def _cycle(path: Path, named_at: Place | None) -> Problem:
    return Problem("base-config-cycle", f"base_config leads back to {path}", named_at)


def read_model(name: str, config: Path, locator: Locator, draft: Draft) -> Entries | None:
    """The file of a model: beside the config, beside its folder, then in MaxText.

    ``-Instruct`` is dropped from the name, as ``pyconfig`` does. None when there is no file.
    """
    file = f"{name.replace('-Instruct', '')}.yml"
    folders = [config.parent / "models", config.parent.parent / "models"]
    if locator.folder is not None:
        folders.append(locator.folder / "models")
    path = next((folder / file for folder in folders if is_file(folder / file)), None)
    return read_entries(path, draft, "model") if path is not None else None


def read_entries(path: Path, draft: Draft, kind: Source) -> Entries:
    """The top-level keys of a config file with their places; problems go to the draft."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        draft.problems.append(
            Problem("unreadable-file", f"{path}: {error.strerror}", Place(str(path)))
        )
        return {}
    document = source.parse(raw, str(path), "maxtext")
    draft.problems.extend(document.problems)
    if not document.readable or document.value is None:
        return {}
    if not isinstance(document.value, dict):
        draft.problems.append(
            Problem("not-a-mapping", "a MaxText config is a mapping of keys", document.place())
        )
        return {}
    return {
        key: ConfigValue(value, kind, document.key_place([key]))
        for key, value in document.value.items()
    }


def parse_value(text: str, place: Place, problems: list[Problem]) -> source.Plain:
    """The YAML value of a ``KEY=VALUE`` argument; its problems are placed at the argument."""
    document = source.parse(text, place.file, "maxtext")
    problems.extend(problem._replace(place=place) for problem in document.problems)
    return document.value
