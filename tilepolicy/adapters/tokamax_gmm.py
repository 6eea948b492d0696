"""Grouped matmuls of Tokamax: what a lookup is answered, once the layer is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tilepolicy.adapters.tokamax_config import build_config, config_fields
from tilepolicy.adapters.tokamax_door import DOORS
from tilepolicy.adapters.tokamax_layer import Evidence, LayerFinder
from tilepolicy.adapters.tokamax_ruling import OP_NAMES, GmmCall, Ruling, gmm_shape, rule
from tilepolicy.adapters.tokamax_upstream import Upstream
from tilepolicy.axes import GmmShape, Kernel
from tilepolicy.backends import illegal_tile
from tilepolicy.context.active import View
from tilepolicy.errors import AdapterError, LayerError, PolicyError, Problem
from tilepolicy.session import Lookup
from tilepolicy.session.rules import RuleKey, key_of
from tilepolicy.settings import LAYERS, Layer

__all__ = ["answer_gmm"]

_V2_TILE: Final = ("tile_m", "tile_k", "tile_n")


@dataclass(frozen=True, slots=True, eq=False)
class _Decision:
    """An answer, its record, and the rules that decided it by the number of their policy."""

    config: Any
    lookup: Lookup
    hits: Mapping[int, frozenset[RuleKey]]


class _Known(NamedTuple):
    """What was found out about one kind of call.

    Attributes:
        shape: the forward problem.
        decisions: by the digests of the active policies and the layer; the layer is None where
            it does not matter, because both have the same tile.
        unlike: digests of the active policies by which the layers' tiles differ.
    """

    shape: GmmShape
    decisions: dict[tuple[tuple[str, ...], Layer | None], _Decision]
    unlike: set[tuple[str, ...]]


def answer_gmm(
    upstream: Upstream,
    kernel: Kernel,
    op: Any,  # noqa: ANN401 - upstream op
    device_kind: str,
    key: Any,  # noqa: ANN401 - upstream key
    view: View,
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
    answers = view.policies[0].answers
    seen = (device_kind, upstream.call_key(op, pass_, key))
    known = answers.get(seen)
    if not isinstance(known, _Known):
        known = answers[seen] = _Known(gmm_shape(op, key, pass_), {}, set())
    finder = LayerFinder(upstream, op, known.shape, view)
    evidence = finder.first()
    if evidence is None and view.digests in known.unlike:
        evidence = finder.last()
    which = (view.digests, None if evidence is None else evidence.layer)
    decision = known.decisions.get(which)
    if decision is None:
        call = GmmCall(kernel, op, device_kind, key, pass_, known.shape, upstream.version)
        decision = _decide(upstream, call, finder, evidence, view)
        if evidence is None and decision.lookup.layer is not None:
            known.unlike.add(view.digests)
        known.decisions[view.digests, decision.lookup.layer] = decision
    _tell(view, decision)
    return decision.config


def _tell(view: View, decision: _Decision) -> None:
    """Record the answer in the innermost session, and the rules in those of their policies."""
    view.policies[0].session.record(decision.lookup)
    if decision not in view.told:
        for number, rules in decision.hits.items():
            view.policies[number].session.hit(rules)
        view.told.add(decision)


def _decide(
    upstream: Upstream,
    call: GmmCall,
    finder: LayerFinder,
    evidence: Evidence | None,
    view: View,
) -> _Decision:
    layers: tuple[Layer, ...] = LAYERS if evidence is None else (evidence.layer,)
    rulings = [rule(call, layer, view.policies) for layer in layers]
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
    if miss and any(policy.fail_on_miss for policy in view.policies):
        raise PolicyError(
            Problem(
                code="miss",
                message=f"no rule decides {call}: {miss}",
                remedy="add a rule for it, or set gmm.on_miss to report",
            )
        )
    lookup = _lookup(call, ruling, layer, how, config, miss, view)
    return _Decision(config, lookup, _hits(rulings))


def _hits(rulings: list[Ruling]) -> dict[int, frozenset[RuleKey]]:
    """Rules by the number of the policy; of both layers where both have one tile."""
    hits: dict[int, frozenset[RuleKey]] = {}
    for ruling in rulings:
        for name, number in ruling.by.items():
            hits[number] = hits.get(number, frozenset()) | {key_of(ruling.fields[name].origin)}
    return hits


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
    view: View,
) -> Lookup:
    fields = {} if miss else ruling.fields
    return Lookup(
        adapter="tokamax",
        op=OP_NAMES[call.kernel],
        device=call.device,
        facts=tuple(sorted(ruling.facts.items())),
        layer=layer,
        pass_=call.pass_,
        phase=view.policies[0].phase,
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
