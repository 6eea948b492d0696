"""Calling the command line within the test process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tilepolicy.cli import main

ROOT = Path(__file__).parents[2]
DEEPSEEK = "examples/deepseek3-671b.yml"


@dataclass(frozen=True)
class Ran:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


class Command:
    """Runs commands from the project's folder, output captured as if piped."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Ran:
        """Runs one command line."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        printed = self._capsys.readouterr()
        code = ended.value.code
        return Ran(code if isinstance(code, int) else 0, printed.out, printed.err)
