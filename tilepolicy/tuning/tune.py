"""``tilepolicy tune``: for each site the best tile by the cost formula that the compiler takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tilepolicy.facts.sites import padded_rows
from tilepolicy.resolution import FactValue
from tilepolicy.settings import AXES, Axis
from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.candidates import Candidate, rank
from tilepolicy.tuning.compiler import CompileRequest, CompileVerdict
from tilepolicy.tuning.cost import site_seconds
from tilepolicy.tuning.missed import MissedSite
from tilepolicy.tuning.sites import BACKENDS, ITEMSIZES, Backend, GmmTile, Site
from tilepolicy.tuning.targets import Target
from tilepolicy.tuning.tpus import tpu

__all__ = ["Limits", "TuneItem", "TunedSite", "first_wave", "plan", "plan_missed", "tune"]

_DECISIVE: Final = ("lock", "config")
_NEEDED: Final = (*AXES, "num_groups", "dtype", "backend")


@dataclass(frozen=True, slots=True)
class Limits:
    """How far to search.

    Attributes:
        wave: candidates of one site that are compiled at a time, at most: a wave ends with the
            first that should fit by the estimate.
        most: candidates of one site that are compiled before giving up.
    """

    wave: int = 3
    most: int = 12


@dataclass(frozen=True, slots=True)
class TuneItem:
    """One site to tune.

    Attributes:
        name: how listings name it.
        role: the model of a distillation that it belongs to; empty elsewhere.
        now: what it would run with today; its tile is None where the library chooses.
        rows: rows before padding.
        facts: facts of the site, for the rule and its proof.
        fixed: axes that a lock or the user's config decides, which a policy's rule cannot change.
        candidates: tiles from the best to the worst; empty when there is nothing to choose.
        skipped: why there is nothing to choose; empty otherwise.
        follows_padding: whether the rows are padded to a multiple of wi.fwd's row tile.
    """

    name: str
    role: str
    now: CompileRequest
    rows: int
    facts: Mapping[str, FactValue]
    fixed: Mapping[Axis, int] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    skipped: str = ""
    follows_padding: bool = True

    @property
    def site(self) -> Site:
        """The grouped matmul."""
        return self.now.site

    @property
    def pads(self) -> bool:
        """Whether its row tile decides to what the rows of the other sites are padded."""
        return self.follows_padding and (self.site.layer, self.site.pass_) == ("wi", "fwd")


@dataclass(frozen=True, slots=True)
class TunedSite:
    """What was found for one site.

    Attributes:
        item: the site, with the rows that the result holds for.
        now: the compile of what it runs with today.
        best: the first candidate that compiled; None when none of the tried ones did.
        verdict: its compile.
        tried: candidates that were compiled.
        shortlist: those of them that compiled, in their order.
        measured_seconds: median time on a device, if it was measured there.
    """

    item: TuneItem
    now: CompileVerdict | None = None
    best: Candidate | None = None
    verdict: CompileVerdict | None = None
    tried: int = 0
    shortlist: tuple[GmmTile, ...] = ()
    measured_seconds: float | None = None

    @property
    def now_tile(self) -> GmmTile | None:
        """The tile of today, as far as it is known."""
        if self.item.now.tile is not None:
            return self.item.now.tile
        return self.now.tile if self.now is not None else None

    @property
    def now_seconds(self) -> float | None:
        """Time of today's tile by the cost formula; None when the tile is not known."""
        tile = self.now_tile
        if tile is None or self.item.site.batch_seq % tile.m:
            return None
        return site_seconds(self.item.site, tile, tpu(self.item.now.device))


