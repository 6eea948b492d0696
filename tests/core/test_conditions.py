"""Conditions: one meaning, one node; what is refused; answers with reasons; versions and sizes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version as Reference

from tilepolicy.model.bytesize import BytesError, parse_bytes, show_bytes
from tilepolicy.model.condition_text import ConditionError, normalize_value, parse_condition
from tilepolicy.model.conditions import AnyOf, Condition, Equals, Glob, Interval, Multiple, NotEqual
from tilepolicy.model.factnames import FACTS, Fact, find_fact, suggest_fact
from tilepolicy.versions import Version


def fact(name: str) -> Fact:
    """A fact that must exist."""
    found = find_fact(name, arguments=True)
    assert found is not None
    return found


def condition(name: str, raw: Any) -> Condition:
    """The condition of a fact."""
    return parse_condition(fact(name), raw)


@pytest.mark.parametrize(
    ("name", "spellings", "node"),
    [
        ("layer", ["wi", ["wi"], ["wi", "wi"], "wi*", "w[i]"], Equals("text", "wi")),
        ("device", ["v7x", "tpu7x", "TPU7x", "ironwood"], Equals("text", "v7x")),
        ("device", ["v6e", "TPU v6 lite", "trillium"], Equals("text", "v6e")),
        (
            "batch_seq",
            [512, "==512", "512..512", ">=512,<=512", ">511,<513"],
            Equals("number", 512),
        ),
        ("batch_seq", [">=4096", ">4095", ">=4096.0", ">= 4096"], Interval("number", 4096)),
        ("batch_seq", ["<4096", "<=4095"], Interval("number", None, 4095)),
        (
            "batch_seq",
            ["1024..8192", ">=1024,<=8192", ">1023,<8193"],
            Interval("number", 1024, 8192),
        ),
        ("batch_seq", ["%128", "% 128"], Multiple(128)),
        ("batch_seq", ["!=128"], NotEqual("number", 128)),
        ("per_device_batch_size", [">0.5"], Interval("number", 0.5, None, low_open=True)),
        ("per_device_batch_size", [2, 2.0, "==2.0"], Equals("number", 2)),
        ("model_name", ["deepseek3*"], Glob("deepseek3*")),
        ("model_name", ["a", ["a"]], Equals("text", "a")),
        ("use_tokamax_gmm", [True, [True]], Equals("flag", True)),
        ("arg.causal", [True], Equals("flag", True)),
        ("arg.q.dim0", [8], Equals("number", 8)),
    ],
)
def test_spellings_of_one_meaning_are_one_node(
    name: str, spellings: list[Any], node: Condition
) -> None:
    """Parsing normalises: equal meanings give equal nodes, hashes and texts."""
    for raw in spellings:
        parsed = condition(name, raw)
        assert parsed == node
        assert hash(parsed) == hash(node)
        assert str(parsed) == str(node)


def test_lists_have_no_order() -> None:
    """A list of alternatives is a set, and a glob over a closed list is one too."""
    assert condition("pass", ["fwd", "dlhs"]) == condition("pass", ["dlhs", "fwd", "dlhs"])
    assert condition("pass", "d*") == condition("pass", ["drhs", "dlhs"])
    mixed = condition("batch_seq", [64, ">=4096", "%256"])
    assert isinstance(mixed, AnyOf)
    assert mixed == condition("batch_seq", ["%256", ">4095", 64])


@pytest.mark.parametrize("fact_name", sorted(FACTS))
def test_the_normal_form_parses_to_itself(fact_name: str) -> None:
    """``str(condition)`` means the same when a policy writes it."""
    by_kind: dict[str, list[Any]] = {
        "count": [5, ">=5", "<=5", "5..9", "%8", "!=3", ">=8,%8"],
        "version": ["0.0.17", ">=0.0.14", "<1", "0.1..0.2", "!=0.3", ">=0.1,<0.2", "0.0.*"],
    }
    known = FACTS[fact_name]
    for raw in by_kind.get(known.kind, list(known.choices)):
        parsed = parse_condition(known, raw)
        text: Any = str(parsed).strip('"')
        again = parse_condition(known, int(text) if text.isdigit() else text)
        assert again == parsed


@pytest.mark.parametrize(
    ("name", "raw", "value", "holds", "reason"),
    [
        ("batch_seq", ">=4096", 4096, True, "4096 is >=4096"),
        ("batch_seq", ">=4096", 2048, False, "2048 is not >=4096"),
        ("batch_seq", "1024..8192", 8192, True, "8192 is 1024..8192"),
        ("batch_seq", "1024..8192", 8193, False, "8193 is not 1024..8192"),
        ("batch_seq", "%128", 2880, False, "2880 is not %128"),
        ("batch_seq", "%128", 2944, True, "2944 is %128"),
        ("batch_seq", [1, "%128"], 1, True, "1 is [%128, 1]"),
        ("batch_seq", ">=256,%128", 128, False, "128 is not %128,>=256"),
        ("batch_seq", "!=128", 128, False, "128 is not !=128"),
        ("batch_seq", 1, True, False, "true is not 1"),
        ("batch_seq", 1, "1", False, '"1" is not 1'),
        ("batch_seq", ">=1", True, False, "true is not >=1"),
        ("batch_seq", "%1", True, False, "true is not %1"),
        ("use_tokamax_gmm", True, 1, False, "1 is not true"),
        ("per_device_batch_size", 2, 2.0, True, "2.0 is 2"),
        ("model_name", "deepseek3*", "deepseek3-671b", True, "deepseek3-671b is deepseek3*"),
        ("model_name", "deepseek3*", "Deepseek3", False, "Deepseek3 is not deepseek3*"),
        ("model_name", "llama?", "llama33", False, "llama33 is not llama?"),
        ("layer", ["wi", "wo"], "wo", True, "wo is [wi, wo]"),
        ("device", "v5*", "TPU v5 lite", True, "v5e is [v5e, v5p]"),
        ("tokamax", ">=0.0.14", "0.0.9", False, "0.0.9 is not >=0.0.14"),
        ("tokamax", ">=0.0.14", "0.0.17", True, "0.0.17 is >=0.0.14"),
        ("tokamax", "0.0.17", "0.0.17.0", True, "0.0.17 is 0.0.17"),
        ("jax", "<0.12", "0.12.0rc1", True, "0.12rc1 is <0.12"),
        ("jax", "0.12.*", "0.12.0.1", True, "0.12.0.1 is 0.12.*"),
        ("jax", ">=0.8", "unknown", False, "unknown is not >=0.8"),
        ("jax", ">=0.8", "0.8.0+cuda", True, "0.8 is >=0.8"),
    ],
)
def test_answers_have_reasons(name: str, raw: Any, value: Any, holds: bool, reason: str) -> None:
    """A condition answers for the value of its fact, strict in kinds, and says why."""
    answer = condition(name, raw).evaluate(normalize_value(fact(name), value))
    assert (answer.holds, answer.reason) == (holds, reason)


@pytest.mark.parametrize(
    ("name", "raw", "code", "message"),
    [
        ("batch_seq", True, "condition", "batch_seq is a whole number, not true"),
        ("batch_seq", "512", "condition", "batch_seq is a whole number, not the text '512'"),
        ("batch_seq", 0.5, "unreachable", "batch_seq is a whole number, never 0.5"),
        ("batch_seq", -1, "unreachable", "batch_seq is never -1"),
        ("batch_seq", "<0", "unreachable", "batch_seq is never <0"),
        ("batch_seq", ">=8,<4", "unreachable", "nothing is >=8,<4"),
        ("batch_seq", "==8,>9", "unreachable", "nothing is ==8,>9"),
        ("batch_seq", "%128,1..100", "unreachable", "nothing is %128,1..100"),
        ("batch_seq", "8..4", "unreachable", "the range 8..4 is empty"),
        ("batch_seq", ">=", "condition", "'>=' is no comparison"),
        ("batch_seq", ">=x", "condition", "'x' is not a number"),
        ("batch_seq", ">=1e3", "condition", "'1e3' is not a number"),
        ("batch_seq", "%-8", "condition", "'%-8' is no comparison"),
        ("batch_seq", "", "condition", "the condition on batch_seq is empty"),
        ("batch_seq", "9" * 300, "condition", "the condition on batch_seq is too long"),
        ("batch_seq", None, "condition", "batch_seq needs a value, not nothing"),
        ("batch_seq", [[1]], "condition", "batch_seq needs a value, not a list in a list"),
        ("batch_seq", {"a": 1}, "condition", "batch_seq needs a value, not a mapping"),
        ("batch_seq", float("inf"), "condition", "batch_seq is never inf"),
        ("batch_seq", [], "unreachable", "an empty list of batch_seq can never match"),
        ("layer", 1, "condition", "layer is a name, not the number 1"),
        ("layer", "x*", "unknown-value", "layer is never 'x*'"),
        ("layer", ">wi", "condition", "layer is a name: comparisons are for numbers and versions"),
        ("device", "v5p-128", "unknown-value", "device is never 'v5p-128'"),
        ("use_tokamax_gmm", 1, "condition", "use_tokamax_gmm is true or false, not the number 1"),
        ("tokamax", True, "condition", "tokamax is a version, not true"),
        ("tokamax", "new", "condition", "'new' is not a version"),
        ("tokamax", ">=new", "condition", "'new' is not a version"),
        ("tokamax", "%2", "condition", "'%2' is no comparison"),
        ("jax", "0.9..0.8", "unreachable", "the range 0.9..0.8 is empty"),
    ],
)
def test_conditions_that_are_refused(name: str, raw: Any, code: str, message: str) -> None:
    """What means nothing for a fact, or can never hold, is an error with a remedy."""
    with pytest.raises(ConditionError) as caught:
        condition(name, raw)
    assert (caught.value.code, caught.value.message) == (code, message)
    assert caught.value.remedy


def test_facts_by_name() -> None:
    """Derived facts, MaxText's keys and arguments of calls are facts; near misses are suggested."""
    assert fact("training_objective").kind == "any"
    assert fact("scan_layers").kind == "flag"
    assert fact("max_target_length").kind == "number"
    assert (fact("arg.q.rank").kind, fact("arg.q.dtype").kind) == ("count", "name")
    assert find_fact("arg.q") is None
    assert find_fact("nonsense") is None
    assert suggest_fact("embed_dims") == "embed_dim"
    assert suggest_fact("trainin_objective") == "training_objective"
    assert suggest_fact("xyzzy") is None


