"""vLLM's and SGLang's fused-MoE files become starting points for Tokamax's Triton kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from format_files import VLLM_DEVICES, moe_entry, write_vllm_files
from hypothesis import given
from hypothesis import strategies as st

from tilepolicy.formats.fused_moe import TRITON_OP, parse_name, read_fused_moe
from tilepolicy.formats.records import FormatError
from tilepolicy.model.condition_text import parse_condition
from tilepolicy.model.factnames import find_fact

NAME = "E=8,N=14336,device_name=NVIDIA_H200.json"


def write(folder: Path, body: object, name: str = NAME) -> Path:
    """One file with a body."""
    path = folder / name
    path.write_text(json.dumps(body, indent=1), "utf-8")
    return path


def test_twenty_vllm_files_are_read(tmp_path: Path) -> None:
    """Six token counts, two matmuls each; block-quantized files are listed as unusable."""
    assert len(write_vllm_files(tmp_path)) == 20
    report = read_fused_moe(tmp_path, "vllm", top_k=2)
    report.raise_errors()
    assert len(report.entries) == 4 * 4 * 6 * 2
    assert len(report.unusable) == 4 * 6
    assert {one.reason for one in report.unusable} == {
        "quantized in blocks, which policies have no facts for"
    }
    assert {entry.kind for entry in report.entries} == {name.lower() for name in VLLM_DEVICES}
    assert {(entry.op, entry.device) for entry in report.entries} == {(TRITON_OP, "gpu")}


def test_an_entry_says_experts_sizes_types_and_its_range_of_rows(tmp_path: Path) -> None:
    """Rows are tokens times the experts of a token; the range ends in the middle."""
    body = {"64": moe_entry(16, 128, 128, SPLIT_K=2), "192": moe_entry(64, 256, 64)}
    first, _, second, _ = read_fused_moe(write(tmp_path, body), "vllm", top_k=2).entries
    assert first.facts == {
        "arg.lhs.dtype": "bfloat16",
        "arg.rhs.dtype": "bfloat16",
        "arg.rhs.dim0": 8,
        "arg.rhs.dim2": 28672,
        "arg.lhs.dim0": "<=256",
    }
    assert first.config == {
        "block_m": 16,
        "block_n": 128,
        "block_k": 128,
        "split_k": 2,
        "num_warps": 4,
        "num_stages": 3,
    }
    assert first.source == f"vllm {NAME}, 64 tokens"
    assert first.place.line == 2
    assert second.facts["arg.rhs.dim1"] == 14336
    assert second.facts["arg.lhs.dim0"] == "<=256"


@given(
    keys=st.lists(st.integers(1, 4096), min_size=1, max_size=8, unique=True),
    tokens=st.integers(1, 8192),
    top_k=st.integers(1, 9),
)
def test_every_number_of_rows_belongs_to_the_nearest_key_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int], tokens: int, top_k: int
) -> None:
    """Nearest by distance; on a tie the key that comes first in the file, as vLLM's min does."""
    body = {str(key): moe_entry(key, 1, 1) for key in keys}
    path = write(tmp_path_factory.mktemp("moe"), body)
    nearest = min(keys, key=lambda key: abs(key - tokens))
    fact = find_fact("arg.lhs.dim0", arguments=True)
    assert fact is not None
    matching = [
        entry.config["block_m"]
        for entry in read_fused_moe(path, "vllm", top_k=top_k).entries
        if "arg.rhs.dim2" in entry.facts
        and parse_condition(fact, entry.facts["arg.lhs.dim0"]).holds(tokens * top_k)
    ]
    assert matching == [nearest]


@pytest.mark.parametrize(("order", "first", "last"), [((64, 192), 256, 257), ((192, 64), 255, 256)])
def test_a_tie_belongs_to_the_key_that_comes_first_in_the_file(
    tmp_path: Path, order: tuple[int, int], first: int, last: int
) -> None:
    """128 tokens (256 rows) are as far from 64 as from 192."""
    path = write(tmp_path, {str(key): moe_entry(key, 1, 1) for key in order})
    entries = read_fused_moe(path, "vllm", top_k=2).entries
    assert {entry.facts["arg.lhs.dim0"] for entry in entries} == {f"<={first}", f">={last}"}


