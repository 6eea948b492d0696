"""Policies: loaded, merged, ready to answer."""

from tilepolicy.policy.policy import (
    Policy,
    builtin_policies,
    combine,
    load,
)

__all__ = [
    "Policy",
    "builtin_policies",
    "combine",
    "load",
]
