"""The way in: what stands in for Tokamax's overlay variable while a scope is open.

Tokamax keeps its overlays in a ``ContextVar`` and the matching trace key in a jax user context,
which is per thread. The two part company wherever a ``contextvars.Context`` was copied before the
scope was entered: a task, or an ``asyncio.Runner``, that exists already, runs under the scope's
trace key but does not see the overlay, and its unscoped program is kept as the scoped one.

So nothing is put into the variable. For as long as any scope is open, the module global that
lookups read is an object that passes everything on to the variable, and adds one overlay at the
innermost place where, and only where, the calling thread or task has a policy in force. What is
in force is read from the same place as jax's trace key. Other threads are passed through.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar, Token
from typing import Any, Final

from tilepolicy.adapters.tokamax_upstream import Upstream
from tilepolicy.context import active
from tilepolicy.errors import AdapterError, Problem

__all__ = ["DOORS", "Doors"]

type Overlays = tuple[Any, ...]


class _Door:
    """Answers like the ``ContextVar`` that it stands in for."""

    def __init__(self, behind: ContextVar[Overlays], overlay: object) -> None:
        self.behind = behind
        self._overlay = overlay
        self.name = behind.name

    def get(self, *default: Overlays) -> Overlays:
        overlays = self.behind.get(*default)
        return (*overlays, self._overlay) if active.policies() else overlays

    def set(self, overlays: Overlays) -> Token[Overlays]:
        return self.behind.set(tuple(o for o in overlays if o is not self._overlay))

    def reset(self, token: Token[Overlays]) -> None:
        self.behind.reset(token)


class Doors:
    """Puts the door in place for the first open scope and takes it away after the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._door: _Door | None = None

    def open(self, upstream: Upstream, overlay: object) -> None:
        """Count one more scope; ``overlay`` is that of the first.

        Raises:
            AdapterError: something else has replaced the variable.
        """
        with self._lock:
            if self._door is None:
                behind = upstream.stack
                if not isinstance(behind, ContextVar):
                    raise AdapterError(
                        Problem(
                            code="tokamax-patched",
                            message=f"{upstream.op_module.__name__}'s overlay stack is a "
                            f"{type(behind).__name__}, not a ContextVar: something replaced it",
                            remedy="remove that patch, or enter the policy before it",
                        )
                    )
                self._door = _Door(behind, overlay)
                upstream.replace_stack(self._door)
            self._open += 1

    def close(self, upstream: Upstream) -> None:
        """Count one scope less."""
        with self._lock:
            self._open -= 1
            if self._open == 0 and self._door is not None:
                upstream.replace_stack(self._door.behind)
                self._door = None

    def behind(self) -> Overlays:
        """The overlays that Tokamax itself holds here, outermost first."""
        door = self._door
        return door.behind.get() if door is not None else ()


DOORS: Final = Doors()
