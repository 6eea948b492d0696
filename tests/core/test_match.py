"""The rule index: first match per field, undecidable rules, tables, nearest, plain scans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilepolicy.match import RuleIndex
from tilepolicy.match.factindex import FactIndex, bits_of, mask_of
from tilepolicy.match.index import MAX_LOSERS
from tilepolicy.match.rules import Facts, Found, Measured, Rule, Table
from tilepolicy.model.condition_text import normalize_value, parse_condition
from tilepolicy.model.factnames import find_fact
from tilepolicy.model.when import When


def when(**conditions: Any) -> When:
    """Conditions by fact; ``pass_`` stands for ``pass``."""
    parsed = {}
    for name, raw in conditions.items():
        fact = find_fact(name.rstrip("_"))
        assert fact is not None
        parsed[fact.name] = parse_condition(fact, raw)
    return When.of(parsed)


def rule(name: str, values: Mapping[str, Any], **conditions: Any) -> Rule:
    """A rule in line 7 of p.yml."""
    return Rule(name, when(**conditions), dict(values), file="p.yml", line=7)


def values(index: RuleIndex, facts: Facts) -> dict[str, Any]:
    """The decided values of a lookup."""
    return {name: choice.value for name, choice in index.lookup(facts).tile.items()}


def test_the_first_match_wins_for_each_field() -> None:
    """Fields that a rule leaves out are decided by later rules; losers are kept in order."""
    index = RuleIndex(
        [
            rule("a", {"batch_seq": 1}, layer="wi"),
            rule("b", {"batch_seq": 2, "embed_dim": 2}),
            rule("c", {"embed_dim": 3, "mlp_dim": 3}, layer="wo"),
            rule("d", {"embed_dim": 4, "mlp_dim": 4}),
        ]
    )
    verdict = index.lookup({"layer": "wi"})
    assert {n: c.value for n, c in verdict.fields.items()} == {
        "batch_seq": 1,
        "embed_dim": 2,
        "mlp_dim": 4,
    }
    origin = verdict.tile["batch_seq"].origin
    assert (origin.kind, origin.name, origin.file, origin.line) == ("rule", "a", "p.yml", 7)
    assert origin.reason == "when layer: wi"
    assert [(lost.name, lost.value, lost.reason) for lost in origin.lost] == [
        ("b", 2, "an earlier rule decides")
    ]
    assert verdict.tile["mlp_dim"].origin.reason == "applies always"
    assert verdict.undecidable == {}


def test_an_authors_reason_is_kept() -> None:
    """The reason of a rule is the author's, if one was given."""
    noted = Rule("a", When(), {"batch_seq": 1}, note="measured", kind="lock")
    choice = RuleIndex([noted]).lookup({}).tile["batch_seq"]
    assert (choice.origin.kind, choice.origin.reason) == ("lock", "measured")


def test_only_some_losers_are_kept() -> None:
    """The number of losers in an origin is bounded, so that a lookup is too."""
    index = RuleIndex(rule(f"r{i}", {"batch_seq": i + 1}) for i in range(100))
    assert len(index.lookup({}).tile["batch_seq"].origin.lost) == MAX_LOSERS


def test_undecidable_rules() -> None:
    """Only rules that no known fact rules out, and that come before the deciding one, count."""
    index = RuleIndex(
        [
            rule("needs model", {"batch_seq": 1}, layer="wi", model_name="x"),
            rule("ruled out", {"batch_seq": 2}, layer="wo", model_name="x"),
            rule("decides", {"batch_seq": 3}, layer="wi"),
            rule("too late", {"batch_seq": 4}, model_name="x"),
            rule("other field", {"mlp_dim": 5}, model_name="x", num_groups=8),
        ]
    )
    verdict = index.lookup({"layer": "wi"})
    assert verdict.tile["batch_seq"].origin.name == "decides"
    assert verdict.undecidable == {
        "needs model": ("model_name",),
        "other field": ("model_name", "num_groups"),
    }
    asked = index.lookup({"layer": "wi"}, ["batch_seq"])
    assert set(asked.undecidable) == {"needs model"}


