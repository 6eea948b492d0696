"""The loss that chooses its form from the shapes."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from losses_cases import arrays, close, gradients, of_inputs
from losses_reference import random_problem, solve

import tilepolicy
from tilepolicy.losses import make_adaptive_sparse_cross_entropy
from tilepolicy.model import VocabSettings
from tilepolicy.session import Note, Session
from tilepolicy.vocab import Thresholds, choose_loss, choose_tiling

SMALL = Thresholds(
    max_chunk_bytes=1024, max_monolithic_vocab_size=8, max_monolithic_bytes=2048, min_chunk_tokens=2
)


@pytest.mark.parametrize(
    ("tokens", "vocab", "loss", "num_tiles"),
    [
        ((8,), 32, "sparse", 1),
        ((32,), 32, "chunked", 4),
        ((4, 8), 32, "chunked", 4),
        ((64,), 8, "sparse", 1),
        ((31,), 32, "online", 1),
        ((4,), 512, "online", 1),
    ],
)
def test_the_choice_is_that_of_the_rule(
    tokens: tuple[int, ...], vocab: int, loss: str, num_tiles: int
) -> None:
    """Shapes decide exactly as ``tilepolicy.vocab`` does, and the result is right."""
    adaptive = make_adaptive_sparse_cross_entropy(SMALL, vocab_tile=16)
    decision = adaptive.decision((*tokens, 4), (4, vocab))
    tiling = choose_tiling(int(jnp.prod(jnp.array(tokens))), vocab, 4, SMALL)
    assert (decision.loss, decision.num_tiles) == (loss, num_tiles)
    assert decision.loss == choose_loss(tiling)
    assert decision.reason.startswith(tiling.reason)
    problem = random_problem(0, tokens, 4, vocab)
    inputs = arrays(problem)[:2]
    sums, grads = gradients(
        lambda h, w: adaptive(h, w, problem.labels, problem.weights), inputs, 2.0, 0.0
    )
    answer = solve(problem, 2.0)
    close(sums[0], answer.loss_sum)
    for gradient, expected in zip(grads, of_inputs(answer), strict=False):
        close(gradient, expected)


def test_the_default_thresholds_are_those_of_a_policy() -> None:
    """Without a policy the published examples of the automatic rule hold."""
    decision = make_adaptive_sparse_cross_entropy().decision((8192, 16), (16, 262144))
    assert (decision.loss, decision.num_tiles, decision.vocab_tile) == ("chunked", 64, None)
    assert decision.reason == (
        "logits 8192 tokens × 262144 × 4 B = 8 GiB > max_chunk_bytes 128 MiB; 64 is the smallest "
        "power of two dividing 8192 that fits: 128 tokens, 128 MiB a chunk: the tokens are cut"
    )


def test_smaller_logits_need_fewer_chunks() -> None:
    """Two bytes a logit halve the number of chunks."""
    adaptive = make_adaptive_sparse_cross_entropy(logits_dtype=jnp.bfloat16)
    assert adaptive.decision((8192, 16), (16, 262144)).num_tiles == 32


@pytest.mark.parametrize(
    ("section", "loss", "num_tiles"),
    [
        ({"loss": "online"}, "online", 1),
        ({"loss": "sparse"}, "sparse", 1),
        ({"num_vocab_tiling": 2}, "chunked", 2),
        ({"num_vocab_tiling": 1}, "sparse", 1),
        ({"loss": "chunked", "num_vocab_tiling": 16}, "chunked", 16),
        (
            {"max_chunk_bytes": 512, "max_monolithic_vocab_size": 1, "min_chunk_tokens": 1},
            "chunked",
            8,
        ),
    ],
)
def test_a_policy_decides(section: dict[str, Any], loss: str, num_tiles: int) -> None:
    """The settings of ``vocab`` hold, given as a section or inside of a policy."""
    vocab = VocabSettings(**section)
    for policy in (vocab, SimpleNamespace(vocab=vocab)):
        adaptive = make_adaptive_sparse_cross_entropy(policy)
        decision = adaptive.decision((32, 4), (4, 32))
        assert (decision.loss, decision.num_tiles) == (loss, num_tiles)


def test_the_gather_is_weighed_when_the_policy_asks_for_it() -> None:
    """``vocab_tiling_ag_once: auto`` gives its arithmetic; true and false are taken as they are."""
    auto = make_adaptive_sparse_cross_entropy(VocabSettings(vocab_tiling_ag_once="auto"))
    decision = auto.decision((8192, 16), (16, 262144))
    assert not decision.ag_once
    assert decision.reason.endswith("ag_once: the head is not sharded, so nothing is gathered")
    assert make_adaptive_sparse_cross_entropy().decision((8, 4), (4, 8)).ag_once


def test_mask_and_soft_cap_and_bias_reach_every_form() -> None:
    """All three forms give the same sums with every option set."""
    problem = random_problem(1, (8, 4), 4, 64, bias=True, soft_cap=3.0, z_loss=1e-3, tied=True)
    hidden, head, bias = arrays(problem)
    answer = solve(problem)
    for loss in ("sparse", "chunked", "online"):
        policy = VocabSettings(loss=loss, num_vocab_tiling=4)
        adaptive = make_adaptive_sparse_cross_entropy(
            policy, vocab_tile=24, z_loss=1e-3, tied=True, soft_cap=3.0
        )
        sums = jax.jit(adaptive)(hidden, head, problem.labels, problem.weights, bias=bias)
        close(sums[0], answer.loss_sum)
        close(sums[1], answer.z_sum)


def test_without_weights_every_token_counts_once() -> None:
    """None stands for weights of one in the online form too."""
    problem = random_problem(2, (8,), 4, 16)
    problem.weights[:] = 1
    hidden, head, _ = arrays(problem)
    adaptive = make_adaptive_sparse_cross_entropy(VocabSettings(loss="online"))
    close(adaptive(hidden, head, problem.labels)[0], solve(problem).loss_sum)


def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Outside of a scope the logger ``tilepolicy`` says which and why, once for each trace."""
    adaptive = make_adaptive_sparse_cross_entropy(SMALL)
    step = jax.jit(lambda h, w, y: adaptive(h, w, y)[0])
    with caplog.at_level(logging.INFO, "tilepolicy"):
        for _ in range(2):
            step(jnp.ones((32, 4)), jnp.ones((4, 32)), jnp.zeros(32, jnp.int32))
    assert caplog.messages == [
        "losses: loss = chunked with num_tiles 4 (logits 32 tokens × 32 × 4 B = 4 KiB > "
        "max_chunk_bytes 1 KiB; 4 is the smallest power of two dividing 32 that fits: 8 tokens, "
        "1 KiB a chunk: the tokens are cut)"
    ]


