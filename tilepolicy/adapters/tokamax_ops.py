"""Any other op of Tokamax: rules under ``ops``, by the snake-case name of its class."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tilepolicy.adapters.tokamax_config import build_config, config_fields
from tilepolicy.adapters.tokamax_upstream import Upstream
from tilepolicy.context.active import ActivePolicy
from tilepolicy.facts.devices import normalize_device
from tilepolicy.resolution import FactValue, FieldChoice
from tilepolicy.session import Lookup
from tilepolicy.session.rules import key_of

__all__ = ["answer_op", "op_facts", "snake_case"]

_CAMEL: Final = re.compile(r"(?!^)([A-Z])")


def snake_case(name: str) -> str:
    """Tokamax's own spelling: ``PallasTritonAttention`` is ``pallas_triton_attention``."""
    return _CAMEL.sub(r"_\1", name).lower()


def op_facts(upstream: Upstream, device_kind: str, key: object) -> dict[str, FactValue]:
    """What a call shows: device, versions, and its arguments.

    An array ``q`` gives ``arg.q.dim0`` …, ``arg.q.rank`` and ``arg.q.dtype``; the first array
    also ``dtype``. An argument that is a number, a text or a flag gives ``arg.NAME``; others
    give nothing.
    """
    facts: dict[str, FactValue] = {
        "device": normalize_device(device_kind) or device_kind,
        "tokamax": upstream.version,
    }
    arguments: Mapping[str, Any] = key if isinstance(key, Mapping) else {}
    for name, value in arguments.items():
        if isinstance(value, bool | int | float | str):
            facts[f"arg.{name}"] = value
        elif hasattr(value, "shape") and hasattr(value, "dtype"):
            facts |= {f"arg.{name}.dim{i}": int(size) for i, size in enumerate(value.shape)}
            facts[f"arg.{name}.rank"] = len(value.shape)
            facts[f"arg.{name}.dtype"] = value.dtype.name
            facts.setdefault("dtype", value.dtype.name)
    return facts


def answer_op(
    upstream: Upstream,
    op: Any,  # noqa: ANN401 - upstream op
    device_kind: str,
    key: Any,  # noqa: ANN401 - upstream key
    active: Sequence[ActivePolicy],
) -> Any:  # noqa: ANN401 - upstream config
    """The config for one lookup of an op, or None to leave it to Tokamax.

    An op that no active policy names is not recorded: a model has many.

    Raises:
        AdapterError: the op's config class does not take what a rule says.
    """
    name = snake_case(type(op).__name__)
    policies = [policy for policy in active if name in policy.ops]
    if not policies:
        return None
    facts = op_facts(upstream, device_kind, key)
    fields: dict[str, FieldChoice] = {}
    nearest = ""
    undecidable: dict[str, tuple[str, ...]] = {}
    by: list[tuple[int, str]] = []
    for number, policy in enumerate(policies):
        verdict = policy.resolver.op(name, facts)
        for field, choice in verdict.decided.items():
            if field not in fields:
                fields[field] = choice
                by.append((number, field))
        undecidable |= verdict.undecidable
        nearest = nearest or verdict.nearest
    config = None
    miss = f"no rule decides; tokamax chooses; nearest: {nearest or 'none'}"
    if fields:
        values: dict[str, object] = {field: choice.value for field, choice in fields.items()}
        base = upstream.cached(op, device_kind, key)
        if base is None:
            base = upstream.heuristic(op, key)
        config, miss = build_config(op, base, values, name), ""
    lookup = Lookup(
        adapter="tokamax",
        op=name,
        device=str(facts["device"]),
        facts=tuple(sorted(facts.items())),
        tile=tuple((field, choice.value) for field, choice in fields.items()),
        origins=tuple(choice.origin for choice in fields.values()),
        config=() if config is None else config_fields(config),
        miss=miss,
        undecidable=tuple(f"{r} (needs {', '.join(n)})" for r, n in undecidable.items()),
    )
    active[0].session.record(lookup)
    for number, field in by:
        policies[number].session.hit([key_of(fields[field].origin)])
    return config
