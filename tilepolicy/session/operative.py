"""The operative policy of a session: what was decided, written as rules for exactly those calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import yaml

from tilepolicy import axes
from tilepolicy.axes import Kernel
from tilepolicy.resolution import SettingValue
from tilepolicy.settings import LAYERS, Layer

if TYPE_CHECKING:
    from tilepolicy.session import Lookup, Session

__all__ = ["operative_policy"]

_PLACE: Final = ("device", "backend", "dtype", "weight_dtype")
_SIZES: Final = ("batch_seq", "embed_dim", "mlp_dim", "num_groups")


def operative_policy(session: Session) -> str:
    """The policy as YAML text, with one rule per decided call in the order of the lookups."""
    name = session.inputs.policy.name if session.inputs is not None else "session"
    gmm: dict[str, dict[str, Any]] = {}
    ops: dict[str, dict[str, dict[str, Any]]] = {}
    for lookup in session.lookups:
        if not lookup.config:
            continue
        if lookup.pass_ is None:
            rules = ops.setdefault(lookup.op, {})
            rule = _op_rule(lookup, len(rules))
            rules.setdefault(repr(rule["when"]), rule)
            continue
        for layer in LAYERS if lookup.layer is None else (lookup.layer,):
            rule = _gmm_rule(lookup, layer, len(gmm))
            gmm.setdefault(repr(rule["when"]), rule)
    document: dict[str, Any] = {"version": 1, "name": f"{name}-operative"}
    if gmm:
        document["gmm"] = {"rules": list(gmm.values())}
    if ops:
        document["ops"] = [{"op": op, "rules": list(r.values())} for op, r in ops.items()]
    text: str = yaml.safe_dump(document, sort_keys=False, width=100)
    return text


def _gmm_rule(lookup: Lookup, layer: Layer, number: int) -> dict[str, Any]:
    facts = _facts_as(lookup, layer)
    kernel = cast("Kernel", facts["backend"])
    assert lookup.pass_ is not None  # noqa: S101 - narrows the type: only grouped matmuls
    tile = axes.from_kernel(dict(lookup.config), kernel, layer, lookup.pass_)
    when = {"layer": layer, "pass": lookup.pass_, "phase": lookup.phase}
    return {
        "name": f"{layer} {lookup.pass_} {number}",
        "when": when | {name: facts[name] for name in (*_PLACE, *_SIZES)},
        "tile": {name: value for name, value in tile.items() if value is not None},
        "reason": _reason(lookup),
    }


def _facts_as(lookup: Lookup, layer: Layer) -> Mapping[str, SettingValue]:
    """The facts of the call when it is the given layer's; recorded are those of the found one."""
    facts = dict(lookup.facts)
    if facts["layer"] != layer:
        embed, mlp = facts["embed_dim"], facts["mlp_dim"]
        facts |= {"embed_dim": mlp, "mlp_dim": embed, "layer": layer}
    return facts


def _op_rule(lookup: Lookup, number: int) -> dict[str, Any]:
    facts = dict(lookup.facts)
    shown = {
        name: value
        for name, value in facts.items()
        if name == "device" or (name.startswith("arg.") and _is_plain(name, value))
    }
    return {
        "name": f"{lookup.op} {number}",
        "when": shown,
        "config": {name: value for name, value in lookup.config if value is not None},
        "reason": _reason(lookup),
    }


def _is_plain(name: str, value: SettingValue) -> bool:
    """Sizes, types and flags; a text could read as a pattern."""
    return isinstance(value, bool | int) or name.endswith(".dtype")


def _reason(lookup: Lookup) -> str:
    places = dict.fromkeys(
        f"{o.kind} {o.name}" + (f" ({o.file}:{o.line})" if o.file else "") for o in lookup.origins
    )
    return f"decided by {', '.join(places)}"
