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

from collections.abc import Mapping
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
        self._model_graphdef, params, rest = nnx.split(self.model, nnx.Param, ...)
        self._params, self._rest = params, rest
        self._param_paths = _template(params)
        self._rest_paths = _template(rest)
        self._check_parts()
        self._watch()

    def is_current(self) -> bool:
        """Whether the live objects are what they were after the last publication."""
        return all(map(_same, self._variables, self._published)) and all(
            _unchanged(node, attributes) for node, attributes in self._nodes
        )

    def split_model(self) -> tuple[Foreign, Foreign, Foreign]:
        """What ``nnx.split(model, nnx.Param, ...)`` would give."""
        return self._model_graphdef, self._params, self._rest

    def split_state(self) -> tuple[Foreign, Foreign]:
        """What ``nnx.split(state)`` would give."""
        return self._state_graphdef, self._state_pure

    def publish_rest(self, rest: Foreign) -> None:
        """Take over the non-parameters that a forward and backward pass returned.

        Raises:
            NotReusableError: they are not those the model was split into.
        """
        if _template(rest) != self._rest_paths:
            raise NotReusableError(
                "fwd_bwd returned other non-parameters than the model was split into"
            )
        self._rest = rest
        model = nnx.merge_state(self._params, rest)
        self._state_pure = _with_model(self._state_pure, model)
        self._read_published()

    def publish_state(self, state: Foreign) -> None:
        """Take over the state that an update returned.

        Raises:
            NotReusableError: it does not have the parts that the state was split into.
        """
        if _template(state) != self._state_paths:
            raise NotReusableError("update returned another state than the engine was split into")
        model = state.raw_mapping[_MODEL]
        self._params = nnx.State(_pick(model, self._param_paths))
        self._rest = nnx.State(_pick(model, self._rest_paths))
        self._state_pure = state
        self._read_published()

    def _check_parts(self) -> None:
        state = self._state_pure
        if not isinstance(state, nnx.State) or _MODEL not in state:
            raise NotReusableError(f"the train state has no {_MODEL!r} part")
        rebuilt = _with_model(state, nnx.merge_state(self._params, self._rest))
        if not _same_structure(rebuilt, state):
            raise NotReusableError(f"the {_MODEL!r} part of the train state is not the model's")
        self._state_paths = _template(state)
        picked = nnx.State(_pick(state.raw_mapping[_MODEL], self._param_paths))
        if not _same_structure(picked, self._params):
            raise NotReusableError("the parameters cannot be picked out of the train state")

    def _watch(self) -> None:
        """Find the live variables and modules; both graphs are walked this once."""
        variables: dict[int, Foreign] = {}
        nodes: dict[int, Foreign] = {}
        for _, node in nnx.iter_graph(self.state):
            if isinstance(node, nnx.Variable):
                variables[id(node)] = node
            elif isinstance(node, nnx.Module):
                nodes[id(node)] = node
        if len(variables) != len(nnx.to_flat_state(self._state_pure)):
            raise NotReusableError("the train state has variables that nnx.split leaves out")
        self._variables = tuple(variables.values())
        self._nodes = tuple((node, dict(vars(node))) for node in nodes.values())
        self._read_published()

    def _read_published(self) -> None:
        self._published = tuple(map(_raw, self._variables))


def _same_structure(one: Foreign, other: Foreign) -> bool:
    first: object = jax.tree.structure(one)
    return first == jax.tree.structure(other)


def _raw(variable: Foreign) -> Foreign:
    return variable.get_raw_value()


def _same(variable: Foreign, value: Foreign) -> bool:
    return variable.get_raw_value() is value


def _unchanged(node: Foreign, attributes: Mapping[str, Foreign]) -> bool:
    present = vars(node)
    return len(present) == len(attributes) and all(
        present.get(name, attributes) is value for name, value in attributes.items()
    )


def _with_model(state: Foreign, model: Foreign) -> Foreign:
    """The state with its model part replaced, in the nesting that ``nnx.split`` gives."""
    return nnx.State({**state.raw_mapping, _MODEL: model.raw_mapping})


def _template(tree: Foreign) -> Foreign:
    """The nesting of a state, with the type of each variable for a leaf."""
    if isinstance(tree, nnx.State):
        tree = tree.raw_mapping
    if isinstance(tree, Mapping):
        return {key: _template(value) for key, value in tree.items()}
    return type(tree)


def _pick(
    tree: Mapping[Foreign, Foreign], template: Mapping[Foreign, Foreign]
) -> dict[Foreign, Foreign]:
    """The part of a nesting that a template names, without copying a variable."""
    return {
        key: _pick(_mapping(tree[key]), inner) if isinstance(inner, Mapping) else tree[key]
        for key, inner in template.items()
    }


def _mapping(tree: Foreign) -> Mapping[Foreign, Foreign]:
    found: Mapping[Foreign, Foreign] = tree.raw_mapping if isinstance(tree, nnx.State) else tree
    return found
