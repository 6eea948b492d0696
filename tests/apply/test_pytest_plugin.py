"""The pytest plugin: its fixture, its check, and what it costs a suite that does not use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from moe import SIX, document, write

SUITE = """
import tilepolicy
from tilepolicy import scope

POLICY = {policy!r}

def test_fixture(apply_policy):
    session = apply_policy(POLICY, adapters=["tokamax"])
    assert scope.current() is session
    assert apply_policy(POLICY, adapters=["tokamax"]) is scope.current()

def test_after_the_fixture():
    assert scope.current() is None

def test_leaves_one():
    tilepolicy.apply(POLICY, adapters=["tokamax"]).__enter__()

def test_after_the_leak():
    assert scope.current() is None

def test_strict(apply_policy):
    apply_policy(POLICY, adapters=["tokamax"], strict=True)
"""


def run(folder: Path, *arguments: str) -> list[str]:
    """Run pytest there; the lines of its output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=dict(os.environ) | {"COLUMNS": "400"},
        check=False,
    )
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.slow
def test_a_leaked_scope_fails_only_the_test_that_leaves_it(tmp_path: Path) -> None:
    """The fixture cleans up; a leak is an error of its test, and the next one starts clean."""
    policy = write(tmp_path, document(SIX))
    (tmp_path / "test_suite.py").write_text(SUITE.format(policy=str(policy)))
    lines = run(tmp_path, "-rA")
    text = "\n".join(lines)
    for name in ("test_fixture", "test_after_the_fixture", "test_after_the_leak"):
        assert f"PASSED test_suite.py::{name}" in text
    assert (
        "ERROR test_suite.py::test_leaves_one - Failed: the test left 1 scope of tilepolicy "
        "active; use `with tilepolicy.apply(...)` or the fixture apply_policy"
    ) in text
    assert "ERROR test_suite.py::test_strict - tilepolicy.errors.StrictError" in text
    assert "5 passed, 2 errors" in lines[-1]


def test_a_suite_that_uses_no_policy_pays_nothing(tmp_path: Path) -> None:
    """The plugin imports neither jax nor the scopes until a test does."""
    (tmp_path / "test_suite.py").write_text(
        "import sys\n"
        "def test_lean():\n"
        "    names = ('jax', 'tokamax', 'pydantic', 'tilepolicy.scope', 'tilepolicy.context')\n"
        "    assert [n for n in names if n in sys.modules] == []\n"
    )
    assert "1 passed" in run(tmp_path, "-p", "no:hypothesispytest", "-p", "no:anyio")[-1]
