"""A training engine that splits and updates its state in each step, as MaxText 0.2.4's does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Model(nnx.Module):
    """Two layers, a count of calls, dropout: parameters, other variables, and keys."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        """One value for each row."""
        self.calls.set_value(self.calls.get_value() + 1)
        return self.second(self.dropout(jax.nn.relu(self.first(x))))


class TrainState(nnx.Module):
    """A model and its optimizer."""

    def __init__(self, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer


class Sown(nnx.Variable):
    """What a forward pass may leave in the model."""


class MaxTextTrainingEngine:
    """``fwd_bwd`` and ``update``, compiled on first use."""

    def __init__(self) -> None:
        self._model = Model(nnx.Rngs(0))
        self._optimizer = nnx.Optimizer(self._model, optax.adam(1e-2), wrt=nnx.Param)
        self._state = None
        self._compiled = False
        self.sows = False
        self.compile()

    def compile(self) -> None:
        """Forget what was compiled."""
        self._compiled_fwd_bwd = jax.jit(self._fwd_bwd_kernel)
        self._compiled_update = jax.jit(self._update_kernel)
        self._compiled = True

    def _fwd_bwd_kernel(self, params: Any, rest: Any, batch: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            model = nnx.merge(self._model_graphdef, params, rest, copy=True)
            value = jnp.mean(model(batch) ** 2)
            if self.sows:
                model.sown = Sown(value)
            return value, nnx.split(model, nnx.Param, ...)[2]

        (value, new_rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, new_rest, grads

    def _update_kernel(self, pure: Any, grads: Any) -> Any:
        state = nnx.merge(self._state_graphdef, pure, copy=True)
        state.optimizer.update(state.model, grads)
        return nnx.split(state)[1]

    def fwd_bwd(self, payload: jax.Array) -> float:
        """One forward and backward pass."""
        if self._state is None:
            self._state = TrainState(self._model, self._optimizer)
        model = self._state.model
        self._model_graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        value, new_rest, self._grads = self._compiled_fwd_bwd(params, rest, payload)
        nnx.update(model, new_rest)
        if self.sows:
            nnx.pop(model, Sown)
        return float(value)

    def update(self) -> None:
        """One optimizer step."""
        self._state_graphdef, pure = nnx.split(self._state)
        nnx.update(self._state, self._compiled_update(pure, self._grads))
