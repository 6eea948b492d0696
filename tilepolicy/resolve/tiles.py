"""What a policy decides for one grouped matmul or op: the door that adapters use at run time.

:class:`TileResolver` holds a policy, a config and its facts. It does no input or output, and it
remembers its answers by the facts of the call, so that asking again costs microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tilepolicy.axes import KERNEL_EXTRA_FIELDS
from tilepolicy.configs.values import ConfigValues
from tilepolicy.facts import Facts
from tilepolicy.precedence import Proposal, decide
from tilepolicy.resolution import (
    FactValue,
    FieldChoice,
    Origin,
    TileVerdict,
)
from tilepolicy.settings import AXES, SETTINGS, Layer, Pass, Phase, tile_setting

if TYPE_CHECKING:
    from tilepolicy.match import Verdict
    from tilepolicy.policy import Policy

__all__ = ["TileResolver", "explicit_proposal", "rule_proposals"]

_KERNEL_FIELDS: Final = tuple(
    dict.fromkeys(name for fields in KERNEL_EXTRA_FIELDS.values() for name in fields)
)
_CACHE_SIZE: Final = 4096
"""Answers that are remembered; a step has a few dozen distinct calls."""


class TileResolver:
    """Answers for one policy under one config.

    Args:
        policy: the policy; of several, combined ones.
        config: the config's values with their sources; None when there is no config.
        facts: facts of the config, or plain facts (device, versions) without one.

    Attributes:
        policy: as given.
        config: as given.
        facts: as given, as :class:`~tilepolicy.facts.Facts`.
    """

    def __init__(
        self, policy: Policy, config: ConfigValues | None, facts: Facts | Mapping[str, FactValue]
    ) -> None:
        self.policy = policy
        self.config = config
        self.facts = facts if isinstance(facts, Facts) else Facts(dict(facts))
        self._tiles: dict[tuple[object, ...], TileVerdict] = {}
        self._ops: dict[tuple[object, ...], TileVerdict] = {}

    def tile(
        self,
        layer: Layer,
        pass_: Pass,
        call_facts: Mapping[str, FactValue],
        phase: Phase = "train",
    ) -> TileVerdict:
        """The tile of one grouped matmul: lock > explicit config > rule > default, for each field.

        Args:
            layer: ``wi`` or ``wo``.
            pass_: ``fwd``, ``dlhs`` or ``drhs``.
            call_facts: what the call shows (``batch_seq``, ``embed_dim``, ``dtype``, …); they go
                before the config's facts of the same name.
            phase: ``train`` or ``eval``.

        Returns:
            A verdict with the three axes, defaults included, and the kernel fields that a rule
            decides. What MaxText or the kernel would do anyway is of kind ``default``.
        """
        key = (layer, pass_, phase, *call_facts.items())
        verdict = self._tiles.get(key)
        if verdict is None:
            verdict = self._tile(layer, pass_, call_facts, phase)
            if len(self._tiles) < _CACHE_SIZE:
                self._tiles[key] = verdict
        return verdict

    def op(self, op_name: str, call_facts: Mapping[str, FactValue]) -> TileVerdict:
        """The config of another op, by its snake-case class name; no field without a rule.

        Args:
            op_name: name as in the policy's ``ops``.
            call_facts: what the call shows; they go before the config's facts of the same name.
        """
        key = (op_name, *call_facts.items())
        verdict = self._ops.get(key)
        if verdict is None:
            verdict = self._op(op_name, call_facts)
            if len(self._ops) < _CACHE_SIZE:
                self._ops[key] = verdict
        return verdict

    def _tile(
        self, layer: Layer, pass_: Pass, call_facts: Mapping[str, FactValue], phase: Phase
    ) -> TileVerdict:
        facts = {**self.facts.values, **call_facts, "layer": layer, "pass": pass_, "phase": phase}
        knobs = phase if phase == "train" or facts.get("eval_tiles_read") else "train"
        names = {axis: tile_setting(layer, pass_, axis, knobs) for axis in AXES}
        rules = self.policy.gmm.lookup(facts)
        locks = self.policy.tile_locks.lookup(facts)
        fields: dict[str, FieldChoice] = {}
        for axis, knob in names.items():
            proposals = [
                *rule_proposals(locks, axis),
                *self._from_config(knob),
                *rule_proposals(rules, axis),
                Proposal(SETTINGS[knob].default, Origin("default")),
            ]
            won = decide(proposals)
            fields[axis] = FieldChoice(won.value, won.origin)
        for name in _KERNEL_FIELDS:
            proposals = [*rule_proposals(locks, name), *rule_proposals(rules, name)]
            if proposals:
                won = decide(proposals)
                fields[name] = FieldChoice(won.value, won.origin)
        decided = any(choice.origin.kind != "default" for choice in fields.values())
        return TileVerdict(
            fields,
            undecidable=dict(locks.undecidable) | dict(rules.undecidable),
            nearest="" if decided else str(self.policy.gmm.nearest(facts) or ""),
        )

    def _from_config(self, name: str) -> list[Proposal]:
        proposal = explicit_proposal(self.config, name)
        return [] if proposal is None else [proposal]

    def _op(self, op_name: str, call_facts: Mapping[str, FactValue]) -> TileVerdict:
        rules = self.policy.ops.get(op_name)
        if rules is None:
            return TileVerdict({}, {})
        facts = {**self.facts.values, **call_facts}
        verdict = rules.lookup(facts)
        return TileVerdict(
            dict(verdict.fields),
            undecidable=dict(verdict.undecidable),
            nearest="" if verdict.fields else str(rules.nearest(facts) or ""),
        )


def rule_proposals(verdict: Verdict, name: str) -> list[Proposal]:
    """What rules or locks say of a field: one proposal or none."""
    choice = verdict.fields.get(name)
    return [] if choice is None else [Proposal(choice.value, choice.origin)]


def explicit_proposal(config: ConfigValues | None, name: str) -> Proposal | None:
    """The value that the user's config or command line gives a setting, if it is explicit."""
    if config is None or not config.is_explicit(name):
        return None
    place = config.place(name)
    value = config[name]
    return Proposal(
        value if isinstance(value, bool | int | float | str) else None,
        Origin(
            "config",
            name=name,
            file=place.file if place is not None else None,
            line=place.line if place is not None else None,
            reason=_SOURCES.get(config.entries[name].source, ""),
        ),
    )


_SOURCES: Final[Mapping[str, str]] = {
    "model": "the model's own file",
    "environment": "an environment variable",
    "object": "the config object",
}