def test_rules_of_one_name_are_told_apart_by_their_place() -> None:
    """An extended policy may have a rule of the same name."""
    index = RuleIndex([rule("same", {"batch_seq": 1}, layer="wi") for _ in range(2)])
    assert list(index.lookup({}).undecidable) == ["same (p.yml:7)"]


def test_facts_are_normalised() -> None:
    """Devices in any spelling and versions as text are compared by what they mean."""
    index = RuleIndex([rule("a", {"batch_seq": 1}, device="v6e", tokamax=">=0.0.14")])
    assert values(index, {"device": "TPU v6 lite", "tokamax": "0.0.17"}) == {"batch_seq": 1}
    assert values(index, {"device": "TPU v6 lite", "tokamax": "0.0.9"}) == {}


def test_explain_gives_every_rule_with_its_reason() -> None:
    """Each rule matches, fails on a known fact, or lacks facts."""
    index = RuleIndex(
        [
            rule("a", {"batch_seq": 1}, layer="wi", batch_seq=">=4096"),
            rule("b", {"batch_seq": 1}, layer="wi", model_name="x"),
            rule("c", {"batch_seq": 1}, layer="wi"),
            rule("d", {"batch_seq": 1}),
        ]
    )
    answers = index.explain({"layer": "wi", "batch_seq": 512})
    assert [(a.rule.name, a.outcome, a.reasons, a.missing) for a in answers] == [
        ("a", "fails", ("batch_seq 512 is not >=4096",), ()),
        ("b", "undecidable", ("model_name is not known",), ("model_name",)),
        ("c", "matches", ("layer wi is wi",), ()),
        ("d", "matches", (), ()),
    ]


def test_nearest_names_the_rule_that_fails_least() -> None:
    """Fewest failing conditions first, then the smallest ratio of sizes."""
    index = RuleIndex(
        [
            rule("far", {"batch_seq": 1}, layer="wi", batch_seq=64),
            rule("near", {"batch_seq": 1}, layer="wi", batch_seq="1024..2048"),
            rule("two", {"batch_seq": 1}, layer="wo", batch_seq=4095),
        ]
    )
    nearest = index.nearest({"layer": "wi", "batch_seq": 4096})
    assert str(nearest) == "rule 'near' (p.yml:7): batch_seq 4096 is not 1024..2048"
    assert index.nearest({"layer": "wi", "batch_seq": 64}) is None
    assert RuleIndex().nearest({"layer": "wi"}) is None
    waiting = index.nearest({"batch_seq": 64})
    assert str(waiting) == "rule 'far' (p.yml:7): layer is not known"


def table(**nearest: float) -> Table:
    """Two points, a factor of four apart."""
    return Table(
        nearest,
        (
            Measured({"batch_seq": 1024, "embed_dim": 2048}, {"batch_seq": 512}, "first"),
            Measured({"batch_seq": 4096, "embed_dim": 2048}, {"batch_seq": 1024, "mlp_dim": 256}),
        ),
    )


