"""Backend paths, who honours which setting, and which tiles a kernel refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from legality_cases import COMPILED, SIZES

from tilepolicy.backends import (
    BACKENDS,
    backend_of,
    honoured,
    illegal_tile,
    oversized_tile,
    padding,
)
from tilepolicy.settings import AXES, SETTINGS, Layer, Pass

FACTS = {"maxtext": "0.2.5", "eval_tiles_read": True, "num_vocab_tiling": 4}
HINT = "a hint to jax.lax.ragged_dot, clamped to the dimension"
TRAIN_TILES = [name for name, s in SETTINGS.items() if s.is_tile and s.phase == "train"]


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        ({}, "none"),
        ({"num_experts": 8}, "megablox"),
        ({"num_experts": 8, "megablox": False}, "ragged_dot"),
        ({"num_experts": 8, "use_tokamax_gmm": True, "megablox": False}, "tokamax_v1"),
        ({"num_experts": 8, "use_tokamax_gmm": True, "use_gmm_v2": True}, "tokamax_v2"),
        (
            {
                "num_experts": 8,
                "use_tokamax_gmm": True,
                "use_gmm_v2": True,
                "use_gmm_v2_heuristic_tiling": True,
            },
            "tokamax_v2_heuristic",
        ),
        ({"num_experts": 8, "use_gmm_v2": True}, "megablox"),
        ({"num_experts": 8, "sparse_matmul": False, "use_tokamax_gmm": True}, "dense_moe"),
        ({"num_experts": 8, "attention": "vllm_rpa", "sparse_matmul": False}, "vllm"),
        ({"num_experts": 8, "attention": "vllm_batched_rpa"}, "vllm"),
        ({"num_experts": 8, "te_moe_block": True, "attention": "vllm_rpa"}, "te_moe_block"),
        (
            {"num_experts": 8, "use_batch_split_schedule": True, "decoder_block": "deepseek"},
            "batch_split",
        ),
        (
            {"num_experts": 8, "use_batch_split_schedule": True, "decoder_block": "mixtral"},
            "megablox",
        ),
        ({"num_experts": 1, "use_tokamax_gmm": True}, "none"),
    ],
)
def test_backend_of(config: dict[str, object], backend: str) -> None:
    """The path that MaxText takes, in the order in which its code decides."""
    assert backend_of(config) == backend


@pytest.mark.parametrize(
    ("backend", "by"),
    [
        ("tokamax_v1", "apply"),
        ("tokamax_v2", "maxtext"),
        ("megablox", "maxtext"),
        ("tokamax_v2_heuristic", None),
        ("dense_moe", None),
        ("batch_split", None),
        ("vllm", None),
        ("te_moe_block", None),
        ("none", None),
    ],
)
def test_train_tiles(backend: str, by: str | None) -> None:
    """All 18 train knobs have one reader, save the rows tile that also pads."""
    readers = {honoured(name, backend, FACTS).by for name in TRAIN_TILES}
    readers_but_padding = {
        honoured(name, backend, FACTS).by for name in TRAIN_TILES if name != "wi_tile_fwd_batch_seq"
    }
    assert readers_but_padding == {by}
    assert readers == ({by, "maxtext"} if backend == "tokamax_v2_heuristic" else {by})


def test_every_backend_has_an_answer_for_every_setting() -> None:
    """No setting and no backend is without a sentence."""
    for backend in BACKENDS:
        for name in SETTINGS:
            answer = honoured(name, backend, {})
            assert answer.why
            assert answer.by in ("maxtext", "apply", None)


@pytest.mark.parametrize(
    ("setting", "facts", "by", "why"),
    [
        ("wi_tile_fwd_embed_dim", {}, "maxtext", HINT),
        (
            "wi_tile_fwd_embed_dim",
            {"quantization": "int8", "use_qwix_quantization": True},
            None,
            "with qwix quantization the contracted axis is one whole tile",
        ),
        (
            "wo_tile_fwd_mlp_dim",
            {"quantization": "int8", "use_qwix_quantization": True},
            None,
            "with qwix quantization the contracted axis is one whole tile",
        ),
        (
            "wi_tile_fwd_mlp_dim",
            {"quantization": "int8", "use_qwix_quantization": True},
            "maxtext",
            HINT,
        ),
        (
            "wi_tile_dlhs_mlp_dim",
            {},
            None,
            "jax.lax.ragged_dot derives its own backward; MaxText tiles only fwd",
        ),
    ],
)  # fmt: skip
def test_ragged_dot(setting: str, facts: dict[str, object], by: str | None, why: str) -> None:
    """jax.lax.ragged_dot takes hints for fwd only, and a whole contracted axis under qwix."""
    answer = honoured(setting, "ragged_dot", FACTS | facts)
    assert (answer.by, answer.why) == (by, why)


@pytest.mark.parametrize("backend", ["megablox", "tokamax_v2", "ragged_dot"])
def test_eval_tiles(backend: str) -> None:
    """The eval knobs are read only where evaluation has axis rules of its own."""
    assert honoured("eval_wi_tile_fwd_mlp_dim", backend, FACTS).by == "maxtext"
    answer = honoured("eval_wi_tile_fwd_mlp_dim", backend, FACTS | {"eval_tiles_read": False})
    assert answer.by is None
    assert answer.why.startswith("evaluation uses the train knobs")


def test_settings_of_a_later_release() -> None:
    """A setting that the release does not have is honoured by nothing, with the reason."""
    answer = honoured("vocab_tiling_ag_once", "none", FACTS | {"maxtext": "0.2.3"})
    assert (answer.by, answer.why) == (
        None,
        "MaxText 0.2.3 has no such key; it came with 0.2.4",
    )
    assert honoured("eval_wo_tile_fwd_mlp_dim", "megablox", FACTS | {"maxtext": "0.2.4"}).by is None


def test_vocabulary_settings() -> None:
    """MaxText reads the vocabulary settings; ag_once is idle with one tile."""
    assert honoured("num_vocab_tiling", "none", FACTS).by == "maxtext"
    assert honoured("vocab_tiling_ag_once", "none", FACTS).by == "maxtext"
    answer = honoured("vocab_tiling_ag_once", "none", FACTS | {"num_vocab_tiling": 1})
    assert answer.why == "with one vocabulary tile there is nothing to gather once"
    assert honoured("loss", "none", FACTS).by == "apply"


@pytest.mark.parametrize(("backend", "pass_", "tile", "axis"), COMPILED)
def test_legality_is_the_compilers(
    backend: str, pass_: Pass, tile: tuple[int, int, int], axis: str | None
) -> None:
    """A tile is refused where the compiler refused it, for the axis that it named."""
    faults = illegal_tile(dict(zip(AXES, tile, strict=True)), backend, "wi", pass_, SIZES)
    assert [fault.axis for fault in faults] == ([axis] if axis else [])


@pytest.mark.parametrize(
    ("backend", "tile", "legal"),
    [("tokamax_v1", 2880, True), ("tokamax_v2", 2880, False), ("tokamax_v2", 2944, True)],
)
def test_whole_dimension_that_is_no_multiple_of_128(backend: str, tile: int, legal: bool) -> None:
    """v1 takes the whole of gpt-oss's 2880; v2 wants the next multiple of 128."""
    sizes = {"batch_seq": 512, "embed_dim": 2880, "mlp_dim": 2880}
    found = illegal_tile({"embed_dim": tile, "mlp_dim": tile}, backend, "wo", "dlhs", sizes)
    assert (not found) == legal
    assert oversized_tile({"embed_dim": 2944}, "wo", "dlhs", sizes) == ()


