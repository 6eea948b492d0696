"""Policies: loaded, merged, ready to answer."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from tilepolicy.errors import Place
from tilepolicy.match import RuleIndex
from tilepolicy.model import EngineSettings, GmmSection, PolicyDocument, VocabSettings, canonical
from tilepolicy.policy.packs import builtin_policies
from tilepolicy.policy.policyfiles import Layer, in_order, read_layers
from tilepolicy.policy.references import locate

if TYPE_CHECKING:
    from tilepolicy.resolution import Resolution

__all__ = ["Policy", "builtin_policies", "combine", "load"]


@dataclass(frozen=True)
class Policy:
    """A policy with everything it extends.

    Attributes:
        name: its name.
        files: the files it was read from, in the order in which their rules are tried.
        document: the merged content.
        gmm: rules for tile fields of grouped matmuls.
        settings: rules for other settings (``gmm.rules`` with ``set``).
        locks: locks of settings that are no tile knobs.
        tile_locks: locks of tile fields, whether written as ``tile`` or as MaxText's knobs.
        ops: rules for fields of other ops' configs, by snake-case op name.
        places: where the explicit settings stand: ``vocab.NAME``, ``engine.NAME``,
            ``gmm.on_miss``. A setting that no file names has no place.
    """

    name: str
    files: tuple[str, ...]
    document: PolicyDocument
    gmm: RuleIndex
    settings: RuleIndex
    locks: RuleIndex
    tile_locks: RuleIndex
    ops: Mapping[str, RuleIndex]
    places: Mapping[str, Place]
    layers: tuple[Layer, ...]

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the merged content; see :func:`tilepolicy.model.canonical.digest`."""
        return canonical.digest(self.document)

    @property
    def vocab(self) -> VocabSettings:
        """Vocabulary tiling and loss."""
        return self.document.vocab

    @property
    def engine(self) -> EngineSettings:
        """MaxText's training engine."""
        return self.document.engine

    @property
    def on_miss(self) -> Literal["report", "error"]:
        """What a grouped matmul does that no rule matches."""
        return self.document.gmm.on_miss

    def resolve(
        self,
        config: object,
        overrides: Sequence[str] = (),
        device: str | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> Resolution:
        """All settings of a MaxText config under this policy.

        Args:
            config: path of a config file, mapping, or MaxText config object.
            overrides: ``KEY=VALUE`` arguments, as MaxText takes them.
            device: device name, if the config does not say it.
            versions: installed versions by library, if others than the installed ones count.

        Raises:
            ConfigError: the config cannot be read or breaks a rule of MaxText.
        """
        from tilepolicy import resolve

        return resolve.resolve(self, config, overrides, device=device, versions=versions)


def load(ref: str | os.PathLike[str], *, allow_outside: bool = False) -> Policy:
    """Read a policy and everything it extends.

    Args:
        ref: path, name of a shipped policy or of a policy pack, or fsspec URL.
        allow_outside: accept ``extends`` paths outside the extending policy's own folder.

    Raises:
        PolicyError: with every problem of every file.
        MissingLibraryError: a URL, and fsspec or what its protocol needs is not installed.
    """
    with _uncollected():
        layers = read_layers(locate(os.fspath(ref)), allow_outside=allow_outside)
        return _merge(layers[0].document.name, layers)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No collection of cycles inside: what a load makes is kept, or freed without its help.

    With 10,000 rules the collector takes a fifth of the load (``benchmarks/policy_lookup.py``).
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def combine(policies: Iterable[Policy]) -> Policy:
    """Several policies as one: each is tried before the next.

    Raises:
        ValueError: there is none.
    """
    given = list(policies)
    if not given:
        raise ValueError("combine needs at least one policy")
    if len(given) == 1:
        return given[0]
    name = "+".join(policy.name for policy in given)
    return _merge(name, in_order([layer for policy in given for layer in policy.layers]))


def _merge(name: str, layers: tuple[Layer, ...]) -> Policy:
    ops = dict.fromkeys(op for layer in layers for op in layer.sections.ops)
    values, places = _explicit(layers)
    gmm = layers[0].document.gmm.model_copy(
        update={
            "on_miss": values.get("gmm.on_miss", GmmSection.standard().on_miss),
            "rules": tuple(rule for layer in layers for rule in layer.document.gmm.rules),
        }
    )
    document = layers[0].document.model_copy(
        update={
            "name": name,
            "extends": (),
            "vocab": _overlaid(VocabSettings.standard(), "vocab", values),
            "engine": _overlaid(EngineSettings.standard(), "engine", values),
            "gmm": gmm,
            "locks": tuple(lock for layer in layers for lock in layer.document.locks),
            "ops": tuple(op for layer in layers for op in layer.document.ops),
        }
    )
    return Policy(
        name=name,
        files=tuple(layer.reference.shown for layer in layers),
        document=document,
        gmm=_joined([layer.indexes[0] for layer in layers]),
        settings=_joined([layer.indexes[1] for layer in layers]),
        locks=_joined([layer.indexes[2] for layer in layers]),
        tile_locks=_joined([layer.indexes[3] for layer in layers]),
        ops={
            op: _joined(
                [
                    layer.indexes[4 + list(layer.sections.ops).index(op)]
                    for layer in layers
                    if op in layer.sections.ops
                ]
            )
            for op in ops
        },
        places=places,
        layers=layers,
    )


def _joined(indexes: list[RuleIndex]) -> RuleIndex:
    """One index over the rules of several; an index that stands alone is used as it is."""
    filled = [index for index in indexes if len(index)]
    if len(filled) == 1:
        return filled[0]
    return RuleIndex(rule for index in filled for rule in index.rules)


def _explicit(layers: tuple[Layer, ...]) -> tuple[dict[str, Any], dict[str, Place]]:
    """Settings that files name, by ``section.key``, and where; earlier layers win."""
    values: dict[str, Any] = {}
    places: dict[str, Place] = {}
    for layer in layers:
        document = layer.document
        for section, part in (
            ("vocab", document.vocab),
            ("engine", document.engine),
            ("gmm", document.gmm),
        ):
            for key in sorted(part.model_fields_set - {"rules"}):
                if (name := f"{section}.{key}") not in values:
                    values[name] = getattr(part, key)
                    places[name] = layer.source.key_place((section, key))
    return values, places


def _overlaid[T: (VocabSettings, EngineSettings)](
    base: T, section: str, values: dict[str, Any]
) -> T:
    """Settings of a section: the explicit ones over the defaults."""
    keys = type(base).model_fields
    update = {key: values[f"{section}.{key}"] for key in keys if f"{section}.{key}" in values}
    return base.model_copy(update=update)
