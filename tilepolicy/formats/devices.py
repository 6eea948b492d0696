"""Tokamax's names of devices, to policy names and back.

Read in tokamax 0.0.17: a cache's directory is ``device_kind.lower().replace(" ", "_")``.
"""

from __future__ import annotations

from typing import Final

from tilepolicy.facts.devices import normalize_device

__all__ = ["TPU_KINDS", "device_directory", "device_of_kind"]

TPU_KINDS: Final[dict[str, str]] = {
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "v7x": "TPU7x",
}
"""Policy name to jax's ``device_kind``, for TPUs."""


def device_of_kind(kind: str) -> str | None:
    """Policy name of a device kind or of a cache directory; None for an unknown device.

    Example:
        ``TPU v6 lite`` and ``tpu_v6_lite`` give ``v6e``; ``nvidia_b200`` gives ``gpu``.
    """
    return normalize_device(kind.replace("_", " "))


def device_directory(kind: str) -> str:
    """The directory in which Tokamax looks for the caches of a device kind."""
    return kind.lower().replace(" ", "_")
