"""Tables in Python source are folded, never executed; tpu-inference's become records."""

from __future__ import annotations

from pathlib import Path

import pytest
from format_files import TPU_INFERENCE, write_tpu_inference
from hypothesis import given
from hypothesis import strategies as st

from tilepolicy.axes import GmmShape
from tilepolicy.formats import pytable
from tilepolicy.formats.pytable import Record, read_tables
from tilepolicy.formats.records import FormatError, GmmCall
from tilepolicy.formats.tpu_inference import GMM_OP, RPA_OP, read_tpu_inference

plain = st.recursive(
    st.integers(-(2**60), 2**60) | st.booleans() | st.none() | st.text(),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=10,
)


def source(folder: Path, text: str) -> Path:
    """A Python file with a text."""
    path = folder / "tuned_block_sizes.py"
    path.write_text(text, "utf-8")
    return path


@given(key=plain, value=plain)
def test_literals_are_read_as_python_reads_them(
    tmp_path_factory: pytest.TempPathFactory, key: object, value: object
) -> None:
    """Repr of nested tuples, numbers, text, booleans and None."""
    path = source(tmp_path_factory.mktemp("t"), f"T = {{{key!r}: {value!r}}}")
    (entry,) = read_tables(path)["T"].entries
    assert (entry.key, entry.value) == (key, value)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("256 * 5", 1280),
        ("-4 + 2 ** 0 if 0 else 1", None),
        ("(1 << 10) // 2 - 12 % 5", 510),
        ("WIDE * 2", 512),
        ("7 / 2", 3.5),
        ("'q_' + 'bfloat16'", "q_bfloat16"),
        ("jnp.bfloat16", "bfloat16"),
        ("Key(1, bq=WIDE)", Record("Key", (1,), {"bq": 256})),
    ],
)
def test_constants_are_folded(tmp_path: Path, expression: str, value: object) -> None:
    """Arithmetic, earlier constants, dotted names and records; None stands for a refusal."""
    table = read_tables(source(tmp_path, f"WIDE = 256\nT = {{1: {expression}}}\n"))["T"]
    if value is None:
        assert [problem.code for problem in table.problems] == ["not-constant"]
    else:
        assert table.entries[0].value == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("f()", None),
        ("__import__('os').system('touch gone')", None),
        ("[x for x in y]", "[x for x in y] is not a constant"),
        ("unknown", "unknown is not a constant"),
        ("10 ** 10 ** 10", "10 ** 10 is not folded"),
        ("'a' * 10 ** 9", "10 ** 9 is not folded"),
        ("'a' * 4", "'a' * 4 is not arithmetic on numbers"),
        ("1 // 0", "1 // 0: integer division or modulo by zero"),
        ("4611686018427387904 * 4", "4611686018427387904 * 4 is beyond 2**63"),
        ("1 << 10000", "1 << 10000 is beyond 2**63"),
        ("Key(**d)", "Key(**…) is not a constant"),
        ("{**d}", "a table that unpacks another (**) is not read"),
        ("(" * 33 + "1" + ",)" * 33, "nested more than 32 deep"),
    ],
)
def test_nothing_is_executed_and_what_is_no_constant_is_located(
    tmp_path: Path, expression: str, message: str | None
) -> None:
    """Calls are records at most; anything else has a line and a column."""
    table = read_tables(source(tmp_path, f"T = {{\n 1: 2,\n 3: {expression}}}"))["T"]
    assert table.entries[0].value == 2
    assert not (tmp_path / "gone").exists()
    if message is None:
        assert isinstance(table.entries[1].value, Record)
        return
    (problem,) = table.problems
    assert problem.message == message
    assert problem.place is not None
    assert problem.place.line == 3
    assert (problem.place.column or 0) >= 5


def test_columns_count_characters_not_bytes(tmp_path: Path) -> None:
    """Ast counts UTF-8 bytes; places count characters."""
    table = read_tables(source(tmp_path, "T = {'äöü': lambda: 0}"))["T"]
    assert table.problems[0].place is not None
    assert table.problems[0].place.column == len("T = {'äöü': ") + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("T = {1: }", r"tuned_block_sizes\.py:1:\d: error: not Python: "),
        ("T = '\0'", "not Python"),
        ("T = " + "(" * 5000, "not Python"),
    ],
)
def test_what_is_not_python_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """Syntax errors have a place; a file that cannot be parsed at all is named."""
    with pytest.raises(FormatError, match=message):
        read_tables(source(tmp_path, text))


