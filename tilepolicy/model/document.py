"""The policy document: frozen, strict models of what a file may say.

The JSON Schema is generated from these, so that every field carries its title and description.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails

from tilepolicy.model import validators as read
from tilepolicy.model.factnames import FACTS, closest
from tilepolicy.model.validators import AUTO, problem
from tilepolicy.model.when import CallWhen, When
from tilepolicy.resolution import SettingValue

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

MIB: Final = 2**20


def _not_null(schema: dict[str, Any]) -> None:
    """Keep the null that stands for 'not given' out of the JSON Schema: it may not be written."""
    schema.pop("default", None)
    kept = [part for part in schema.pop("anyOf", []) if part != {"type": "null"}]
    if len(kept) == 1:
        schema.update(kept[0])
    elif kept:
        schema["anyOf"] = kept


def _about(title: str, description: str, *, alias: str | None = None) -> FieldInfo:
    """The field information of a key that may be left out, but not be written as null."""
    field: FieldInfo = Field(
        title=title, description=description, alias=alias, json_schema_extra=_not_null
    )
    return field


# Plain aliases, not `type` statements: pydantic makes a schema definition of each of those.
_T = TypeVar("_T")
Given = Annotated[_T | None, BeforeValidator(read.refuse_nothing)]

# The limit stands inside, where the JSON Schema shows it too: outside of the null it gets lost.
Size = Annotated[int, Field(ge=1)]
ByteSize = Annotated[int, PlainValidator(read.read_bytes), WithJsonSchema(read.BYTES_SCHEMA)]
AutoOrBool = Annotated[
    bool | Literal["auto"],
    PlainValidator(read.read_auto_or_bool),
    WithJsonSchema({"enum": [AUTO, True, False]}),
]
Tiling = Annotated[
    int | Literal["auto"],
    PlainValidator(read.read_tiling),
    WithJsonSchema({"anyOf": [{"enum": [AUTO, -1]}, {"type": "integer", "minimum": 1}]}),
]
Settings = Annotated[
    Mapping[str, SettingValue],
    PlainValidator(read.read_settings),
    WithJsonSchema(read.SETTINGS_SCHEMA),
]
ConfigFields = Annotated[
    Mapping[str, SettingValue],
    PlainValidator(read.read_fields),
    WithJsonSchema(
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {"type": ["boolean", "number", "string"]},
        }
    ),
]
# The text of a rule's name: shown in tables, so one line that is not empty.
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S(.*\S)?$")]
Reference = Annotated[str, Field(min_length=1, max_length=1000)]


class Strict(BaseModel):
    """What all parts of a document share: frozen, no conversion, no unknown keys.

    A part's own validator is built when it is first used, which reading a document never does:
    the document's validator holds those of its parts.
    """

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", protected_namespaces=(), defer_build=True
    )

    @classmethod
    def standard(cls) -> Self:
        """The part when nothing is given; its defaults need no check, and so no validator."""
        return cls.model_construct()


class Tile(Strict):
    """Tile sizes by axis, and other fields of the kernel's config by their own names."""

    batch_seq: Annotated[Given[Size], _about("batch_seq", "Tile of the rows.")] = None
    embed_dim: Annotated[Given[Size], _about("embed_dim", "Tile of the model width.")] = None
    mlp_dim: Annotated[Given[Size], _about("mlp_dim", "Tile of the expert MLP's width.")] = None
    input_buffer_count: Annotated[
        Given[Size], _about("input_buffer_count", "Buffers per input in VMEM (Tokamax v1).")
    ] = None
    combine_scopes: Annotated[
        Given[bool],
        _about("combine_scopes", "Accumulate and store in one scope (Tokamax v1, drhs)."),
    ] = None
    bucket_base: Annotated[
        Given[Size], _about("bucket_base", "Base of the row buckets (Tokamax v2).")
    ] = None

    @model_validator(mode="after")
    def _decides(self) -> Self:
        if not self.model_fields_set:
            raise problem(
                "empty", "the tile is empty and decides nothing", "name at least one axis"
            )
        return self

    @property
    def fields(self) -> dict[str, int | bool]:
        """The fields that are given, in the order of the class."""
        return {name: getattr(self, name) for name in _TILE_FIELDS if name in self.model_fields_set}


