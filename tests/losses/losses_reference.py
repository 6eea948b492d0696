"""The losses once more, in float64 numpy, straight from their definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Problem:
    """Inputs of a loss, as numpy arrays.

    Attributes:
        hidden: ``(*tokens, D)``.
        head: ``(D, V)``, or ``(V, D)`` if tied.
        labels: ``tokens``.
        weights: ``tokens``.
        bias: ``(V,)`` or None.
        tied: whether the head is an embedding table.
        soft_cap: cap of the logits, or None.
        z_loss: coefficient of the squared log-sum-exp.
    """

    hidden: np.ndarray
    head: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    bias: np.ndarray | None = None
    tied: bool = False
    soft_cap: float | None = None
    z_loss: float = 0.0


@dataclass
class Answer:
    """Losses of each token, and gradients of the weighted sums."""

    loss: np.ndarray
    z_term: np.ndarray
    loss_sum: float
    z_sum: float
    of_hidden: np.ndarray
    of_head: np.ndarray
    of_bias: np.ndarray


def solve(problem: Problem, of_loss: float = 1.0, of_z: float = 0.0) -> Answer:
    """Losses, and the gradients of ``of_loss · loss_sum + of_z · z_sum``."""
    depth = problem.hidden.shape[-1]
    hidden = problem.hidden.astype(np.float64).reshape(-1, depth)
    head = problem.head.astype(np.float64)
    head = head.T if problem.tied else head
    labels, weights = problem.labels.reshape(-1), problem.weights.reshape(-1).astype(np.float64)
    raw = hidden @ head
    if problem.bias is not None:
        raw = raw + problem.bias.astype(np.float64)
    logits, slope = raw, np.ones_like(raw)
    if problem.soft_cap:
        logits = np.tanh(raw / problem.soft_cap) * problem.soft_cap
        slope = 1 - (logits / problem.soft_cap) ** 2
    loss, z_term, of_logits = solve_logits(
        logits, labels, problem.z_loss, of_loss * weights, of_z * weights
    )
    of_raw = of_logits * slope
    of_head = hidden.T @ of_raw
    masked = np.where(weights == 0, 0, np.stack([loss, z_term]))
    sums = (masked * weights).sum(-1)
    return Answer(
        loss=loss.reshape(problem.labels.shape),
        z_term=z_term.reshape(problem.labels.shape),
        loss_sum=float(sums[0]),
        z_sum=float(sums[1]),
        of_hidden=(of_raw @ head.T).reshape(problem.hidden.shape),
        of_head=of_head.T if problem.tied else of_head,
        of_bias=of_raw.sum(0),
    )


def solve_logits(
    logits: np.ndarray,
    labels: np.ndarray,
    z_loss: float,
    of_loss: np.ndarray,
    of_z: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss and z-loss term of each token, and the cotangent of its logits."""
    logits = logits.astype(np.float64)
    vocab = logits.shape[-1]
    largest = logits.max(-1, keepdims=True)
    exponentials = np.exp(logits - largest)
    total = exponentials.sum(-1, keepdims=True)
    log_z = (np.log(total) + largest)[..., 0]
    softmax = exponentials / total
    valid = (labels >= 0) & (labels < vocab)
    one_hot = (np.arange(vocab) == labels[..., None]).astype(np.float64)
    target = np.take_along_axis(logits, np.clip(labels, 0, vocab - 1)[..., None], -1)[..., 0]
    z_term = z_loss * log_z**2
    loss = np.where(valid, log_z - target, 0.0) + z_term
    of_label = of_loss * valid
    of_softmax = of_label + (of_loss + of_z) * 2 * z_loss * log_z
    return loss, z_term, of_softmax[..., None] * softmax - of_label[..., None] * one_hot


def random_problem(
    seed: int,
    tokens: tuple[int, ...],
    depth: int,
    vocab: int,
    *,
    scale: float = 1.0,
    tied: bool = False,
    bias: bool = False,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
) -> Problem:
    """A problem with some labels out of range and some weights of zero."""
    rng = np.random.default_rng(seed)
    shape = (vocab, depth) if tied else (depth, vocab)
    labels = rng.integers(0, vocab, tokens)
    labels = np.where(rng.random(tokens) < 0.1, rng.choice([-100, -1, vocab, vocab + 7]), labels)
    return Problem(
        hidden=(rng.normal(size=(*tokens, depth)) * scale).astype(np.float32),
        head=rng.normal(size=shape).astype(np.float32),
        labels=labels.astype(np.int32),
        weights=(rng.random(tokens) < 0.7).astype(np.float32) * rng.choice([1.0, 2.0], tokens),
        bias=rng.normal(size=vocab).astype(np.float32) if bias else None,
        tied=tied,
        soft_cap=soft_cap,
        z_loss=z_loss,
    )
