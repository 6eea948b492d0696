"""``tilepolicy import``: from foreign files to a policy that loads and is hit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from format_files import (
    V1_OP,
    arguments,
    moe_entry,
    record,
    v1_config,
    write_cache,
    write_result,
    write_tpu_inference,
    write_vllm_files,
)
from hypothesis import example, given
from hypothesis import strategies as st

from tilepolicy import cli, formats, policy
from tilepolicy.axes import GmmShape
from tilepolicy.errors import TilepolicyError
from tilepolicy.formats.policies import fastest, policy_text
from tilepolicy.formats.records import FormatError, ImportReport
from tilepolicy.formats.tokamax_cache import read_cache_directory, read_cache_file, shipped_caches
from tilepolicy.formats.yamltext import comment, flow, scalar
from tilepolicy.resolution import FactValue

FORMATS = Path(formats.__file__).parent
SHAPE = GmmShape(m=4096, k=7168, n=2048, g=8)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of one command."""
    with pytest.raises(SystemExit) as exited:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    code = exited.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def call_facts(layer: str, pass_: str, **other: FactValue) -> dict[str, FactValue]:
    """Facts of a v1 call on v6e with the sizes of SHAPE, seen as the layer's."""
    embed, mlp = (SHAPE.k, SHAPE.n) if layer == "wi" else (SHAPE.n, SHAPE.k)
    facts: dict[str, FactValue] = {
        "device": "v6e",
        "backend": "tokamax_v1",
        "layer": layer,
        "pass": pass_,
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        "batch_seq": SHAPE.m,
        "embed_dim": embed,
        "mlp_dim": mlp,
        "num_groups": SHAPE.g,
    }
    return facts | other


@given(st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text())
@example("\x85")
@example("a\u2028b\ufeff")
@example("\ufffe\U0001f600")
def test_scalars_are_read_back_as_they_were(value: bool | int | float | str) -> None:
    """By the policy reader, which refuses what YAML 1.1 and 1.2 read differently."""
    from tilepolicy.source import parse

    text = value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
    document = parse(f"x: {scalar(value)}\n", "x.yml")
    assert not document.problems
    assert document.value == {"x": text}
    assert type(document.value["x"]) is type(text)


@pytest.mark.parametrize(
    "word", ["on", "no", "null", "0512", "1_024", "12:30", "1e3", "~", "-", ""]
)
def test_words_that_yaml_reads_as_something_else_are_quoted(word: str) -> None:
    """Also for readers of YAML 1.1."""
    assert yaml.safe_load(f"x: {scalar(word)}") == {"x": word}


def test_flow_mappings_and_comments_are_one_line_each() -> None:
    """The shapes of text that the writers are made of."""
    assert flow({"a": 1, "b": True, "c": "x y"}) == '{a: 1, b: true, c: "x y"}'
    assert comment("one\n\ntwo\n") == "# one\n#\n# two\n"


def test_a_measured_entry_serves_both_layers_with_its_axes_renamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As wi with embed = k, and as wo with embed = n; the origin names entry and time."""
    entries = {
        json.dumps(arguments(SHAPE, "dlhs")): {v1_config(512, 1792, 2048, 3): record(1.0, 2.5)}
    }
    write_cache(tmp_path, entries)
    code, out, _ = run(capsys, "import", "tokamax", tmp_path, "-o", tmp_path / "tuned.yml")
    assert code == 0
    assert out == f"{tmp_path}/tuned.yml: 2 rules, 2 table points, from 1 usable entries\n"
    loaded = policy.load(tmp_path / "tuned.yml")
    wi = loaded.gmm.lookup(call_facts("wi", "dlhs")).tile
    wo = loaded.gmm.lookup(call_facts("wo", "dlhs")).tile
    assert {name: choice.value for name, choice in wi.items()} == {
        "batch_seq": 512,
        "embed_dim": 1792,
        "mlp_dim": 2048,
        "input_buffer_count": 3,
        "combine_scopes": False,
    }
    assert (wo["embed_dim"].value, wo["mlp_dim"].value) == (2048, 1792)
    assert f"tpu_v6_lite/{V1_OP}, 1.75 ms" in wi["embed_dim"].origin.reason
    for other in (
        call_facts("wi", "fwd"),
        call_facts("wi", "dlhs", device="v5p"),
        call_facts("wi", "dlhs", backend="tokamax_v2"),
        call_facts("wi", "dlhs", weight_dtype="float8_e4m3fn"),
        call_facts("wi", "dlhs", batch_seq=8192),
    ):
        assert not loaded.gmm.lookup(other).tile


def test_nearest_declares_how_far_a_call_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default a table serves only the sizes that were measured."""
    write_cache(tmp_path, {json.dumps(arguments(SHAPE)): {v1_config(512, 7168, 512): record(1.0)}})
    target = tmp_path / "wide.yml"
    options = ("--nearest", "batch_seq=2", "--nearest", "num_groups=4")
    assert run(capsys, "import", "tokamax", tmp_path, "-o", target, *options)[0] == 0
    loaded = policy.load(target)
    assert loaded.gmm.lookup(call_facts("wi", "fwd", batch_seq=8192, num_groups=32)).tile
    assert not loaded.gmm.lookup(call_facts("wi", "fwd", batch_seq=16384)).tile
    code, _, errors = run(
        capsys, "import", "tokamax", tmp_path, "-o", target, "--nearest", "rows=2"
    )
    assert code == 2
    assert "'rows=2' is not FACT=RATIO" in errors