@pytest.mark.parametrize(
    ("backend", "layer", "pass_", "tile", "text"),
    [
        (
            "megablox",
            "wo",
            "dlhs",
            {"batch_seq": 100, "mlp_dim": 192},
            [
                "megablox needs a batch_seq tile that divides the 1024 padded rows of wo dlhs; "
                "100 does not | use a divisor of 1024",
                "megablox takes mlp_dim tiles of wo dlhs in multiples of 128 or the whole "
                "dimension 384, not 192 | use 256",
            ],
        ),
        (
            "tokamax_v2",
            "wi",
            "fwd",
            {"batch_seq": 100, "embed_dim": 100},
            [
                "tokamax_v2 takes batch_seq tiles of wi fwd in multiples of 8, not 100 | use 104",
                "tokamax_v2 takes embed_dim tiles of wi fwd in multiples of 128, not 100 | use 128",
            ],
        ),
        (
            "ragged_dot",
            "wi",
            "fwd",
            {"batch_seq": 0, "embed_dim": -1, "mlp_dim": True},
            [
                "batch_seq tile 0 is not a positive integer | use 1 or more",
                "embed_dim tile -1 is not a positive integer | use 1 or more",
                "mlp_dim tile True is not a positive integer | use 1 or more",
            ],
        ),
    ],
)
def test_texts(
    backend: str, layer: Layer, pass_: Pass, tile: dict[str, object], text: list[str]
) -> None:
    """Each fault says what the kernel wants and what would do."""
    faults = illegal_tile(tile, backend, layer, pass_, SIZES)
    assert [f"{fault.message} | {fault.remedy}" for fault in faults] == text


def test_unknown_dimensions_are_not_checked() -> None:
    """What depends on a size that is not known is left to the run."""
    tile = {"batch_seq": 300, "embed_dim": 192, "mlp_dim": 192}
    assert illegal_tile(tile, "tokamax_v1", "wi", "fwd", {}) == ()
    assert illegal_tile({"input_buffer_count": 0}, "tokamax_v1", "wi", "fwd", SIZES) == ()


def test_oversized_tile() -> None:
    """A tile may exceed its dimension to the next multiple of 128, and no further."""
    [fault] = oversized_tile({"mlp_dim": 1024, "embed_dim": 256}, "wi", "fwd", SIZES)
    assert fault.message == (
        "mlp_dim tile 1024 exceeds the 384 of wi fwd beyond the next multiple of 128"
    )
    assert fault.remedy == "use at most 384"
    assert oversized_tile({"mlp_dim": 384}, "wi", "fwd", {"mlp_dim": 300}) == ()


@given(rows=st.integers(1, 10**6), tile=st.integers(1, 4096))
def test_padding(rows: int, tile: int) -> None:
    """Padding reaches the next multiple of the tile and is a share of the padded rows."""
    added, share = padding(rows, tile)
    assert 0 <= added < tile
    assert (rows + added) % tile == 0
    assert share == pytest.approx(100 * added / (rows + added))


@pytest.mark.parametrize(("rows", "tile"), [(0, 1), (1, 0), (-1, 8)])
def test_padding_of_nothing(rows: int, tile: int) -> None:
    """Rows and tile must be positive."""
    with pytest.raises(
        ValueError, match=f"rows and tile must be positive: rows={rows}, tile={tile}"
    ):
        padding(rows, tile)
