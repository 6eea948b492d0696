"""``tune`` with the real compiler: killed in the middle, run again, nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_moe import TOKAMAX, write_config

from tilepolicy import policy

pytestmark = [pytest.mark.compiled, pytest.mark.slow]


def command(config: Path, output: Path) -> list[str]:
    """The command line of a search over two sites."""
    only = ["--only", "wo.fwd", "--only", "wo.drhs"]
    return [
        sys.executable,
        "-m",
        "tilepolicy",
        "tune",
        str(config),
        "-d",
        "v6e",
        "-o",
        str(output),
        "--jobs",
        "1",
        *only,
    ]


def verdicts(journal: Path) -> int:
    """Verdicts on disk: whole lines below the head."""
    return max(0, journal.read_text().count("\n") - 1) if journal.exists() else 0


def test_a_killed_search_goes_on(tmp_path: Path) -> None:
    """Killed without warning after two verdicts: the second run uses both and ends the search."""
    config, output = write_config(tmp_path, TOKAMAX), tmp_path / "tuned.yml"
    journal = tmp_path / "tuned.yml.journal"
    first = subprocess.Popen(
        command(config, output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while verdicts(journal) < 2 and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    known = verdicts(journal)
    assert known >= 2
    assert not output.exists()
    second = subprocess.run(
        command(config, output), capture_output=True, text=True, check=False, timeout=300
    )
    assert second.returncode == 0, second.stderr
    assert f"{known} verdicts are known from an interrupted run" in second.stdout
    assert second.stderr.count("(known)") == known
    assert second.stderr.count(": fits (") + second.stderr.count(": does-not-fit (") == 4
    assert "2 of 2 tuned sites get their tile from it" in second.stdout
    assert not journal.exists()
    rules = [rule.name for rule in policy.load(output).document.gmm.rules]
    assert rules[:2] == ["wo.fwd 4096x1024x512 in 8 on v6e", "wo.drhs 4096x1024x512 in 8 on v6e"]