def test_of_equal_calls_the_fastest_is_kept_and_the_loser_listed(tmp_path: Path) -> None:
    """return_residuals is nothing that a policy can tell; an equal tile is no loser."""
    slow = {v1_config(128, 7168, 256): record(9.0)}
    fast = {v1_config(512, 7168, 512): record(3.0)}
    entries = {
        json.dumps(arguments(SHAPE)): slow,
        json.dumps(arguments(SHAPE, return_residuals=True)): fast,
        json.dumps(arguments(SHAPE, return_residuals=False)): fast,
    }
    report = read_cache_file(write_cache(tmp_path, entries))
    kept, left_out = fastest(report.entries)
    assert [entry.median_ms for entry in kept] == [3.0]
    assert [one.reason for one in left_out] == [
        "another tile of the same call for a policy is faster, or comes first"
    ]
    assert left_out[0].place.line == 2


def test_unusable_entries_are_counted_and_listed_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By op, device and reason; with --list each with its place."""
    entries: dict[str, dict[str, object]] = {
        json.dumps(arguments(SHAPE)): {v1_config(512, 7168, 512): record(1.0)},
        json.dumps(arguments(SHAPE, "drhs")): {},
    }
    path = write_cache(tmp_path, entries)
    _, out, _ = run(capsys, "import", "tokamax", path, "-o", tmp_path / "p.yml", "--list")
    assert "1 entries give no tile of their own:\n" in out
    assert f"  1  {V1_OP} on v6e: no usable configuration was found when it was tuned\n" in out
    lines = path.read_text().splitlines()
    line = next(at for at, text in enumerate(lines, 1) if text.endswith(": {}"))
    assert f"{path}:{line}:2: {V1_OP}: no usable configuration" in out


def test_a_malformed_source_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, every problem with file and line, and no policy."""
    path = write_cache(
        tmp_path,
        {
            json.dumps(arguments(SHAPE)): {v1_config(512, 7168, 512): record(1.0)},
            '{"lhs": 1}': {},
            "{": {},
        },
    )
    code, _, errors = run(capsys, "import", "tokamax", path, "-o", tmp_path / "p.yml")
    assert code == 1
    assert "the arguments have no rhs and no group_sizes" in errors
    assert "the arguments are not JSON" in errors
    assert not (tmp_path / "p.yml").exists()


def test_sources_without_a_device_ask_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """tpu-inference's megablox table names none; its tiles are for the megablox backend."""
    write_tpu_inference(tmp_path)
    source, target = tmp_path / "megablox", tmp_path / "p.yml"
    code, _, errors = run(capsys, "import", "tpu-inference", source, "-o", target)
    assert code == 1
    assert "the source does not say which device its tiles are for" in errors
    assert "remedy: name it with --device" in errors
    assert run(capsys, "import", "tpu-inference", source, "-o", target, "-d", "TPU v6 lite")[0] == 0
    facts = call_facts("wi", "fwd", backend="megablox", batch_seq=4096, embed_dim=2048)
    facts |= {"mlp_dim": 768, "num_groups": 16}
    tile = policy.load(target).gmm.lookup(facts).tile
    assert {name: choice.value for name, choice in tile.items()} == {
        "batch_seq": 512,
        "embed_dim": 2048,
        "mlp_dim": 768,
    }
    assert run(capsys, "import", "tpu-inference", source, "-o", target, "-d", "abacus")[0] == 2


