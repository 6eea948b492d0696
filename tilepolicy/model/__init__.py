"""The policy document: frozen, strict models of what a file may say."""

from tilepolicy.model.document import (
    EngineSettings,
    GmmSection,
    Lock,
    OpRule,
    OpSection,
    Point,
    PolicyDocument,
    Rule,
    Table,
    Tile,
    VocabSettings,
)

__all__ = [
    "EngineSettings",
    "GmmSection",
    "Lock",
    "OpRule",
    "OpSection",
    "Point",
    "PolicyDocument",
    "Rule",
    "Table",
    "Tile",
    "VocabSettings",
]
