"""Values of a MaxText config with their sources, and the draft in which sources are merged."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tilepolicy.configs.keys import OLD_KEYS, ReleaseKeys
from tilepolicy.errors import ConfigError, Place, Problem
from tilepolicy.settings import SETTINGS

__all__ = ["ConfigValue", "ConfigValues", "Draft", "Entries", "Source"]

Source = Literal["default", "file", "model", "command line", "mapping", "environment", "object"]

_AXIS_RULES: Final = "logical_axis_rules"
_RANKED_AS_ARGUMENTS: Final = ("model", "command line", "mapping")
_CHECKED: Final = frozenset(
    {
        "compile_topology_num_slices",
        "eval_per_device_batch_size",
        "eval_ragged_buffer_factor",
        "global_parameter_scale",
        "gradient_accumulation_steps",
        "max_target_length",
        "megablox",
        "num_experts",
        "num_experts_per_tok",
        "num_moe_emb_chunks",
        "num_moe_token_chunks",
        "per_device_batch_size",
        "prefuse_moe_weights",
        "ragged_buffer_factor",
        "sparse_matmul",
        "use_gmm_v2",
        "use_gmm_v2_heuristic_tiling",
        "use_ring_of_experts",
        "use_tokamax_gmm",
        "vocab_size",
    }
)
"""Keys beside settings, base sizes and parallelism whose type decides what tilepolicy computes."""


class ConfigValue(NamedTuple):
    """One value of a config key.

    Attributes:
        value: as read from YAML; ``None`` also for the word ``none``, as MaxText takes it.
        source: which kind of source set it.
        place: where; None for MaxText's defaults and for values of config objects.
        lost: the values of weaker sources, strongest first.
    """

    value: object
    source: Source
    place: Place | None = None
    lost: tuple[ConfigValue, ...] = ()


type Entries = dict[str, ConfigValue]


@dataclass(frozen=True)
class ConfigValues(Mapping[str, object]):
    """The values of a config as a mapping, with the source of each.

    Attributes:
        entries: key to value with source; every key that MaxText would see.
        files: the config files that were read, the user's first.
        release: MaxText release whose defaults and keys hold.
        maxtext_configs: MaxText's ``configs`` folder, or None where there is none.
        warnings: what is wrong without making the values wrong.
    """

    entries: Mapping[str, ConfigValue]
    files: tuple[str, ...] = ()
    release: str = ""
    maxtext_configs: Path | None = None
    warnings: tuple[Problem, ...] = ()

    def __getitem__(self, key: str) -> object:
        return self.entries[key].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def place(self, key: str) -> Place | None:
        """Where a key's value stands; None for defaults, unknown keys and config objects."""
        entry = self.entries.get(key)
        return entry.place if entry is not None else None

    def is_explicit(self, key: str) -> bool:
        """Whether the user chose this value: not MaxText's default, and not -1 or ``auto``."""
        entry = self.entries.get(key)
        if entry is None or entry.source == "default" or entry.value is None:
            return False
        return not (key in SETTINGS and is_automatic(entry.value))

    def explicit(self) -> dict[str, ConfigValue]:
        """Every explicit value."""
        return {key: entry for key, entry in self.entries.items() if self.is_explicit(key)}


def is_automatic(value: object) -> bool:
    """Whether a setting's value asks for an automatic choice: -1 or ``auto``."""
    return value == "auto" or (value == -1 and not isinstance(value, bool))


