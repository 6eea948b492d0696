"""Automatic vocabulary tiling: how many token chunks a loss forms its logits in, and why.

Pure arithmetic on sizes, shared by ``resolve`` (predicted sizes) and by the adaptive loss (sizes
at trace time), so that both always choose alike. ``num_vocab_tiling`` is MaxText's name; despite
it the loss is cut along the tokens, and every chunk holds the logits of the whole vocabulary.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

__all__ = [
    "BROKEN_TILED_LOSS",
    "FIRST_CORRECT_TILED_LOSS",
    "AgOnceChoice",
    "Loss",
    "Thresholds",
    "TilingChoice",
    "choose_loss",
    "choose_tiling",
    "tiled_loss_is_broken",
    "weigh_ag_once",
    "working_lengths",
]

Loss = Literal["upstream", "sparse", "chunked", "online"]

MIB: Final = 2**20
GIB: Final = 2**30

FIRST_CORRECT_TILED_LOSS: Final = (0, 2, 5)
BROKEN_TILED_LOSS: Final = (
    "before MaxText 0.2.5 the tiled loss does not multiply its hidden-state gradient by the "
    "cotangent of the loss"
)


class Thresholds(NamedTuple):
    """The numbers that decide about tiling; each is a policy setting of ``vocab``.

    Attributes:
        max_chunk_bytes: largest logits of one chunk, inclusive; 128 MiB.
        max_monolithic_vocab_size: largest vocabulary that may stay in one chunk, inclusive.
        max_monolithic_bytes: largest logits of such a small vocabulary, inclusive; 1 GiB.
        min_chunk_tokens: smallest number of tokens in a chunk.
    """

    max_chunk_bytes: int = 128 * MIB
    max_monolithic_vocab_size: int = 32768
    max_monolithic_bytes: int = GIB
    min_chunk_tokens: int = 64


_PUBLISHED: Final = Thresholds()


class TilingChoice(NamedTuple):
    """A number of token chunks, with the arithmetic that led to it.

    Attributes:
        num_tiles: number of chunks; None when no number satisfies the thresholds.
        reason: the arithmetic, in one line.
    """

    num_tiles: int | None
    reason: str


def choose_tiling(
    tokens: int, vocab: int, itemsize: int, thresholds: Thresholds = _PUBLISHED
) -> TilingChoice:
    """Chooses the number of token chunks for a loss over ``tokens × vocab`` logits.

    One chunk if the logits are at most ``max_chunk_bytes``, or if the vocabulary is small and they
    are at most ``max_monolithic_bytes``. Otherwise the smallest power of two that divides the
    tokens and brings a chunk to ``max_chunk_bytes``; if none does, the smallest divisor that does.
    A chunk never has fewer than ``min_chunk_tokens``.

    Args:
        tokens: tokens of one microbatch on one device (T).
        vocab: vocabulary entries on one device (V).
        itemsize: bytes of one logit (B): 4 if logits are float32, else 2.
        thresholds: the numbers to decide by.

    Raises:
        ValueError: a size is not positive.
    """
    if min(tokens, vocab, itemsize) < 1:
        raise ValueError(f"sizes must be positive: {tokens=}, {vocab=}, {itemsize=}")
    logits = tokens * vocab * itemsize
    size = f"logits {tokens} tokens × {vocab} × {itemsize} B = {_bytes(logits)}"
    if logits <= thresholds.max_chunk_bytes:
        return TilingChoice(1, f"{size} ≤ max_chunk_bytes {_bytes(thresholds.max_chunk_bytes)}")
    if vocab <= thresholds.max_monolithic_vocab_size and logits <= thresholds.max_monolithic_bytes:
        return TilingChoice(
            1,
            f"{size} ≤ max_monolithic_bytes {_bytes(thresholds.max_monolithic_bytes)} and "
            f"{vocab} ≤ max_monolithic_vocab_size {thresholds.max_monolithic_vocab_size}",
        )
    tiles = _smallest_divisor(tokens, vocab * itemsize, thresholds)
    over = f"{size} > max_chunk_bytes {_bytes(thresholds.max_chunk_bytes)}"
    if tiles is None:
        return TilingChoice(
            None,
            f"{over}, and no divisor of {tokens} tokens gives chunks of at most that many bytes "
            f"and at least min_chunk_tokens {thresholds.min_chunk_tokens}",
        )
    kind = "power of two dividing" if tiles & (tiles - 1) == 0 else "divisor of"
    return TilingChoice(
        tiles,
        f"{over}; {tiles} is the smallest {kind} {tokens} that fits: "
        f"{tokens // tiles} tokens, {_bytes(logits // tiles)} a chunk",
    )


def _smallest_divisor(tokens: int, row_bytes: int, thresholds: Thresholds) -> int | None:
    """The smallest fitting power of two, else the smallest fitting divisor, else None."""
    largest_chunk = thresholds.max_chunk_bytes // row_bytes
    smallest_chunk = max(1, thresholds.min_chunk_tokens)
    fitting = [
        tokens // chunk
        for chunk in range(min(largest_chunk, tokens), smallest_chunk - 1, -1)
        if tokens % chunk == 0
    ]
    powers = (tiles for tiles in fitting if tiles & (tiles - 1) == 0)
    return next(powers, fitting[0] if fitting else None)


def working_lengths(
    length: int,
    batch: float,
    vocab: int,
    itemsize: int,
    thresholds: Thresholds = _PUBLISHED,
) -> tuple[int, ...]:
    """The nearest sequence lengths below and above ``length`` that can be tiled.

    Args:
        length: ``max_target_length`` that does not work.
        batch: ``per_device_batch_size``; may be a fraction.
        vocab: vocabulary entries on one device.
        itemsize: bytes of one logit.
        thresholds: the numbers to decide by.

    Returns:
        None, one or two lengths, ascending. The search ends at half and at twice the length.
    """

    def works(candidate: int) -> bool:
        tokens = candidate * batch
        if tokens < 1 or tokens != int(tokens):
            return False
        return choose_tiling(int(tokens), vocab, itemsize, thresholds).num_tiles is not None

    below = next((n for n in range(length - 1, length // 2, -1) if works(n)), None)
    above = next((n for n in range(length + 1, 2 * length + 1) if works(n)), None)
    return tuple(n for n in (below, above) if n is not None)


def choose_loss(tiling: TilingChoice) -> Loss:
    """The loss that fits a tiling: what ``loss: auto`` means where tilepolicy's may run.

    One chunk needs no cutting (``sparse``); several are cut along the tokens (``chunked``, three
    matmuls as in the monolithic loss); where the tokens cannot be cut the vocabulary is
    (``online``, which needs a fourth matmul but no divisor).
    """
    if tiling.num_tiles is None:
        return "online"
    return "sparse" if tiling.num_tiles == 1 else "chunked"


def tiled_loss_is_broken(maxtext: str) -> bool:
    """Whether this MaxText release's own tiled loss computes wrong gradients (0.2.0 to 0.2.4).

    Read in the wheels of every release: up to 0.2.4 the backward rule of
    ``vocab_tiling_nnx_loss`` returns the hidden-state gradient without the loss cotangent.
    """
    release = tuple(int(part) for part in maxtext.split(".")[:3] if part.isdigit())
    return release < FIRST_CORRECT_TILED_LOSS


class AgOnceChoice(NamedTuple):
    """Whether to gather the output head once, with both sides of the trade.

    Attributes:
        value: what ``vocab_tiling_ag_once: auto`` resolves to.
        gathers_saved: all-gathers of the head saved in each step.
        held_bytes: bytes of the gathered head and of its gradient, held through the loss.
        reason: both numbers, in one line.
    """

    value: bool
    gathers_saved: int
    held_bytes: int
    reason: str


def weigh_ag_once(
    *,
    num_tiles: int,
    vocab: int,
    embed_dim: int,
    head_itemsize: int,
    gradient_itemsize: int,
    head_shards: int,
    max_held_bytes: int,
) -> AgOnceChoice:
    """Weighs the gathers that ``vocab_tiling_ag_once`` saves against the memory it holds.

    Without it the forward and the backward loop gather the head in each of ``num_tiles`` steps,
    with it there is one gather: ``2·num_tiles - 1`` are saved (counted in HLO compiled for v6e-8
    with MaxText 0.2.5: 16 gathers become 1 with 8 tiles).

    Args:
        num_tiles: resolved ``num_vocab_tiling``.
        vocab: vocabulary entries of the gathered head (a tensor axis keeps dividing it).
        embed_dim: rows of the head.
        head_itemsize: bytes of one gathered weight.
        gradient_itemsize: bytes of one gradient entry.
        head_shards: devices over which the head is sharded and from which it is gathered.
        max_held_bytes: most bytes that the gathered head and its gradient may hold.
    """
    saved = 2 * num_tiles - 1 if num_tiles > 1 and head_shards > 1 else 0
    held = vocab * embed_dim * (head_itemsize + gradient_itemsize)
    numbers = (
        f"saves {saved} all-gathers of the head a step and holds {_bytes(held)} "
        f"(head {vocab} × {embed_dim} × {head_itemsize} B and its gradient × {gradient_itemsize} B)"
    )
    if num_tiles == 1:
        return AgOnceChoice(False, 0, held, "one chunk gathers the head once anyway")
    if saved == 0:
        return AgOnceChoice(False, 0, held, "the head is not sharded, so nothing is gathered")
    value = held <= max_held_bytes
    sign = "≤" if value else ">"
    return AgOnceChoice(
        value, saved, held, f"{numbers} {sign} max_held_bytes {_bytes(max_held_bytes)}"
    )


def _bytes(count: int) -> str:
    """A size in its largest binary unit, rounded to two places where it is not whole."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if count >= factor:
            whole = count / factor
            return f"{whole:g} {unit}" if count % factor == 0 else f"{whole:.2f} {unit}"
    return f"{count} B"
