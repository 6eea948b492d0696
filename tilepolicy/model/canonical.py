"""The content of a policy in one form, and its digest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tilepolicy import model
from tilepolicy.model.when import When

__all__ = ["canonical", "digest"]


def digest(policy: model.PolicyDocument) -> str:
    """Hex SHA-256 of the content.

    Independent of the order of keys, of comments, of where the file lies, of how a value was
    written (``128MiB`` or 134217728, ``wi`` or ``[wi]``), and of whether a rule was inherited or
    written out. Texts for people (``reason``, ``source``) do not count, names of rules do.
    """
    text = json.dumps(canonical(policy), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def canonical(policy: model.PolicyDocument) -> dict[str, Any]:
    """The content as plain JSON data.

    Args:
        policy: a document whose ``extends`` is already merged into it.
    """
    return {
        "version": policy.version,
        "name": policy.name,
        "vocab": dict(policy.vocab),
        "engine": dict(policy.engine),
        "gmm": {
            "on_miss": policy.gmm.on_miss,
            "rules": [_rule(rule) for rule in policy.gmm.rules],
        },
        "locks": [_rule(lock) for lock in policy.locks],
        "ops": {
            op: [
                {"name": rule.name, "when": _when(rule.when), "config": dict(rule.config)}
                for section in policy.ops
                if section.op == op
                for rule in section.rules
            ]
            for op in {section.op for section in policy.ops}
        },
    }


def _rule(rule: model.Rule | model.Lock) -> dict[str, Any]:
    content: dict[str, Any] = {"name": rule.name, "when": _when(rule.when)}
    if rule.tile is not None:
        content["tile"] = rule.tile.fields
    elif rule.set_ is not None:
        content["set"] = dict(rule.set_)
    elif isinstance(rule, model.Rule) and rule.table is not None:
        content["nearest"] = dict(rule.table.nearest)
        content["points"] = [[dict(p.at), p.tile.fields] for p in rule.table.points]
    return content


def _when(when: When) -> dict[str, str]:
    return {fact: str(condition) for fact, condition in when}