def plan(targets: Sequence[Target], *, only: Iterable[str] = ()) -> tuple[TuneItem, ...]:
    """One item per target, with its candidates.

    Args:
        targets: from :func:`tilepolicy.tuning.targets.find_targets`.
        only: names of sites (``wi.fwd``); empty for all.
    """
    wanted = set(only)
    items = []
    for target in targets:
        if wanted and target.site.name not in wanted:
            continue
        fixed: dict[Axis, int] = {
            axis: size
            for axis in AXES
            if target.choices[axis].origin.kind in _DECISIVE
            and isinstance(size := target.choices[axis].value, int)
        }
        item = TuneItem(target.name, target.role, target.request, target.rows, target.facts, fixed)
        items.append(_with_candidates(item))
    return tuple(items)


def plan_missed(
    missed: Sequence[MissedSite], device: str, *, scoped_vmem_limit_kib: int | None = None
) -> tuple[TuneItem, ...]:
    """One item per recorded miss on the device; those of other devices are left out.

    Args:
        missed: from :func:`tilepolicy.tuning.missed.read_missed`.
        device: normalised name.
        scoped_vmem_limit_kib: ``--xla_tpu_scoped_vmem_limit_kib``; None for the default.
    """
    items = []
    for entry in missed:
        if entry.facts.get("device", device) != device:
            continue
        facts = dict(entry.facts) | {"device": device}
        site, reason = _missed_site(entry)
        request = CompileRequest(site, device, None, scoped_vmem_limit_kib=scoped_vmem_limit_kib)
        item = TuneItem(
            site.name, "", request, site.batch_seq, facts, skipped=reason, follows_padding=False
        )
        items.append(item if reason else _with_candidates(item))
    return tuple(items)


def _missed_site(entry: MissedSite) -> tuple[Site, str]:
    """The site, and why it cannot be tuned if it cannot."""
    facts = entry.facts
    lacking = [name for name in _NEEDED if name not in facts]
    reason = ""
    if entry.layer is None:
        reason = "the record does not say whether this was wi or wo"
    elif lacking:
        reason = f"the record lacks {', '.join(lacking)}"
    elif facts["backend"] not in BACKENDS:
        reason = f"backend {facts['backend']} runs no tiled kernel"
    sizes = {name: int(facts.get(name, 0)) for name in (*AXES, "num_groups")}
    backend: Backend = next((b for b in BACKENDS if b == facts.get("backend")), "tokamax_v1")
    site = Site(
        layer=entry.layer or "wi",
        pass_=entry.pass_,
        **sizes,
        dtype=str(facts.get("dtype", "")),
        weight_dtype=str(facts.get("weight_dtype", "")),
        backend=backend,
        phase=entry.phase,
    )
    return site, reason


def _with_candidates(item: TuneItem) -> TuneItem:
    """The item with its candidates, or with the reason why there are none."""
    site = item.site
    if site.backend == "tokamax_v2_heuristic":
        return replace(item, skipped="use_gmm_v2_heuristic_tiling makes MaxText ignore all tiles")
    if unknown := {site.dtype, site.weights} - ITEMSIZES.keys():
        return replace(item, skipped=f"operands of type {', '.join(sorted(unknown))}")
    if len(item.fixed) == len(AXES):
        return replace(item, skipped="the config decides all three axes; a rule would lose")
    found = rank(
        site,
        tpu(item.now.device),
        scoped_vmem_limit_kib=item.now.scoped_vmem_limit_kib,
        fixed=item.fixed,
    )
    return replace(item, candidates=found, skipped="" if found else "no candidate can fit VMEM")


def tune(
    items: Sequence[TuneItem], compiler: Compiler, limits: Limits | None = None
) -> tuple[TunedSite, ...]:
    """Compile candidates in their order, a wave of each site at a time, until one fits.

    wi.fwd goes first: its row tile decides to what the rows of all sites are padded, and so which
    row tiles the others may have.

    Args:
        items: from :func:`plan` or :func:`plan_missed`.
        compiler: how to compile.
        limits: how far to search.

    Raises:
        MissingLibraryError: a library is not installed.
        VerifyError: the compiler does not start.
    """
    bounds = limits or Limits()
    found: dict[int, TunedSite] = {}
    first = {index: item for index, item in enumerate(items) if item.pads}
    found |= _search(first, compiler, bounds)
    pad_to = {
        (tuned.item.role, tuned.item.site.phase): tuned.best.tile.m
        for tuned in found.values()
        if tuned.best is not None
    }
    rest = {
        index: _padded(item, pad_to.get((item.role, item.site.phase)))
        for index, item in enumerate(items)
        if not item.pads
    }
    found |= _search(rest, compiler, bounds)
    return tuple(found[index] for index in range(len(items)))


