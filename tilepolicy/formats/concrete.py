"""The concrete tiles of a policy: calls that its rules name in full, with the tile each gets.

A cache knows calls, a policy knows rules. A rule, or a point of a table, is concrete when device,
backend, layer, pass, types and all four sizes are given; the tile is what the whole policy decides
for that call, so that an earlier rule or a lock is honoured. Everything else is reported.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tilepolicy.axes import KERNEL_EXTRA_FIELDS, GmmShape, Kernel, forward_axes, to_kernel
from tilepolicy.formats.devices import TPU_KINDS
from tilepolicy.match.rules import Measured, Rule
from tilepolicy.model.conditions import AnyOf, Condition, Equals
from tilepolicy.model.factnames import DTYPES
from tilepolicy.policy import Policy
from tilepolicy.resolution import FactValue, SettingValue, TileVerdict
from tilepolicy.resolve.tiles import TileResolver
from tilepolicy.settings import AXES, LAYERS, PASSES, Layer, Pass

__all__ = ["Concrete", "ConcreteTile", "LeftOut", "concrete_tiles"]

_BACKENDS: Final[tuple[Kernel, ...]] = ("tokamax_v1", "tokamax_v2")
_SIZES: Final = (*AXES, "num_groups")
_CALL_FACTS: Final = frozenset(
    {"device", "backend", "layer", "pass", "dtype", "weight_dtype", *_SIZES, "rows_per_group"}
)
_MEDIAN: Final = re.compile(r", (\d+(?:\.\d+)?(?:e-?\d+)?) ms$", re.ASCII)


@dataclass(frozen=True, slots=True)
class ConcreteTile:
    """One call and its configuration.

    Attributes:
        device: policy name.
        kernel: ``tokamax_v1`` or ``tokamax_v2``.
        pass_: which pass.
        shape: the forward problem.
        dtype: element type of the activations.
        weight_dtype: element type of the weights.
        config: the kernel's own field names and values.
        median_ms: measured time in milliseconds, where the point's source has one.
        origin: the rule that decided, for people.
    """

    device: str
    kernel: Kernel
    pass_: Pass
    shape: GmmShape
    dtype: str
    weight_dtype: str
    config: Mapping[str, SettingValue]
    median_ms: float | None
    origin: str

    @property
    def call(self) -> tuple[str, Kernel, Pass, GmmShape, str, str]:
        """What the kernel sees: equal for wi and wo calls of the same problem."""
        return (
            self.device,
            self.kernel,
            self.pass_,
            self.shape,
            self.dtype,
            self.weight_dtype,
        )


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A rule, or one call of it, that a cache cannot say.

    Attributes:
        rule: the rule's name.
        reason: why.
    """

    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class Concrete:
    """The concrete tiles of a policy, and what of it is not concrete."""

    tiles: tuple[ConcreteTile, ...]
    left_out: tuple[LeftOut, ...]


def concrete_tiles(policy: Policy, *, dtype: str = "bfloat16") -> Concrete:
    """Find the concrete tiles of a policy.

    Args:
        policy: the policy, with everything it extends.
        dtype: element type for rules that do not name one.
    """
    resolver = TileResolver(policy, None, {})
    found: dict[tuple[object, ...], ConcreteTile] = {}
    left_out: dict[LeftOut, None] = {}
    for rule in (*policy.tile_locks.rules, *policy.gmm.rules):
        for item in _of_rule(rule, resolver, dtype):
            if isinstance(item, LeftOut):
                left_out[item] = None
                continue
            held = found.setdefault(item.call, item)
            if held.config != item.config:
                reason = (
                    f"wi and wo of one call have different tiles; that of {held.origin} is kept"
                )
                left_out[LeftOut(rule.name, reason)] = None
    for name in policy.ops:
        left_out[LeftOut(name, "rules of other ops do not name a call in full")] = None
    return Concrete(tuple(found.values()), tuple(left_out))


def _of_rule(rule: Rule, resolver: TileResolver, dtype: str) -> Iterator[ConcreteTile | LeftOut]:
    conditions = dict(rule.when)
    foreign = sorted(set(conditions) - _CALL_FACTS)
    if foreign:
        yield LeftOut(rule.name, f"depends on {', '.join(foreign)}, which a cache does not know")
        return
    calls = list(_calls(conditions, rule, dtype))
    if not calls:
        yield LeftOut(rule.name, _why_not_concrete(conditions, rule))
    for facts, point in calls:
        item = _resolve(rule, facts, point, resolver)
        if item is not None:
            yield item


