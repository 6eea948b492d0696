"""What the losses accept, and how they explain what they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses_cases import close
from losses_reference import random_problem

from tilepolicy.losses import (
    chunked_sparse_cross_entropy,
    chunked_sparse_cross_entropy_fn,
    make_adaptive_sparse_cross_entropy,
    online_sparse_cross_entropy,
    sparse_cross_entropy_with_logits,
)
from tilepolicy.model import VocabSettings

ARGUMENTS = {
    "hidden": jnp.zeros((12, 8)),
    "head": jnp.zeros((8, 5)),
    "labels": jnp.zeros(12, jnp.int32),
}
OF_BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"labels": jnp.zeros(11, int)}, ValueError, r"labels must have the shape of the tokens \(12,"),
    ({"labels": jnp.zeros(12)}, TypeError, "labels must be integers, got float32"),
    ({"head": jnp.zeros((7, 5))}, ValueError, r"an untied head has shape \(D, V\) with D = \(8,"),
    ({"tied": True}, ValueError, r"a tied head has shape \(V, D\) with D = \(8,\) of hidden"),
    ({"head": jnp.zeros((8, 0))}, ValueError, "the head has no vocabulary entry"),
    ({"bias": jnp.zeros(4)}, ValueError, r"bias must have shape \(5,\), got \(4,\)"),
    ({"bias": jnp.zeros(5, int)}, TypeError, "bias must be floating, got int32"),
    ({"soft_cap": -1.0}, ValueError, "soft_cap must be a finite number >= 0 or None, got -1.0"),
    ({"z_loss": -1.0}, ValueError, "z_loss must be a finite number >= 0, got -1.0"),
    ({"hidden": jnp.zeros((12, 8), int)}, TypeError, "hidden must be floating, got int32"),
    ({"head": jnp.zeros((8, 5), int)}, TypeError, "head must be floating, got int32"),
    ({"logits_dtype": "int8"}, TypeError, "logits_dtype must be floating, got int8"),
]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        *OF_BOTH,
        ({"num_tiles": 5}, ValueError, r"num_tiles=5 must divide the 12 tokens of shape \(12,\)"),
        ({"num_tiles": 0}, ValueError, "num_tiles must be at least 1, got 0"),
        ({"num_tiles": 4.0}, TypeError, "num_tiles must be an integer, got 4.0"),
        ({"weights": jnp.zeros(11)}, ValueError, r"weights must have the shape of the tokens \(1"),
        ({"weights": 1.0}, ValueError, r"weights must have the shape of the tokens .* got \(\)"),
        ({"weights": jnp.zeros(12, complex)}, TypeError, "weights must be real numbers or a mask"),
        ({"ag_once": False}, ValueError, "ag_once=False and reduce_once=False say nothing with"),
        ({"reduce_once": False}, ValueError, "say nothing without sharding: pass a LossSharding"),
    ],
)
def test_the_chunked_loss_explains_wrong_arguments(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    """Every argument is checked before anything is computed."""
    with pytest.raises(error, match=text):
        chunked_sparse_cross_entropy(**{**ARGUMENTS, "num_tiles": 3, **change})


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        *OF_BOTH,
        ({"vocab_tile": 0}, ValueError, "vocab_tile must be at least 1, got 0"),
        ({"vocab_tile": 3.0}, TypeError, "vocab_tile must be an integer, got 3.0"),
        ({"token_tile": 5}, ValueError, "token_tile=5 must divide the 12 tokens of shape"),
        ({"token_tile": 0}, ValueError, "token_tile must be at least 1, got 0"),
        ({"ag_once": False}, ValueError, "ag_once=False says nothing without sharding"),
    ],
)
def test_the_online_loss_explains_wrong_arguments(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    """Every argument is checked before anything is computed."""
    with pytest.raises(error, match=text):
        online_sparse_cross_entropy(**{**ARGUMENTS, "vocab_tile": 3, **change})


@pytest.mark.parametrize(
    ("logits", "labels", "z_loss", "error", "text"),
    [
        ((2, 3), (3,), 0.0, ValueError, r"shape of the tokens \(2,\), got \(3,\)"),
        ((2, 3), (2,), -1.0, ValueError, "z_loss must be a finite number >= 0, got -1.0"),
        ((2, 3), (2,), float("nan"), ValueError, "z_loss must be a finite number >= 0, got nan"),
        ((), (), 0.0, ValueError, r"logits must have a vocabulary axis, got shape \(\)"),
        ((2, 0), (2,), 0.0, ValueError, r"logits must have a vocabulary axis, got shape \(2, 0\)"),
    ],
)
def test_the_loss_of_logits_explains_wrong_arguments(
    logits: tuple[int, ...],
    labels: tuple[int, ...],
    z_loss: float,
    error: type[Exception],
    text: str,
) -> None:
    """Shapes and the coefficient are checked before anything is computed."""
    with pytest.raises(error, match=text):
        sparse_cross_entropy_with_logits(
            jnp.zeros(logits), jnp.zeros(labels, jnp.int32), z_loss=z_loss
        )


def test_logits_have_to_be_floating_and_labels_integers() -> None:
    """A one-hot or soft target is refused, not rounded."""
    with pytest.raises(TypeError, match="labels must be integers, got float32"):
        sparse_cross_entropy_with_logits(jnp.zeros((2, 3)), jnp.zeros(2))
    with pytest.raises(TypeError, match="logits must be floating, got int32"):
        sparse_cross_entropy_with_logits(jnp.zeros((2, 3), int), jnp.zeros(2, int))


def test_the_coefficient_has_to_be_known_at_trace_time() -> None:
    """A traced z_loss is refused by jax, with its own explanation."""
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(
            lambda z: sparse_cross_entropy_with_logits(
                jnp.zeros((2, 3)), jnp.zeros(2, int), z_loss=z
            )
        )(0.1)


@pytest.mark.parametrize(
    ("params", "logits_fn", "error", "text"),
    [
        (
            {"w": jnp.zeros((8, 5)), "step": jnp.zeros((), int)},
            lambda params, hidden: hidden @ params["w"],
            TypeError,
            r"params\['step'\] must be floating, got int32: pass what is not",
        ),
        (
            jnp.zeros((8, 5)),
            lambda head, hidden: (hidden @ head)[0],
            ValueError,
            r"logits_fn must return \(\*tokens, V\) with the tokens \(4,\) of its chunk",
        ),
    ],
)
def test_a_head_function_is_checked(
    params: Any, logits_fn: Callable[..., Any], error: type[Exception], text: str
) -> None:
    """Parameters without a gradient, and logits of another shape than the chunk's, are named."""
    with pytest.raises(error, match=text):
        chunked_sparse_cross_entropy_fn(
            logits_fn, params, ARGUMENTS["hidden"], ARGUMENTS["labels"], num_tiles=3
        )