def test_the_choice_is_in_the_report_of_every_active_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of scopes the sessions note which loss was traced, and why."""
    sessions = [Session(), Session()]
    scopes = [SimpleNamespace(session=session) for session in (*sessions, sessions[0])]
    monkeypatch.setattr("tilepolicy.context.active.policies", lambda: tuple(scopes))
    adaptive = make_adaptive_sparse_cross_entropy(VocabSettings(loss="online"), vocab_tile=16)
    adaptive(jnp.ones((4, 2)), jnp.ones((2, 8)), jnp.zeros(4, jnp.int32))
    for session in sessions:
        assert session.notes == {
            Note(
                "losses",
                "loss",
                "online with vocab_tile 16",
                "logits 4 tokens × 8 × 4 B = 128 B ≤ max_chunk_bytes 128 MiB: "
                "loss is set to online",
            ): 1
        }


def test_the_report_of_a_scope_says_which_loss_was_chosen_and_why(tmp_path: Path) -> None:
    """A loss made from a policy file, traced inside of ``apply``, stands in the report's text."""
    file = tmp_path / "own.yml"
    file.write_text("version: 1\nname: own\nvocab: {loss: auto, min_chunk_tokens: 64}\n")
    policy = tilepolicy.load(file)
    adaptive = make_adaptive_sparse_cross_entropy(policy)
    with tilepolicy.apply(policy, adapters=[]) as session:
        jax.eval_shape(adaptive, *(jnp.zeros(shape) for shape in ((64, 4), (4, 8))), jnp.arange(64))
    assert (
        "losses: loss = sparse (logits 64 tokens × 8 × 4 B = 2 KiB ≤ max_chunk_bytes 128 MiB: "
        "one chunk holds all logits)"
    ) in session.report()


def test_a_loss_that_cannot_run_is_explained() -> None:
    """Chunks that are asked for but impossible, and MaxText's own loss, are errors."""
    forced = make_adaptive_sparse_cross_entropy(
        VocabSettings(loss="chunked", max_chunk_bytes=128, max_monolithic_vocab_size=1)
    )
    with pytest.raises(ValueError, match=r"the chunked loss cannot run here: .*; use online"):
        forced.decision((31, 4), (4, 32))
    with pytest.raises(ValueError, match=r"vocab[.]loss is upstream: that is MaxText's own loss"):
        make_adaptive_sparse_cross_entropy(VocabSettings(loss="upstream"))
