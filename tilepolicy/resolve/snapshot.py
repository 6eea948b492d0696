"""What was resolved, reduced to what can be recorded and compared: values and who honours them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilepolicy.resolution import Origin, Resolution, SettingValue

__all__ = ["VERSIONS", "Change", "Recorded", "Snapshot", "compare", "snapshot_of"]

VERSIONS = ("maxtext", "tokamax", "jax")
"""Facts that are library versions."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One setting: its value, who honours it, and, unless read from a lock, its origin."""

    value: SettingValue
    by: str | None
    origin: Origin | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The settings of one config at one time.

    Attributes:
        policy: name of the policy.
        digest: its content digest.
        device: normalised device name, or None.
        backend: grouped-matmul path.
        versions: library to installed version.
        settings: setting name to what was recorded.
    """

    policy: str
    digest: str
    device: str | None
    backend: str
    versions: Mapping[str, str]
    settings: Mapping[str, Recorded]


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that differs; None on the side that does not have it."""

    name: str
    before: Recorded | None
    after: Recorded | None


def snapshot_of(resolution: Resolution) -> Snapshot:
    """What a resolution says, ready to be recorded or compared."""
    return Snapshot(
        policy=resolution.policy.name,
        digest=resolution.policy.digest,
        device=resolution.device,
        backend=resolution.backend,
        versions={
            name: str(resolution.facts[name]) for name in VERSIONS if name in resolution.facts
        },
        settings={
            name: Recorded(one.value, one.honoured.by, one.origin)
            for name, one in resolution.settings.items()
        },
    )


def compare(before: Snapshot, after: Snapshot) -> tuple[Change, ...]:
    """Settings whose value or reader differs, in the order of ``before``, then new ones."""
    names = dict.fromkeys((*before.settings, *after.settings))
    pairs = ((name, before.settings.get(name), after.settings.get(name)) for name in names)
    return tuple(Change(name, one, other) for name, one, other in pairs if _differs(one, other))


def _differs(one: Recorded | None, other: Recorded | None) -> bool:
    """Whether two records differ; ``true`` and ``1`` do, although Python calls them equal."""
    if one is None or other is None:
        return one is not other
    return one != other or type(one.value) is not type(other.value)
