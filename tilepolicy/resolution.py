"""What resolving a policy gives: settings with their origins. Plain frozen data, no behaviour.

The JSON form of these types is stable; ``schemas/resolution.schema.json`` describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from tilepolicy.errors import Problem

__all__ = [
    "FactValue",
    "FieldChoice",
    "Honoured",
    "Loser",
    "Origin",
    "OriginKind",
    "PolicyIdentity",
    "Resolution",
    "ResolvedSetting",
    "SettingValue",
    "TileVerdict",
]

type FactValue = bool | int | float | str
type SettingValue = bool | int | float | str | None
OriginKind = Literal["lock", "config", "rule", "auto", "default"]


class Loser(NamedTuple):
    """A value that was proposed for a setting and lost.

    Attributes:
        kind: what proposed it.
        value: the value it proposed.
        name: rule or lock name, or the config's key.
        file: file of the proposal; None for a default or an automatic value.
        line: 1-based line in ``file``.
        reason: why it lost.
    """

    kind: OriginKind
    value: SettingValue
    name: str = ""
    file: str | None = None
    line: int | None = None
    reason: str = ""


class Origin(NamedTuple):
    """Where a value comes from, why, and what lost against it.

    Attributes:
        kind: lock > config > rule > auto > default, in order of strength.
        name: rule or lock name, or the config's key.
        file: file that decided; None for defaults and automatic values.
        line: 1-based line in ``file``.
        reason: the arithmetic or the author's words; for a table, the point and its distance.
        lost: the weaker proposals, strongest first.
    """

    kind: OriginKind
    name: str = ""
    file: str | None = None
    line: int | None = None
    reason: str = ""
    lost: tuple[Loser, ...] = ()


class FieldChoice(NamedTuple):
    """One field of a tile (``embed_dim``, ``input_buffer_count``, …) with its origin."""

    value: SettingValue
    origin: Origin


class TileVerdict(NamedTuple):
    """What a policy says of one grouped matmul or other op.

    Attributes:
        fields: every field that has a value, by policy name (``batch_seq``, ``embed_dim``,
            ``mlp_dim``, or the kernel's own field name).
        undecidable: rules that could have matched but need facts that are not known here:
            rule name to the missing facts.
        nearest: when nothing was decided, one line that names the nearest rule and why it
            did not match; empty otherwise.
    """

    fields: Mapping[str, FieldChoice]
    undecidable: Mapping[str, tuple[str, ...]]
    nearest: str = ""

    @property
    def decided(self) -> Mapping[str, FieldChoice]:
        """The fields that a lock, the config or a rule decided; defaults are not decisions."""
        return {name: c for name, c in self.fields.items() if c.origin.kind != "default"}


class Honoured(NamedTuple):
    """Who makes a setting take effect on the selected backend.

    Attributes:
        by: ``maxtext`` (the knob itself is read), ``apply`` (only inside ``tilepolicy.apply`` or
            ``tilepolicy run``), or None (nothing reads it).
        why: one sentence.
    """

    by: Literal["maxtext", "apply"] | None
    why: str


class ResolvedSetting(NamedTuple):
    """One setting with its value, who honours it, and its origin."""

    value: SettingValue
    honoured: Honoured
    origin: Origin


class PolicyIdentity(NamedTuple):
    """Name, content digest (hex SHA-256) and files of the policy that was resolved."""

    name: str
    digest: str
    files: tuple[str, ...]


class Resolution(NamedTuple):
    """All settings of one config under one policy.

    Attributes:
        policy: which policy.
        device: normalised device name (``v6e``), or None when it is not known.
        backend: the grouped-matmul path that MaxText takes for this config (see ``backends``).
        settings: setting name to its resolved value, in the order of the settings table.
        facts: every fact that decisions could depend on.
        warnings: problems that do not make the resolution wrong.
    """

    policy: PolicyIdentity
    device: str | None
    backend: str
    settings: Mapping[str, ResolvedSetting]
    facts: Mapping[str, FactValue]
    warnings: tuple[Problem, ...] = ()
