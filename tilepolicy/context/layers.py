"""Which layer a grouped matmul belongs to: what a user says, and what sizes and code say.

Tokamax sees shapes only, and with equal embedding and MLP sizes the shapes of wi and wo are the
same. What decides, from the strongest: a tag (:func:`layer`, or an op that carries one), the
declared sizes, the function that made the call, and nothing else: where none of these decides and
the two layers' tiles differ, the lookup fails and says what to do. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Final

from tilepolicy.axes import GmmShape
from tilepolicy.context import strands
from tilepolicy.errors import Problem, ScopeError
from tilepolicy.settings import LAYERS, Layer

__all__ = ["MAXTEXT_CALL_SITES", "CallSites", "LayerSizes", "LayerTag", "check_layer", "layer"]


@dataclass(frozen=True, slots=True)
class LayerTag:
    """What :func:`layer` puts in force.

    Attributes:
        tag: the layer.
        of_op: whether an op that carries its layer put it in force for its own backward pass:
            it then goes before what is remembered of the call.
    """

    tag: Layer
    of_op: bool = False


@dataclass(frozen=True, slots=True)
class CallSites:
    """Functions whose calls tell the layer: the innermost one on the stack decides.

    ::

        sites = tilepolicy.CallSites(wi=("expert_in",), wo=("expert_out",), file="model/moe.py")
        with tilepolicy.apply(policy, call_sites=[sites]): ...

    Attributes:
        wi: names of functions that call (or lead to) the wi matmuls.
        wo: names of functions that call the wo matmul; they may contain the wi functions.
        file: what the path of their source file ends with; empty for any file.
    """

    wi: tuple[str, ...]
    wo: tuple[str, ...]
    file: str = ""

    def layer_of(self, code: CodeType) -> Layer | None:
        """The layer that a function stands for, or None."""
        name = code.co_name
        if name in self.wi:
            found: Layer = "wi"
        elif name in self.wo:
            found = "wo"
        else:
            return None
        path = code.co_filename.replace("\\", "/")
        return found if path.endswith(self.file) else None


# Read in MaxText 0.2.4 and 0.2.5: ``_moe_body`` calls ``gmm_up`` for both wi matmuls and makes the
# wo call itself. tests/apply/test_call_sites.py holds that against the installed release.
MAXTEXT_CALL_SITES: Final = CallSites(
    wi=("gmm_up",), wo=("_moe_body",), file="maxtext/layers/moe.py"
)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of one shard, by which the shapes of a call tell its layer.

    Attributes:
        embed_dim: model width, as wo produces it.
        mlp_dim: width of the expert's MLP, as wo contracts it.
        wi_embed_dim: width that wi contracts where it is called on chunks of the model width
            (``num_moe_emb_chunks``); None where it is ``embed_dim``.
        wi_mlp_dim: width of wi's result where gate and up are fused into one matmul
            (``prefuse_moe_weights``: twice ``mlp_dim``); None where it is ``mlp_dim``.
    """

    embed_dim: int
    mlp_dim: int
    wi_embed_dim: int | None = None
    wi_mlp_dim: int | None = None

    def layer_of(self, shape: GmmShape) -> Layer | None:
        """The layer whose sizes a call's forward problem has; None when both or neither fits."""
        is_wi = shape.k == (self.wi_embed_dim or self.embed_dim) and shape.n == (
            self.wi_mlp_dim or self.mlp_dim
        )
        is_wo = shape.k == self.mlp_dim and shape.n == self.embed_dim
        if is_wi == is_wo:
            return None
        return "wi" if is_wi else "wo"


def check_layer(name: str) -> Layer:
    """The name, if it is a layer's.

    Raises:
        ScopeError: it is neither ``wi`` nor ``wo``.
    """
    for known in LAYERS:
        if name == known:
            return known
    raise ScopeError(
        Problem(
            code="unknown-layer",
            message=f"{name!r} is not a layer",
            remedy='use "wi" (embedding to MLP) or "wo" (MLP to embedding)',
        )
    )


@contextmanager
def layer(name: str) -> Iterator[None]:
    """Say which layer the grouped matmuls inside belong to; also a decorator.

    ::

        with tilepolicy.layer("wi"):
            gate = tokamax.ragged_dot(x, w_gate, group_sizes)

    The backward pass is traced long after this scope has been left. It is recognised by the chain
    of calls that led to the forward call, which jax keeps for it. One line that serves both layers
    with equal shapes (a loop over ``("wi", "wo")``) cannot be told apart that way: the backward
    pass then fails and asks for :func:`tilepolicy.adapters.tokamax.ragged_dot_op`, whose op carries
    the layer itself.

    Seen by the calling thread or task only, like :func:`tilepolicy.apply`. Inside an active
    policy the tag is part of jax's trace key, so that one jitted function that serves both layers
    is traced for each.

    Args:
        name: ``wi`` or ``wo``.

    Raises:
        ScopeError: another name.
    """
    entry = strands.push(LayerTag(check_layer(name)))
    try:
        yield
    finally:
        strands.remove(entry)
