"""Grouped matmuls of Tokamax: the facts of a call, its layer, and the config to answer with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from tilepolicy import axes
from tilepolicy.adapters.tokamax_config import build_config, config_fields
from tilepolicy.adapters.tokamax_door import DOORS
from tilepolicy.adapters.tokamax_layer import Evidence, LayerFinder
from tilepolicy.adapters.tokamax_upstream import Upstream
from tilepolicy.axes import GmmShape, Kernel
from tilepolicy.backends import illegal_tile
from tilepolicy.context import active, carrier
from tilepolicy.context.active import ActivePolicy
from tilepolicy.errors import AdapterError, LayerError, PolicyError, Problem
from tilepolicy.facts.devices import normalize_device
from tilepolicy.resolution import FactValue, FieldChoice, Origin
from tilepolicy.session import Lookup
from tilepolicy.settings import LAYERS, Layer, Pass

__all__ = ["GmmCall", "Ruling", "answer_gmm"]

_OP_NAMES: Final[Mapping[Kernel, str]] = {
    "tokamax_v1": "pallas_mosaic_tpu_ragged_dot",
    "tokamax_v2": "pallas_mosaic_tpu_v2_ragged_dot",
}
_V2_TILE: Final = ("tile_m", "tile_k", "tile_n")


@cache
def _device(device_kind: str) -> str:
    return normalize_device(device_kind) or device_kind


@dataclass(frozen=True, slots=True)
class GmmCall:
    """One grouped matmul as its lookup key shows it.

    Attributes:
        kernel: which kernel asks.
        op: the bound op.
        device_kind: jax's name of the device.
        key: Tokamax's lookup key: the call's arguments, arrays by shape and type.
        pass_: which pass.
        shape: the forward problem behind it.
        dtype: type of the first operand.
        weight_dtype: type of the second operand (of the output gradient in drhs).
    """

    kernel: Kernel
    op: Any
    device_kind: str
    key: Any
    pass_: Pass
    shape: GmmShape
    dtype: str
    weight_dtype: str

    @property
    def device(self) -> str:
        """Normalised device name; jax's own where it is not known."""
        return _device(self.device_kind)

    def facts(self, layer: Layer, version: str) -> dict[str, FactValue]:
        """What the call shows to a rule when it is the given layer's."""
        facts: dict[str, FactValue] = dict(axes.layer_facts(self.shape, layer))
        return facts | {
            "layer": layer,
            "pass": self.pass_,
            "dtype": self.dtype,
            "weight_dtype": self.weight_dtype,
            "backend": self.kernel,
            "device": self.device,
            "tokamax": version,
        }

    def __str__(self) -> str:
        s = self.shape
        return (
            f"{_OP_NAMES[self.kernel]} {self.pass_} m={s.m} k={s.k} n={s.n} groups={s.g} "
            f"{self.dtype} on {self.device}"
        )


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the active policies together say of a call taken as one layer's.

    Attributes:
        layer: the layer.
        facts: what the rules saw.
        fields: decided fields by policy name; the inner policy's before the outer's.
        config: the decided fields by the kernel's name.
        by: for each decided field, which of the active policies decided it.
        undecidable: rules whose conditions need facts that are not known here.
        nearest: the nearest rule of the innermost policy, and why it did not match.
    """

    layer: Layer
    facts: Mapping[str, FactValue]
    fields: Mapping[str, FieldChoice]
    config: Mapping[str, object]
    by: Mapping[str, int]
    undecidable: tuple[str, ...]
    nearest: str


@dataclass(frozen=True, slots=True)
class _Decision:
    """An answer, its record, and the rules that decided it by the number of their policy."""

    config: Any
    lookup: Lookup
    hits: Mapping[int, tuple[Origin, ...]]


def answer_gmm(
    upstream: Upstream,
    kernel: Kernel,
    op: Any,  # noqa: ANN401 - upstream op
    device_kind: str,
    key: Any,  # noqa: ANN401 - upstream key
) -> Any:  # noqa: ANN401 - upstream config
    """The config for one lookup of a grouped matmul, or None to leave it to Tokamax.

    Raises:
        LayerError: nothing tells the layer, and the layers' tiles differ.
        AdapterError: the decided tile is not one that the kernel takes.
        PolicyError: nothing was decided, and a policy says ``on_miss: error``.
    """
    pass_ = upstream.pass_of(key["ragged_dot_dimension_numbers"])
    if pass_ is None:
        return None
    policies = active.policies()
    answers = policies[0].answers
    # The key keeps its hash, so that looking for it twice costs one.
    seen = (
        kernel,
        device_kind,
        key,
        str(getattr(op, "qdtype", None)),
        getattr(op, "num_actual_groups", None),
    )
    shape = answers.get(seen)
    if not isinstance(shape, GmmShape):
        shape = answers[seen] = _shape(op, key, pass_)
    finder = LayerFinder(upstream, op, shape, policies)
    evidence = finder.first()
    memo = (seen, carrier.key(), None if evidence is None else evidence.layer)
    known = answers.get(memo)
    if not isinstance(known, _Decision):
        types = _dtype(key["lhs"]), _dtype(key["rhs"])
        call = GmmCall(kernel, op, device_kind, key, pass_, shape, *types)
        known = _decide(upstream, call, finder, evidence, policies)
        if evidence is not None or known.lookup.layer is None:
            answers[memo] = known
    policies[0].session.record(known.lookup)
    for number, origins in known.hits.items():
        policies[number].session.hit(origins)
    return known.config


def _shape(op: Any, key: Any, pass_: Pass) -> GmmShape:  # noqa: ANN401 - upstream types
    """The forward problem behind a call."""
    lhs, rhs = key["lhs"], key["rhs"]
    if pass_ == "drhs":
        groups = getattr(op, "num_actual_groups", None) or _length(key["group_sizes"])
    else:
        groups = rhs.shape[0]
    return GmmShape.of_operands(pass_, tuple(lhs.shape), tuple(rhs.shape), groups)


def _length(group_sizes: Any) -> int:  # noqa: ANN401 - GroupSizes or an abstract array
    return int(getattr(group_sizes, "value", group_sizes).shape[0])


def _dtype(array: Any) -> str:  # noqa: ANN401 - array, quantized array, or one to quantize
    """Name of the element type; of a quantized array that of its values."""
    return str(getattr(array, "qvalue", array).dtype.name)


def _decide(
    upstream: Upstream,
    call: GmmCall,
    finder: LayerFinder,
    evidence: Evidence | None,
    policies: tuple[ActivePolicy, ...],
) -> _Decision:
    layers: tuple[Layer, ...] = LAYERS if evidence is None else (evidence.layer,)
    rulings = [_rule(upstream, call, layer, policies) for layer in layers]
    how = evidence.how if evidence is not None else "both layers have this tile"
    layer = evidence.layer if evidence is not None else None
    if evidence is None and rulings[0].config != rulings[1].config:
        evidence = finder.last()
        if evidence is None:
            raise _undecided(call, finder, rulings)
        rulings = [r for r in rulings if r.layer == evidence.layer]
        how, layer = evidence.how, evidence.layer
    ruling = rulings[0]
    config, miss = _config(upstream, call, ruling)
    if miss and any(policy.fail_on_miss for policy in policies):
        raise PolicyError(
            Problem(
                code="miss",
                message=f"no rule decides {call}: {miss}",
                remedy="add a rule for it, or set gmm.on_miss to report",
            )
        )
    lookup = _lookup(call, ruling, layer, how, config, miss, policies)
    return _Decision(config, lookup, _hits(rulings))


def _hits(rulings: list[Ruling]) -> dict[int, tuple[Origin, ...]]:
    """Origins by the number of the policy; of both layers where both have one tile."""
    hits: dict[int, tuple[Origin, ...]] = {}
    for ruling in rulings:
        for name, number in ruling.by.items():
            hits[number] = (*hits.get(number, ()), ruling.fields[name].origin)
    return hits


def _rule(
    upstream: Upstream, call: GmmCall, layer: Layer, policies: tuple[ActivePolicy, ...]
) -> Ruling:
    """Ask every active policy, inner ones first; each field is decided by the first that does."""
    facts = call.facts(layer, upstream.version)
    fields: dict[str, FieldChoice] = {}
    undecidable: dict[str, tuple[str, ...]] = {}
    nearest = ""
    by: dict[str, int] = {}
    for number, policy in enumerate(policies):
        verdict = policy.resolver.tile(layer, call.pass_, facts, policy.phase)
        for name, choice in verdict.decided.items():
            if name not in fields:
                fields[name], by[name] = choice, number
        undecidable |= verdict.undecidable
        nearest = nearest or verdict.nearest
    values: dict[str, object] = {name: choice.value for name, choice in fields.items()}
    try:
        config = axes.to_kernel(values, call.kernel, layer, call.pass_)
    except ValueError as error:
        names = ", ".join(dict.fromkeys(c.origin.name for c in fields.values()))
        raise AdapterError(
            Problem(
                code="config-refused",
                message=f"{call}, by {names}: {error}",
                remedy=f"restrict the rule with `backend`; this call's is {call.kernel}",
            )
        ) from error
    missing = tuple(f"{rule} (needs {', '.join(names)})" for rule, names in undecidable.items())
    return Ruling(layer, facts, fields, config, by, missing, nearest)


def _config(upstream: Upstream, call: GmmCall, ruling: Ruling) -> tuple[Any, str]:
    """The config to answer with, or None and why nothing is answered."""
    if not ruling.fields:
        return None, _miss(upstream, call, ruling)
    _refuse_illegal(call, ruling)
    base = _tokamax_choice(upstream, call)
    config = build_config(call.op, base, ruling.config, str(call))
    if call.kernel == "tokamax_v2" and any(getattr(config, f) is None for f in _V2_TILE):
        given = ", ".join(f"{name}={choice.value}" for name, choice in ruling.fields.items())
        return None, (
            f"{given} is decided alone, and this kernel reads a tile only when all three axes "
            f"are set; the kernel calculates its own"
        )
    return config, ""


def _tokamax_choice(upstream: Upstream, call: GmmCall) -> Any:  # noqa: ANN401 - upstream config
    """What Tokamax would use for the call: its overlays, its shipped cache, its heuristic."""
    for overlay in reversed(DOORS.behind()):
        data = overlay.get(call.op, {}).get(call.device_kind, {}).get(call.key)
        if data is not None and data.items():
            return data.fastest_config
    cached = upstream.cached(call.op, call.device_kind, call.key)
    return cached if cached is not None else upstream.heuristic(call.op, call.key)


def _miss(upstream: Upstream, call: GmmCall, ruling: Ruling) -> str:
    cached = upstream.cached(call.op, call.device_kind, call.key)
    used = "tokamax's shipped cache entry" if cached is not None else "tokamax's heuristic"
    config = cached if cached is not None else upstream.heuristic(call.op, call.key)
    shown = ", ".join(f"{name}={value}" for name, value in config_fields(config))
    nearest = f"; nearest: {ruling.nearest}" if ruling.nearest else ""
    return f"no rule decides; {used} is used ({shown}){nearest}"


def _refuse_illegal(call: GmmCall, ruling: Ruling) -> None:
    values = {name: choice.value for name, choice in ruling.fields.items()}
    sizes = {str(axis): size for axis, size in call.shape.axis_sizes(ruling.layer).items()}
    found = illegal_tile(values, call.kernel, ruling.layer, call.pass_, sizes)
    if found:
        raise AdapterError(
            [
                Problem(
                    code="illegal-tile",
                    message=f"{call}, by {ruling.fields[bad.axis].origin.name}: {bad.message}",
                    remedy=bad.remedy,
                )
                for bad in found
            ]
        )


def _lookup(
    call: GmmCall,
    ruling: Ruling,
    layer: Layer | None,
    how: str,
    config: Any,  # noqa: ANN401 - upstream config
    miss: str,
    policies: tuple[ActivePolicy, ...],
) -> Lookup:
    fields = {} if miss else ruling.fields
    return Lookup(
        adapter="tokamax",
        op=_OP_NAMES[call.kernel],
        device=call.device,
        facts=tuple(sorted(ruling.facts.items())),
        layer=layer,
        pass_=call.pass_,
        phase=policies[0].phase,
        evidence=how,
        tile=tuple((name, choice.value) for name, choice in fields.items()),
        origins=tuple(choice.origin for choice in fields.values()),
        config=() if config is None else config_fields(config),
        miss=miss,
        undecidable=ruling.undecidable,
    )


def _undecided(call: GmmCall, finder: LayerFinder, rulings: list[Ruling]) -> LayerError:
    tables = "; ".join(
        f"{r.layer}: " + (", ".join(f"{n}={v}" for n, v in r.config.items()) or "no tile")
        for r in rulings
    )
    where = finder.lines()
    if finder.serves_both:
        why = (
            "one line with these shapes serves both layers, so a tag cannot tell its backward pass"
        )
        remedy = "pass implementation=[tilepolicy.adapters.tokamax.ragged_dot_op(layer)]"
    else:
        why = "nothing tells whether it is wi or wo"
        remedy = (
            'wrap the call in `with tilepolicy.layer("wi")` (or "wo"), declare the sizes with '
            "apply(sizes=...), or name the calling functions with apply(call_sites=...)"
        )
    site = "".join(f"\n    {line}" for line in where) or " jax keeps no traceback of it"
    return LayerError(
        Problem(
            code="unknown-layer",
            message=f"{call}: {why}, and their tiles differ ({tables}); called from:{site}",
            remedy=remedy,
        )
    )