_TILE_FIELDS: Final = tuple(Tile.model_fields)


class Point(Strict):
    """One measured point of a table."""

    at: Mapping[str, Annotated[int, Field(ge=1)]] = Field(
        title="at", description="The facts that were measured: fact to whole number.", min_length=1
    )
    tile: Tile = Field(title="tile", description="The tile that was best there.")
    source: Annotated[Given[str], _about("source", "Where the measurement comes from.")] = None


class Table(Strict):
    """Measured points, and how far a call may be from the nearest one."""

    nearest: Mapping[str, Annotated[float, Field(ge=1, allow_inf_nan=False)]] = Field(
        title="nearest",
        description="Fact to the largest ratio, either way, between a call and a point; "
        "1.0 = must be equal. Every point gives exactly these facts.",
        min_length=1,
    )
    points: Annotated[tuple[Point, ...], Field(strict=False)] = Field(
        title="points", description="The points; on equal distance the earlier wins.", min_length=1
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        errors = [*self._odd_facts(), *self._odd_points()]
        if errors:
            raise ValidationError.from_exception_data("table", errors)
        return self

    def _odd_facts(self) -> Iterator[InitErrorDetails]:
        """Facts between whose values there is no ratio."""
        sizes = [fact.name for fact in FACTS.values() if fact.kind == "count"]
        for name in self.nearest:
            if name not in sizes:
                near = closest(name, sizes)
                remedy = f"did you mean {near}?" if near else "name a size such as batch_seq"
                wrong = problem("unknown-fact", f"{name!r} is no size and has no ratio", remedy)
                yield InitErrorDetails(type=wrong, loc=("nearest", name), input=name)

    def _odd_points(self) -> Iterator[InitErrorDetails]:
        """Points with other facts than ``nearest``, and points at one place."""
        seen: dict[tuple[int, ...], int] = {}
        for index, point in enumerate(self.points):
            if odd := sorted(point.at.keys() ^ self.nearest.keys()):
                message = f"the point and nearest differ in {', '.join(odd)}"
                wrong = problem("table-facts", message, "give the same facts in both")
            else:
                first = seen.setdefault(tuple(point.at[name] for name in self.nearest), index)
                if first == index:
                    continue
                message = f"the point repeats points[{first}], which comes first"
                wrong = problem("shadowed", message, "delete one of the two")
            yield InitErrorDetails(type=wrong, loc=("points", index, "at"), input=point.at)


class _Decision(Strict):
    """Name, conditions and reason, which all rules have."""

    name: Name = Field(title="name", description="Shown wherever the rule decides.")
    when: When = Field(
        default=When(),
        title="when",
        description="When the rule applies; always, if it is left out.",
        json_schema_extra={"default": {}},
    )
    reason: Annotated[Given[str], _about("reason", "Why; shown next to the value.")] = None


def _one_form(rule: BaseModel, names: tuple[str, ...]) -> None:
    """Refuse a rule that does not have exactly one of these keys."""
    forms = [name for name in names if name.replace("set", "set_") in rule.model_fields_set]
    if len(forms) != 1:
        choices = f"{', '.join(names[:-1])} or {names[-1]}"
        found = f"has {' and '.join(forms)}" if forms else "decides nothing"
        raise problem(
            "rule-form",
            f"a rule needs exactly one of {choices}; this one {found}",
            f"keep one of {choices}" if forms else f"add {choices}",
        )


class Rule(_Decision):
    """One rule for grouped matmuls: exactly one of tile, set and table."""

    tile: Annotated[Given[Tile], _about("tile", "The tile where the conditions hold.")] = None
    set_: Annotated[
        Given[Settings], _about("set", "MaxText settings by their own names.", alias="set")
    ] = None
    table: Annotated[
        Given[Table], _about("table", "Measured points with a bounded nearest match.")
    ] = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        _one_form(self, ("tile", "set", "table"))
        return self


class Lock(_Decision):
    """A rule that nothing overrides: exactly one of set and tile."""

    set_: Annotated[
        Given[Settings], _about("set", "MaxText settings by their own names.", alias="set")
    ] = None
    tile: Annotated[Given[Tile], _about("tile", "The tile where the conditions hold.")] = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        _one_form(self, ("set", "tile"))
        return self


class GmmSection(Strict):
    """The grouped matmuls of MoE layers."""

    on_miss: Literal["report", "error"] = Field(
        default="report",
        title="on_miss",
        description="What a call does that no rule matches: be reported, or fail.",
    )
    rules: Annotated[tuple[Rule, ...], Field(strict=False)] = Field(
        default=(), title="rules", description="First match wins, per field."
    )


class VocabSettings(Strict):
    """The vocabulary projection and its loss."""

    num_vocab_tiling: Tiling = Field(
        default=AUTO, title="num_vocab_tiling", description="auto (or -1), or a number of tiles."
    )
    vocab_tiling_ag_once: AutoOrBool = Field(
        default=True,
        title="vocab_tiling_ag_once",
        description="Gather the output head once per step; auto weighs gathers against memory.",
    )
    max_chunk_bytes: ByteSize = Field(
        default=128 * MIB,
        title="max_chunk_bytes",
        description="Largest logits of one chunk, in bytes, inclusive.",
    )
    max_monolithic_vocab_size: int = Field(
        default=32768,
        ge=1,
        title="max_monolithic_vocab_size",
        description="Vocabularies up to this size are not tiled, inclusive.",
    )
    max_monolithic_bytes: ByteSize = Field(
        default=1024 * MIB,
        title="max_monolithic_bytes",
        description="Largest logits that a small vocabulary may leave untiled, in bytes.",
    )
    min_chunk_tokens: int = Field(
        default=64,
        ge=1,
        title="min_chunk_tokens",
        description="Fewest tokens of one chunk.",
    )
    loss: Literal["auto", "upstream", "sparse", "chunked", "online"] = Field(
        default="auto", title="loss", description="Which cross-entropy computes the training loss."
    )
    allow_broken_upstream_loss: bool = Field(
        default=False,
        title="allow_broken_upstream_loss",
        description="Allow tiling with a MaxText release whose tiled loss has wrong gradients.",
    )


class EngineSettings(Strict):
    """MaxText's training engine."""

    cache_pure_state: AutoOrBool = Field(
        default=AUTO,
        title="cache_pure_state",
        description="Keep the engine's split state between steps.",
    )


class OpRule(Strict):
    """One rule for another Tokamax op."""

    name: Name = Field(title="name", description="Shown wherever the rule decides.")
    when: Annotated[When, CallWhen] = Field(
        default=When(),
        title="when",
        description="Conditions on facts and arg.NAME; all must hold.",
        json_schema_extra={"default": {}},
    )
    config: ConfigFields = Field(
        title="config", description="Fields of the op's config class, by their own names."
    )
    reason: Annotated[Given[str], _about("reason", "Why; shown next to the value.")] = None


class OpSection(Strict):
    """Rules of one Tokamax op."""

    op: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=100)] = Field(
        title="op", description="Snake-case name of the op's class."
    )
    rules: Annotated[tuple[OpRule, ...], Field(strict=False)] = Field(
        title="rules", description="First match wins, per field.", min_length=1
    )


