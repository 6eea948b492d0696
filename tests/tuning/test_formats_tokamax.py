"""Tokamax's caches and results become records; what gives no tile is reported with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from format_files import V1_OP, arguments, record, v1_config, write_cache, write_result
from hypothesis import given
from hypothesis import strategies as st

from tilepolicy.axes import GmmShape
from tilepolicy.formats.records import FormatError, ImportReport
from tilepolicy.formats.tokamax_arguments import (
    DTYPES,
    PASS_DIMENSIONS,
    parse_array,
    parse_group_sizes,
    parse_ragged_dot,
    short_dtype,
)
from tilepolicy.formats.tokamax_cache import read_cache_directory, read_cache_file
from tilepolicy.formats.tokamax_entries import op_file_name
from tilepolicy.formats.tokamax_result import read_result
from tilepolicy.settings import PASSES, Pass

SHAPE = GmmShape(m=4096, k=7168, n=2048, g=8)
sizes = st.integers(min_value=1, max_value=1 << 22)


def one_entry(folder: Path, call: dict[str, object], configs: dict[str, object]) -> ImportReport:
    """Read a cache file of one entry."""
    return read_cache_file(write_cache(folder, {json.dumps(call): configs}))


@given(
    shape=st.lists(sizes, max_size=4),
    short=st.sampled_from(sorted(DTYPES)),
    batched=st.booleans(),
)
def test_an_array_is_read_back_as_it_was_written(
    shape: list[int], short: str, batched: bool
) -> None:
    """Shapes, short dtypes and the vmap suffix of Tokamax's grammar."""
    text = f"{short}[{','.join(map(str, shape))}]"
    array = parse_array(text + ("{vmap_axes=[[0,8],null]}" if batched else ""))
    assert array.shape == tuple(shape)
    assert short_dtype(array.dtype) == short
    assert array.batched is batched


def test_quantized_arrays_have_the_type_of_their_values() -> None:
    """A stored quantized array, and one that the kernel quantizes on the fly."""
    stored = {
        "qvalue": "f8_e4m3fn[8,7168,2048]",
        "scale": "bf16[8,1,2048]",
        "zero_point": None,
        "qtype": "float8_e4m3fn",
    }
    assert parse_array(stored).dtype == "float8_e4m3fn"
    on_the_fly = {"value": "bf16[4096,7168]", "qtype": "jax.numpy.float8_e4m3fn"}
    array = parse_array(on_the_fly)
    assert (array.dtype, array.quantized_to) == ("bfloat16", "float8_e4m3fn")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("bf16(4,8)", r"^'bf16\(4,8\)' is not an array of the form bf16\[4096,7168\]$"),
        ("bf17[4,8]", r"^'bf17\[4,8\]' has the unknown dtype 'bf17'$"),
        ("bf16[4,-8]", r"is not an array"),
        (17, r"^17 is not an array"),
        ({"scale": "bf16[1]"}, r"is not an array"),
    ],
)
def test_what_is_no_array_is_refused_with_what_was_found(value: object, message: str) -> None:
    """The text shows the value."""
    with pytest.raises(ValueError, match=message):
        parse_array(value)


def test_group_sizes_come_as_a_list_or_as_number_and_sum() -> None:
    """Both give the number of groups and the rows."""
    assert parse_group_sizes([4096, 0, 0]).count == 3
    assert parse_group_sizes([4096, 0, 0]).total == 4096
    assert parse_group_sizes({"num_groups": 8, "total_size": 64}).total == 64
    for wrong in ([], [1, -1], [True], {"num_groups": 8}, {"num_groups": 0, "total_size": 1}, "8"):
        with pytest.raises(ValueError, match="is neither a list of group sizes nor their number"):
            parse_group_sizes(wrong)


@given(
    shape=st.builds(GmmShape, m=sizes, k=sizes, n=sizes, g=st.integers(1, 512)),
    pass_=st.sampled_from(PASSES),
)
def test_operands_and_dimension_numbers_give_pass_and_forward_problem(
    shape: GmmShape, pass_: Pass
) -> None:
    """All three passes are recognised, whatever the sizes."""
    call = parse_ragged_dot(arguments(shape, pass_))
    assert (call.pass_, call.shape) == (pass_, shape)
    assert call.facts == {"dtype": "bfloat16", "weight_dtype": "bfloat16"}


