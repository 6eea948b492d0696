"""All settings of a config under a policy, with their origins, warnings and errors.

``Resolver`` is also what adapters ask at run time (see :mod:`tilepolicy.resolve.tiles`);
:func:`resolve` is the whole way from a config file to a :class:`~tilepolicy.resolution.Resolution`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tilepolicy import configs, facts, guards
from tilepolicy.configs.values import ConfigValues
from tilepolicy.errors import ConfigError, Place, Problem
from tilepolicy.model.factnames import FACTS
from tilepolicy.precedence import Proposal, decide
from tilepolicy.resolution import (
    FactValue,
    Origin,
    PolicyIdentity,
    Resolution,
    ResolvedSetting,
)
from tilepolicy.resolve.checks import (
    lock_contradictions,
    missed_sites,
    tile_problems,
    undecidable_rules,
)
from tilepolicy.resolve.readers import reader
from tilepolicy.resolve.sites import Site, resolve_sites
from tilepolicy.resolve.tiles import TileResolver, explicit_proposal, rule_proposals
from tilepolicy.resolve.vocab_settings import VocabProposals
from tilepolicy.settings import SETTINGS, settings_of_release

if TYPE_CHECKING:
    from tilepolicy.policy import Policy

__all__ = ["Resolver", "resolve", "resolver"]


def resolve(
    policy: Policy,
    config: configs.Config | ConfigValues,
    overrides: Iterable[str] = (),
    *,
    device: str | None = None,
    versions: Mapping[str, str] | None = None,
) -> Resolution:
    """Resolve a config under a policy.

    Args:
        policy: the policy; of several, combined ones.
        config: config file, mapping or MaxText config object, or values that were read already.
        overrides: ``KEY=VALUE`` arguments; not together with values that were read already.
        device: device or topology (``v6e``, ``v5p-128``); default the config's own.
        versions: ``maxtext``, ``tokamax`` and ``jax`` to resolve for; default the installed ones.

    Raises:
        ConfigError: with every problem of the config, the guards and the tiles.
    """
    if isinstance(config, ConfigValues):
        values = config
    else:
        release = versions.get("maxtext") if versions is not None else None
        values = configs.read(config, overrides, release=release)
    return resolver(policy, values, device=device, versions=versions).resolution()


def resolver(
    policy: Policy,
    values: ConfigValues,
    *,
    device: str | None = None,
    versions: Mapping[str, str] | None = None,
) -> Resolver:
    """A resolver for a config that was read, with the facts derived from it.

    Args:
        policy: the policy; of several, combined ones.
        values: the config.
        device: device or topology (``v6e``, ``v5p-128``); default the config's own.
        versions: ``maxtext``, ``tokamax`` and ``jax`` to resolve for; default the installed ones.

    Raises:
        ConfigError: the device is not known.
    """
    known = facts.derive(values, device, versions=versions, env=os.environ)
    return Resolver(policy, values, known)


def _place_of(config: ConfigValues) -> Place | None:
    """The config as a whole."""
    return Place(config.files[0]) if config.files else None


class Resolver(TileResolver):
    """Answers for one policy under one config, call by call or all at once."""

    def resolution(self) -> Resolution:
        """Every setting of the MaxText release, resolved for the sizes that the config predicts.

        Raises:
            ConfigError: with every contradiction, broken rule and illegal tile.
            TypeError: there is no config.
        """
        config = self.config
        if config is None:
            raise TypeError("a resolution needs a config; without one, ask tile() call by call")
        problems: list[Problem] = []
        chosen = self._plain_settings(config, problems)
        sites = resolve_sites(self)
        for site in sites:
            chosen |= site.proposals
        problems += lock_contradictions(chosen, config)
        values = {name: proposal.value for name, proposal in chosen.items()}
        problems += guards.check(config, self.facts, values)
        backend = str(self.facts.values["backend"])
        place = _place_of(config)
        problems += tile_problems(sites, backend, config)
        problems += missed_sites(
            sites,
            backend,
            place,
            on_miss=self.policy.on_miss,
            has_rules=len(self.policy.gmm) > 0,
        )
        problems += undecidable_rules(sites, self.facts, place)
        errors = [problem for problem in problems if problem.severity == "error"]
        if errors:
            raise ConfigError(errors)
        warnings = [*config.warnings, *self.facts.problems, *problems]
        return self._finished(chosen, sites, tuple(warnings))

    def _plain_settings(self, config: ConfigValues, problems: list[Problem]) -> dict[str, Proposal]:
        """The settings that are no tiles; what has no answer becomes a problem."""
        vocab = VocabProposals(self.policy.vocab, self.facts, self.policy.places)
        chosen: dict[str, Proposal] = {}
        chosen["loss"] = self._decide("loss", vocab.propose_loss())
        tiling = vocab.propose_tiling(str(chosen["loss"].value))
        proposal = self._decide("num_vocab_tiling", None if isinstance(tiling, Problem) else tiling)
        if isinstance(tiling, Problem) and proposal.origin.kind == "default":
            problems.append(tiling._replace(place=_place_of(config)))
        chosen["num_vocab_tiling"] = proposal
        problems += vocab.broken_tiling(chosen, config.place("num_vocab_tiling"))
        count = proposal.value if isinstance(proposal.value, int) else 1
        chosen["vocab_tiling_ag_once"] = self._decide(
            "vocab_tiling_ag_once", vocab.propose_ag_once(count)
        )
        chosen["shard_optimizer_over_data"] = self._decide("shard_optimizer_over_data", None)
        chosen["engine.cache_pure_state"] = self._decide(
            "engine.cache_pure_state", self._engine_proposal()
        )
        return chosen

    def _engine_proposal(self) -> Proposal:
        value = self.policy.engine.cache_pure_state
        name = "engine.cache_pure_state"
        place = self.policy.places.get(name)
        if place is None or value == "auto":
            return Proposal(value, Origin("auto", name, reason="cached where MaxText can"))
        return Proposal(value, Origin("rule", name, file=place.file, line=place.line))

    def _decide(self, name: str, proposal: Proposal | None) -> Proposal:
        """Lock > explicit > rule > what the policy's section proposes > default."""
        known = self.facts.values
        explicit = explicit_proposal(self.config, name)
        return decide(
            [
                *rule_proposals(self.policy.locks.lookup(known, (name,)), name),
                *([explicit] if explicit is not None else []),
                *rule_proposals(self.policy.settings.lookup(known, (name,)), name),
                *([proposal] if proposal is not None else []),
                Proposal(SETTINGS[name].default, Origin("default")),
            ]
        )

    def _finished(
        self,
        chosen: Mapping[str, Proposal],
        sites: Sequence[Site],
        warnings: tuple[Problem, ...],
    ) -> Resolution:
        known = self.facts.values
        backend = str(known["backend"])
        release = settings_of_release(str(known.get("maxtext", "")))
        tiling: dict[str, FactValue] = {}
        if isinstance(count := chosen["num_vocab_tiling"].value, int):
            tiling["num_vocab_tiling"] = count
        seen = {**known, **tiling}
        settings: dict[str, ResolvedSetting] = {}
        for name in SETTINGS:
            proposal = chosen.get(name)
            if proposal is None or (name not in release and proposal.origin.kind == "default"):
                continue
            by = reader(name, chosen, backend, seen)
            settings[name] = ResolvedSetting(proposal.value, by, proposal.origin)
        for site in sites:
            settings |= site.kernel_fields(backend)
        return Resolution(
            policy=PolicyIdentity(self.policy.name, self.policy.digest, self.policy.files),
            device=str(known["device"]) if "device" in known else None,
            backend=backend,
            settings=settings,
            facts=self._shown_facts(sites),
            warnings=warnings,
        )

    def _shown_facts(self, sites: Sequence[Site]) -> dict[str, FactValue]:
        """Derived facts, explicit config keys, what rules depend on, and the sizes of each site."""
        known, config = self.facts.values, self.config
        policy = self.policy
        indexes = (policy.gmm, policy.settings, policy.locks, policy.tile_locks)
        wanted = {*FACTS, *(fact for index in indexes for fact in index.facts)}
        wanted |= set(config.explicit()) if config is not None else set()
        shown = {name: value for name, value in known.items() if name in wanted}
        for site in sites:
            if site.pass_ == "fwd":
                prefix = "eval." if site.phase == "eval" else ""
                shown |= {f"{prefix}{site.layer}.{name}": v for name, v in site.sizes.items()}
        return shown
