"""The active scopes as part of jax's trace key: one carrier, keyed by content.

jax finds compiled programs and cached traces by, among others, the values of its user contexts on
the calling thread. The one made here holds the digests of the active policies, innermost first,
and the innermost ``layer`` tag, so that

- the same content again finds the same program (no retrace), and other content another;
- leaving every scope brings the unscoped program back;
- a lookup that is made while jax traces can be answered from what is active, because the trace is
  kept under exactly that (:func:`key` and jax's own value are compared at every lookup).

Importing this module imports jax; nothing of the core does so before a scope is entered.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import jax

from tilepolicy.context import active, strands
from tilepolicy.errors import Problem, ScopeError

__all__ = ["check", "key"]

type Key = tuple[str, ...]

_UNSCOPED: Final[Key] = ()
# Made when the module is imported: making one is not safe while jax is in use elsewhere.
_CONTEXT: Final[Any] = jax.make_user_context(default_value=_UNSCOPED)  # type: ignore[no-untyped-call]


class _Here(threading.local):
    """The context whose exit gives the thread back what it had before the first scope."""

    base: Any = None


_HERE: Final = _Here()


def key() -> Key:
    """The key of what is active here; empty without a policy."""
    return active.view().key


def check(view: active.View) -> None:
    """Make sure that jax keeps the current trace under the key of what is active here.

    Raises:
        ScopeError: it does not; only a scope that another thread closed can bring this about.
    """
    if view.key != _CONTEXT.value:
        raise ScopeError(
            Problem(
                code="scope-changed-elsewhere",
                message="another thread changed the scopes of this one while jax was tracing",
                remedy="close a generator or coroutine that holds a scope in its own thread",
            )
        )


def _follow(payloads: tuple[object, ...]) -> None:
    del payloads
    wanted = key()
    if wanted != _UNSCOPED:
        context = _CONTEXT(wanted)
        context.__enter__()
        if _HERE.base is None:
            _HERE.base = context
    elif _HERE.base is not None:
        base, _HERE.base = _HERE.base, None
        base.__exit__(None, None, None)


strands.listen(_follow)
