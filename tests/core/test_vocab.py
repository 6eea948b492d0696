"""Automatic vocabulary tiling: the rule, its borders, and what it says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepolicy.vocab import (
    Thresholds,
    choose_loss,
    choose_tiling,
    tiled_loss_is_broken,
    weigh_ag_once,
    working_lengths,
)


@pytest.mark.parametrize(
    ("tokens", "vocab", "tiles"),
    [
        (8192, 262144, 64),
        (8192, 129280, 32),
        (8192, 32000, 1),
        (3000, 128256, 12),
        (512, 65536, 1),
        (2048, 151936, 16),
    ],
)
def test_published_examples(tokens: int, vocab: int, tiles: int) -> None:
    """The six worked examples of float32 logits have their published number of chunks."""
    assert choose_tiling(tokens, vocab, 4).num_tiles == tiles


def test_the_reason_shows_the_arithmetic() -> None:
    """The reason names sizes, the threshold that was crossed, and the chunk that results."""
    assert choose_tiling(8192, 262144, 4).reason == (
        "logits 8192 tokens × 262144 × 4 B = 8 GiB > max_chunk_bytes 128 MiB; 64 is the smallest "
        "power of two dividing 8192 that fits: 128 tokens, 128 MiB a chunk"
    )
    assert choose_tiling(3000, 128256, 4).reason == (
        "logits 3000 tokens × 128256 × 4 B = 1.43 GiB > max_chunk_bytes 128 MiB; 12 is the "
        "smallest divisor of 3000 that fits: 250 tokens, 122.31 MiB a chunk"
    )


@pytest.mark.parametrize(
    ("tokens", "vocab", "tiles"),
    [
        (512, 65536, 1),  # exactly max_chunk_bytes
        (1024, 65536, 2),  # twice it
        (8192, 32768, 1),  # exactly max_monolithic_vocab_size and exactly 1 GiB
        (8192, 32769, 16),  # one entry more: 1 GiB and a little, so 16 chunks of under 128 MiB
        (16384, 32768, 16),  # a small vocabulary alone does not bring 2 GiB back
    ],
)
def test_borders_are_inclusive(tokens: int, vocab: int, tiles: int) -> None:
    """Each threshold belongs to the side that keeps fewer chunks."""
    assert choose_tiling(tokens, vocab, 4).num_tiles == tiles


def test_bfloat16_logits_need_half_the_chunks() -> None:
    """The item size of the logits counts."""
    assert choose_tiling(8192, 262144, 2).num_tiles == 32


def test_a_prime_number_of_tokens_has_no_answer() -> None:
    """Without a divisor there is no number, and the reason says what was looked for."""
    choice = choose_tiling(8191, 262144, 4)
    assert choice.num_tiles is None
    assert choice.reason.endswith(
        "no divisor of 8191 tokens gives chunks of at most that many bytes and at least "
        "min_chunk_tokens 64"
    )


def test_chunks_below_the_minimum_are_refused() -> None:
    """128 MiB of a two-million-entry vocabulary are 16 tokens, fewer than a chunk may have."""
    assert choose_tiling(8192, 2_097_152, 4).num_tiles is None
    allowed = Thresholds(min_chunk_tokens=16)
    assert choose_tiling(8192, 2_097_152, 4, allowed).num_tiles == 512


def test_working_lengths_are_the_nearest_on_both_sides() -> None:
    """For a length that cannot be cut, both neighbours that can are named."""
    assert working_lengths(8191, 1, 262144, 4) == (8190, 8192)
    assert working_lengths(8191, 0.5, 262144, 4) == (8190, 8192)
    assert working_lengths(8192, 1, 2_097_152, 4) == ()


@given(
    tokens=st.integers(1, 20_000),
    vocab=st.integers(1, 300_000),
    itemsize=st.sampled_from([2, 4]),
)
def test_a_choice_divides_and_fits(tokens: int, vocab: int, itemsize: int) -> None:
    """Every number chosen divides the tokens, fits, and no smaller power of two would."""
    limits = Thresholds()
    tiles = choose_tiling(tokens, vocab, itemsize, limits).num_tiles
    logits = tokens * vocab * itemsize

    def fits(count: int) -> bool:
        chunk = tokens // count
        enough = chunk >= limits.min_chunk_tokens
        return tokens % count == 0 and enough and logits // count <= limits.max_chunk_bytes

    if tiles is None:
        assert not any(fits(count) for count in range(2, tokens + 1))
    elif tiles > 1:
        assert fits(tiles)
        powers = [2**k for k in range(1, 15) if fits(2**k)]
        expected = powers[0] if powers else next(n for n in range(2, tokens + 1) if fits(n))
        assert tiles == expected


@pytest.mark.parametrize("sizes", [(0, 1, 4), (1, 0, 4), (1, 1, 0)])
def test_sizes_must_be_positive(sizes: tuple[int, int, int]) -> None:
    """A size of zero is a caller's mistake, not a tiling."""
    with pytest.raises(ValueError, match="sizes must be positive"):
        choose_tiling(*sizes)


def test_the_loss_follows_the_tiling() -> None:
    """One chunk: sparse; several: chunked; tokens that cannot be cut: online."""
    assert choose_loss(choose_tiling(512, 65536, 4)) == "sparse"
    assert choose_loss(choose_tiling(8192, 262144, 4)) == "chunked"
    assert choose_loss(choose_tiling(8191, 262144, 4)) == "online"


@pytest.mark.parametrize(
    ("release", "broken"),
    [("0.2.0", True), ("0.2.4", True), ("0.2.5", False), ("0.2.5.post1", False), ("0.3.0", False)],
)
def test_releases_with_wrong_gradients(release: str, broken: bool) -> None:
    """0.2.5 is the first release whose tiled loss is right."""
    assert tiled_loss_is_broken(release) is broken


def _weigh(**changed: int) -> tuple[bool, int, int, str]:
    sizes = {
        "num_tiles": 8,
        "vocab": 131072,
        "embed_dim": 2048,
        "head_itemsize": 2,
        "gradient_itemsize": 2,
        "head_shards": 8,
        "max_held_bytes": 2**31,
    }
    choice = weigh_ag_once(**(sizes | changed))
    return choice.value, choice.gathers_saved, choice.held_bytes, choice.reason


def test_ag_once_shows_both_numbers() -> None:
    """Gathers saved and bytes held are both named, whichever side wins."""
    assert _weigh() == (
        True,
        15,
        2**30,
        "saves 15 all-gathers of the head a step and holds 1 GiB (head 131072 × 2048 × 2 B and "
        "its gradient × 2 B) ≤ max_held_bytes 2 GiB",
    )
    value, saved, held, reason = _weigh(embed_dim=8192)
    assert (value, saved, held) == (False, 15, 2**32)
    assert reason.endswith("> max_held_bytes 2 GiB")


def test_ag_once_is_pointless_without_tiles_or_shards() -> None:
    """With one chunk, or a head that is not sharded, there is nothing to save."""
    assert _weigh(num_tiles=1)[::3] == (False, "one chunk gathers the head once anyway")
    assert _weigh(head_shards=1)[::3] == (
        False,
        "the head is not sharded, so nothing is gathered",
    )
