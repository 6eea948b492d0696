"""A name for what has no static type in MaxText and flax."""

from __future__ import annotations

from typing import Any

__all__ = ["Foreign"]

type Foreign = Any
"""An object of MaxText, flax or jax whose type cannot be named here without importing it."""
