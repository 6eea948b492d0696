"""The policy document: strictness, defaults, descriptions, digest."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tilepolicy import axes, settings
from tilepolicy.model import PolicyDocument, Tile, canonical
from tilepolicy.model.when import When
from tilepolicy.source import parse

FULL = Path(__file__).parents[1] / "examples" / "valid" / "full.yml"


def full() -> dict[str, Any]:
    """A document that uses every part of the language."""
    value = parse(FULL.read_bytes(), "full.yml").value
    assert isinstance(value, dict)
    return value


def digest(value: object) -> str:
    """Digest of a plain document."""
    return canonical.digest(PolicyDocument.model_validate(value))


def mappings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All mappings of a plain value that have fixed keys, with their paths."""
    if isinstance(value, dict):
        yield path, value
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from mappings(inner, (*path, key))
    for index, inner in enumerate(value) if isinstance(value, list) else ():
        yield from mappings(inner, (*path, index))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """The part of a plain value at a path."""
    for step in path:
        value = value[step]
    return value


@pytest.mark.parametrize(
    "path", [p for p, _ in mappings(full()) if not (p and p[-1] == "config")], ids=str
)
def test_an_unknown_key_is_refused_at_every_level(path: tuple[Any, ...]) -> None:
    """No mapping of the document takes a key that it does not know."""
    value = full()
    at(value, path)["surprise"] = 1
    with pytest.raises(ValidationError, match="surprise"):
        PolicyDocument.model_validate(value)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("version",), True),
        (("version",), 1.0),
        (("version",), "1"),
        (("vocab", "max_monolithic_vocab_size"), 32768.0),
        (("vocab", "min_chunk_tokens"), "64"),
        (("vocab", "min_chunk_tokens"), True),
        (("vocab", "max_chunk_bytes"), True),
        (("vocab", "max_chunk_bytes"), 1.5),
        (("vocab", "vocab_tiling_ag_once"), 1),
        (("vocab", "vocab_tiling_ag_once"), "true"),
        (("vocab", "num_vocab_tiling"), -2),
        (("vocab", "num_vocab_tiling"), True),
        (("vocab", "num_vocab_tiling"), "8"),
        (("vocab", "allow_broken_upstream_loss"), 0),
        (("gmm", "rules", 0, "tile", "batch_seq"), True),
        (("gmm", "rules", 0, "tile", "batch_seq"), "512"),
        (("gmm", "rules", 0, "tile", "batch_seq"), 512.0),
        (("gmm", "rules", 0, "tile", "batch_seq"), None),
        (("gmm", "rules", 1, "tile", "combine_scopes"), 1),
        (("gmm", "rules", 2, "table", "nearest", "batch_seq"), True),
        (("gmm", "rules", 2, "table", "nearest", "batch_seq"), float("inf")),
        (("gmm", "rules", 2, "table", "nearest", "batch_seq"), float("nan")),
        (("gmm", "rules", 2, "table", "points", 0, "at", "batch_seq"), 4096.0),
        (("gmm", "rules", 3, "set", "num_vocab_tiling"), True),
        (("gmm", "rules", 3, "set", "num_vocab_tiling"), "auto"),
        (("gmm", "rules", 0, "name"), 7),
        (("gmm", "rules", 0, "name"), "two\nlines"),
        (("gmm", "rules", 0, "reason"), None),
        (("ops", 0, "rules", 0, "config", "block_q"), [512]),
        (("engine", "cache_pure_state"), "yes"),
        (("extends",), "minimal.yml"),
        (("locks",), {}),
        (("gmm",), []),
    ],
    ids=str,
)
def test_nothing_is_converted(path: tuple[Any, ...], wrong: Any) -> None:
    """A value of another kind is an error, even if Python would convert it."""
    value = full()
    at(value, path[:-1])[path[-1]] = wrong
    with pytest.raises(ValidationError):
        PolicyDocument.model_validate(value)


def test_the_full_example_is_what_it_says() -> None:
    """Sizes are bytes, -1 is auto, conditions and tiles are parsed."""
    document = PolicyDocument.model_validate(full())
    assert document.vocab.max_chunk_bytes == 134217728
    assert document.gmm.rules[0].tile is not None
    assert document.gmm.rules[0].tile.fields == {
        "batch_seq": 512,
        "embed_dim": 7168,
        "mlp_dim": 512,
        "input_buffer_count": 2,
    }
    assert str(document.gmm.rules[0].when).startswith("batch_seq: >=4096, device: v6e, dtype: b")
    read = document.gmm.rules[0].when
    assert str(read) == str(When(read.items))
    assert read == When(read.items)
    assert document.locks[0].set_ == {"num_vocab_tiling": 1}
    value = full()
    value["vocab"]["num_vocab_tiling"] = -1
    assert PolicyDocument.model_validate(value).vocab.num_vocab_tiling == "auto"


def test_a_document_is_frozen() -> None:
    """No part of a document can be assigned to."""
    document = PolicyDocument.model_validate(full())
    with pytest.raises(ValidationError, match="frozen"):
        document.gmm.on_miss = "report"  # type: ignore[misc]  # that it is refused is the point
    hash(document.gmm.rules[0].when)