def test_a_source_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing costs many times the size of the text."""
    monkeypatch.setattr(pytable, "MAX_BYTES", 10)
    with pytest.raises(FormatError, match="the file is larger than 10 bytes"):
        read_tables(source(tmp_path, "T = {1: 2, 3: 4}"))


def test_an_odd_escape_in_a_docstring_is_no_warning(tmp_path: Path) -> None:
    """Files of others are read quietly."""
    assert read_tables(source(tmp_path, '"""A \\d digit."""\nT: dict = {1: 2}')).keys() == {"T"}


def test_all_five_tables_are_read_from_one_directory(tmp_path: Path) -> None:
    """What a policy can say becomes entries, everything else is listed with its reason."""
    report = read_tpu_inference(write_tpu_inference(tmp_path), device="v7x")
    report.raise_errors()
    assert [entry.op for entry in report.entries].count(GMM_OP) == 2
    assert [entry.op for entry in report.entries].count(RPA_OP) == 4
    assert sorted(one.reason for one in report.unusable) == [
        "Tokamax's batched RPA takes query blocks in multiples of 16 and KV blocks in multiples of"
        " 128",
        "no Tokamax op has the eight blocks of this fused MoE kernel",
        "no Tokamax op multiplies a quantized matrix in these blocks",
        "no Tokamax op multiplies a quantized matrix in these blocks",
        "policies have no facts for TunableParams of this kernel",
        "quantized in blocks along k, which policies have no facts for",
    ]


def test_megablox_keys_give_the_forward_problem_on_the_local_experts(tmp_path: Path) -> None:
    """The table names no device: it is the one that the user named."""
    path = write_tpu_inference(tmp_path) / "megablox" / "tuned_block_sizes.py"
    first, second = read_tpu_inference(path, device="v6e").entries
    assert first.gmm == GmmCall("megablox", "fwd", GmmShape(128, 2560, 5120, 20))
    assert first.facts == {"dtype": "bfloat16", "weight_dtype": "float8_e4m3fn"}
    assert first.config == {"tile_m": 128, "tile_k": 2560, "tile_n": 5120}
    assert (first.device, first.source) == ("v6e", "tpu-inference megablox/tuned_block_sizes.py")
    assert first.place.line == 5
    assert second.config["tile_k"] == 2048
    assert read_tpu_inference(path).entries[0].device is None


def test_rpa_pairs_become_blocks_in_tokens(tmp_path: Path) -> None:
    """16 pages of 128 tokens are a KV block of 2048; the keys become facts of the call."""
    write_tpu_inference(tmp_path)
    v3 = read_tpu_inference(tmp_path / "ragged_paged_attention" / "v3" / "tuned_block_sizes.py")
    first = v3.entries[0]
    assert (first.device, first.config) == ("v7x", {"prefill_bq_sz": 32, "bkv_sz": 2048})
    assert first.facts == {
        "arg.queries.dtype": "bfloat16",
        "arg.queries.dim1": 8,
        "arg.queries.dim2": 256,
        "arg.keys.dim1": 4,
        "arg.kv_cache.dtype": "float8_e4m3fn",
        "arg.kv_cache.dim1": 128,
    }
    v2 = read_tpu_inference(tmp_path / "ragged_paged_attention" / "v2" / "tuned_block_sizes.py")
    assert {entry.device for entry in v2.entries} == {"v6e", "v5e"}
    assert v2.entries[0].facts["arg.queries.dim0"] == 1024


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("megablox", "(512, WIDE, 768)", "(512, 768)", "the value is not 3 positive whole numbers"),
        ("megablox", "(512, WIDE, 768)", "(512, -1, 768)", "the value is not 3 positive whole"),
        ("megablox", "'bfloat16', 'bfloat16'", "'bf17', 'bfloat16'", "'bf17' is not a known dtype"),
        ("megablox", "(512, WIDE, 768)", "tile()", "the value is not 3 positive whole numbers"),
        ("megablox", "(512, WIDE, 768)", "[t for t in x]", "is not a constant"),
        ("ragged_paged_attention/v3", "TPU v7", "Abacus", "'Abacus' is not a known device"),
        ("ragged_paged_attention/v3", "q_head-8", "heads-8", "are not of the form of RPA v3"),
        ("quantized_matmul", "TUNED_BLOCK_SIZES_RAW = {", "T = {", None),
    ],
)
def test_malformed_table_entries_are_located(
    tmp_path: Path, name: str, old: str, new: str, message: str | None
) -> None:
    """Names of tables do not matter; shapes of keys and values do."""
    text = TPU_INFERENCE[f"{name}/tuned_block_sizes.py"]
    assert old in text
    report = read_tpu_inference(source(tmp_path, text.replace(old, new, 1)), device="v6e")
    if message is None:
        report.raise_errors()
        return
    with pytest.raises(FormatError, match=message) as caught:
        report.raise_errors()
    assert all(p.place is not None and p.place.line for p in caught.value.problems)


def test_a_file_or_directory_without_tables_is_refused(tmp_path: Path) -> None:
    """An import of nothing is an error, not an empty policy."""
    with pytest.raises(FormatError, match=r"no file tuned\*\.py in this directory"):
        read_tpu_inference(tmp_path)
    report = read_tpu_inference(source(tmp_path, "T = {}\nDEFAULTS = {'a': 1}"))
    with pytest.raises(FormatError, match="no table of a known shape in this file"):
        report.raise_errors()