_VERSIONS = st.from_regex(
    re.compile(
        r"([0-9]!)?[0-9]{1,2}(\.[0-9]{1,2}){0,3}((a|b|rc)[0-9])?(\.post[0-9])?(\.dev[0-9])?", re.A
    ),
    fullmatch=True,
)


@given(_VERSIONS, _VERSIONS)
def test_versions_are_ordered_as_packaging_orders_them(left: str, right: str) -> None:
    """Order and equality are those of PEP 440, as its reference implementation has them."""
    ours, theirs = (Version.parse(left), Version.parse(right)), (Reference(left), Reference(right))
    assert ours[0] is not None
    assert ours[1] is not None
    assert (ours[0] < ours[1]) == (theirs[0] < theirs[1])
    assert (ours[0] == ours[1]) == (theirs[0] == theirs[1])
    assert Version.parse(str(ours[0])) == ours[0]


@pytest.mark.parametrize(
    "text", ["v1.0", "1.0-1", "1.0.rev2", "1.0alpha", "1.0_c3", "2!1.0.preview"]
)
def test_loose_spellings_of_versions(text: str) -> None:
    """Spellings that PEP 440 allows are read as packaging reads them."""
    version = Version.parse(text)
    assert version is not None
    spelled = Version.parse(str(Reference(text)))
    assert version == spelled
    assert hash(version) == hash(spelled)


