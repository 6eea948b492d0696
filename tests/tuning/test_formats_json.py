"""JSON with places: strict where ``json`` is lenient, bounded, and never losing a member."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilepolicy.errors import Place
from tilepolicy.formats import jsontext
from tilepolicy.formats.records import FormatError
from tilepolicy.source.text import SourceText

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False).map(abs),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
).filter(lambda value: "Infinity" not in json.dumps(value))


@settings(max_examples=50)
@given(st.dictionaries(st.text(), values, max_size=5), st.sampled_from([None, 0, 3]))
def test_members_gives_every_member_where_it_stands(
    value: dict[str, object], indent: int | None
) -> None:
    """Keys, values and order are json's own; each place points at the key's quote."""
    source = SourceText("x.json", json.dumps(value, indent=indent))
    found = list(jsontext.members(source))
    assert {member.key: member.value for member in found} == value
    assert [member.key for member in found] == list(value)
    for member in found:
        line = source.text.split("\n")[(member.place.line or 0) - 1]
        assert line[(member.place.column or 0) - 1] == '"'


@settings(max_examples=50)
@given(st.lists(values, max_size=5), st.sampled_from([None, 2]))
def test_items_gives_every_item(value: list[object], indent: int | None) -> None:
    """Items of an array in order, with their index as key."""
    source = SourceText("x.json", json.dumps(value, indent=indent))
    found = list(jsontext.items(source))
    assert [item.value for item in found] == value
    assert [item.key for item in found] == [str(i) for i in range(len(value))]


@pytest.mark.parametrize(
    ("text", "message", "line", "column"),
    [
        ('{"a": 1,\n "a": 2}', "the key 'a' appears twice in one object", 2, 2),
        ('{"x": 1,\n "y": {"b": 1, "b": 2}}', "the key 'b' appears twice in one object", 2, 2),
        ("[1,\n NaN]", "NaN is not a JSON number", 2, 2),
        ('{"a": -Infinity}', "-Infinity is not a JSON number", 1, 7),
        ('{"a": \n}', "not JSON: Expecting value", 2, 1),
        ("[1, 2", "not JSON: Expecting ',' delimiter", 1, 6),
        ("[" * 40 + "]" * 40, "nested more than 32 deep", 1, 1),
        ("[" * 100_000, "nested more than 32 deep", None, None),
    ],
)
def test_what_json_lets_pass_is_a_located_error(
    text: str, message: str, line: int | None, column: int | None
) -> None:
    """Repeated keys, NaN, deep nesting and syntax errors name their place."""
    with pytest.raises(FormatError) as caught:
        jsontext.parse(SourceText("x.json", text))
    (problem,) = caught.value.problems
    assert (problem.code, problem.message) == ("bad-json", message)
    assert problem.place is not None
    assert (problem.place.line, problem.place.column) == (line, column)


def test_a_number_with_thousands_of_digits_is_refused() -> None:
    """Python's limit on digits becomes a problem, not a ValueError of its own."""
    with pytest.raises(FormatError, match="Exceeds the limit"):
        jsontext.parse(SourceText("x.json", "[" + "9" * 5000 + "]"))


def test_json_inside_a_string_has_the_place_of_the_string() -> None:
    """The message says what it should have been, and which character of the string is wrong."""
    place = Place("x.json", 7, 3)
    with pytest.raises(
        FormatError, match="the arguments are not JSON: Expecting value at character 7 of the str"
    ) as caught:
        jsontext.parse_inner('{"a": }', "arguments", place)
    assert caught.value.problems[0].place == place
    with pytest.raises(FormatError, match="the arguments: the key 'a' appears twice"):
        jsontext.parse_inner('{"a": 1, "a": 2}', "arguments", place)


def test_unreadable_files_are_problems_with_the_file_named(tmp_path: Path) -> None:
    """A missing file, other bytes than UTF-8, and a file beyond the limit."""
    with pytest.raises(FormatError, match=r"gone\.json: error: the file cannot be read: No such"):
        jsontext.read(tmp_path / "gone.json")
    odd = tmp_path / "odd.json"
    odd.write_bytes(b'{"a":\n "\xff"}')
    with pytest.raises(FormatError, match=r"odd\.json:2: error: the byte 0xff is not UTF-8"):
        jsontext.read(odd)


def test_a_file_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than the limit is read into memory."""
    monkeypatch.setattr(jsontext, "MAX_BYTES", 10)
    big = tmp_path / "big.json"
    big.write_text("[" + "1," * 20 + "1]")
    with pytest.raises(FormatError, match="the file is larger than 10 bytes"):
        jsontext.read(big)


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    """Files from Windows editors read like others."""
    path = tmp_path / "bom.json"
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert jsontext.parse(jsontext.read(path)) == {}
