"""What a scope stands for: policy, config and facts, read once, and their content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from tilepolicy import __version__
from tilepolicy.context.layers import LayerSizes
from tilepolicy.errors import ConfigError, Problem
from tilepolicy.installed import installed_version
from tilepolicy.resolution import FactValue, Resolution
from tilepolicy.settings import Phase

if TYPE_CHECKING:
    from tilepolicy.facts import Facts
    from tilepolicy.policy import Policy
    from tilepolicy.resolve import Resolver

__all__ = ["Inputs", "PolicyLike", "load_policy", "read_inputs"]

type PolicyLike = Policy | str | os.PathLike[str] | Sequence[Policy | str | os.PathLike[str]]
"""A loaded policy, its path or shipped name, or several in the order in which they are tried."""

_LIBRARIES: Final = ("jax", "jaxlib", "tokamax", "maxtext")


@dataclass(frozen=True)
class Inputs:
    """What a scope stands for.

    Attributes:
        policy: the policy; of several, combined ones.
        resolver: answers lookups.
        resolution: every setting under the config; None without a config.
        facts: facts of the config, or those that hold without one (device, versions).
        phase: ``train`` or ``eval``.
        sizes: sizes of the layers on one shard, as declared or as the config says; None where
            neither is known.
    """

    policy: Policy
    resolver: Resolver
    resolution: Resolution | None
    facts: Mapping[str, FactValue]
    phase: Phase
    sizes: LayerSizes | None

    @property
    def fail_on_miss(self) -> bool:
        """Whether the policy says ``on_miss: error``."""
        return self.policy.on_miss == "error"

    @cached_property
    def content(self) -> tuple[object, ...]:
        """All that a lookup's answer depends on besides the call, as plain JSON data."""
        return (
            self.policy.digest,
            dict(self.facts),
            _settings(self.resolution),
            self.phase,
            None if self.sizes is None else asdict(self.sizes),
        )

    def statement(self, versions: Mapping[str, str]) -> dict[str, str]:
        """What all processes of one run must agree on: field to value."""
        settings = json.dumps(_settings(self.resolution), sort_keys=True)
        resolved = hashlib.sha256(settings.encode()).hexdigest()
        return {
            "policy": self.policy.digest,
            "resolution": resolved if self.resolution is not None else "none",
            "phase": self.phase,
            "sizes": repr(self.sizes),
            "tilepolicy": __version__,
            **_installed(),
            **versions,
        }


def read_inputs(
    policy: PolicyLike,
    config: object,
    overrides: Iterable[str],
    device: str | None,
    *,
    phase: Phase,
    sizes: LayerSizes | None,
) -> Inputs:
    """Read policy and config, and resolve the one under the other.

    Raises:
        PolicyError: the policy cannot be read, or contradicts the config.
        ConfigError: the config is wrong, or there are overrides without a config.
    """
    from tilepolicy.resolve import Resolver

    chosen = load_policy(policy)
    overrides = tuple(overrides)
    if config is None:
        if overrides:
            raise ConfigError(
                Problem(
                    code="overrides-without-config",
                    message=f"overrides without a config: {', '.join(overrides)}",
                    remedy="pass config=",
                )
            )
        known = _plain_facts(device)
        resolver = Resolver(chosen, None, known)
        return Inputs(chosen, resolver, None, known, phase, sizes)
    from tilepolicy import configs, facts

    values = configs.read(config, overrides)
    derived = facts.derive(values, device, env=os.environ)
    resolver = Resolver(chosen, values, derived)
    resolution = resolver.resolution()
    return Inputs(
        chosen, resolver, resolution, derived.values, phase, sizes or _sizes(derived, phase)
    )


def load_policy(policy: PolicyLike) -> Policy:
    """The policy that was meant; several as one, in the order in which they are tried.

    Raises:
        PolicyError: one of them cannot be read.
    """
    from tilepolicy.policy import Policy, combine, load

    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str | os.PathLike):
        return load(policy)
    loaded = [p if isinstance(p, Policy) else load(p) for p in policy]
    return loaded[0] if len(loaded) == 1 else combine(loaded)


def _plain_facts(device: str | None) -> dict[str, FactValue]:
    from tilepolicy.facts.devices import normalize_device

    facts: dict[str, FactValue] = {
        name: release for name, release in _installed().items() if name != "jaxlib"
    }
    if device is not None:
        known = normalize_device(device)
        if known is None:
            raise ConfigError(
                Problem(
                    code="unknown-device",
                    message=f"{device!r} is not a device",
                    remedy="use v4, v5e, v5p, v6e, v7x, cpu or gpu",
                )
            )
        facts["device"] = known
    return facts


def _installed() -> dict[str, str]:
    found = ((library, installed_version(library)) for library in _LIBRARIES)
    return {library: release for library, release in found if release is not None}


def _settings(resolution: Resolution | None) -> dict[str, object]:
    if resolution is None:
        return {}
    return {name: setting.value for name, setting in resolution.settings.items()}


def _sizes(facts: Facts, phase: Phase) -> LayerSizes | None:
    """The sizes of both layers as the config gives them; None where one is not known."""
    found: dict[str, int] = {}
    for layer in ("wi", "wo"):
        site = facts.sites.get((layer, phase))
        if site is None:
            return None
        for axis, size in (("embed_dim", site.embed_dim), ("mlp_dim", site.mlp_dim)):
            if not isinstance(size, int):
                return None
            found[f"{layer}.{axis}"] = size
    return LayerSizes(
        embed_dim=found["wo.embed_dim"],
        mlp_dim=found["wo.mlp_dim"],
        wi_embed_dim=found["wi.embed_dim"],
        wi_mlp_dim=found["wi.mlp_dim"],
    )
