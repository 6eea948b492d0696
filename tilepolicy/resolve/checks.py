"""What is wrong with a resolution: contradictions, illegal tiles, sites that nothing decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from tilepolicy.backends import illegal_tile, oversized_tile, padding
from tilepolicy.configs.values import ConfigValues
from tilepolicy.errors import Place, Problem
from tilepolicy.precedence import Proposal
from tilepolicy.resolution import Origin
from tilepolicy.resolve.sites import Site
from tilepolicy.settings import AXES, tile_setting

if TYPE_CHECKING:
    from tilepolicy.facts import Facts

__all__ = [
    "lock_contradictions",
    "missed_sites",
    "origin_place",
    "tile_problems",
    "undecidable_rules",
]

PADDING_WORTH_A_WORD: Final = 10.0
"""Per cent of padded rows from which a warning says so."""

_CALLS_OUT: Final = ("batch_split", "dense_moe", "none", "te_moe_block", "vllm")
"""Backends without a grouped matmul that any tile reaches."""


def origin_place(origin: Origin) -> Place | None:
    """The file and line of an origin as a place; the source line itself is not kept."""
    return Place(origin.file, origin.line) if origin.file is not None else None


def lock_contradictions(chosen: Mapping[str, Proposal], config: ConfigValues) -> Iterator[Problem]:
    """Every explicit value that a lock forbids; each names both places."""
    for name, proposal in chosen.items():
        origin = proposal.origin
        if origin.kind != "lock":
            continue
        for loser in origin.lost:
            if loser.kind != "config" or loser.name != name or _same(loser.value, proposal.value):
                continue
            because = f": {origin.reason}" if origin.reason else ""
            yield Problem(
                "lock-contradiction",
                f"{name} is {_text(loser.value)} here, but lock {origin.name!r} at "
                f"{origin_place(origin)} keeps it at {_text(proposal.value)}{because}",
                config.place(name),
                f"remove {name} here, or change what the lock depends on",
                path=name,
            )


def _same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def tile_problems(sites: Iterable[Site], backend: str, config: ConfigValues) -> Iterator[Problem]:
    """Tiles that the backend refuses, padding that costs much, sizes that do not settle.

    A tile that somebody chose is an error; MaxText's own default is a warning, because nothing in
    the policy or the config says it.
    """
    if backend in _CALLS_OUT:
        return
    for site in sites:
        if site.phase == "eval" and not site.facts.get("eval_tiles_read"):
            continue  # the same calls as in training
        for illegal in illegal_tile(site.tile, backend, site.layer, site.pass_, site.facts):
            if illegal.axis == "batch_seq" and not site.settled:
                continue  # no rows are sure; _padding says so
            choice = site.verdict.fields[illegal.axis]
            knob = tile_setting(site.layer, site.pass_, illegal.axis, site.phase)
            explicit = choice.origin.kind == "config"
            yield Problem(
                "illegal-tile",
                f"{site}: {illegal.message}",
                config.place(knob) if explicit else origin_place(choice.origin),
                illegal.remedy,
                path=knob,
                severity="warning" if choice.origin.kind == "default" else "error",
            )
        yield from _oversized(site, config)
        if (site.layer, site.pass_) == ("wi", "fwd"):
            yield from _padding(site)


def _oversized(site: Site, config: ConfigValues) -> Iterator[Problem]:
    """Tiles that somebody chose larger than the dimension and its padding: they only cost."""
    for fault in oversized_tile(site.tile, site.layer, site.pass_, site.facts):
        choice = site.verdict.fields[fault.axis]
        if choice.origin.kind == "default":
            continue
        knob = tile_setting(site.layer, site.pass_, fault.axis, site.phase)
        explicit = choice.origin.kind == "config"
        yield Problem(
            "oversized-tile",
            f"{site}: {fault.message}",
            config.place(knob) if explicit else origin_place(choice.origin),
            fault.remedy,
            path=knob,
            severity="warning",
        )


def _padding(site: Site) -> Iterator[Problem]:
    choice = site.verdict.fields["batch_seq"]
    knob = tile_setting("wi", "fwd", "batch_seq", site.phase)
    if not site.settled:
        yield Problem(
            "unsettled-padding",
            f"{site}: padding to its batch_seq tile changes the rows so that another rule "
            "matches, without end",
            origin_place(choice.origin),
            "let the rules depend on ranges of batch_seq that padding does not leave",
            path=knob,
            severity="warning",
        )
    rows, tile = site.facts.get("rows"), choice.value
    if not isinstance(rows, int) or not isinstance(tile, int) or min(rows, tile) < 1:
        return
    added, share = padding(rows, tile)
    if share >= PADDING_WORTH_A_WORD:
        yield Problem(
            "costly-padding",
            f"{site}: {rows} rows are padded by {added} to a multiple of {tile}: "
            f"{share:.1f} % of the rows of every grouped matmul are padding",
            origin_place(choice.origin),
            f"use a smaller {knob}",
            path=knob,
            severity="warning",
        )


def missed_sites(
    sites: Iterable[Site], backend: str, place: Place | None, *, on_miss: str, has_rules: bool
) -> Iterator[Problem]:
    """Sites whose tile nothing decides: what happens instead, the nearest rule, and a remedy.

    ``place`` is the config. Sites with the same outcome share one problem. MaxText's own defaults
    are no surprise under a policy that has no rule at all, unless ``on_miss`` is ``error``.
    """
    if backend in _CALLS_OUT or backend == "tokamax_v2_heuristic":
        return
    if backend != "tokamax_v1" and not has_rules and on_miss != "error":
        return
    groups: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        if not site.verdict.decided and site.phase == "train":
            key = (_instead(site, backend), site.verdict.nearest)
            groups.setdefault(key, []).append(site)
    for (instead, nearest), missed in groups.items():
        names = ", ".join(str(site) for site in missed)
        near = f"; nearest: {nearest}" if nearest else ""
        yield Problem(
            "no-match",
            f"no rule decides the tile of {names} ({_call(missed[0])}): {instead}{near}",
            place,
            remedy="add a rule, or find tiles with `tilepolicy tune CONFIG -o FILE`",
            path="gmm.rules",
            severity="error" if on_miss == "error" else "warning",
        )


def _call(site: Site) -> str:
    """The sizes that a rule would have to match."""
    shown = [f"{name} {value}" for name, value in site.sizes.items() if name != "rows"]
    shown += [str(site.facts[name]) for name in ("dtype", "device") if name in site.facts]
    return ", ".join(shown) or "sizes not known"


def _instead(site: Site, backend: str) -> str:
    if backend == "tokamax_v1":
        return _tokamax_v1_instead(site.facts.get("device"))
    sizes = " × ".join(str(site.verdict.fields[axis].value) for axis in AXES)
    return f"MaxText's defaults {sizes} are used"


def _tokamax_v1_instead(device: object) -> str:
    """What Tokamax does on a miss: its shipped cache, else its heuristic (tokamax 0.0.17).

    Its cache has no entry for the calls that MaxText makes forward (their
    ``preferred_element_type`` differs), so it is the heuristic that decides there.
    """
    if device == "v7x":
        return (
            "Tokamax uses its shipped cache or its heuristic, which starts at "
            "min(rows, 1024) × whole dimensions and halves until it fits"
        )
    where = f" on {device}" if device is not None else " below TPU7x"
    return f"Tokamax uses its shipped cache or its heuristic, 128 × 128 × 128{where}"


def undecidable_rules(
    sites: Sequence[Site], facts: Facts, place: Place | None
) -> Iterator[Problem]:
    """Rules that might have decided, but depend on facts that are not known of the config."""
    rules: dict[str, dict[str, None]] = {}
    for site in sites:
        for rule, missing in site.verdict.undecidable.items():
            rules.setdefault(rule, {}).update(dict.fromkeys(missing))
    for rule, unknown in rules.items():
        names = list(unknown)
        keys = dict.fromkeys(key for name in names for key in _keys_for(name, facts))
        yield Problem(
            "undecidable-rule",
            f"rule {rule!r} was passed over: {', '.join(names)} "
            f"{'is' if len(names) == 1 else 'are'} not known",
            place,
            remedy=f"set {' or '.join(keys)}" if keys else None,
            path="gmm.rules",
            severity="warning",
        )


def _keys_for(name: str, facts: Facts) -> tuple[str, ...]:
    """Config keys or options that would make a fact known, also as a fact of one layer."""
    for full in (name, f"wi.{name}", f"wo.{name}"):
        if full in facts.missing:
            return facts.missing[full]
    return ()