class Draft:
    """A config while its sources are laid over each other, weakest first."""

    def __init__(self, keys: ReleaseKeys) -> None:
        self.keys = keys
        self.entries: Entries = {}
        self.problems: list[Problem] = []

    def lay(self, layer: Mapping[str, ConfigValue]) -> None:
        """Lay a stronger source over what is there; unknown keys become problems."""
        replaces_rules = bool(getattr(layer.get("override_logical_axis_rules"), "value", False))
        for key, given in layer.items():
            if given.source != "default" and not self.keys.knows(key):
                self.problems.append(self._unknown(key, given))
                continue
            new = _null(given) if given.source == "default" else self._checked(key, given)
            below = self.entries.get(key)
            if below is None:
                self.entries[key] = new
            else:
                value = _merged(key, below.value, new, replaces_rules)
                lost = (below._replace(lost=()), *below.lost)
                self.entries[key] = new._replace(value=value, lost=lost)

    def finish(self, files: tuple[str, ...], configs: Path | None) -> ConfigValues:
        """The values.

        Raises:
            ConfigError: at least one problem is an error.
        """
        errors = [problem for problem in self.problems if problem.severity == "error"]
        if errors:
            raise ConfigError(errors)
        return ConfigValues(self.entries, files, self.keys.release, configs, tuple(self.problems))

    def _unknown(self, key: str, new: ConfigValue) -> Problem:
        if key in OLD_KEYS:
            return Problem(
                "old-key",
                f"{key} is a key of before November 2025, which MaxText {self.keys.release} "
                "refuses",
                new.place,
                f"set {OLD_KEYS[key]}",
                path=key,
            )
        near = difflib.get_close_matches(key, self.keys.names(), n=1, cutoff=0.75)
        remedy = f"did you mean {near[0]}?" if near else "remove it"
        return Problem(
            "unknown-key",
            f"MaxText {self.keys.release} has no key {key!r} and refuses a config with it",
            new.place,
            remedy,
            path=key,
        )

    def _checked(self, key: str, new: ConfigValue) -> ConfigValue:
        """The value as MaxText's model would take it; a value that it cannot take is a problem."""
        new = _null(new)
        value = new.value
        default = self.keys.base.get(key)
        if not isinstance(default, bool | int | float) or value is None:
            return new
        if key in SETTINGS and is_automatic(value):
            return new
        number = _as_kind(value, type(default))
        if number is None:
            if _is_checked(key):
                self.problems.append(_wrong_type(key, new, type(default)))
            return new
        return new._replace(value=number)


def _null(new: ConfigValue) -> ConfigValue:
    """The word ``none`` as null, which MaxText makes of it wherever it stands."""
    is_none = isinstance(new.value, str) and new.value.lower() == "none"
    return new._replace(value=None) if is_none else new


def _is_checked(key: str) -> bool:
    named = key in _CHECKED or key in SETTINGS
    return named or key.endswith("_parallelism") or (key.startswith("base_") and "_dim" in key)


def _wrong_type(key: str, new: ConfigValue, kind: type) -> Problem:
    wanted = {bool: "true or false", int: "an integer", float: "a number"}[kind]
    return Problem("wrong-type", f"{key} takes {wanted}, not {new.value!r}", new.place, path=key)


_WORDS: Final = {
    "true": True, "t": True, "yes": True, "y": True, "on": True, "1": True,
    "false": False, "f": False, "no": False, "n": False, "off": False, "0": False,
}  # fmt: skip
"""The words for booleans that pydantic takes, and with it MaxText."""


def _as_kind(value: object, kind: type) -> bool | int | float | None:
    """The value as ``kind``, converted as pydantic's lax mode does; None if it cannot be."""
    if kind is bool:
        if isinstance(value, bool):
            return value
        return _WORDS.get(str(value).lower()) if isinstance(value, str | int) else None
    if not isinstance(value, bool | int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if kind is float:
        return number
    if isinstance(value, int):
        return int(value)
    return int(number) if number.is_integer() else None


def _merged(key: str, below: object, new: ConfigValue, replaces_rules: bool) -> object:
    """What a stronger value makes of a weaker one.

    Mappings merge. Axis rules of a model's file or of arguments replace those of the same
    logical axis, unless their own source sets ``override_logical_axis_rules``.
    """
    value = new.value
    if isinstance(below, dict) and isinstance(value, dict):
        return below | value
    if key == _AXIS_RULES and new.source in _RANKED_AS_ARGUMENTS and not replaces_rules:
        return merge_axis_rules(below, value)
    return value


def merge_axis_rules(below: object, above: object) -> list[object]:
    """Logical axis rules after a stronger source: its rules replace all of the same name."""
    old = list(below) if isinstance(below, list | tuple) else []
    new = list(above) if isinstance(above, list | tuple) else []
    names = {rule[0] for rule in new if isinstance(rule, list | tuple) and rule}
    return [rule for rule in old if not (isinstance(rule, list | tuple) and rule[0] in names)] + new
