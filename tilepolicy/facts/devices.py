"""Names of accelerators and of MaxText's compile topologies."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = [
    "DEFAULT_SCOPED_VMEM_KIB",
    "DEVICES",
    "DeviceSpec",
    "normalize_device",
    "parse_device",
]

DEVICES: Final = ("v4", "v5e", "v5p", "v6e", "v7x", "cpu", "gpu")

DEFAULT_SCOPED_VMEM_KIB: Final = {"v5e": 16384, "v5p": 16384, "v6e": 32768, "v7x": 32768}
"""Scoped VMEM of one kernel where no XLA flag sets it: the limit in the TPU compiler's errors."""

_ALIASES: Final = {
    "v4": "v4",
    "v5e": "v5e",
    "v5lite": "v5e",
    "v5litepod": "v5e",
    "v5": "v5p",
    "v5p": "v5p",
    "v6e": "v6e",
    "v6lite": "v6e",
    "v6litepod": "v6e",
    "trillium": "v6e",
    "v7": "v7x",
    "7": "v7x",
    "7x": "v7x",
    "v7x": "v7x",
    "ironwood": "v7x",
    "cpu": "cpu",
    "gpu": "gpu",
    "gpumultiprocess": "gpu",
    "cuda": "gpu",
}
_CORES_PER_DEVICE: Final = {"v4": 2, "v5p": 2}
"""Topologies of these name TensorCores, two to a device; all others name devices."""


class DeviceSpec(NamedTuple):
    """What a device or topology name says.

    Attributes:
        device: one of :data:`DEVICES`.
        devices: devices as jax counts them; None when the name gives none.
    """

    device: str
    devices: int | None = None


def normalize_device(name: str) -> str | None:
    """The name of :data:`DEVICES` that a spelling means; None for one that is not known.

    Takes jax's device kinds (``TPU v6 lite``), topologies (``v5p-128``, ``v5litepod-8``,
    ``tpu7x:2x2x1``) and other common spellings, in any case.
    """
    spec = parse_device(name)
    return spec.device if spec is not None else None


def parse_device(name: str) -> DeviceSpec | None:
    """The device, and the number of devices where the name tells it; None if it is not known.

    ``v6e-8`` and ``tpu7x-8`` are 8 devices, ``v5p-8`` and ``v4-8`` are 8 TensorCores: 4 devices
    (MaxText's ``accelerator_to_spec_map``; jax sees both cores of a v4 or v5p as one device, and
    the two dies of a TPU7x as two). ``v6e:2x4`` is 8 devices. ``a3`` is a host of 8 GPUs.
    """
    if name.strip().lower() == "a3":
        return DeviceSpec("gpu", 8)
    if name.lower().startswith(("nvidia", "amd ")):
        return DeviceSpec("gpu")
    match = re.fullmatch(
        r"\s*(?:tpu)?[\s_-]*(?P<kind>[a-z0-9 _]*?)\s*"
        r"(?:-(?P<count>\d+)|:(?P<grid>\d+(?:x\d+)*))?\s*",
        name.lower(),
    )
    if match is None:
        return None
    device = _ALIASES.get(re.sub(r"[\s_]", "", match["kind"]))
    if device is None:
        return None
    if match["count"]:
        count = int(match["count"]) // _CORES_PER_DEVICE.get(device, 1)
        return DeviceSpec(device, count) if count else None
    if match["grid"]:
        return DeviceSpec(device, _grid_devices(device, match["grid"]))
    return DeviceSpec(device)


def _grid_devices(device: str, grid: str) -> int:
    """Devices of a grid of chips; a TPU7x chip is two devices."""
    devices = 2 if device == "v7x" else 1
    for side in grid.split("x"):
        devices *= int(side)
    return devices