def test_defaults_are_the_documented_ones() -> None:
    """A policy without settings has the numbers of the language reference."""
    document = PolicyDocument.model_validate({"version": 1, "name": "x"})
    assert document.vocab.model_dump() == {
        "num_vocab_tiling": "auto",
        "vocab_tiling_ag_once": True,
        "max_chunk_bytes": 134217728,
        "max_monolithic_vocab_size": 32768,
        "max_monolithic_bytes": 1073741824,
        "min_chunk_tokens": 64,
        "loss": "auto",
        "allow_broken_upstream_loss": False,
    }
    assert (document.gmm.on_miss, document.engine.cache_pure_state) == ("report", "auto")


def test_every_field_has_a_title_and_a_description() -> None:
    """Editors complete from the schema, so no property may be bare, at any level."""
    schema = PolicyDocument.model_json_schema()
    for name, part in {"PolicyDocument": schema, **schema["$defs"]}.items():
        assert part.get("description"), name
        for key, field in part.get("properties", {}).items():
            assert field.get("description"), f"{name}.{key}"
            if name not in ("When", "CallWhen"):
                assert field.get("title"), f"{name}.{key}"
    assert "null" not in json.dumps(schema)


def test_a_tile_has_the_fields_of_all_kernels() -> None:
    """Tile fields are the axes and what the kernels' configs have beside them."""
    extra = {name for fields in axes.KERNEL_EXTRA_FIELDS.values() for name in fields}
    assert set(Tile.model_fields) == {*settings.AXES, *extra}


def shuffled(value: Any, order: int) -> Any:
    """The same document with other key orders."""
    if isinstance(value, dict):
        items = [(key, shuffled(inner, order + 1)) for key, inner in value.items()]
        return dict(items[order % len(items) :] + items[: order % len(items)] if items else items)
    return [shuffled(inner, order) for inner in value] if isinstance(value, list) else value


@given(st.integers(0, 50))
def test_the_digest_does_not_depend_on_the_order_of_keys(order: int) -> None:
    """Keys of a mapping have no order."""
    assert digest(shuffled(full(), order)) == digest(full())


@pytest.mark.parametrize(
    ("path", "same"),
    [
        (("vocab", "max_chunk_bytes"), 134217728),
        (("vocab", "max_chunk_bytes"), "131072KiB"),
        (("vocab", "num_vocab_tiling"), -1),
        (("gmm", "rules", 0, "when", "layer"), ["wi"]),
        (("gmm", "rules", 0, "when", "pass"), ["dlhs", "fwd"]),
        (("gmm", "rules", 0, "when", "device"), "v6e"),
        (("gmm", "rules", 0, "when", "batch_seq"), ">4095"),
        (("gmm", "rules", 0, "reason"), "for people only"),
        (("gmm", "rules", 1, "when", "tokamax"), "<0.1.0,>=0.0.14"),
        (("gmm", "rules", 2, "table", "nearest", "batch_seq"), 2),
        (("gmm", "rules", 2, "table", "points", 0, "source"), "for people only"),
    ],
    ids=str,
)
def test_the_digest_does_not_depend_on_notation(path: tuple[Any, ...], same: Any) -> None:
    """Equal meanings have one digest, however they are written."""
    value = full()
    at(value, path[:-1])[path[-1]] = same
    assert digest(value) == digest(full())


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all numbers of a plain value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    elif isinstance(value, int) and not isinstance(value, bool) and path != ("version",):
        yield path


@pytest.mark.parametrize("path", list(leaves(full())), ids=str)
def test_the_digest_depends_on_every_number(path: tuple[Any, ...]) -> None:
    """Another number anywhere is another policy."""
    value = copy.deepcopy(full())
    at(value, path[:-1])[path[-1]] += 1
    if path[:4] == ("gmm", "rules", 2, "table") and "embed_dim" in path and "nearest" in path:
        value["gmm"]["rules"][2]["table"]["nearest"]["embed_dim"] = 2.0
    assert digest(value) != digest(full())


@pytest.mark.parametrize(
    ("path", "other"),
    [
        (("name",), "another"),
        (("gmm", "on_miss"), "report"),
        (("gmm", "rules", 0, "name"), "another"),
        (("gmm", "rules", 0, "when", "layer"), "wo"),
        (("gmm", "rules", 1, "tile", "combine_scopes"), False),
        (("ops", 0, "op"), "another"),
        (("engine", "cache_pure_state"), False),
        (("vocab", "loss"), "online"),
    ],
    ids=str,
)
def test_the_digest_depends_on_meaning(path: tuple[Any, ...], other: Any) -> None:
    """Another name, condition or choice is another policy."""
    value = full()
    at(value, path[:-1])[path[-1]] = other
    assert digest(value) != digest(full())


def test_the_digest_of_a_known_policy() -> None:
    """The canonical form is part of the lock file format: it must not change by accident."""
    assert digest({"version": 1, "name": "x"}) == (
        "69a3777ee40e7def15a4499c5014b00c3f13afe7443d6fff136828d64c38fc24"
    )
