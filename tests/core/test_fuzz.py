"""Generated inputs never end in a traceback, a hang or an error without a place."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tilepolicy.errors import Problem
from tilepolicy.source import parse


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    """The fuzzing script, as a module."""
    path = Path(__file__).parents[2] / "scripts" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("fuzz_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_generated_inputs_break_no_promise(fuzz: ModuleType) -> None:
    """A smaller run of ``scripts/fuzz.py``; the large one is run before a release."""
    findings = fuzz.fuzz(count=600, seed=7)
    assert findings.failures == []
    assert sum(findings.outcomes.values()) == 600
    assert len(findings.outcomes) > 15


def test_the_fuzzer_notices_a_traceback(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that raises is reported with its input."""

    def broken(text: bytes, folder: Path) -> list[object]:
        raise KeyError(len(text), folder)

    monkeypatch.setattr(fuzz, "read", broken)
    findings = fuzz.fuzz(count=3, seed=7)
    assert [promise.split("(")[0] for promise, _ in findings.failures] == ["raised KeyError"] * 3


def test_the_fuzzer_notices_a_missing_place(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error without a place is reported too."""
    monkeypatch.setattr(fuzz, "read", lambda _text, _folder: [Problem("x", "somewhere")])
    assert len(fuzz.fuzz(count=2, seed=7).failures) == 2


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "{a: " * 100_000, "- " * 100_000, "a:" * 100_000, "'" * 99_999, "? " * 50_000],
    ids=lambda text: text[:3],
)
def test_large_hostile_texts_are_refused_quickly(text: str) -> None:
    """A hundred thousand opening brackets cost no more than the limit allows."""
    for dialect in ("policy", "maxtext"):
        document = parse(text, "f.yml", dialect)  # type: ignore[arg-type]  # one of the literals
        assert document.problems
