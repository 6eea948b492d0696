"""The command line as a fixture."""

from __future__ import annotations

import pytest
from cli_calls import ROOT, Command


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs commands from the project's folder."""
    monkeypatch.chdir(ROOT)
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    return Command(capsys)
