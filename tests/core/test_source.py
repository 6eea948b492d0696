"""YAML to plain values with places: values, refusals, limits, both scanners."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tilepolicy.source import LIMITS, Limits, parse

EXAMPLES = Path(__file__).parents[1] / "examples"
SCANNERS = pytest.mark.parametrize("pure", [False, True], ids=["libyaml", "python"])


def codes(text: str | bytes, *, pure: bool = False, limits: Limits = LIMITS) -> list[str]:
    """Codes of the problems of a text."""
    return [problem.code for problem in parse(text, "f.yml", limits=limits, pure=pure).problems]


def test_this_python_has_libyaml() -> None:
    """The tests of two scanners are about two scanners."""
    assert yaml.__with_libyaml__


@SCANNERS
def test_plain_values_come_out_with_their_types(pure: bool) -> None:
    """Only str, int, float, bool, None, list and dict are made, as both YAML versions read them."""
    text = "a: 1\nb: -2\nc: 1.5\nd: true\ne: null\nf: ~\ng:\nh: text\ni: '1'\nj: [1, x]\nk: +3\n"
    document = parse(text, "f.yml", pure=pure)
    assert document.problems == ()
    assert document.value == {
        "a": 1, "b": -2, "c": 1.5, "d": True, "e": None, "f": None, "g": None,
        "h": "text", "i": "1", "j": [1, "x"], "k": 3,
    }  # fmt: skip
    assert isinstance(document.value, dict)
    assert type(document.value["a"]) is int
    assert type(document.value["d"]) is bool


@SCANNERS
@pytest.mark.parametrize(
    ("scalar", "message", "remedy"),
    [
        ("0512", "YAML 1.1 reads it as 330", "write 512 or 330,"),
        ("1_024", "YAML 1.1 reads it as 1024", "write 1024,"),
        ("12:30", "YAML 1.1 reads it as 750", "write 750,"),
        ("1:30.5", "YAML 1.1 reads it as 90.5", "write 90.5,"),
        ("0x10", "YAML 1.1 reads it as 16", "write 16,"),
        ("0b11", "YAML 1.1 reads it as 3", "write 3,"),
        ("0o17", "YAML 1.1 reads it as text", "write 15,"),
        ("08", "YAML 1.1 reads it as text", "write 8,"),
        (".5", "YAML 1.1 reads it as 0.5", "write 0.5,"),
        ("1.", "YAML 1.1 reads it as 1.0", "write 1.0,"),
        ("1e3", "YAML 1.1 reads it as text", "write 1000,"),
        ("1.5e3", "YAML 1.1 reads it as text", "write 1500.0,"),
        ("on", "on is true in YAML 1.1 and text in YAML 1.2", "write true,"),
        ("No", "No is false in YAML 1.1 and text in YAML 1.2", "write false,"),
        (".inf", ".inf is not a finite number", "write a finite number"),
    ],
)
def test_a_scalar_that_yaml_versions_read_differently_is_refused(
    scalar: str, message: str, remedy: str, pure: bool
) -> None:
    """The problem says what YAML 1.1 reads and what to write; quotes make the scalar text."""
    (problem,) = parse(f"a: {scalar}", "f.yml", pure=pure).problems
    assert problem.code == "ambiguous-scalar"
    assert message in problem.message
    assert problem.remedy is not None
    assert remedy.removesuffix(",") in problem.remedy
    assert str(problem.place) == "f.yml:1:4"
    quoted = parse(f"a: '{scalar}'", "f.yml", pure=pure)
    assert (quoted.problems, quoted.value) == ((), {"a": scalar})


@pytest.mark.parametrize("text", ["2026-11-30", "0.0.17", "v6e", "128MiB", "y", "n", "=", "a:b"])
def test_text_that_only_looks_special_stays_text(text: str) -> None:
    """Dates, versions, sizes and single letters are text in a policy."""
    document = parse(f"a: {text}", "f.yml")
    assert (document.problems, document.value) == ((), {"a": text})


def test_a_caret_stands_under_the_column() -> None:
    """A problem shows the source line, with a caret under what is meant."""
    (problem,) = parse("a: 1\nbb: on\n", "p.yml").problems
    assert str(problem) == (
        "p.yml:2:5: error: on is true in YAML 1.1 and text in YAML 1.2 [ambiguous-scalar]\n"
        "  2 | bb: on\n"
        "          ^\n"
        "  remedy: write true, or quote it if it is text"
    )


@SCANNERS
def test_places_of_keys_values_and_missing_parts(pure: bool) -> None:
    """A value, its key and a part that does not exist all have a place."""
    text = "gmm:\n  rules:\n    - name: é x\n      tile: {batch_seq: 1}\n"
    document = parse(text, "f.yml", pure=pure)
    tile = ("gmm", "rules", 0, "tile", "batch_seq")
    assert str(document.place(tile)) == "f.yml:4:25"
    assert str(document.key_place(tile)) == "f.yml:4:14"
    assert document.key_place(tile).text == "      tile: {batch_seq: 1}"
    assert document.line(("gmm", "rules", 0)) == 3
    assert str(document.place((*tile[:-1], "mlp_dim"))) == "f.yml:4:13"
    assert str(document.key_place(("gmm", "rules", 7, "x"))) == "f.yml:3:5"
    assert (document.has(tile), document.has(("gmm", "rules", 1))) == (True, False)


@SCANNERS
def test_lines_are_counted_as_editors_do(pure: bool) -> None:
    """Windows line ends count once, and the byte order mark not at all."""
    document = parse(b"\xef\xbb\xbfa: 1\r\nb: on\r\n", "f.yml", pure=pure)
    (problem,) = document.problems
    assert str(problem.place) == "f.yml:2:4"
    assert problem.place is not None
    assert problem.place.text == "b: on"


@SCANNERS
def test_duplicate_keys_are_refused_with_both_places(pure: bool) -> None:
    """The second of two equal keys is the problem, and names the line of the first."""
    (problem,) = parse("a: 1\nb: {c: 1,\n c: 2}\n", "f.yml", pure=pure).problems
    assert problem.code == "duplicate-key"
    assert problem.message == "the key 'c' is given twice, first on line 2"
    assert str(problem.place) == "f.yml:3:2"


@SCANNERS
def test_merge_keys(pure: bool) -> None:
    """Own keys win over merged ones, wherever they stand; merging may be repeated."""
    text = "x: &x {a: 1, b: 2}\ny: &y {<<: *x, c: 3}\nz: {b: 9, <<: *y, d: 4}\n"
    document = parse(text, "f.yml", pure=pure)
    assert document.problems == ()
    assert isinstance(document.value, dict)
    assert document.value["z"] == {"b": 9, "d": 4, "a": 1, "c": 3}
    assert str(document.place(("z", "a"))) == "f.yml:1:11"


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (
            "x: &x {a: 1}\ny: &y {a: 2}\nz: {<<: [*x, *y]}",
            "duplicate-key",
            "two merged mappings give 'a': on line 1 and on line 2",
        ),
        (
            "x: &x {a: 1}\ny: &y {b: 2}\nz: {<<: *x, <<: *y}",
            "duplicate-key",
            "the key << is given twice",
        ),
        (
            "x: &x {a: 1}\nz: {<<: *x, b: 1, b: 2}",
            "duplicate-key",
            "the key 'b' is given twice, first on line 2",
        ),
        ("z: {<<: 3}", "merge", "<< merges mappings only"),
        ("z: {<<: [3]}", "merge", "<< merges mappings only"),
    ],
)  # fmt: skip
def test_merges_that_lose_something(text: str, code: str, message: str) -> None:
    """A key that two merged mappings give is as much a duplicate as one that is written twice."""
    (problem,) = parse(text, "f.yml").problems
    assert (problem.code, problem.message) == (code, message)


@SCANNERS
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a: !!python/object/apply:os.system ['true']", "tag"),
        ("a: !!python/name:os.system", "tag"),
        ("a: !!binary aGk=", "tag"),
        ("a: !!set {x, y}", "tag"),
        ("a: !mine 3", "tag"),
        ("a: !!int '3'", "tag"),
        ("a: *nowhere", "no-anchor"),
        ("a: &a [*a]", "recursive-alias"),
        ("a: &a {b: *a}", "recursive-alias"),
        ("1: x", "key-not-text"),
        ("? [a]\n: b", "key-not-text"),
        ("a: 1\n---\nb: 2", "two-documents"),
        ("a: [", "syntax"),
        ("a: 'x", "syntax"),
        ("\ta: 1", "syntax"),
        ("a: b: c", "syntax"),
        ("a: \x00", "bad-character"),
        ("a: \x1b[31m", "bad-character"),
        ("a: " + "9" * 5000, "number-too-long"),
    ],
)
def test_what_is_refused(text: str, code: str, pure: bool) -> None:
    """Both scanners refuse the same texts, with the same code and at the same place."""
    (problem,) = parse(text, "f.yml", pure=pure).problems
    (other,) = parse(text, "f.yml", pure=not pure).problems
    assert problem.code == code
    assert problem.place == other.place
    assert problem.place is not None
    assert problem.place.column is not None


def test_a_text_tag_is_allowed() -> None:
    """``!!str`` is a way to say that a number is text."""
    assert parse("a: !!str 512", "f.yml").value == {"a": "512"}


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("a: {b: >=4096}", "quote a value that starts with a sign YAML reserves"),
        ("a: >=4096", "quote a value that starts with a sign YAML reserves"),
        ("a: %128", "quote a value that starts with a sign YAML reserves"),
        ("a: @x", "quote a value that starts with a sign YAML reserves"),
        ("a: *x", 'quote it if it is a pattern: "*x"'),
        ("a:\n\t- b", "indent with spaces, not with tabs"),
        ("a: b: c", "quote a value that holds ': '"),
    ],
)
def test_remedies_of_common_slips(text: str, remedy: str) -> None:
    """A comparison without quotes, a tab and a stray colon get their own remedy."""
    (problem,) = parse(text, "f.yml").problems
    assert problem.remedy is not None
    assert problem.remedy.startswith(remedy)


def test_bytes_that_are_not_utf8() -> None:
    """The first wrong byte has a place, and the line is shown as far as it can be read."""
    (problem,) = parse("a: é\nb: ".encode() + b"\xff\xfe: x", "f.yml").problems
    assert problem.code == "bad-encoding"
    assert problem.message == "the byte 0xff is not UTF-8"
    assert str(problem.place) == "f.yml:2:4"
    assert codes("a: 1".encode("utf-16")) == ["bad-encoding"]


@SCANNERS
def test_limits(pure: bool) -> None:
    """Size, depth, number of values, alias expansion and number of problems are bounded."""
    small = Limits(max_bytes=200, max_depth=4, max_nodes=20, max_alias_nodes=10, max_problems=3)
    assert codes("x" * 201, pure=pure, limits=small) == ["too-large"]
    assert codes("[" * 5 + "]" * 5, pure=pure, limits=small) == ["too-deep"]
    assert codes("[" * 4 + "]" * 4, pure=pure, limits=small) == []
    assert codes(f"[{'1, ' * 19}1]", pure=pure, limits=small) == ["too-large"]
    assert codes(f"[{'1, ' * 18}1]", pure=pure, limits=small) == []
    bomb = "a: &a [1, 1, 1]\nb: &b [*a, *a]\nc: [*b]"
    assert codes(bomb, pure=pure, limits=small) == ["alias-bomb"]
    ladder = "a: &a [1]\nb: &b [*a]\nc: &c [*b]\nd: [*c]"
    assert codes(ladder, pure=pure, limits=small) == ["too-deep"]
    many = codes("[on, on, on, on, on]", pure=pure, limits=small)
    assert many == ["ambiguous-scalar"] * 3 + ["too-many-problems"]


def test_an_empty_text_is_nothing() -> None:
    """No text, and a text of comments, read as null at the first line."""
    for text in ("", "# comment\n"):
        document = parse(text, "f.yml")
        assert (document.readable, document.value, document.problems) == (True, None, ())
        assert str(document.place()).startswith("f.yml:1:")


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yml")), ids=lambda path: path.stem)
def test_both_scanners_agree_on_every_example(path: Path) -> None:
    """With and without libyaml a file gives the same value, problems and places."""
    fast, slow = (parse(path.read_bytes(), path.name, pure=pure) for pure in (False, True))
    assert fast.value == slow.value
    assert [(p.code, p.place) for p in fast.problems] == [(p.code, p.place) for p in slow.problems]


_WORDS = st.sampled_from(["a", "b", "on", "1", "0512", "1.5", "null", '"x"', "'on'", ">=1", "é"])


@given(
    st.recursive(
        _WORDS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]"),
            st.lists(st.tuples(_WORDS, inner), max_size=4).map(
                lambda pairs: f"{{{', '.join(f'{k}: {v}' for k, v in pairs)}}}"
            ),
        ),
        max_leaves=20,
    )
)
def test_both_scanners_agree_on_generated_texts(text: str) -> None:
    """The two scanners give one value and the same problems at the same places."""
    fast, slow = (parse(text, "f.yml", pure=pure) for pure in (False, True))
    assert fast.readable == slow.readable
    if fast.readable:
        assert fast.value == slow.value
        assert fast.problems == slow.problems
