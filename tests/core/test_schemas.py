"""JSON Schemas: generated, published, and of one mind with the models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from resolving import MOE, resolved

import tilepolicy
from tilepolicy.errors import TilepolicyError
from tilepolicy.report import resolution_json
from tilepolicy.schemas import SCHEMAS, schema, schema_text
from tilepolicy.settings import SETTINGS
from tilepolicy.validation import validate

ROOT = Path(__file__).parents[2]
VALID = sorted((ROOT / "tests/examples/valid").glob("*.yml"))
INVALID = sorted((ROOT / "tests/examples/invalid").glob("*.yml"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_published_schemas_are_what_the_models_give(name: str) -> None:
    """`schemas/NAME.schema.json` is exactly what is generated; `tilepolicy schema` writes it."""
    published = ROOT / "schemas" / f"{name}.schema.json"
    assert published.read_text(encoding="utf-8") == schema_text(name), (
        f"run: tilepolicy schema {name} --output schemas/{name}.schema.json"
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_valid_and_named(name: str) -> None:
    """Each is a correct 2020-12 schema with an `$id` of its own and a title."""
    document = schema(name)
    jsonschema.Draft202012Validator.check_schema(document)
    assert document["$id"] == f"urn:tilepolicy:schema:{name}:1"
    assert document["title"]


def _properties(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.get("properties", {}).items():
            yield f"{path}.{key}", value
        for key, value in node.items():
            yield from _properties(value, f"{path}.{key}")
    elif isinstance(node, list):
        for at, value in enumerate(node):
            yield from _properties(value, f"{path}[{at}]")


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_property_has_words_for_an_editor(name: str) -> None:
    """An editor can show a description for every property."""
    mute = [path for path, value in _properties(schema(name), "") if not value.get("description")]
    assert mute == []


def test_config_schema_has_every_setting_of_maxtext() -> None:
    """All knobs are in the config schema, and none of tilepolicy's own settings."""
    properties = schema("config")["properties"]
    assert {name for name in SETTINGS if SETTINGS[name].since} <= properties.keys()
    assert "loss" not in properties


def test_a_real_resolution_satisfies_its_schema() -> None:
    """What `resolve --format json` gives is what the resolution schema describes."""
    document = resolution_json(resolved(tilepolicy.load("maxtext-default"), MOE))
    jsonschema.validate(json.loads(json.dumps(document)), schema("resolution"))


@pytest.mark.parametrize("path", sorted((ROOT / "policies").glob("*.yml")), ids=lambda p: p.stem)
def test_shipped_policies_point_editors_at_the_schema(path: Path) -> None:
    """Each shipped policy starts with the editor's line, and the schema it names is there."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first == "# yaml-language-server: $schema=../schemas/policy.schema.json"
    assert (path.parent / "../schemas/policy.schema.json").is_file()


def by_schema(name: str, path: Path) -> bool:
    """Whether a file satisfies a schema, read as other YAML tools read it."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, RecursionError):
        return False
    return jsonschema.Draft202012Validator(schema(name)).is_valid(value)


def by_model(path: Path) -> bool:
    """Whether tilepolicy accepts a policy."""
    try:
        tilepolicy.load(path)
    except TilepolicyError:
        return False
    return True


SEEN_ONLY_BY_TILEPOLICY = {
    "duplicate-after-merge": "a schema sees values, not the keys that a parser dropped",
    "duplicate-keys": "as above: the last of two keys is all that a schema sees",
    "duplicate-names": "names must differ within a list, and a schema compares whole rules",
    "extends-cycle": "a schema sees one file",
    "extends-outside": "a schema knows no folders",
    "shadowed": "whether a rule can decide depends on the rules before it",
    "unknown-facts": "any key may be a fact: MaxText's keys differ from release to release",
    "unreachable-set": "a knob's layer and the rule's conditions are compared by the lint",
}
"""Wrong policies that satisfy the JSON Schema, and why a schema cannot see what is wrong."""


@pytest.mark.parametrize("path", [*VALID, *INVALID], ids=lambda path: path.stem)
def test_schema_and_models_agree_on_the_examples(path: Path) -> None:
    """Every example policy gets the same verdict both ways, but for the differences above."""
    expected = path in VALID
    assert by_model(path) is expected
    assert by_schema("policy", path) is (expected or path.stem in SEEN_ONLY_BY_TILEPOLICY)


