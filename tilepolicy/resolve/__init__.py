"""All settings of a config under a policy, with their origins, warnings and errors."""

from tilepolicy.resolve.resolving import (
    Resolver,
    resolve,
    resolver,
)

__all__ = [
    "Resolver",
    "resolve",
    "resolver",
]
