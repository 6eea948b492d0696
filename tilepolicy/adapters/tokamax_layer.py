"""Which layer a call of a grouped matmul is: the evidence, from the strongest to none.

=====================  ===========================================================================
the op                 :func:`~tilepolicy.adapters.tokamax_op.ragged_dot_op` carries its layer,
                       and puts it in force while its own backward pass is traced
the remembered chain   jax brings back the traceback of the forward call: what a tag said of it
a tag                  ``with tilepolicy.layer("wi")`` around the call
the remembered op      a forward re-trace without a traceback binds the same op object again
declared sizes         of the config, or given to ``apply``
(one tile for both)    then there is nothing to decide
a known function       MaxText's, or those given to ``apply``, on the stack or in the traceback
=====================  ===========================================================================
"""

from __future__ import annotations

import sys
from functools import cached_property
from types import FrameType
from typing import Any, Final, NamedTuple

from tilepolicy.adapters.tokamax_upstream import Upstream
from tilepolicy.axes import GmmShape
from tilepolicy.context.active import View
from tilepolicy.context.callstack import MOST_FRAMES, CallStack, SiteMemory
from tilepolicy.settings import LAYERS, Layer

__all__ = ["Evidence", "LayerFinder"]

_JAX: Final = "/jax/_src/"
_FOREIGN: Final = ("/jax/", "/jaxlib/", "/tokamax/", "/tilepolicy/", "/contextlib.py")

_MEMORY: Final = SiteMemory()


class Evidence(NamedTuple):
    """A layer and what told it."""

    layer: Layer
    how: str


# Made once: these answer most lookups of a backward pass.
_BY_CHAIN: Final = {
    frozenset({layer}): Evidence(layer, "the tag of the forward call") for layer in LAYERS
}
_BY_OP: Final = {
    frozenset({layer}): Evidence(layer, "the op of the first trace") for layer in LAYERS
}


class LayerFinder:
    """Collects the evidence for one call; the Python stack is walked only where it is needed.

    Attributes:
        serves_both: whether tags gave both layers to the line of the call, with these sizes.
    """

    def __init__(
        self,
        upstream: Upstream,
        op: Any,  # noqa: ANN401 - upstream op
        shape: GmmShape,
        view: View,
    ) -> None:
        self._upstream = upstream
        self._op = op
        self._shape = shape
        self._view = view
        self.serves_both = False

    def first(self) -> Evidence | None:
        """What is stated: by the op, a tag, the memory of either, or declared sizes."""
        own: Layer | None = getattr(self._op, "tilepolicy_layer", None)
        if own is not None:
            return Evidence(own, "the op")
        tag = self._view.tag
        if tag is not None and tag.of_op:
            _MEMORY.remember_op(self._op, tag.tag)
            return Evidence(tag.tag, "the op of the forward pass")
        if (remembered := self._remembered()) is not None:
            return remembered
        if tag is not None:
            self._keep(tag.tag)
            return Evidence(tag.tag, "a tag")
        return self._by_op() or self._by_sizes()

    def last(self) -> Evidence | None:
        """The innermost known function that the call comes from."""
        origin = self._upstream.call_origin()
        layer = origin.function_layer(self._running, self._view.call_sites, _JAX)
        if layer is None:
            return None
        _MEMORY.remember_op(self._op, layer)
        return Evidence(layer, "the calling function")

    def lines(self) -> list[str]:
        """The user's frames that led to the call, for a message."""
        stack = self._upstream.call_origin().remembered
        if stack is None and self._running is not None:
            stack = CallStack.above(self._running, sys.maxsize)
        return [] if stack is None else stack.lines(leave_out=_FOREIGN)

    @cached_property
    def _running(self) -> FrameType | None:
        return self._upstream.running_call(self._op)

    def _keep(self, layer: Layer) -> None:
        """Remember the call that a tag is in force for, by its op and by its callers."""
        _MEMORY.remember_op(self._op, layer)
        if self._upstream.call_origin().remembered is None and self._running is not None:
            callers = CallStack.above(self._running, MOST_FRAMES)
            _MEMORY.remember(callers, self._shape[:3], layer)

    def _remembered(self) -> Evidence | None:
        """What a tag said when this call was traced first."""
        if not _MEMORY.knows_chains():
            return None
        origin = self._upstream.call_origin()
        if origin.remembered is None or not origin.remembers_op:
            return None
        layers = _MEMORY.recall(origin.remembered, self._shape[:3])
        self.serves_both = len(layers) > 1
        return _BY_CHAIN.get(layers)

    def _by_op(self) -> Evidence | None:
        found = _BY_OP.get(_MEMORY.recall_op(self._op))
        # An op that is called directly has its caller on the stack: its identity must not stand
        # in for that, because one op may be called for both layers.
        return None if found is None or self._running is not None else found

    def _by_sizes(self) -> Evidence | None:
        for policy in self._view.policies:
            if policy.sizes is not None:
                layer = policy.sizes.layer_of(self._shape)
                return None if layer is None else Evidence(layer, "declared sizes")
        return None
