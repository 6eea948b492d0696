"""Which loss a scope wants for a MaxText training step, and the note of it for the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from tilepolicy.context import active, carrier
from tilepolicy.context.active import ActivePolicy
from tilepolicy.resolution import Origin, Resolution
from tilepolicy.resolve import resolve
from tilepolicy.session import Lookup, Note, Session

if TYPE_CHECKING:
    from tilepolicy.vocab import Loss

__all__ = ["BLOCK_DIFFUSION", "LossChoice", "choose", "fell_back", "note_choice", "resolution_of"]

BLOCK_DIFFUSION: Final = "block_diffusion"
SOURCE: Final = "maxtext"


@dataclass(frozen=True, slots=True)
class LossChoice:
    """The resolved loss of one scope under one config.

    Attributes:
        loss: which loss; ``upstream`` is MaxText's own.
        num_tiles: resolved ``num_vocab_tiling``.
        ag_once: resolved ``vocab_tiling_ag_once``.
        vocab_tile_bytes: the policy's ``max_chunk_bytes``.
        origin: where the loss comes from.
        device: normalised device name, empty if not known.
        session: the scope's record.
    """

    loss: Loss
    num_tiles: int
    ag_once: bool
    vocab_tile_bytes: int
    origin: Origin
    device: str
    session: Session


def choose(scope: ActivePolicy, config: object) -> LossChoice:
    """The loss that a scope wants for a training step with this config.

    Args:
        scope: a scope in force here.
        config: MaxText's config object of the call; resolved where the scope has none of its own.

    Raises:
        ConfigError: the config contradicts the policy, or breaks a rule.
        ScopeError: jax keeps the current trace under other scopes than those in force.
    """
    carrier.check(active.view())
    resolution = resolution_of(scope, config)
    loss = resolution.settings["loss"]
    ag_once = resolution.settings.get("vocab_tiling_ag_once")
    return LossChoice(
        loss=cast("Loss", loss.value if config_allows_own_loss(config) else "upstream"),
        num_tiles=int(str(resolution.settings["num_vocab_tiling"].value)),
        # Before 0.2.4 MaxText has no such knob and always gathers once.
        ag_once=True if ag_once is None else bool(ag_once.value),
        vocab_tile_bytes=scope.resolver.policy.vocab.max_chunk_bytes,
        origin=loss.origin,
        device=resolution.device or "",
        session=scope.session,
    )


def config_allows_own_loss(config: object) -> bool:
    """Whether tilepolicy's losses fit: block diffusion keeps MaxText's, on aligned logits."""
    return getattr(config, "training_objective", None) != BLOCK_DIFFUSION


def resolution_of(scope: ActivePolicy, config: object) -> Resolution:
    """The scope's resolution: of its own config, else of the call's; worked out once."""
    inputs = scope.session.inputs
    if inputs is not None and inputs.resolution is not None:
        return inputs.resolution
    # The config is part of the value, so that its id cannot come to name another object.
    key = ("maxtext resolution", id(config))
    known = scope.answers.get(key)
    if known is None:
        known = scope.answers[key] = (config, resolve(scope.resolver.policy, config))
    return cast("tuple[object, Resolution]", known)[1]


def note_choice(choice: LossChoice, used: str, reason: str) -> None:
    """Record which loss a step was traced with, and why."""
    choice.session.note(Note(SOURCE, "loss", used, reason, choice.origin))


def fell_back(choice: LossChoice, used: str, reason: str) -> None:
    """Record that a step was traced with another loss than the policy selects: a miss."""
    choice.session.record(
        Lookup(
            adapter=SOURCE,
            op="loss",
            device=choice.device,
            facts=(("wanted", choice.loss), ("used", used)),
            miss=f"{used} instead of {choice.loss}: {reason}",
        )
    )
    note_choice(choice, used, reason)
