"""JSON Schemas of a policy, of MaxText's tile config and of a resolution.

They are generated from the models that the code itself uses. ``schemas/*.schema.json`` are these
texts; a test regenerates and compares them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from pydantic import TypeAdapter

__all__ = ["DIALECT", "SCHEMAS", "SchemaName", "schema", "schema_text"]

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

SchemaName = Literal["policy", "config", "resolution"]


def schema(name: SchemaName) -> dict[str, Any]:
    """One schema, as plain JSON data, with ``$schema``, ``$id`` and ``title`` first.

    Raises:
        KeyError: no schema has that name.
    """
    title, build = SCHEMAS[name]
    body = build()
    body.pop("title", None)
    return {
        "$schema": DIALECT,
        "$id": f"urn:tilepolicy:schema:{name}:1",
        "title": title,
        **body,
    }


def schema_text(name: SchemaName) -> str:
    """The text of ``schemas/NAME.schema.json``."""
    return json.dumps(schema(name), indent=2, ensure_ascii=False) + "\n"


def _policy() -> dict[str, Any]:
    from tilepolicy.model import PolicyDocument

    return PolicyDocument.model_json_schema()


def _config() -> dict[str, Any]:
    from tilepolicy.configs.tileconfig import tile_config_model

    return tile_config_model().model_json_schema()


def _resolution() -> dict[str, Any]:
    from tilepolicy.report.jsonform import ResolutionJson

    return TypeAdapter(ResolutionJson).json_schema()


SCHEMAS: Final[Mapping[str, tuple[str, Callable[[], dict[str, Any]]]]] = {
    "policy": ("tilepolicy policy", _policy),
    "config": ("MaxText config, its tile and vocabulary-tiling keys", _config),
    "resolution": ("tilepolicy resolution", _resolution),
}
