"""A resolution as blocks for reading: what is used, who reads it, where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tilepolicy.report.blocks import Block, Cell, Column, Lines, Row, Table
from tilepolicy.report.problems import summary
from tilepolicy.resolution import (
    FactValue,
    Honoured,
    Loser,
    Origin,
    Resolution,
    ResolvedSetting,
    SettingValue,
)
from tilepolicy.settings import AXES, LAYERS, PASSES, SETTINGS, Layer, Pass, Phase, tile_setting

__all__ = ["loser_line", "origin_text", "resolution_blocks", "setting_blocks", "value_text"]

_KIND_STYLES: Final[Mapping[str, str]] = {
    "lock": "magenta",
    "config": "cyan",
    "rule": "green",
    "auto": "blue",
    "default": "dim",
    "mixed": "yellow",
}
_UNREAD = "dim"


def value_text(value: SettingValue) -> str:
    """A value as YAML and MaxText write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "-" if value is None else str(value)


def origin_text(origin: Origin, *, full: bool) -> str:
    """``FILE:LINE name — reason``; an automatic reason is cut to its conclusion unless ``full``."""
    reason = origin.reason
    if origin.kind == "auto" and not full:
        reason = reason.rpartition("; ")[2]
    head = " ".join(part for part in (_where(origin.file, origin.line), _name(origin)) if part)
    return " — ".join(part for part in (head, reason) if part)


def _name(origin: Origin) -> str:
    """Name of a rule or lock; a config's key says nothing that the row does not."""
    return "" if origin.kind == "config" or origin.name in SETTINGS else origin.name


def _words(origin: Origin) -> str:
    """``name — reason``: what an origin says beside its place."""
    return " — ".join(part for part in (_name(origin), origin.reason) if part)


def loser_line(loser: Loser) -> str:
    """``over default 512: reason (FILE:LINE name)``."""
    name = "" if loser.name in SETTINGS else loser.name
    place = " ".join(part for part in (_where(loser.file, loser.line), name) if part)
    shown = f" ({place})" if place else ""
    why = f": {loser.reason}" if loser.reason else ""
    return f"over {loser.kind} {value_text(loser.value)}{shown}{why}"


def _where(file: str | None, line: int | None) -> str:
    if file is None:
        return ""
    return file if line is None else f"{file}:{line}"


def resolution_blocks(
    resolution: Resolution, *, title: str, explain: bool = False
) -> tuple[Block, ...]:
    """The whole resolution: head, settings, tiles as one row a site, warnings, and a sum.

    Args:
        resolution: what to show.
        title: first line, usually the config's name.
        explain: show the losers and the whole arithmetic too.
    """
    notes = _Notes()
    blocks: list[Block] = [
        Lines((title,), style="bold"),
        Lines(tuple(_head(resolution))),
        _settings_table(resolution, notes, explain=explain),
    ]
    if any(name in resolution.settings for name in SETTINGS if SETTINGS[name].is_tile):
        blocks.append(_tiles_table(resolution, notes, explain=explain))
    if notes.lines:
        blocks.append(Lines(tuple(notes.lines), style="dim"))
    blocks += [Lines(tuple(str(w).splitlines()), style="yellow") for w in resolution.warnings]
    blocks.append(Lines((_sum(resolution),)))
    return tuple(blocks)


def setting_blocks(name: str, setting: ResolvedSetting) -> tuple[Block, ...]:
    """Everything about one setting."""
    by = setting.honoured.by or "nothing"
    lines = [
        f"{name} = {value_text(setting.value)}",
        f"  origin       {setting.origin.kind}: {origin_text(setting.origin, full=True)}".rstrip(
            ": "
        ),
        f"  honoured by  {by}: {setting.honoured.why}",
        *(f"  {loser_line(loser)}" for loser in setting.origin.lost),
    ]
    if name in SETTINGS:
        lines.insert(1, f"  {SETTINGS[name].summary}")
    return (Lines(tuple(lines)),)