def test_absent_dimension_numbers_are_those_of_the_forward_pass() -> None:
    """Tokamax binds defaults to absent fields."""
    call = arguments(SHAPE)
    del call["ragged_dot_dimension_numbers"]
    assert parse_ragged_dot(call).pass_ == "fwd"


def test_foreign_dimension_numbers_are_refused() -> None:
    """No pass is guessed."""
    odd = {**PASS_DIMENSIONS["fwd"], "rhs_group_dimensions": [1]}
    with pytest.raises(ValueError, match="are none of fwd, dlhs, drhs"):
        parse_ragged_dot({**arguments(SHAPE), "ragged_dot_dimension_numbers": odd})
    with pytest.raises(ValueError, match=r"^the arguments have no rhs and no group_sizes$"):
        parse_ragged_dot({"lhs": "bf16[4,8]"})


def test_the_winner_is_the_configuration_with_the_lowest_median(tmp_path: Path) -> None:
    """Not the lowest single time, and not the first."""
    configs = {
        v1_config(128, 7168, 256): record(1.0, 9.0, 9.0),
        v1_config(512, 7168, 512, 3): record(2.0, 2.5, 3.0),
        v1_config(256, 1024, 512): record(3.0, 3.0, 3.0),
    }
    report = one_entry(tmp_path, arguments(SHAPE, return_residuals=True), configs)
    (entry,) = report.entries
    assert entry.config == {
        "tile_m": 512,
        "tile_k": 7168,
        "tile_n": 512,
        "input_buffer_count": 3,
        "combine_scopes": False,
    }
    assert entry.median_ms == 2.5
    assert entry.gmm is not None
    assert (entry.gmm.kernel, entry.gmm.pass_, entry.gmm.shape) == ("tokamax_v1", "fwd", SHAPE)
    assert (entry.device, entry.source) == ("v6e", f"tpu_v6_lite/{V1_OP}")
    assert (entry.place.line, entry.place.column) == (2, 2)
    assert entry.record["peak_memory_mb"] == 402.5


def test_tiles_that_a_configuration_leaves_out_are_the_defaults_of_the_kernel(
    tmp_path: Path,
) -> None:
    """128 in v1; v2 takes a tile only if all three sizes are set."""
    (entry,) = one_entry(tmp_path, arguments(SHAPE), {'{"tile_m": 512}': record(1.0)}).entries
    assert entry.config == {"tile_m": 512, "tile_k": 128, "tile_n": 128}
    partial = {'{"tile_m": 512, "tile_k": 128, "tile_n": null}': record(1.0)}
    op = "pallas_mosaic_tpu_v2_ragged_dot"
    path = write_cache(tmp_path, {json.dumps(arguments(SHAPE)): partial}, op=op)
    assert read_cache_file(path).entries == ()


@pytest.mark.parametrize(
    ("op", "call", "configs", "reason"),
    [
        (V1_OP, arguments(SHAPE), {}, "no usable configuration was found when it was tuned"),
        (
            V1_OP,
            arguments(SHAPE),
            {v1_config(128, 128, 128): record()},
            "every configuration that was tried failed",
        ),
        (
            "pallas_mosaic_tpu_v2_ragged_dot",
            arguments(SHAPE),
            {'{"tile_m":null,"tile_k":null,"tile_n":null,"bucket_base":null}': record(1.0)},
            "the winner is the kernel's own heuristic (tiles are null)",
        ),
        ("ragged_dot", arguments(SHAPE), {"{}": record(1.0)}, "measured XLA's own ragged_dot"),
        (
            V1_OP,
            arguments(SHAPE, lhs="bf16[4096,7168]{vmap_axes=[[0,8]]}"),
            {v1_config(128, 128, 128): record(1.0)},
            "measured inside vmap",
        ),
        (
            V1_OP,
            arguments(SHAPE, lhs={"value": "bf16[4096,7168]", "qtype": "jax.numpy.int8"}),
            {v1_config(128, 128, 128): record(1.0)},
            "the rows are quantized on the fly to int8",
        ),
        ("splash_attention", {"q": "bf16[1]"}, {}, "policies have no facts for the calls of this"),
        (
            "triton_ragged_dot",
            arguments(GmmShape(4096, 2048, 2048, 8), "dlhs"),
            {'{"block_m":64}': record(1.0)},
            "k equals n, so that the arguments of dlhs look like those of fwd",
        ),
    ],
)
def test_entries_without_a_tile_are_reported_with_the_reason(
    tmp_path: Path, op: str, call: dict[str, object], configs: dict[str, object], reason: str
) -> None:
    """Nothing is dropped in silence."""
    report = read_cache_file(write_cache(tmp_path, {json.dumps(call): configs}, op=op))
    assert report.entries == report.problems == ()
    (unusable,) = report.unusable
    assert unusable.reason.startswith(reason)
    assert (unusable.op, unusable.device, unusable.place.line) == (op, "v6e", 2)


