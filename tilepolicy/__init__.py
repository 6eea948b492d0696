"""Declarative tile and vocabulary-tiling policies for MaxText and Tokamax.

``load`` reads a policy, ``Policy.resolve`` shows every setting with its origin, and ``apply``
installs the choice for one scope. Importing this package imports nothing else of it: each public
name is looked up when it is first used, so that the core never pays for jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tilepolicy.context.layers import CallSites, LayerSizes, layer
    from tilepolicy.errors import TilepolicyError
    from tilepolicy.policy import Policy, combine, load
    from tilepolicy.resolution import Resolution
    from tilepolicy.scope import apply
    from tilepolicy.session import Session

__all__ = [
    "CallSites",
    "LayerSizes",
    "Policy",
    "Resolution",
    "Session",
    "TilepolicyError",
    "apply",
    "combine",
    "layer",
    "load",
]

__version__ = "0.1.0"

_HOMES: Final = {
    "CallSites": "tilepolicy.context.layers",
    "LayerSizes": "tilepolicy.context.layers",
    "Policy": "tilepolicy.policy",
    "Resolution": "tilepolicy.resolution",
    "Session": "tilepolicy.session",
    "TilepolicyError": "tilepolicy.errors",
    "apply": "tilepolicy.scope",
    "combine": "tilepolicy.policy",
    "layer": "tilepolicy.context.layers",
    "load": "tilepolicy.policy",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
