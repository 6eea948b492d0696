"""The overlay: answers Tokamax's config lookups from the active policies.

Tokamax asks ``overlay.get(op, {}).get(device_kind, {}).get(key)`` and takes ``fastest_config`` of
the answer if its ``items()`` is not empty. Answers are formed per call, from the op, its class,
the shapes and types in the key and, for a grouped matmul, the layer.
"""

from __future__ import annotations

from typing import Any, Final

from tilepolicy.adapters.tokamax_gmm import answer_gmm
from tilepolicy.adapters.tokamax_ops import answer_op
from tilepolicy.adapters.tokamax_upstream import Upstream
from tilepolicy.context import active, carrier, distributed
from tilepolicy.context.active import View
from tilepolicy.errors import AdapterError, Problem

__all__ = ["PolicyOverlay"]

_NOTHING: Final[dict[Any, Any]] = {}


class _Answer:
    """One config in the form that a lookup expects of autotuning data."""

    __slots__ = ("fastest_config",)

    def __init__(self, config: object) -> None:
        self.fastest_config = config

    def items(self) -> tuple[tuple[object, None], ...]:
        return ((self.fastest_config, None),)


class _Call:
    """A lookup in the making: op known, then device kind, then key."""

    __slots__ = ("_device_kind", "_op", "_upstream", "_view")

    def __init__(self, upstream: Upstream, op: object, view: View) -> None:
        self._upstream = upstream
        self._op = op
        self._view = view
        self._device_kind = ""

    def get(self, part: Any, _default: object = None) -> Any:  # noqa: ANN401 - upstream protocol
        if not self._device_kind:
            self._device_kind = str(part)
            return self
        return _answer(self._upstream, self._op, self._device_kind, part, self._view)


class PolicyOverlay:
    """An overlay that holds nothing: what it says depends on the policies in force."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def get(self, op: Any, _default: object = None) -> Any:  # noqa: ANN401 - upstream protocol
        """First step of a lookup: an object that takes device kind and key, or an empty one."""
        view = active.view()
        return _Call(self._upstream, op, view) if view.policies else _NOTHING


def _answer(
    upstream: Upstream,
    op: Any,  # noqa: ANN401 - upstream op
    device_kind: str,
    key: Any,  # noqa: ANN401 - upstream key
    view: View,
) -> _Answer | None:
    """The policies' answer, or None to leave the call to Tokamax.

    Raises:
        AdapterError: in place of any ``NotImplementedError``, which Tokamax would take as "try
            the next implementation" and so silently run another kernel.
    """
    carrier.check(view)
    distributed.settle()
    try:
        kernel = upstream.kernel_of(op)
        if kernel is None:
            config = answer_op(upstream, op, device_kind, key, view.policies)
        else:
            config = answer_gmm(upstream, kernel, op, device_kind, key, view)
    except NotImplementedError as error:
        raise AdapterError(
            Problem(
                code="lookup-failed",
                message=f"the lookup for {type(op).__name__} is not implemented: {error}",
                remedy="report this with the call's shapes",
            )
        ) from error
    return None if config is None else _Answer(config)
