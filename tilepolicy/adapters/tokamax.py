"""Tokamax: the adapter, and the ops that carry their layer.

Tokamax is imported when a scope is entered, not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from tilepolicy.adapters import ScopeRequest, tokamax_upstream
from tilepolicy.adapters.tokamax_door import DOORS
from tilepolicy.axes import Kernel
from tilepolicy.errors import AdapterError, Problem
from tilepolicy.installed import installed_version

if TYPE_CHECKING:
    from tilepolicy.adapters.tokamax_overlay import PolicyOverlay

__all__ = ["TokamaxAdapter", "adapter", "ragged_dot_op"]


class TokamaxAdapter:
    """Makes policies answer Tokamax's config lookups while a scope is open.

    Covers v1 and v2 ragged dot in all passes, and through ``ops`` any other op. A policy wins
    over Tokamax's overlays, its shipped cache and its heuristics; an explicit ``op.config`` wins
    over the policy. Where only some fields are decided, the others are what Tokamax would have
    used for that call.
    """

    name = tokamax_upstream.LIBRARY

    def versions(self) -> Mapping[str, str]:
        """Tokamax's release, without importing it; empty when it is not installed."""
        release = installed_version(self.name)
        return {} if release is None else {self.name: release}

    @contextmanager
    def enter(self, request: ScopeRequest) -> Iterator[None]:
        """Let lookups in, for one more scope.

        Raises:
            AdapterError: the installed release lacks what this attaches to, or is told to skip
                its cache and overlays, and so would skip the policy.
        """
        del request  # What is in force is read at each lookup, where jax's trace key is kept.
        upstream = tokamax_upstream.load()
        if upstream.ignores_cache():
            raise AdapterError(
                Problem(
                    code="tokamax-ignores-cache",
                    message="tokamax_ignore_autotuning_cache is set: tokamax would not ask for "
                    "the policy's tiles",
                    remedy="unset it",
                )
            )
        DOORS.open(upstream, _overlay())
        try:
            yield
        finally:
            DOORS.close(upstream)


@cache
def _overlay() -> PolicyOverlay:
    from tilepolicy.adapters.tokamax_overlay import PolicyOverlay

    return PolicyOverlay(tokamax_upstream.load())


def ragged_dot_op(layer: str, kernel: Kernel = "tokamax_v1", **fields: Any) -> Any:  # noqa: ANN401
    """An op for ``tokamax.ragged_dot(..., implementation=[op])`` that carries its layer.

    See :func:`tilepolicy.adapters.tokamax_op.ragged_dot_op`, which this imports on demand.
    """
    from tilepolicy.adapters import tokamax_op

    return tokamax_op.ragged_dot_op(layer, kernel, **fields)


adapter: Final = TokamaxAdapter()