def test_the_adaptive_loss_explains_wrong_arguments() -> None:
    """What is no loaded policy, no tile and no head is refused with the remedy."""
    with pytest.raises(TypeError, match=r"policy must be what tilepolicy[.]load returns, .*a.yml"):
        make_adaptive_sparse_cross_entropy("a.yml")  # type: ignore[arg-type]  # the mistake itself
    with pytest.raises(ValueError, match="vocab_tile must be at least 1, got 0"):
        make_adaptive_sparse_cross_entropy(vocab_tile=0)
    with pytest.raises(ValueError, match=r"an untied head has shape \(D, V\) .* got \(8,\)"):
        make_adaptive_sparse_cross_entropy()(jnp.zeros((12, 8)), jnp.zeros(8), jnp.zeros(12, int))


@pytest.mark.parametrize("loss", ["sparse", "online"])
def test_weights_are_never_broadcast(loss: str) -> None:
    """Weights of one token axis where there are two are an error in every form."""
    adaptive = make_adaptive_sparse_cross_entropy(VocabSettings(loss=loss))
    hidden, labels = jnp.zeros((4, 4, 8)), jnp.zeros((4, 4), int)
    with pytest.raises(
        ValueError, match=r"weights must have the shape of the tokens \(4, 4\), got"
    ):
        adaptive(hidden, jnp.zeros((8, 5)), labels, jnp.ones(4))


@pytest.mark.parametrize("loss", ["sparse", "chunked", "online"])
def test_narrow_labels_do_not_wrap_around(loss: str) -> None:
    """Labels of eight bits, which cannot count the vocabulary, have the right gradients."""
    problem = random_problem(3, (8,), 5, 300)
    labels = np.array([0, 1, 2, 44, 45, 46, 100, 127])

    def mean(head: jax.Array, labels: np.ndarray) -> jax.Array:
        if loss == "sparse":
            return sparse_cross_entropy_with_logits(problem.hidden @ head, labels)[0].mean()
        if loss == "chunked":
            sums = chunked_sparse_cross_entropy(problem.hidden, head, labels, num_tiles=2)
            return sums[0] / labels.size
        return online_sparse_cross_entropy(problem.hidden, head, labels, vocab_tile=90)[0].mean()

    head = jnp.asarray(problem.head, jnp.float32)
    step = jax.jit(jax.value_and_grad(mean))
    jax.tree.map(close, step(head, labels.astype(np.int8)), step(head, labels))


def test_numpy_arrays_are_arrays() -> None:
    """Labels and weights come from data loaders, which know nothing of jax."""
    hidden, head = np.ones((4, 2), np.float32), np.eye(2, dtype=np.float32)
    loss, z_loss = chunked_sparse_cross_entropy(
        hidden,
        head,
        np.array([0, 1, 0, -100]),
        np.array([True, True, False, True]),
        num_tiles=2,
    )
    close(loss, 2 * np.log(2))
    assert float(z_loss) == 0.0
