"""A session as text for people and as JSON for programs. Draws only; nothing is decided here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tilepolicy.resolution import Origin

if TYPE_CHECKING:
    from tilepolicy.session import Lookup, Session

__all__ = ["as_data", "as_json", "as_text"]


def as_json(session: Session) -> str:
    """The report as indented JSON; see :func:`as_data`."""
    return json.dumps(as_data(session), indent=2)


def as_data(session: Session) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "policy": _policy(session),
        "versions": dict(session.versions),
        "adapters": list(session.adapters),
        "lookups": [_lookup(lookup, count) for lookup, count in session.lookups.items()],
        "notes": [
            {
                "source": note.source,
                "subject": note.subject,
                "value": note.value,
                "reason": note.reason,
                "origin": None if note.origin is None else _origin(note.origin),
                "count": count,
            }
            for note, count in session.notes.items()
        ],
        "rules_never_hit": [
            {"name": rule.name, "file": rule.file, "line": rule.line}
            for rule in session.rules_never_hit
        ],
    }


def _policy(session: Session) -> dict[str, Any] | None:
    if session.inputs is None:
        return None
    policy = session.inputs.policy
    return {"name": policy.name, "digest": policy.digest, "files": list(policy.files)}


def _lookup(lookup: Lookup, count: int) -> dict[str, Any]:
    return {
        "adapter": lookup.adapter,
        "op": lookup.op,
        "layer": lookup.layer,
        "pass": lookup.pass_,
        "phase": lookup.phase,
        "device": lookup.device,
        "facts": dict(lookup.facts),
        "evidence": lookup.evidence,
        "tile": {
            name: {"value": value, "origin": _origin(origin)}
            for (name, value), origin in zip(lookup.tile, lookup.origins, strict=True)
        },
        "config": dict(lookup.config),
        "miss": lookup.miss,
        "undecidable": list(lookup.undecidable),
        "count": count,
    }


def _origin(origin: Origin) -> dict[str, Any]:
    return {
        "kind": origin.kind,
        "name": origin.name,
        "file": origin.file,
        "line": origin.line,
        "reason": origin.reason,
    }


def as_text(session: Session) -> str:
    """The report as text, one line per distinct lookup, note and unused rule."""
    return "\n".join(_lines(session))


def _lines(session: Session) -> Iterator[str]:
    if session.inputs is not None:
        policy = session.inputs.policy
        yield f"policy {policy.name} ({policy.digest[:12]}) from {', '.join(policy.files)}"
    versions = ", ".join(f"{name} {release}" for name, release in session.versions.items())
    yield f"adapters: {', '.join(session.adapters) or 'none'}" + (
        f" ({versions})" if versions else ""
    )
    lookups = session.lookups
    hits = {lookup: count for lookup, count in lookups.items() if not lookup.miss}
    total, missed = sum(lookups.values()), sum(session.misses.values())
    yield f"lookups: {total}, of which {missed} found no rule"
    yield from (f"  {line}" for line in _aligned([_hit(*item) for item in hits.items()]))
    if session.misses:
        yield "misses:"
        for lookup, count in session.misses.items():
            yield f"  {lookup.site} {_shape(lookup)}: {lookup.miss} (x{count})"
    undecidable = dict.fromkeys(rule for lookup in lookups for rule in lookup.undecidable)
    if undecidable:
        yield "rules that need facts which are not known here:"
        yield from (f"  {rule}" for rule in undecidable)
    if session.notes:
        yield "notes:"
        for note, count in session.notes.items():
            reason = f" ({note.reason})" if note.reason else ""
            yield f"  {note.source}: {note.subject} = {note.value}{reason} (x{count})"
    unused = session.rules_never_hit
    if unused:
        yield "rules never hit:"
        yield from (f"  {rule.name} ({rule.file}:{rule.line})" for rule in unused)


def _hit(lookup: Lookup, count: int) -> tuple[str, ...]:
    tile = " ".join(f"{name}={value}" for name, value in lookup.tile)
    places = dict.fromkeys(
        f"{o.kind} {o.name}" + (f" ({o.file}:{o.line})" if o.file else "") for o in lookup.origins
    )
    how = f"[{lookup.evidence}]" if lookup.evidence else ""
    return (lookup.site, _shape(lookup), tile, f"x{count}", f"{', '.join(places)} {how}".strip())


def _shape(lookup: Lookup) -> str:
    facts = dict(lookup.facts)
    if lookup.pass_ is None:
        sizes = " ".join(f"{n}={v}" for n, v in facts.items() if n.startswith("arg."))
        return f"{sizes} {lookup.device}".strip()
    sizes = (
        f"batch_seq={facts['batch_seq']} embed_dim={facts['embed_dim']} "
        f"mlp_dim={facts['mlp_dim']} groups={facts['num_groups']}"
    )
    return f"{sizes} {facts['dtype']} {lookup.device} {facts['backend']}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
