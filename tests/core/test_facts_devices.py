"""Names of devices and topologies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepolicy.facts.devices import DEVICES, DeviceSpec, normalize_device, parse_device


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("v6e", "v6e"),
        ("TPU v6 lite", "v6e"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU7x", "v7x"),
        ("tpu7x", "v7x"),
        ("TPU v4", "v4"),
        ("v5litepod-8", "v5e"),
        ("NVIDIA H100 80GB HBM3", "gpu"),
        ("gpu_multiprocess", "gpu"),
        ("CPU", "cpu"),
        ("tpu", None),
        ("v9", None),
        ("", None),
        ("v6e-", None),
    ],
)
def test_spellings(name: str, device: str | None) -> None:
    """Device kinds of jax, topologies and common names mean one device, in any case."""
    assert normalize_device(name) == device


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("v6e-8", DeviceSpec("v6e", 8)),
        ("v5e-256", DeviceSpec("v5e", 256)),
        ("v5p-128", DeviceSpec("v5p", 64)),
        ("v4-8", DeviceSpec("v4", 4)),
        ("tpu7x-8", DeviceSpec("v7x", 8)),
        ("v6e:2x4", DeviceSpec("v6e", 8)),
        ("tpu7x:2x2x1", DeviceSpec("v7x", 8)),
        ("v5p:2x2x2", DeviceSpec("v5p", 8)),
        ("a3", DeviceSpec("gpu", 8)),
        ("v5p-1", None),
    ],
)
def test_numbers_of_devices(name: str, spec: DeviceSpec | None) -> None:
    """v4 and v5p count cores, two to a device; a TPU7x chip of a grid is two devices."""
    assert parse_device(name) == spec


@given(st.sampled_from(DEVICES))
def test_normalised_names_are_fixed_points(name: str) -> None:
    """A normalised name is its own normal form."""
    assert normalize_device(name) == name


@given(st.text(max_size=30))
def test_any_text_is_a_known_device_or_none(name: str) -> None:
    """No text raises."""
    assert normalize_device(name) in (*DEVICES, None)
