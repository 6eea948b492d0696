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

from dataclasses import dataclass
from typing import Any, Final

from tilepolicy.adapters.tokamax_upstream import Upstream
from tilepolicy.axes import GmmShape
from tilepolicy.context import active
from tilepolicy.context.active import ActivePolicy
from tilepolicy.context.callstack import CallOrigin, SiteMemory
from tilepolicy.settings import Layer

__all__ = ["Evidence", "LayerFinder"]

_JAX: Final = "/jax/_src/"
_FOREIGN: Final = ("/jax/", "/jaxlib/", "/tokamax/", "/tilepolicy/", "/contextlib.py")

_MEMORY: Final = SiteMemory()


@dataclass(frozen=True, slots=True)
class Evidence:
    """A layer and what told it."""

    layer: Layer
    how: str


class LayerFinder:
    """Collects the evidence for one call; the stack is only captured where it is needed."""

    def __init__(
        self,
        upstream: Upstream,
        op: Any,  # noqa: ANN401 - upstream op
        shape: GmmShape,
        policies: tuple[ActivePolicy, ...],
    ) -> None:
        self._upstream = upstream
        self._op = op
        self._problem = (shape.m, shape.k, shape.n)
        self._shape = shape
        self._policies = policies
        self._captured: CallOrigin | None = None
        self.serves_both = False

    @property
    def origin(self) -> CallOrigin:
        """Where the call comes from; captured when it is first needed."""
        if self._captured is None:
            self._captured = self._upstream.call_origin(self._op)
        return self._captured

    def first(self) -> Evidence | None:
        """What is stated: by the op, a tag, the memory of either, or declared sizes."""
        own = getattr(self._op, "tilepolicy_layer", None)
        if own is not None:
            return Evidence(own, "the op")
        tag = active.tag()
        if tag is not None and tag.of_op:
            _MEMORY.remember_op(self._op, tag.tag)
            return Evidence(tag.tag, "the op of the forward pass")
        remembered = self._remembered()
        if remembered is not None:
            return remembered
        if tag is not None:
            self._keep(tag.tag)
            return Evidence(tag.tag, "a tag")
        return self._by_op() or self._by_sizes()

    def last(self) -> Evidence | None:
        """The innermost known function that the call comes from."""
        sites = tuple(site for policy in self._policies for site in policy.call_sites)
        layer = self.origin.function_layer(sites, _JAX)
        if layer is None:
            return None
        _MEMORY.remember_op(self._op, layer)
        return Evidence(layer, "the calling function")

    def lines(self) -> list[str]:
        """The user's frames that led to the call, for a message."""
        stack = self.origin.running if self.origin.remembered is None else self.origin.remembered
        return [] if stack is None else stack.lines(leave_out=_FOREIGN)

    def _keep(self, layer: Layer) -> None:
        """Remember the call that a tag is in force for, by its op and by its callers."""
        _MEMORY.remember_op(self._op, layer)
        if self.origin.remembered is None and self.origin.running is not None:
            _MEMORY.remember(self.origin.running, self._problem, layer)

    def _remembered(self) -> Evidence | None:
        """What a tag said when this call was traced first."""
        if not _MEMORY.knows_chains():
            return None
        callers = self.origin.remembered
        if callers is None or not self.origin.remembers_op:
            return None
        layers = _MEMORY.recall(callers, self._problem)
        self.serves_both = len(layers) > 1
        if len(layers) != 1:
            return None
        return Evidence(next(iter(layers)), "the tag of the forward call")

    def _by_op(self) -> Evidence | None:
        layers = _MEMORY.recall_op(self._op)
        # An op that is called directly has its caller on the stack: its identity must not stand
        # in for that, because one op may be called for both layers.
        if len(layers) != 1 or self.origin.running is not None:
            return None
        return Evidence(next(iter(layers)), "the op of the first trace")

    def _by_sizes(self) -> Evidence | None:
        for policy in self._policies:
            if policy.sizes is not None:
                layer = policy.sizes.layer_of(self._shape)
                return None if layer is None else Evidence(layer, "declared sizes")
        return None