@pytest.mark.parametrize(
    ("rows", "tile", "reason"),
    [
        (1024, {"batch_seq": 512}, "table point FIRST, distance 0.00"),
        (2048, {"batch_seq": 512}, "table point FIRST, distance 1.00"),
        (2049, {"batch_seq": 1024, "mlp_dim": 256}, "table point SECOND, distance 1.00"),
        (8192, {"batch_seq": 1024, "mlp_dim": 256}, "table point SECOND, distance 1.00"),
        (512, {"batch_seq": 512}, "table point FIRST, distance 1.00"),
    ],
)
def test_tables_give_the_nearest_point(rows: int, tile: dict[str, int], reason: str) -> None:
    """The point with the smallest distance within reach wins, the earlier on a tie."""
    index = RuleIndex([Rule("t", When(), table=table(batch_seq=2.0, embed_dim=1.0))])
    verdict = index.lookup({"batch_seq": rows, "embed_dim": 2048})
    assert {n: c.value for n, c in verdict.tile.items()} == tile
    reason = reason.replace("FIRST", "batch_seq 1024, embed_dim 2048 (first)")
    reason = reason.replace("SECOND", "batch_seq 4096, embed_dim 2048")
    assert verdict.tile["batch_seq"].origin.reason == reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (
            {"batch_seq": 8193, "embed_dim": 2048},
            "no point is near enough: from the nearest, batch_seq 4096, embed_dim 2048, "
            "batch_seq 8193 is 2.0002x away, 2x is allowed",
        ),
        (
            {"batch_seq": 1024, "embed_dim": 2049},
            "no point is near enough: from the nearest, batch_seq 1024, embed_dim 2048 (first), "
            "embed_dim 2049 is 1.0005x away, it must be equal",
        ),
        ({"batch_seq": 0, "embed_dim": 2048}, "batch_seq is 0, which is no size"),
        ({"batch_seq": True, "embed_dim": 2048}, "batch_seq is True, which is no size"),
        ({"batch_seq": "x", "embed_dim": 2048}, "batch_seq is x, which is no size"),
    ],
)
def test_tables_are_bounded(facts: dict[str, Any], reason: str) -> None:
    """Beyond the declared ratio a table says nothing, and says why."""
    index = RuleIndex([Rule("t", When(), table=table(batch_seq=2.0, embed_dim=1.0))])
    assert index.lookup(facts).tile == {}
    (answer,) = index.explain(facts)
    assert (answer.outcome, answer.reasons) == ("fails", (reason,))
    assert str(index.nearest(facts)) == f"rule 't': {reason}"


def test_a_later_rule_decides_where_a_table_does_not() -> None:
    """A table out of reach, or without a field, leaves the field to later rules."""
    index = RuleIndex(
        [
            Rule("t", When(), table=table(batch_seq=2.0, embed_dim=1.0), note="from runs"),
            rule("always", {"batch_seq": 7, "mlp_dim": 7}),
        ]
    )
    near = index.lookup({"batch_seq": 1024, "embed_dim": 2048})
    assert {n: c.value for n, c in near.tile.items()} == {"batch_seq": 512, "mlp_dim": 7}
    assert near.tile["batch_seq"].origin.reason.startswith("from runs; table point")
    assert values(index, {"batch_seq": 64, "embed_dim": 2048}) == {"batch_seq": 7, "mlp_dim": 7}


def test_a_table_without_its_facts_is_undecidable() -> None:
    """The facts of ``nearest`` are needed like those of ``when``."""
    index = RuleIndex([Rule("t", when(layer="wi"), table=table(batch_seq=2.0, embed_dim=1.0))])
    assert index.lookup({"batch_seq": 1024}).undecidable == {"t": ("layer", "embed_dim")}


def test_a_neighbours_tile_is_cut_to_the_call() -> None:
    """A tile of a neighbour may not exceed the next multiple of 128; a measured one may."""
    points = (Measured({"mlp_dim": 1024}, {"mlp_dim": 2048, "embed_dim": 9}),)
    index = RuleIndex([Rule("t", When(), table=Table({"mlp_dim": 2.0}, points))])
    choice = index.lookup({"mlp_dim": 700, "embed_dim": 64}).tile["mlp_dim"]
    assert choice.value == 768
    assert choice.origin.reason == (
        f"table point mlp_dim 1024, distance {math.log2(1024 / 700):.2f}; "
        "mlp_dim cut from 2048 to 768"
    )
    assert values(index, {"mlp_dim": 1024}) == {"mlp_dim": 2048, "embed_dim": 9}


