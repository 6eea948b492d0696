"""The cost formula, held against the tiles that won tokamax's measurements."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "formula_quality.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that the documents' figures come from."""
    spec = importlib.util.spec_from_file_location("formula_quality", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["v5e", "v5p", "v6e", "v7x"])
def test_winners_are_near_the_top(script: ModuleType, device: str) -> None:
    """Few tiles are better than a measured winner by the formula, many by the kernel's estimate."""
    found = script.quality(device, every=4 if device != "v5e" else 1)
    assert found.shapes >= 11
    assert found.grid_share < 0.025
    assert found.kernel_share > 0.1
    assert found.correlation > 0.95
    assert found.first_ratio < 1.02
    assert found.within >= 0.9