class _Notes:
    """Numbered reasons, each shown once below the tables."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.numbers: dict[str, int] = {}

    def label(self, honoured: Honoured) -> str:
        """``maxtext``, or who reads the setting with the number of the reason."""
        if honoured.by == "maxtext":
            return "maxtext"
        if honoured.why not in self.numbers:
            self.numbers[honoured.why] = len(self.numbers) + 1
            self.lines.append(f"[{self.numbers[honoured.why]}] {honoured.why}")
        return f"{honoured.by or 'nothing'} [{self.numbers[honoured.why]}]"


def _head(resolution: Resolution) -> Iterable[str]:
    policy = resolution.policy
    files = ", ".join(policy.files)
    yield f"policy  {policy.name} {policy.digest[:12]} · {files}"
    facts = resolution.facts
    target = [resolution.device or "device not known", f"backend {resolution.backend}"]
    target += [f"{name} {facts[name]}" for name in ("maxtext", "tokamax") if name in facts]
    yield f"target  {' · '.join(target)}"
    if sizes := list(_sizes(facts)):
        yield f"device  {' · '.join(sizes)}"


_SIZES: Final = (
    ("tokens_per_device", "{} tokens"),
    ("vocab_per_device", "vocabulary {}"),
    ("wi.num_groups", "{} experts"),
    ("wi.embed_dim", "embed {}"),
    ("wi.mlp_dim", "mlp {}"),
)


def _sizes(facts: Mapping[str, FactValue]) -> Iterable[str]:
    yield from (form.format(facts[name]) for name, form in _SIZES if name in facts)
    rows, padded = facts.get("wi.rows"), facts.get("wi.batch_seq")
    if isinstance(rows, int) and isinstance(padded, int) and padded:
        share = 100 * (padded - rows) / padded
        yield f"{rows} rows + {padded - rows} of padding ({share:.1f} %)"


def _settings_table(resolution: Resolution, notes: _Notes, *, explain: bool) -> Table:
    rows = [
        _row((name,), [one], [], notes, explain=explain)
        for name, one in resolution.settings.items()
        if name in SETTINGS and not SETTINGS[name].is_tile
    ]
    columns = (
        Column("setting"),
        Column("value", right=True),
        Column("honoured by"),
        Column("origin"),
        Column("from", wrap=True),
    )
    return Table(columns, tuple(rows))


def _tiles_table(resolution: Resolution, notes: _Notes, *, explain: bool) -> Table:
    """One row a site with the place of its rule; the words of each rule once, below."""
    rows = []
    legend = _Legend()
    for layer, pass_, phase in _sites():
        names = [tile_setting(layer, pass_, axis, phase) for axis in AXES]
        present = [resolution.settings[name] for name in names if name in resolution.settings]
        if len(present) < len(names):
            continue
        site = f"{layer} {pass_}" if phase == "train" else f"{layer} {pass_} eval"
        extras = _extras(resolution, layer, pass_, phase)
        legend.add(site, present)
        rows.append(_row((site,), present, extras, notes, explain=explain))
    columns = (
        Column("tile"),
        *(Column(axis, right=True) for axis in AXES),
        Column("honoured by"),
        Column("origin"),
        Column("from", wrap=True),
    )
    return Table(columns, tuple(rows), notes=tuple(legend.lines()))


class _Legend:
    """What rules say of themselves, each once, by its place."""

    def __init__(self) -> None:
        self.sites: dict[tuple[str, str], list[str]] = {}

    def add(self, site: str, settings: Sequence[ResolvedSetting]) -> None:
        """Note the rules that decide a site."""
        for one in settings:
            place = _where(one.origin.file, one.origin.line)
            words = _words(one.origin)
            if place and words:
                sites = self.sites.setdefault((place, words), [])
                sites += [site] if site not in sites else []

    def lines(self) -> Iterable[str]:
        """``FILE:LINE  name — reason``; with the sites where one rule has several reasons."""
        places = [place for place, _ in self.sites]
        for (place, words), sites in self.sites.items():
            where = f" ({', '.join(sites)})" if places.count(place) > 1 else ""
            yield f"{place}{where}  {words}"


def _sites() -> Iterable[tuple[Layer, Pass, Phase]]:
    for layer in LAYERS:
        for pass_ in PASSES:
            yield layer, pass_, "train"
    for layer in LAYERS:
        yield layer, "fwd", "eval"


def _extras(
    resolution: Resolution, layer: Layer, pass_: Pass, phase: Phase
) -> list[tuple[str, ResolvedSetting]]:
    """Decided kernel fields of a site that are no MaxText knob: ``input_buffer_count``."""
    prefix = tile_setting(layer, pass_, "batch_seq", phase).removesuffix("batch_seq")
    return [
        (name.removeprefix(prefix), one)
        for name, one in resolution.settings.items()
        if name.startswith(prefix) and name not in SETTINGS
    ]


def _row(
    head: tuple[str, ...],
    settings: Sequence[ResolvedSetting],
    extras: Sequence[tuple[str, ResolvedSetting]],
    notes: _Notes,
    *,
    explain: bool,
) -> Row:
    """One row for settings that belong together; they share cells where they agree."""
    labels = list(dict.fromkeys(notes.label(one.honoured) for one in settings))
    kinds = list(dict.fromkeys(one.origin.kind for one in settings))
    kind = kinds[0] if len(kinds) == 1 else "mixed"
    if len(settings) == 1:
        origin = origin_text(settings[0].origin, full=explain)
    else:
        origin = _shared_place(settings)
    if extras:
        also = ", ".join(f"{name} {value_text(one.value)}" for name, one in extras)
        origin = f"{origin} · {also}" if origin else also
    cells = (
        *(Cell(text, style="bold") for text in head),
        *(_value_cell(one) for one in settings),
        Cell(", ".join(labels), style="" if labels == ["maxtext"] else "yellow"),
        Cell(kind, style=_KIND_STYLES[kind]),
        Cell(origin),
    )
    details = dict.fromkeys(
        loser_line(loser) for one in settings for loser in one.origin.lost if explain
    )
    return Row(cells, tuple(details))


def _value_cell(setting: ResolvedSetting) -> Cell:
    text = value_text(setting.value)
    return Cell(f"({text})", style=_UNREAD) if setting.honoured.by is None else Cell(text)


def _shared_place(settings: Sequence[ResolvedSetting]) -> str:
    """The place that decided all axes; else each place with the axes it decided."""
    groups: dict[str, list[str]] = {}
    for one, axis in zip(settings, AXES, strict=True):
        place = _where(one.origin.file, one.origin.line) or one.origin.kind
        groups.setdefault(place, []).append(axis)
    if len(groups) == 1:
        place = next(iter(groups))
        return "" if place == "default" else place
    return "; ".join(f"{', '.join(axes)}: {place}" for place, axes in groups.items())


def _sum(resolution: Resolution) -> str:
    kinds = [setting.origin.kind for setting in resolution.settings.values()]
    parts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    unread = sum(one.honoured.by is None for one in resolution.settings.values())
    text = f"{len(kinds)} settings: {', '.join(parts)}"
    if unread:
        text += f" · {unread} in parentheses not honoured"
    problems = summary(resolution.warnings)
    return f"{text} · {problems}" if problems else text