def test_tpu_inference_directories_give_ops_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """RPA blocks become rules of Tokamax's batched RPA; the rest is counted."""
    write_tpu_inference(tmp_path)
    target = tmp_path / "p.yml"
    code, out, _ = run(capsys, "import", "tpu-inference", tmp_path, "-o", target, "-d", "v7x")
    assert code == 0
    assert "no Tokamax op has the eight blocks of this fused MoE kernel" in out
    facts: dict[str, FactValue] = {
        "device": "v5e",
        "arg.queries.dtype": "bfloat16",
        "arg.queries.dim0": 1024,
        "arg.queries.dim1": 32,
        "arg.queries.dim2": 128,
        "arg.keys.dim1": 8,
        "arg.kv_cache.dtype": "bfloat16",
        "arg.kv_cache.dim1": 16,
    }
    found = policy.load(target).ops["pallas_tpu_batched_rpa"].lookup(facts).fields
    assert {name: choice.value for name, choice in found.items()} == {
        "prefill_bq_sz": 32,
        "bkv_sz": 2048,
    }


def test_fused_moe_files_give_rules_for_the_triton_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranges of rows as conditions; without --top-k the reason for it is given."""
    path = tmp_path / "E=8,N=14336,device_name=NVIDIA_H200.json"
    path.write_text(json.dumps({"64": moe_entry(16, 128, 128), "192": moe_entry(64, 256, 64)}))
    target = tmp_path / "p.yml"
    code, _, errors = run(capsys, "import", "vllm", path, "-o", target)
    assert code == 1
    assert "rows are tokens times the experts of a token" in errors
    assert run(capsys, "import", "vllm", path, "-o", target, "--top-k", "2")[0] == 0
    facts: dict[str, FactValue] = {
        "device": "gpu",
        "arg.lhs.dtype": "bfloat16",
        "arg.rhs.dtype": "bfloat16",
        "arg.lhs.dim0": 257,
        "arg.rhs.dim0": 8,
        "arg.rhs.dim1": 4096,
        "arg.rhs.dim2": 28672,
    }
    rules = policy.load(target).ops["triton_ragged_dot"]
    assert rules.lookup(facts).fields["block_m"].value == 64
    assert rules.lookup(facts | {"arg.lhs.dim0": 256}).fields["block_m"].value == 16


def test_several_kinds_of_gpu_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No fact tells them apart, so the user has to choose one."""
    write_vllm_files(tmp_path)
    options = ("-o", tmp_path / "p.yml", "--top-k", "2")
    code, _, errors = run(capsys, "import", "vllm", tmp_path, *options)
    assert code == 1
    assert "remedy: import one kind of GPU at a time" in errors


def test_results_and_single_files_are_told_from_caches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their content, whatever their name."""
    path = write_result(
        tmp_path / "tuned.txt", [(arguments(SHAPE), {v1_config(512, 7168, 512): record(1.0)})]
    )
    target = tmp_path / "p.yml"
    assert run(capsys, "import", "tokamax", path, "-o", target, "--name", "mine")[0] == 0
    loaded = policy.load(target)
    assert loaded.name == "mine"
    assert loaded.gmm.lookup(call_facts("wi", "fwd")).tile
    code, _, errors = run(capsys, "import", "tokamax", tmp_path / "gone", "-o", target)
    assert code == 1
    assert "there is no such file or directory" in errors


def test_a_report_with_errors_or_without_entries_gives_no_policy() -> None:
    """The library refuses as the command does."""
    with pytest.raises(FormatError, match="the source has no usable entry"):
        policy_text(ImportReport(), name="empty")
    assert issubclass(FormatError, TilepolicyError)


def test_the_whole_shipped_ragged_dot_data_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every entry of tokamax 0.0.17 is either usable or has a reason; none is malformed."""
    assert version("tokamax") == "0.0.17", "count the entries of the new release"
    data = shipped_caches()
    report = read_cache_directory(data, op="*ragged_dot")
    report.raise_errors()
    files = [json.loads(path.read_text()) for path in data.glob("*/*ragged_dot.json")]
    assert len(report.entries) + len(report.unusable) == sum(map(len, files)) == 1953
    assert len(report.entries) == 725
    usable = Counter(entry.device for entry in report.entries if entry.gmm is not None)
    assert usable == {"v5e": 19, "v5p": 102, "v6e": 98, "v7x": 102}
    target = tmp_path / "all.yml"
    code, out, errors = run(capsys, "import", "tokamax", data, "-o", target)
    assert code == 0
    assert "24 rules, 474 table points, from 725 usable entries" in out
    assert "7 dlhs entries have a tile_k or tile_n beyond its dimension" in errors
    assert len(policy.load(target).gmm.rules) == 24


def test_reading_and_writing_foreign_files_needs_no_jax() -> None:
    """The formats and both commands import none of the libraries whose files they know."""
    modules = [
        *(f"tilepolicy.formats.{path.stem}" for path in FORMATS.glob("[a-z]*.py")),
        "tilepolicy.commands.importing",
        "tilepolicy.commands.exporting",
    ]
    code = (
        f"import sys, importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted({'jax', 'tokamax', 'maxtext', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(modules) > 15
    assert done.stdout == "[]\n"