def _calls(
    conditions: Mapping[str, Condition], rule: Rule, dtype: str
) -> Iterator[tuple[dict[str, FactValue], Measured | None]]:
    """Every call that a rule names in full, with the point that names it."""
    places: Iterable[tuple[Mapping[str, int], Measured | None]]
    if rule.table is not None:
        places = [(point.at, point) for point in rule.table.points]
    else:
        places = [({}, None)]
    all_names = _names(conditions, dtype)
    for at, point in places:
        for sizes in _sizes(conditions, at):
            for names in all_names:
                facts: dict[str, FactValue] = {**names, **sizes}
                facts["rows_per_group"] = sizes["batch_seq"] // sizes["num_groups"]
                if all(condition.holds(facts[fact]) for fact, condition in conditions.items()):
                    yield facts, point


def _sizes(conditions: Mapping[str, Condition], at: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes that are given one by one: by a point, or by conditions on exact values."""
    choices = [[at[n]] if n in at else _exact_sizes(conditions.get(n)) for n in _SIZES]
    for values in itertools.product(*choices):
        yield dict(zip(_SIZES, values, strict=True))


def _exact_sizes(condition: Condition | None) -> list[int]:
    parts = condition.parts if isinstance(condition, AnyOf) else (condition,)
    values = [part.value if isinstance(part, Equals) else None for part in parts]
    exact = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
    return exact if len(exact) == len(values) else []


def _names(conditions: Mapping[str, Condition], dtype: str) -> list[dict[str, FactValue]]:
    """Names of device, backend, layer, pass and types that a rule allows."""
    if "device" not in conditions:
        return []
    candidates: dict[str, Iterable[str]] = {
        "device": TPU_KINDS,
        "backend": _BACKENDS,
        "layer": LAYERS,
        "pass": PASSES,
        "dtype": DTYPES if "dtype" in conditions else (dtype,),
        "weight_dtype": DTYPES if "weight_dtype" in conditions else ("",),
    }
    allowed = [
        [value for value in values if fact not in conditions or conditions[fact].holds(value)]
        for fact, values in candidates.items()
    ]
    found: list[dict[str, FactValue]] = []
    for values in itertools.product(*allowed):
        names: dict[str, FactValue] = dict(zip(candidates, values, strict=True))
        # Weights are of the activations' type where a rule does not say.
        names["weight_dtype"] = names["weight_dtype"] or names["dtype"]
        found.append(names)
    return found


def _why_not_concrete(conditions: Mapping[str, Condition], rule: Rule) -> str:
    if "device" not in conditions:
        return "names no device"
    at = rule.table.nearest if rule.table is not None else {}
    vague = [n for n in _SIZES if n not in at and not _exact_sizes(conditions.get(n))]
    if vague:
        return f"gives no exact {', '.join(vague)}"
    return "names no call of a TPU kernel of Tokamax"


def _resolve(
    rule: Rule,
    facts: Mapping[str, FactValue],
    point: Measured | None,
    resolver: TileResolver,
) -> ConcreteTile | LeftOut | None:
    layer = next(one for one in LAYERS if one == facts["layer"])
    pass_ = next(one for one in PASSES if one == facts["pass"])
    kernel = next(one for one in _BACKENDS if one == facts["backend"])
    verdict = resolver.tile(layer, pass_, facts)
    if verdict.undecidable:
        names = ", ".join(verdict.undecidable)
        return LeftOut(rule.name, f"depends on facts of the config through {names}")
    decided = verdict.decided
    if not all(axis in decided for axis in AXES):
        return LeftOut(rule.name, "decides only some axes of the tile")
    foreign = set(decided) - set(AXES) - set(KERNEL_EXTRA_FIELDS[kernel])
    if foreign and "backend" not in dict(rule.when):
        return None  # The rule does not say for which kernel; it is for the other one.
    if foreign:
        return LeftOut(rule.name, f"{kernel} has no field {', '.join(sorted(foreign))}")
    return _tile(rule, facts, point, verdict, (layer, pass_, kernel))


def _tile(
    rule: Rule,
    facts: Mapping[str, FactValue],
    point: Measured | None,
    verdict: TileVerdict,
    site: tuple[Layer, Pass, Kernel],
) -> ConcreteTile:
    layer, pass_, kernel = site
    values = {name: choice.value for name, choice in verdict.decided.items()}
    origin = verdict.fields["batch_seq"].origin
    mine = (origin.name, origin.line) == (rule.name, rule.line)
    m, k, n = (int(facts[axis]) for axis in forward_axes(layer))
    return ConcreteTile(
        device=str(facts["device"]),
        kernel=kernel,
        pass_=pass_,
        shape=GmmShape(m, k, n, int(facts["num_groups"])),
        dtype=str(facts["dtype"]),
        weight_dtype=str(facts["weight_dtype"]),
        config=to_kernel(values, kernel, layer, pass_),
        median_ms=_median(point) if mine and point is not None else None,
        origin=f"{origin.name} ({layer})",
    )


def _median(point: Measured) -> float | None:
    match = _MEDIAN.search(point.source)
    return None if match is None else float(match[1])