def _padded(item: TuneItem, pad_to: int | None) -> TuneItem:
    """The item with the rows that padding to the new row tile of wi.fwd gives it."""
    if pad_to is None or not item.follows_padding:
        return item
    padded = _with_rows(item, padded_rows(item.rows, pad_to))
    return item if padded is item else _with_candidates(replace(padded, candidates=(), skipped=""))


def _with_rows(item: TuneItem, rows: int) -> TuneItem:
    if rows == item.site.batch_seq:
        return item
    now = replace(item.now, site=replace(item.site, batch_seq=rows))
    facts = dict(item.facts) | {"batch_seq": rows, "rows_per_group": rows // now.site.num_groups}
    return replace(item, now=now, facts=facts)


def _search(
    items: Mapping[int, TuneItem], compiler: Compiler, limits: Limits
) -> dict[int, TunedSite]:
    """The first candidate of each item that compiles, and the compile of what it runs with now."""
    waiting = {index: item for index, item in items.items() if not item.skipped}
    done = dict.fromkeys(waiting, 0)
    best: dict[int, Candidate] = {}
    verdicts: dict[str, CompileVerdict] = {}
    requests = [item.now for item in items.values() if item.site.dtype in ITEMSIZES]
    while waiting or requests:
        waves = {index: _wave(item, done[index], limits) for index, item in waiting.items()}
        for index, wave in waves.items():
            requests += [_asked(waiting[index], candidate) for candidate in wave]
        verdicts |= compiler.verdicts(requests)
        requests = []
        for index, wave in waves.items():
            done[index] += len(wave)
            item = waiting[index]
            fitting = [c for c in wave if verdicts[_asked(item, c).identity].fits]
            if fitting:
                best[index] = fitting[0]
            if fitting or done[index] >= min(limits.most, len(item.candidates)):
                del waiting[index]
    return {index: _tuned(item, best.get(index), verdicts) for index, item in items.items()}


def first_wave(item: TuneItem, limits: Limits) -> Sequence[Candidate]:
    """The candidates of a site that are compiled first."""
    return _wave(item, 0, limits)


def _wave(item: TuneItem, start: int, limits: Limits) -> Sequence[Candidate]:
    """The next candidates to compile: up to the first that should fit, by the estimate."""
    stop = min(start + limits.wave, limits.most)
    wave = item.candidates[start:stop]
    for position, candidate in enumerate(wave, 1):
        if candidate.vmem.verdict == "fits":
            return wave[:position]
    return wave


def _asked(item: TuneItem, candidate: Candidate) -> CompileRequest:
    """What to compile: wi.fwd with the rows that its own row tile pads them to."""
    if item.pads:
        item = _with_rows(item, padded_rows(item.rows, candidate.tile.m))
    return replace(item.now, tile=candidate.tile)


def _tuned(
    item: TuneItem, best: Candidate | None, verdicts: Mapping[str, CompileVerdict]
) -> TunedSite:
    asked = {candidate.tile: _asked(item, candidate).identity for candidate in item.candidates}
    tried = [tile for tile, identity in asked.items() if identity in verdicts]
    fitting = tuple(tile for tile in tried if verdicts[asked[tile]].fits)
    found = TunedSite(
        item, now=verdicts.get(item.now.identity), tried=len(tried), shortlist=fitting
    )
    if best is None:
        return found
    if item.pads:
        item = _with_rows(item, padded_rows(item.rows, best.tile.m))
    return replace(found, item=item, best=best, verdict=verdicts[asked[best.tile]])
