"""A policy's text from imported entries: tables for grouped matmuls, rules for other ops.

A grouped matmul that was measured knows m, k, n and g, but not whether it was wi or wo. Its
tile serves wi with embed = k and mlp = n, and wo with mlp = k and embed = n, so that every entry
gives a point to the tables of both layers, with its axes renamed for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from tilepolicy.axes import Kernel, from_kernel, layer_facts
from tilepolicy.errors import Problem
from tilepolicy.formats.records import FormatError, GmmCall, ImportReport, MeasuredEntry, Unusable
from tilepolicy.formats.yamltext import comment, flow, scalar
from tilepolicy.model import PolicyDocument
from tilepolicy.model.problems import problems_of
from tilepolicy.settings import LAYERS, Layer, Pass
from tilepolicy.source import parse

__all__ = [
    "EXACT",
    "GmmTable",
    "PolicyText",
    "TablePoint",
    "check_policy_text",
    "fastest",
    "gmm_tables",
    "policy_text",
    "table_lines",
]

POINT_FACTS: Final = ("batch_seq", "embed_dim", "mlp_dim", "num_groups")
EXACT: Final[Mapping[str, float]] = dict.fromkeys(POINT_FACTS, 1.0)
"""A table that only serves the calls that were measured."""


type _Kind = tuple[str, Kernel, Pass, str, str]
"""Device, kernel, pass, and types of both operands: what one pair of tables is for."""


@dataclass(frozen=True, slots=True)
class TablePoint:
    """One point: where, which tile, and where it comes from."""

    at: Mapping[str, int]
    tile: Mapping[str, bool | int]
    source: str


@dataclass(frozen=True, slots=True)
class GmmTable:
    """One rule with a table.

    Attributes:
        name: the rule's name.
        when: its conditions.
        points: its points, in the order in which ties are decided.
        nearest: fact to the largest ratio.
        reason: shown next to every value.
    """

    name: str
    when: Mapping[str, bool | int | float | str]
    points: tuple[TablePoint, ...]
    nearest: Mapping[str, float] = field(default_factory=lambda: EXACT)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PolicyText:
    """The text of a policy, and what of the entries it does not say.

    Attributes:
        text: the policy file.
        left_out: entries that could not be kept beside a better one.
        points: number of table points.
        rules: number of rules, those with tables included.
    """

    text: str
    left_out: tuple[Unusable, ...]
    points: int
    rules: int


def fastest(
    entries: Iterable[MeasuredEntry],
) -> tuple[tuple[MeasuredEntry, ...], tuple[Unusable, ...]]:
    """Keep one entry of those that are the same call for a policy: the one with the lowest median.

    Without medians the first is kept.

    Returns:
        The entries that are kept, in their order, and those with another configuration, with the
        reason; entries that say the same twice are not worth a word.
    """
    best: dict[tuple[object, ...], MeasuredEntry] = {}
    left_out: list[Unusable] = []
    for entry in entries:
        key = (entry.op, entry.device, entry.gmm, *sorted(entry.facts.items()))
        held = best.setdefault(key, entry)
        if held is entry:
            continue
        loser = entry
        if entry.median_ms is not None and (
            held.median_ms is None or entry.median_ms < held.median_ms
        ):
            best[key], loser = entry, held
        if loser.config != best[key].config:
            reason = "another tile of the same call for a policy is faster, or comes first"
            left_out.append(Unusable(loser.op, loser.device, reason, loser.place))
    return tuple(best.values()), tuple(left_out)


def gmm_tables(
    entries: Sequence[MeasuredEntry], nearest: Mapping[str, float] = EXACT, label: str = "imported"
) -> list[GmmTable]:
    """Tables of the entries whose tiles the ``gmm`` part can say, two for each kind of call.

    Args:
        entries: entries, one for each call.
        nearest: fact to the largest ratio between a call and a point.
        label: first word of the rules' names.

    Raises:
        FormatError: an entry names no device.
    """
    homeless = [entry for entry in entries if entry.gmm is not None and entry.device is None]
    if homeless:
        message = "the source does not say which device its tiles are for"
        problem = Problem("no-device", message, homeless[0].place, "name it with --device")
        raise FormatError(problem)
    groups: dict[_Kind, list[MeasuredEntry]] = {}
    for entry in entries:
        if entry.gmm is None or entry.device is None:
            continue
        dtypes = (str(entry.facts["dtype"]), str(entry.facts["weight_dtype"]))
        kind = (entry.device, entry.gmm.kernel, entry.gmm.pass_, *dtypes)
        groups.setdefault(kind, []).append(entry)
    tables = []
    for (device, kernel, pass_, dtype, weights), members in groups.items():
        for layer in LAYERS:
            types = dtype if dtype == weights else f"{dtype} x {weights}"
            tables.append(
                GmmTable(
                    name=f"{label} {device} {kernel} {layer} {pass_} {types}",
                    when={
                        "device": device,
                        "backend": kernel,
                        "layer": layer,
                        "pass": pass_,
                        "dtype": dtype,
                        "weight_dtype": weights,
                    },
                    points=tuple(_point(entry, entry.gmm, layer) for entry in members if entry.gmm),
                    nearest=nearest,
                )
            )
    return tables


def _point(entry: MeasuredEntry, gmm: GmmCall, layer: Layer) -> TablePoint:
    facts = layer_facts(gmm.shape, layer)
    tile = from_kernel(entry.config, gmm.kernel, layer, gmm.pass_)
    median = "" if entry.median_ms is None else f", {entry.median_ms!r} ms"
    return TablePoint(
        at={name: facts[name] for name in POINT_FACTS},
        tile={name: value for name, value in tile.items() if isinstance(value, bool | int)},
        source=f"{entry.source}{median}",
    )


def table_lines(table: GmmTable) -> list[str]:
    """The lines of a rule with a table, as they stand below ``rules:``."""
    lines = [f"    - name: {scalar(table.name)}", f"      when: {flow(table.when)}"]
    if table.reason:
        lines.append(f"      reason: {scalar(table.reason)}")
    lines += ["      table:", f"        nearest: {flow(table.nearest)}", "        points:"]
    for point in table.points:
        at, tile, source = flow(point.at), flow(point.tile), scalar(point.source)
        lines.append(f"          - {{at: {at}, tile: {tile}, source: {source}}}")
    return lines


def policy_text(
    report: ImportReport,
    *,
    name: str,
    header: str = "",
    nearest: Mapping[str, float] = EXACT,
) -> PolicyText:
    """The policy that says what a report's entries say.

    Args:
        report: imported entries; its unusable entries are not looked at.
        name: name of the policy.
        header: text for comments in front.
        nearest: fact to the largest ratio between a call and a point of a table.

    Raises:
        FormatError: there is no entry to say, or an entry names no device.
    """
    report.raise_errors()
    told_apart, mixed = _one_kind_of_gpu(report.entries)
    kept, left_out = fastest(told_apart)
    if not kept:
        remedy = "import one kind of GPU at a time" if mixed else None
        raise FormatError(Problem("no-entries", "the source has no usable entry", None, remedy))
    tables = gmm_tables(kept, nearest)
    sections = _op_lines([entry for entry in kept if entry.gmm is None])
    lines = ["version: 1", f"name: {scalar(name)}"]
    if tables:
        lines += ["gmm:", "  rules:"]
        lines += [line for table in tables for line in table_lines(table)]
    if sections:
        lines += ["ops:", *sections]
    return PolicyText(
        text=comment(header) + "\n".join(lines) + "\n",
        left_out=mixed + left_out,
        points=sum(len(table.points) for table in tables),
        rules=len(tables) + sum(line.startswith("      - name:") for line in sections),
    )


def _one_kind_of_gpu(
    entries: tuple[MeasuredEntry, ...],
) -> tuple[tuple[MeasuredEntry, ...], tuple[Unusable, ...]]:
    """Leave out the GPU entries if they are of several kinds, which no fact tells apart."""
    kinds = {entry.kind for entry in entries if entry.device == "gpu"}
    if len(kinds) < 2:
        return entries, ()
    reason = "policies do not tell kinds of GPU apart: import one kind at a time"
    mixed = tuple(
        Unusable(entry.op, entry.device, reason, entry.place)
        for entry in entries
        if entry.device == "gpu"
    )
    return tuple(entry for entry in entries if entry.device != "gpu"), mixed


def _op_lines(entries: Sequence[MeasuredEntry]) -> list[str]:
    """The lines below ``ops:``; one section an op, one rule an entry."""
    by_op: dict[str, list[MeasuredEntry]] = {}
    for entry in entries:
        by_op.setdefault(entry.op, []).append(entry)
    lines: list[str] = []
    for op, members in by_op.items():
        lines += [f"  - op: {op}", "    rules:"]
        for number, entry in enumerate(members, 1):
            when = entry.facts if entry.device is None else {"device": entry.device, **entry.facts}
            config = {key: value for key, value in entry.config.items() if value is not None}
            lines += [
                f"      - name: {scalar(f'{op} {number}')}",
                f"        when: {flow(when)}",
                f"        config: {flow(config)}",
                f"        reason: {scalar(_reason(entry))}",
            ]
    return lines


def _reason(entry: MeasuredEntry) -> str:
    return entry.source if entry.median_ms is None else f"{entry.source}, {entry.median_ms!r} ms"


def check_policy_text(text: str, file: str) -> None:
    """Read a generated text as the policy that it will be.

    Args:
        text: the policy.
        file: name for places.

    Raises:
        FormatError: it is not a valid policy; what was imported holds something that a policy
            cannot say.
    """
    document = parse(text, file)
    problems = list(document.problems)
    if document.readable:
        try:
            PolicyDocument.model_validate(document.value)
        except ValidationError as error:
            problems += problems_of(error, document, PolicyDocument)
    if problems:
        raise FormatError(problems)