@pytest.mark.parametrize(
    ("key", "configs", "message"),
    [
        ("{", {}, "the arguments are not JSON: Expecting property name"),
        ("{}", {}, "the arguments have no lhs and no rhs and no group_sizes"),
        (json.dumps(arguments(SHAPE)), [], "the configurations are not an object"),
        (
            json.dumps(arguments(SHAPE, rhs="bf16[8,7169,2048]")),
            {},
            r"fwd with 8 groups does not take operands of shapes \(4096, 7168\) and",
        ),
        (json.dumps(arguments(SHAPE)), {"{": {}}, "the fields of the configuration are not JSON"),
        (json.dumps(arguments(SHAPE)), {"[]": record(1.0)}, "a configuration is not an object"),
        (json.dumps(arguments(SHAPE)), {"{}": 1.0}, "a benchmark record is not an object"),
        (
            json.dumps(arguments(SHAPE)),
            {v1_config(128, 128, 128): {"evaluation_times_ms": [-1.0]}},
            "a benchmark record has no evaluation_times_ms, a list of milliseconds",
        ),
        (
            json.dumps(arguments(SHAPE)),
            {'{"tile_mm": 128}': record(1.0)},
            "pallas_mosaic_tpu_ragged_dot has no field tile_mm; its fields are combine_scopes,",
        ),
        (
            json.dumps(arguments(SHAPE)),
            {'{"tile_m": "128"}': record(1.0)},
            "tile_m is '128', not a positive whole number",
        ),
        (
            json.dumps(arguments(SHAPE)),
            {'{"tile_m": 128, "tile_k": [1]}': record(1.0)},
            "the field tile_k of a configuration is not a plain value",
        ),
    ],
)
def test_malformed_entries_are_located_and_do_not_hide_the_others(
    tmp_path: Path, key: str, configs: object, message: str
) -> None:
    """Each problem has the line of its entry; the good entry behind it is still read."""
    good = {json.dumps(arguments(SHAPE, "drhs")): {v1_config(128, 128, 128): record(1.0)}}
    path = write_cache(tmp_path, {key: configs, **good})  # type: ignore[dict-item]  # malformed on purpose
    report = read_cache_file(path)
    assert len(report.entries) == 1
    with pytest.raises(FormatError, match=message):
        report.raise_errors()
    (problem,) = report.problems
    assert problem.place is not None
    assert (problem.place.file, problem.place.line, problem.place.column) == (str(path), 2, 2)


def test_files_that_are_no_cache_and_unknown_devices_are_refused(tmp_path: Path) -> None:
    """The text says what is wrong and what to do."""
    odd = tmp_path / "tpu_v6_lite" / f"{V1_OP}.json"
    odd.parent.mkdir()
    odd.write_text('{"E": {"BLOCK_SIZE_M": 16}}')
    with pytest.raises(FormatError, match="not a Tokamax cache: its keys are not the JSON text"):
        read_cache_file(odd).raise_errors()
    path = write_cache(tmp_path, {json.dumps(arguments(SHAPE)): {}}, device="mystery_chip")
    with pytest.raises(FormatError, match="'mystery_chip' does not name a device") as caught:
        read_cache_file(path).raise_errors()
    assert caught.value.problems[0].remedy == "name it with --device"
    assert read_cache_file(path, device="v5p").unusable[0].device == "v5p"


