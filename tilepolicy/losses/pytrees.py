"""Names for what has no static type in jax."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["Index", "PyTree"]

type PyTree = Any
"""A nest of arrays; where it says so, of None or of things jax puts in place of arrays."""

type Index = int | jax.Array
"""A position that may be traced."""