@pytest.mark.parametrize("text", ["", "x", "1..2", "1.0.x", "1" * 200])
def test_texts_that_are_no_version(text: str) -> None:
    """Anything else is no version."""
    assert Version.parse(text) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("128MiB", 134217728),
        ("128MB", 128000000),
        ("128 MiB", 134217728),
        ("1GiB", 2**30),
        ("1.5GiB", 1610612736),
        ("0.5kB", 500),
        ("2KiB", 2048),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """Binary and decimal units are distinct; fractions must give whole bytes."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("128", "'128' is no size in bytes", "write a number with a unit: 128MiB"),
        ("-1MB", "'-1MB' is no size in bytes", "write a number with a unit: 128MiB"),
        (
            "128mb",
            "'mb' is no unit of bytes",
            "write 128MB (128,000,000 bytes) or 128MiB (134,217,728 bytes)",
        ),
        (
            "1G",
            "'G' is no unit of bytes",
            "write 1GB (1,000,000,000 bytes) or 1GiB (1,073,741,824 bytes)",
        ),
        (
            "1bit",
            "'bit' is no unit of bytes",
            "write one of B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB",
        ),
        ("0.3B", "0.3B is no whole number of bytes", "write a smaller unit"),
    ],
)
def test_sizes_that_are_refused(text: str, message: str, remedy: str) -> None:
    """A sloppy unit is not guessed: both readings are shown with their bytes."""
    with pytest.raises(BytesError, match=re.escape(message)) as caught:
        parse_bytes(text)
    assert caught.value.remedy == remedy
    assert show_bytes(1024) == "1,024 bytes"
