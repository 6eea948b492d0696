"""``apply``: install a policy for one scope.  ``current``: the session of the innermost scope."""

from tilepolicy.scope.applying import (
    Scope,
    apply,
    current,
)

__all__ = [
    "Scope",
    "apply",
    "current",
]
