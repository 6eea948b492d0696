"""Ops that carry their layer, for Tokamax's public ``implementation=[…]`` argument.

Importing this module imports Tokamax. The classes are top-level because Tokamax writes the class
of an op, by its import path, into the lowered module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from tilepolicy.adapters import tokamax_upstream
from tilepolicy.axes import Kernel
from tilepolicy.context import strands
from tilepolicy.context.layers import LayerTag, check_layer
from tilepolicy.settings import Layer

__all__ = ["LayeredRaggedDot", "LayeredRaggedDotV2", "ragged_dot_op"]

_UPSTREAM: Final = tokamax_upstream.load()
_V1: Any = _UPSTREAM.op_class("tokamax_v1")
_V2: Any = _UPSTREAM.op_class("tokamax_v2")


def _tagging(vjp: Any, layer: Layer) -> Any:  # noqa: ANN401 - upstream callable
    """The op's own backward rule, with the layer in force for the two calls that it makes."""

    def tagged_vjp(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - upstream signature
        entry = strands.push(LayerTag(layer, of_op=True))
        try:
            return vjp(*args, **kwargs)
        finally:
            strands.remove(entry)

    return tagged_vjp


def _tag_backward(op: Any, given: bool) -> None:  # noqa: ANN401 - upstream op
    if not given:
        object.__setattr__(op, "vjp", _tagging(op.vjp, op.tilepolicy_layer))


@dataclass(frozen=True, kw_only=True)
class LayeredRaggedDot(_V1):  # type: ignore[misc]  # the base is known at run time only
    """Tokamax's v1 ragged dot that knows its layer."""

    # Tokamax annotates it in each subclass; without a value here it would have no default.
    config: Any = None
    tilepolicy_layer: Literal["wi", "wo"]

    def __post_init__(self) -> None:
        given = self.vjp is not None
        _V1.__post_init__(self)
        _tag_backward(self, given)

    def get_autotuning_cache(self, device_kind: str | None = None) -> Any:  # noqa: ANN401
        """The shipped cache of the plain op: it is found by the name of the class."""
        return _V1(qdtype=self.qdtype, interpret=self.interpret).get_autotuning_cache(device_kind)


@dataclass(frozen=True, kw_only=True)
class LayeredRaggedDotV2(_V2):  # type: ignore[misc]  # the base is known at run time only
    """Tokamax's v2 ragged dot that knows its layer."""

    # Tokamax annotates it in each subclass; without a value here it would have no default.
    config: Any = None
    tilepolicy_layer: Literal["wi", "wo"]

    def __post_init__(self) -> None:
        given = self.vjp is not None
        _V2.__post_init__(self)
        _tag_backward(self, given)

    def get_autotuning_cache(self, device_kind: str | None = None) -> Any:  # noqa: ANN401
        """The shipped cache of the plain op: it is found by the name of the class."""
        return _V2(qdtype=self.qdtype).get_autotuning_cache(device_kind)


def ragged_dot_op(layer: str, kernel: Kernel = "tokamax_v1", **fields: Any) -> Any:  # noqa: ANN401
    """An op for ``tokamax.ragged_dot(..., implementation=[op])`` that carries its layer.

    Its backward pass keeps the layer too, whatever line called it. An explicit ``config=`` still
    wins over the policy, for the passes that Tokamax gives it to (v1: forward only).

    Args:
        layer: ``wi`` or ``wo``.
        kernel: ``tokamax_v1`` or ``tokamax_v2``.
        **fields: further fields of Tokamax's op, such as ``interpret=True`` or ``qdtype``.

    Raises:
        ScopeError: another layer name.
        ValueError: another kernel.
    """
    known = check_layer(layer)
    if kernel == "tokamax_v1":
        return LayeredRaggedDot(tilepolicy_layer=known, **fields)
    if kernel == "tokamax_v2":
        return LayeredRaggedDotV2(tilepolicy_layer=known, **fields)
    raise ValueError(f"{kernel!r} is not a kernel of Tokamax: use tokamax_v1 or tokamax_v2")
