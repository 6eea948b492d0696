"""Who makes each resolved setting take effect, given what else was resolved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tilepolicy.backends import honoured
from tilepolicy.precedence import Proposal
from tilepolicy.resolution import FactValue, Honoured
from tilepolicy.settings import SETTINGS
from tilepolicy.vocab import tiled_loss_is_broken

__all__ = ["PADDING_KNOBS", "reader"]

PADDING_KNOBS: Final = ("wi_tile_fwd_batch_seq", "eval_wi_tile_fwd_batch_seq")
"""Knobs to whose multiple MaxText pads the rows of every grouped matmul."""


def reader(
    name: str, chosen: Mapping[str, Proposal], backend: str, facts: Mapping[str, FactValue]
) -> Honoured:
    """Who honours a setting.

    Args:
        name: the setting.
        chosen: all resolved settings.
        backend: MaxText's grouped-matmul path.
        facts: facts of the config, with the resolved ``num_vocab_tiling``.
    """
    proposal = chosen[name]
    by = honoured(name, backend, facts)
    if name == "loss":
        return _loss_reader(proposal)
    if name == "num_vocab_tiling":
        return _tiling_reader(chosen, facts, by)
    left_to_tokamax = backend == "tokamax_v1" and proposal.origin.kind == "default"
    if SETTINGS[name].is_tile and left_to_tokamax and by.by is not None:
        if name in PADDING_KNOBS:
            return Honoured(
                "maxtext", "only as padding of the rows; the tile itself is left to Tokamax"
            )
        return Honoured(None, "nothing decides it, so the tile is left to Tokamax")
    return by


def _loss_reader(proposal: Proposal) -> Honoured:
    if proposal.value == "upstream":
        return Honoured("maxtext", "MaxText's own loss, which runs unless a scope replaces it")
    return Honoured("apply", "tilepolicy's loss, only inside tilepolicy.apply or tilepolicy run")


def _tiling_reader(
    chosen: Mapping[str, Proposal], facts: Mapping[str, FactValue], by: Honoured
) -> Honoured:
    """MaxText reads the number; with a broken loss of its own only tilepolicy's may use it."""
    value, release = chosen["num_vocab_tiling"].value, facts.get("maxtext")
    own_loss = chosen["loss"].value != "upstream"
    tiled = isinstance(value, int) and value > 1
    if tiled and own_loss and isinstance(release, str) and tiled_loss_is_broken(release):
        return Honoured(
            "apply",
            f"only with tilepolicy's loss, inside tilepolicy run: MaxText {release}'s own tiled "
            "loss has wrong gradients",
        )
    return by
