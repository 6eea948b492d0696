"""The split state of one training engine of MaxText 0.2.4, kept between its steps.

``MaxTextTrainingEngine`` calls ``nnx.split`` on the model in each ``fwd_bwd`` and on the train
state in each ``update``, which walks every graph node. What it gets is what the step before has
just written with ``nnx.update``, so it can be kept. :class:`PureState` answers those two calls from
memory while the live objects are, object for object, what they were when it last looked:

- every variable still holds the very array that was published to it, and
- every module still has the very attributes it had.

So a program that changes the model behind the engine's back gets a real split, at that step only.
A state whose parts cannot be put together from each other ends the caching for that engine.

MaxText keeps the split state itself from 0.2.5 on, with its own checks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain
from typing import Final

import jax
from flax import nnx

from tilepolicy.adapters.maxtext_types import Foreign

__all__ = ["NotReusableError", "PureState"]

_MODEL: Final = "model"


class NotReusableError(Exception):
    """Why the split state of an engine cannot be kept; the text is for the report."""


class PureState:
    """What ``nnx.split`` gives for an engine's train state and for the model in it.

    Everything that runs in each step is a pass over flat tuples in C, or a walk over the nested
    mappings of a state; the modules themselves are walked once, when the object is made.

    Attributes:
        state: the live train state.
        model: the live model, ``state.model``.
    """

    def __init__(self, state: Foreign) -> None:
        """Split once.

        Raises:
            NotReusableError: the parts do not line up.
        """
        self.state = state
        self.model = state.model
        self._state_graphdef, self._state_pure = nnx.split(state)
        self._model_graphdef, self._params, self._rest = nnx.split(self.model, nnx.Param, ...)
        self._param_shape = _shape(self._params.raw_mapping)
        self._rest_shape = _shape(self._rest.raw_mapping)
        self._state_shape = _shape(self._state_pure.raw_mapping)
        self._rest_is_newer = False
        self._compared_kernel: object = None
        self._check_parts()
        self._watch()

    def model_is_current(self) -> bool:
        """Whether model and state are, object for object, what the last step left."""
        return self.state_is_current() and all(
            map(operator.is_, _values(self._attributes), self._known)
        )

    def state_is_current(self) -> bool:
        """The same, but of the modules only how many attributes they have.

        For the update that belongs to a forward pass: the gradients it is given are of the model
        that :meth:`model_is_current` has looked at.
        """
        return (
            all(map(operator.is_, map(_RAW, self._variables), self._published))
            and all(map(operator.is_, map(_RAW, self._rest_variables), self._rest_published))
            and sum(map(len, self._attributes)) == len(self._known)
        )

    def split_model(self) -> tuple[Foreign, Foreign, Foreign]:
        """What ``nnx.split(model, nnx.Param, ...)`` would give."""
        return self._model_graphdef, self._params, self._rest

    def split_state(self) -> tuple[Foreign, Foreign]:
        """What ``nnx.split(state)`` would give."""
        if self._rest_is_newer:
            whole = self._state_pure.raw_mapping
            model = _grafted(whole[_MODEL], self._rest.raw_mapping)
            self._state_pure = nnx.State({**whole, _MODEL: model})
            self._rest_is_newer = False
        return self._state_graphdef, self._state_pure

    def publish_rest(self, rest: Foreign) -> None:
        """Take over the non-parameters that a forward and backward pass returned.

        Raises:
            NotReusableError: they are not those the model was split into.
        """
        if not _fits(rest.raw_mapping, self._rest_shape):
            raise NotReusableError(
                "fwd_bwd returned other non-parameters than the model was split into"
            )
        self._rest = rest
        self._rest_is_newer = True
        self._rest_published = tuple(map(_RAW, self._rest_variables))

    def publish_state(self, state: Foreign, kernel: object = None) -> None:
        """Take over the state that an update returned.

        Args:
            state: the returned state.
            kernel: the jitted function that returned it, whose results have one structure, so
                that only its first is compared in full; None compares every one.

        Raises:
            NotReusableError: it does not have the parts that the state was split into.
        """
        whole = state.raw_mapping
        if kernel is None or kernel is not self._compared_kernel:
            if not _fits(whole, self._state_shape):
                raise NotReusableError(
                    "update returned another state than the engine was split into"
                )
            self._compared_kernel = kernel
        self._params = nnx.State(_picked(whole[_MODEL], self._param_shape))
        self._rest = nnx.State(_picked(whole[_MODEL], self._rest_shape))
        self._state_pure = state
        self._rest_is_newer = False
        self._read_published()

    def _check_parts(self) -> None:
        """Put the state together from its parts, and take it apart, as each step will do."""
        whole = self._state_pure.raw_mapping
        if _MODEL not in whole:
            raise NotReusableError(f"the train state has no {_MODEL!r} part")
        joined = nnx.merge_state(self._params, self._rest)
        rebuilt = nnx.State({**whole, _MODEL: joined.raw_mapping})
        if not _same_structure(rebuilt, self._state_pure):
            raise NotReusableError(f"the {_MODEL!r} part of the train state is not the model's")
        for part, shape in ((self._params, self._param_shape), (self._rest, self._rest_shape)):
            if not _same_structure(nnx.State(_picked(whole[_MODEL], shape)), part):
                raise NotReusableError("the model cannot be picked out of the train state")

    def _watch(self) -> None:
        """Find the live variables and modules; both graphs are walked this once."""
        variables: dict[int, Foreign] = {}
        modules: dict[int, Foreign] = {}
        for _, node in nnx.iter_graph(self.state):
            if isinstance(node, nnx.Variable):
                variables[id(node)] = node
            elif isinstance(node, nnx.Module):
                modules[id(node)] = node
        if len(variables) != len(nnx.to_flat_state(self._state_pure)):
            raise NotReusableError("the train state has variables that nnx.split leaves out")
        of_rest = {
            id(node)
            for _, node in nnx.iter_graph(self.model)
            if isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param)
        }
        self._variables = tuple(v for key, v in variables.items() if key not in of_rest)
        self._rest_variables = tuple(v for key, v in variables.items() if key in of_rest)
        self._attributes = tuple(module.__dict__ for module in modules.values())
        self._known = tuple(_values(self._attributes))
        self._read_published()

    def _read_published(self) -> None:
        """Remember the arrays that the live variables hold now."""
        self._published = tuple(map(_RAW, self._variables))
        self._rest_published = tuple(map(_RAW, self._rest_variables))


# The plain function is final in flax, and three times faster than a methodcaller.
_RAW = nnx.Variable.get_raw_value


def _values(attributes: tuple[dict[str, Foreign], ...]) -> Iterator[Foreign]:
    """Every attribute of every module, one after the other."""
    return chain.from_iterable(map(dict.values, attributes))


def _same_structure(one: Foreign, other: Foreign) -> bool:
    first: object = jax.tree.structure(one)
    return first == jax.tree.structure(other)


def _shape(tree: Foreign) -> Foreign:
    """The nesting of a state's mapping, with the type of each variable for a leaf."""
    if isinstance(tree, dict):
        return {key: _shape(value) for key, value in tree.items()}
    return type(tree)


def _fits(tree: Foreign, shape: dict[Foreign, Foreign]) -> bool:
    """Whether a state's mapping has this nesting and these types."""
    try:
        if len(tree) != len(shape):
            return False
        for key, inner in shape.items():
            value = tree[key]
            if type(value) is not inner and not (type(inner) is dict and _fits(value, inner)):
                return False
    except (KeyError, TypeError):
        return False
    return True


def _picked(tree: dict[Foreign, Foreign], shape: dict[Foreign, Foreign]) -> dict[Foreign, Foreign]:
    """The part of a nesting that a shape names; variables are not copied."""
    return {
        key: _picked(tree[key], inner) if type(inner) is dict else tree[key]
        for key, inner in shape.items()
    }


def _grafted(tree: dict[Foreign, Foreign], newer: dict[Foreign, Foreign]) -> dict[Foreign, Foreign]:
    """A nesting with some of its leaves replaced; what is not on their way is shared."""
    grown = dict(tree)
    for key, value in newer.items():
        grown[key] = _grafted(tree[key], value) if type(value) is dict else value
    return grown
