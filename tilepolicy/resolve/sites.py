"""The grouped matmuls of a config ("sites") with their predicted sizes and their tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from tilepolicy.facts import site
from tilepolicy.precedence import Proposal
from tilepolicy.resolution import FactValue, Honoured, ResolvedSetting, TileVerdict
from tilepolicy.resolve.tiles import TileResolver
from tilepolicy.settings import AXES, LAYERS, PASSES, Layer, Pass, Phase, tile_setting

__all__ = ["Site", "resolve_sites"]

_MAX_ROUNDS: Final = 8
_SIZES: Final = ("rows", "batch_seq", "embed_dim", "mlp_dim", "num_groups", "rows_per_group")


class Site(NamedTuple):
    """One grouped matmul: where it is, what is known of it, and what is decided.

    Attributes:
        layer: ``wi`` or ``wo``.
        pass_: ``fwd``, ``dlhs`` or ``drhs``.
        phase: ``train`` or ``eval``.
        facts: the facts of the config and of the call.
        verdict: the tile.
        settled: False where padding to the tile changes the rows so that another tile matches,
            again and again.
    """

    layer: Layer
    pass_: Pass
    phase: Phase
    facts: Mapping[str, FactValue]
    verdict: TileVerdict
    settled: bool = True

    def __str__(self) -> str:
        """``wi fwd``, ``wo fwd eval``."""
        return f"{self.layer} {self.pass_}" + (" eval" if self.phase == "eval" else "")

    @property
    def prefix(self) -> str:
        """What the names of its knobs start with: ``wi_tile_fwd_``."""
        return tile_setting(self.layer, self.pass_, "batch_seq", self.phase)[: -len("batch_seq")]

    @property
    def tile(self) -> dict[str, object]:
        """Axis to tile size."""
        return {axis: self.verdict.fields[axis].value for axis in AXES}

    @property
    def sizes(self) -> dict[str, FactValue]:
        """The known sizes of the call, by fact."""
        return {name: self.facts[name] for name in _SIZES if name in self.facts}

    @property
    def proposals(self) -> dict[str, Proposal]:
        """Knob to the value that won it."""
        fields = self.verdict.fields
        return {
            tile_setting(self.layer, self.pass_, axis, self.phase): Proposal(
                fields[axis].value, fields[axis].origin
            )
            for axis in AXES
        }

    def kernel_fields(self, backend: str) -> dict[str, ResolvedSetting]:
        """Decided kernel fields that are no knob of MaxText: ``wi_tile_fwd_input_buffer_count``."""
        reader = (
            Honoured("apply", "a field of Tokamax's config; MaxText has no knob for it")
            if backend == "tokamax_v1"
            else Honoured(None, f"a field of Tokamax's config, which {backend} does not have")
        )
        return {
            self.prefix + name: ResolvedSetting(choice.value, reader, choice.origin)
            for name, choice in self.verdict.fields.items()
            if name not in AXES
        }


def resolve_sites(resolver: TileResolver) -> tuple[Site, ...]:
    """Every site, in the order of the settings table: training first, then evaluation."""
    return (*_phase(resolver, "train"), *_phase(resolver, "eval"))


def _phase(resolver: TileResolver, phase: Phase) -> Iterator[Site]:
    first = _padded(resolver, phase)
    yield first
    pad_to = first.verdict.fields["batch_seq"].value
    for layer in LAYERS:
        for pass_ in PASSES if phase == "train" else PASSES[:1]:
            if (layer, pass_) != ("wi", "fwd"):
                yield _ask(resolver, layer, pass_, phase, pad_to)


def _padded(resolver: TileResolver, phase: Phase) -> Site:
    """``wi fwd``: its batch_seq tile decides to what its own rows are padded."""
    pad_to: object = None
    found = _ask(resolver, "wi", "fwd", phase, None)
    for _ in range(_MAX_ROUNDS):
        tile = found.verdict.fields["batch_seq"].value
        if tile == pad_to:
            return found
        pad_to = tile
        found = _ask(resolver, "wi", "fwd", phase, pad_to)
    return Site("wi", "fwd", phase, found.facts, found.verdict, settled=False)


def _ask(resolver: TileResolver, layer: Layer, pass_: Pass, phase: Phase, pad_to: object) -> Site:
    whole = pad_to if isinstance(pad_to, int) and not isinstance(pad_to, bool) else None
    facts = site(resolver.facts, layer, pass_, phase, pad_to=whole)
    return Site(layer, pass_, phase, facts, resolver.tile(layer, pass_, facts, phase))