_COUNTS = st.integers(0, 12)
_CONDITIONS = st.fixed_dictionaries(
    {},
    optional={
        "layer": st.sampled_from(["wi", "wo", ["wi", "wo"], "w*"]),
        "batch_seq": st.one_of(
            _COUNTS,
            st.builds(lambda a, b: f"{min(a, b)}..{max(a, b)}", _COUNTS, _COUNTS),
            st.builds(lambda a, b: [a, f">={b}"], _COUNTS, _COUNTS),
            st.builds(lambda s, a: f"{s}{a}", st.sampled_from([">=", ">", "<=", "!="]), _COUNTS),
            st.builds(lambda a, b: [f"{a}..{a + 1}", f"{b}..{b + 2}"], _COUNTS, _COUNTS),
            st.sampled_from(["%2", "%3", ">=2,%3"]),
        ),
        "model_name": st.sampled_from(["a", "ab", "a*", ["b", "a?"]]),
        "tokamax": st.sampled_from([">=0.0.2", "0.0.1", "0.0.1..0.0.2", "<0.0.3", "0.0.*"]),
        "per_device_batch_size": st.sampled_from([">0.5", "<=2", 1, "0.5..1.5", ">1,<3"]),
    },
)
_FACTS = st.fixed_dictionaries(
    {},
    optional={
        "layer": st.sampled_from(["wi", "wo"]),
        "batch_seq": _COUNTS,
        "model_name": st.sampled_from(["a", "ab", "abc", "b"]),
        "tokamax": st.sampled_from(["0.0.1", "0.0.2", "0.0.10"]),
        "per_device_batch_size": st.sampled_from([0.5, 1, 1.0, 1.5, 3, True]),
    },
)
_FIELDS = st.dictionaries(
    st.sampled_from(["batch_seq", "embed_dim", "mlp_dim"]), st.integers(1, 9), min_size=1
)


def scan(rules: list[Rule], facts: Facts) -> tuple[dict[str, str], set[str]]:
    """The plain meaning of a lookup: deciding rule by field, and undecidable rules."""
    decided: dict[str, str] = {}
    undecidable: dict[str, set[str]] = {}
    fields = {name for rule in rules for name in rule.values}
    for each in rules:
        known = all(
            condition.holds(normalize_value(find_fact(fact), facts[fact]))
            for fact, condition in each.when
            if fact in facts
        )
        missing = [fact for fact, _ in each.when if fact not in facts]
        for name in each.values:
            if known and missing and name not in decided:
                undecidable.setdefault(name, set()).add(each.name)
            elif known and not missing:
                decided.setdefault(name, each.name)
    return decided, {rule for name in fields for rule in undecidable.get(name, ())}


@settings(max_examples=200)
@given(st.lists(st.tuples(_CONDITIONS, _FIELDS), max_size=12), st.lists(_FACTS, max_size=4))
def test_the_index_agrees_with_a_plain_scan(
    given_rules: list[tuple[dict[str, Any], dict[str, int]]], calls: list[dict[str, Any]]
) -> None:
    """For any rules and facts the index finds what asking each rule in order finds."""
    rules = [rule(f"r{i}", v, **c) for i, (c, v) in enumerate(given_rules)]
    index = RuleIndex(rules)
    for facts in calls:
        verdict = index.lookup(facts)
        decided, undecidable = scan(rules, facts)
        assert {n: c.origin.name for n, c in verdict.fields.items()} == decided
        assert set(verdict.undecidable) == undecidable
        nearest = index.nearest(facts)
        if nearest is not None and not undecidable:
            fails = [len(a.reasons) for a in index.explain(facts)]
            assert len(nearest.reasons) == min(fails)


@settings(max_examples=150)
@given(st.lists(_CONDITIONS, min_size=1, max_size=12), st.sampled_from(["batch_seq", "tokamax"]))
def test_implied_conditions_really_are(conditions: list[dict[str, Any]], name: str) -> None:
    """Where the index says that one condition implies another, every value agrees."""
    parsed = [when(**c) for c in conditions]
    items = [(i, dict(w)[name]) for i, w in enumerate(parsed) if name in dict(w)]
    fact = find_fact(name)
    index = FactIndex(fact, items)
    versions: list[Any] = ["0.0.0", "0.0.1", "0.0.2", "0.0.3", "0.0.2.1"]
    samples = [*range(16)] if name == "batch_seq" else versions
    for _, condition in items:
        for bit in bits_of(index.containing(condition)):
            wider = dict(items)[bit]
            for sample in samples:
                value = normalize_value(fact, sample)
                assert wider.holds(value) or not condition.holds(value)


@given(st.lists(st.integers(0, 300)))
def test_masks_hold_their_bits(bits: list[int]) -> None:
    """A mask gives back the bits it was made of, in order."""
    assert list(bits_of(mask_of(bits))) == sorted(set(bits))


def test_a_found_tile_says_why() -> None:
    """A rule without a table decides with its own values."""
    found = rule("a", {"batch_seq": 1}).decide({})
    assert found == Found({"batch_seq": 1}, "applies always")