def test_int4_halves_the_intermediate_size_of_the_name(tmp_path: Path) -> None:
    """VLLM doubles N in the names of ``int4_w4a16`` files."""
    name = "E=8,N=28672,device_name=NVIDIA_H200,dtype=int4_w4a16.json"
    entry = read_fused_moe(write(tmp_path, {"1": moe_entry(1, 1, 1)}, name), "vllm", top_k=1)
    assert entry.entries[1].facts["arg.rhs.dim1"] == 14336
    assert entry.entries[1].facts["arg.rhs.dtype"] == "int4"
    assert entry.entries[1].facts["arg.lhs.dtype"] == "bfloat16"


def test_sglang_names_have_a_space_and_a_suffix(tmp_path: Path) -> None:
    """They are SGLang's only; files for the second matmul come first."""
    spaced = "E=8,N=128,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
    assert parse_name(spaced, "sglang").block_shape == "128, 128"
    for name in (spaced, NAME.replace(".json", "_down.json")):
        with pytest.raises(FormatError, match="is SGLang's: a space in block_shape") as caught:
            parse_name(name, "vllm")
        assert caught.value.problems[0].remedy == "import it with: tilepolicy import sglang"
    write(tmp_path, {"1": moe_entry(16, 16, 16)})
    write(tmp_path, {"1": moe_entry(32, 32, 32)}, NAME.replace(".json", "_down.json"))
    report = read_fused_moe(tmp_path, "sglang", top_k=1)
    assert [entry.config["block_m"] for entry in report.entries] == [32, 16, 16]


def test_entries_that_tokamax_cannot_have_are_listed(tmp_path: Path) -> None:
    """Other types, and devices that are no GPU."""
    for name, reason in (
        ("E=8,N=128,device_name=NVIDIA_H200,dtype=mxfp4_w4a4.json", "the element types mxfp4_w4a4"),
        ("E=8,N=128,device_name=Abacus.json", "Abacus is not a GPU that policies know"),
    ):
        report = read_fused_moe(write(tmp_path, {"1": moe_entry(1, 1, 1)}, name), "vllm", top_k=1)
        assert report.unusable[0].reason.startswith(reason)


@pytest.mark.parametrize(
    ("body", "message", "line"),
    [
        ({"64": {"BLOCK_SIZE_M": 16}}, "the entry has no BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps", 2),
        ({"64": 17}, "the entry is not an object", 2),
        ({"64": moe_entry(0, 1, 1)}, "BLOCK_SIZE_M is 0, not a positive whole number", 2),
        ({"64": {**moe_entry(1, 1, 1), "num_warps": True}}, "num_warps is True, not a positive", 2),
        ({"1": moe_entry(1, 1, 1), "many": {}}, "the key 'many' is not a number of tokens", 10),
        ({"-4": {}}, "the key '-4' is not a number of tokens", 2),
        ([], "the file is not an object", 1),
        ({}, "the file has no entries", 1),
        ({"triton_version": "3.5.0"}, "the file has no entries", 1),
    ],
)
def test_malformed_files_give_located_errors(
    tmp_path: Path, body: object, message: str, line: int
) -> None:
    """File, line and what is wrong."""
    path = write(tmp_path, body)
    with pytest.raises(FormatError, match=message) as caught:
        read_fused_moe(path, "vllm", top_k=2).raise_errors()
    (problem,) = caught.value.problems
    assert problem.place is not None
    assert (problem.place.file, problem.place.line) == (str(path), line)


def test_all_problems_of_a_directory_come_in_one_report(tmp_path: Path) -> None:
    """A file with a wrong name and one that is not JSON."""
    write(tmp_path, {}, "E=8.json")
    (tmp_path / NAME).write_text("{")
    report = read_fused_moe(tmp_path, "vllm", top_k=1)
    assert [problem.code for problem in report.problems] == ["bad-json", "bad-name"]


def test_sglang_files_have_no_version_key(tmp_path: Path) -> None:
    """There ``int(key)`` would fail on it."""
    with pytest.raises(FormatError, match="the key 'triton_version' is not a number of tokens"):
        read_fused_moe(write(tmp_path, {"triton_version": "3"}), "sglang", top_k=1).raise_errors()


def test_an_empty_directory_and_an_impossible_top_k_are_refused(tmp_path: Path) -> None:
    """Nothing to read is an error."""
    with pytest.raises(FormatError, match=r"no file E=….json in this directory"):
        read_fused_moe(tmp_path, "vllm", top_k=2)
    with pytest.raises(ValueError, match="top_k must be 1 or more, not 0"):
        read_fused_moe(tmp_path, "vllm", top_k=0)
