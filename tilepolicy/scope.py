"""``apply``: install a policy for one scope.  ``current``: the session of the innermost scope."""

from __future__ import annotations

from tilepolicy.session import Session

__all__ = ["current"]


def current() -> Session | None:
    """The session of the innermost scope that is active here, or None.

    "Here" is this thread and, inside a coroutine, this task: scopes of others are not seen.
    """
    return None