def test_a_directory_gives_all_its_devices_or_the_one_asked_for(tmp_path: Path) -> None:
    """``<device>/<op>.json`` below it, or the files of one device's directory."""
    configs = {v1_config(128, 1024, 512): record(1.0)}
    for device in ("tpu_v6_lite", "tpu7x"):
        write_cache(tmp_path, {json.dumps(arguments(SHAPE)): configs}, device=device)
    write_cache(tmp_path, {json.dumps({"q": "bf16[1]"}): {}}, op="splash_attention")
    devices = {entry.device for entry in read_cache_directory(tmp_path, op="*ragged_dot").entries}
    assert devices == {"v6e", "v7x"}
    assert len(read_cache_directory(tmp_path).unusable) == 1
    assert {e.device for e in read_cache_directory(tmp_path, device="v7x").entries} == {"v7x"}
    assert len(read_cache_directory(tmp_path / "tpu7x").entries) == 1
    with pytest.raises(FormatError, match=r"no cache file <device>/\*\.json for the device v4"):
        read_cache_directory(tmp_path, device="v4")


def test_old_names_of_dlhs_tiles_are_recognised_by_tiles_beyond_their_dimension(
    tmp_path: Path,
) -> None:
    """One entry that only fits exchanged exchanges all dlhs entries of the file, with a warning."""
    narrow, square = GmmShape(4096, 256, 7168, 8), GmmShape(4096, 4096, 4096, 8)
    entries = {
        json.dumps(arguments(narrow, "dlhs")): {v1_config(512, 7168, 128): record(1.0)},
        json.dumps(arguments(square, "dlhs")): {v1_config(512, 4096, 1024): record(1.0)},
        json.dumps(arguments(narrow)): {v1_config(512, 256, 7168): record(1.0)},
    }
    path = write_cache(tmp_path, entries)

    def tiles(report: ImportReport) -> list[tuple[object, object]]:
        return [(entry.config["tile_k"], entry.config["tile_n"]) for entry in report.entries]

    report = read_cache_file(path)
    assert tiles(report) == [(128, 7168), (1024, 4096), (256, 7168)]
    (warning,) = report.problems
    assert (warning.code, warning.severity) == ("dlhs-names", "warning")
    assert warning.message.startswith("1 dlhs entries have a tile_k or tile_n beyond its dimension")
    report.raise_errors()
    assert tiles(read_cache_file(path, dlhs_names="forward"))[0] == (7168, 128)
    explicit = read_cache_file(path, dlhs_names="contracting-first")
    assert tiles(explicit) == tiles(report)
    assert explicit.problems == ()


def test_a_result_file_gives_the_same_entries_as_a_cache(tmp_path: Path) -> None:
    """Arguments are plain objects there, and the device keeps its case and spaces."""
    configs = {v1_config(512, 7168, 512): record(2.0)}
    result = write_result(tmp_path / "result.json", [(arguments(SHAPE, "dlhs"), configs)])
    (entry,) = read_result(result).entries
    (cached,) = one_entry(tmp_path, arguments(SHAPE, "dlhs"), configs).entries
    assert (entry.op, entry.device, entry.gmm, entry.config, entry.median_ms) == (
        cached.op,
        cached.device,
        cached.gmm,
        cached.config,
        cached.median_ms,
    )
    assert entry.source == "tokamax 0.0.17 TPU v6 lite"
    assert entry.place.line is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"op": {}, "arguments": {}}]', "a list of calls without timings"),
        ('{"data": []}', "not an AutotuningResult: it has device_kind and data"),
        ('{"device_kind": "TPU v6 lite", "data": []}', "the AutotuningResult is empty"),
        ('{"device_kind": "TPU v6 lite", "data": {}}', "data is not a list"),
        ('{"device_kind": "Abacus", "data": [1]}', "'Abacus' is not the kind of a device"),
        ('{"device_kind": "TPU v6 lite", "data": [[{}]]}', "an item of data is not"),
        ("", "not JSON: Expecting value"),
    ],
)
def test_empty_and_foreign_results_are_refused_with_a_reason(
    tmp_path: Path, text: str, message: str
) -> None:
    """Each refusal is located."""
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=message) as caught:
        read_result(path).raise_errors()
    assert caught.value.problems[0].place is not None


def test_class_names_become_file_names_as_tokamax_makes_them() -> None:
    """An underscore before each capital but the first."""
    assert op_file_name("PallasMosaicTpuV2RaggedDot") == "pallas_mosaic_tpu_v2_ragged_dot"
    assert op_file_name("TritonRaggedDot") == "triton_ragged_dot"