TILE = "gmm: {{rules: [{{name: a, tile: {{embed_dim: {}}}}}]}}"
POLICY_VALUES = [
    # text, JSON Schema, tilepolicy
    (TILE.format("128"), True, True),
    (TILE.format("0"), False, False),
    (TILE.format("-128"), False, False),
    (TILE.format("true"), False, False),
    (TILE.format('"128"'), False, False),
    (TILE.format("null"), False, False),
    (TILE.format("128.5"), False, False),
    # 128.0 is an integer to JSON Schema; a policy says what it means.
    (TILE.format("128.0"), True, False),
    # YAML 1.1 reads these as 334, 1024, 750 and true; tilepolicy refuses to guess.
    (TILE.format("0516"), True, False),
    (TILE.format("1_024"), True, False),
    (TILE.format("12:30"), True, False),
    (TILE.format("1e3"), False, False),
    ("vocab: {num_vocab_tiling: auto}", True, True),
    ("vocab: {num_vocab_tiling: -1}", True, True),
    ("vocab: {num_vocab_tiling: 0}", False, False),
    ("vocab: {max_chunk_bytes: 128MiB}", True, True),
    ("vocab: {max_chunk_bytes: 128 apples}", False, False),
    # A pattern cannot say that a fraction of a unit must be a whole number of bytes, or above 0.
    ("vocab: {max_chunk_bytes: 0MiB}", True, False),
    ("vocab: {vocab_tiling_ag_once: auto}", True, True),
    ("vocab: {vocab_tiling_ag_once: yes}", True, False),
    ("vocab: {loss: best}", False, False),
    ("gmm: {on_miss: error}", True, True),
    ("gmm: {on_mis: error}", False, False),
]
"""One value each: the differences between a schema and tilepolicy are all here."""


@pytest.mark.parametrize(("text", "schema_says", "model_says"), POLICY_VALUES)
def test_policy_verdicts_and_their_pinned_differences(
    tmp_path: Path, text: str, schema_says: bool, model_says: bool
) -> None:
    """The table of single values: verdict of the JSON Schema and of tilepolicy."""
    path = tmp_path / "p.yml"
    path.write_text(f"version: 1\nname: p\n{text}\n", encoding="utf-8")
    assert (by_schema("policy", path), by_model(path)) == (schema_says, model_says)


CONFIG_VALUES = [
    # text, JSON Schema, tilepolicy
    ("num_vocab_tiling: 4", True, True),
    ("num_vocab_tiling: -1", True, True),
    ("num_vocab_tiling: auto", True, True),
    ("num_vocab_tiling: 0", False, False),
    ("num_vocab_tiling: -2", False, False),
    ("num_vocab_tiling: four", False, False),
    # MaxText's model converts these, so they are no mistake; an editor still marks the first.
    ("num_vocab_tiling: '4'", False, True),
    ("num_vocab_tiling: 4.0", True, True),
    ("wi_tile_fwd_batch_seq: 512", True, True),
    ("wi_tile_fwd_batch_seq: 0", False, False),
    ("wo_tile_drhs_mlp_dim: many", False, False),
    ("vocab_tiling_ag_once: false", True, True),
    ("vocab_tiling_ag_once: maybe", False, False),
    ("use_gmm_v2: perhaps", False, False),
    # The schema knows the keys that decide about tiles; tilepolicy knows every key of MaxText.
    ("no_such_key: 1", True, False),
    ("tile_batch_seq: 512", True, False),
    # What depends on another key.
    ("use_gmm_v2: true", True, False),
    ("num_vocab_tiling: 5", True, False),
]
"""The same for MaxText configs."""


@pytest.mark.parametrize(("text", "schema_says", "model_says"), CONFIG_VALUES)
def test_config_verdicts_and_their_pinned_differences(
    tmp_path: Path, text: str, schema_says: bool, model_says: bool
) -> None:
    """The table of single values of a config: verdict of the JSON Schema and of `validate`."""
    path = tmp_path / "c.yml"
    path.write_text(f"base_config: base.yml\n{text}\n", encoding="utf-8")
    (checked,) = validate([str(path)])
    assert checked.kind == "config"
    assert (by_schema("config", path), checked.valid) == (schema_says, model_says)