class PolicyDocument(Strict):
    """A tilepolicy policy file."""

    # Built on import, under its lock: threads may read their first documents at once.
    model_config = ConfigDict(defer_build=False)

    version: Annotated[Literal[1], BeforeValidator(read.read_version)] = Field(
        title="version", description="Version of the policy language."
    )
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=200)] = Field(
        title="name", description="Name of the policy."
    )
    extends: Annotated[tuple[Reference, ...], Field(strict=False)] = Field(
        default=(),
        title="extends",
        description="Policies whose rules are tried after the own ones: shipped names, names of "
        "packs, or paths below the folder of this file.",
    )
    vocab: VocabSettings = Field(
        default=VocabSettings.standard(), title="vocab", description="Vocabulary tiling and loss."
    )
    gmm: GmmSection = Field(
        default=GmmSection.standard(), title="gmm", description="Tiles of the grouped matmuls."
    )
    locks: Annotated[tuple[Lock, ...], Field(strict=False)] = Field(
        default=(), title="locks", description="Rules that nothing overrides."
    )
    ops: Annotated[tuple[OpSection, ...], Field(strict=False)] = Field(
        default=(), title="ops", description="Rules for other Tokamax ops."
    )
    engine: EngineSettings = Field(
        default=EngineSettings.standard(),
        title="engine",
        description="Settings of the training engine.",
    )
