"""The file of missed sites: written, merged, read, and refused with places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tilepolicy.tuning.missed import MissedFileError, MissedSite, read_missed, write_missed

FACTS = {"device": "v6e", "backend": "tokamax_v1", "batch_seq": 4096, "dtype": "bfloat16"}


def test_sites_survive(tmp_path: Path) -> None:
    """What is written is read back, order and all."""
    path = tmp_path / "missed.yml"
    sites = (
        MissedSite("wi", "fwd", FACTS, count=3, instead="the heuristic: 128x128x128"),
        MissedSite(None, "drhs", {"flag": True, "ratio": 0.5}, phase="eval"),
    )
    write_missed(path, sites)
    assert read_missed(path) == sites


def test_the_same_site_is_one_entry(tmp_path: Path) -> None:
    """Counts add up, whatever the order of the facts."""
    path = tmp_path / "missed.yml"
    backwards = dict(reversed(FACTS.items()))
    write_missed(
        path, [MissedSite("wi", "fwd", FACTS, count=2), MissedSite("wi", "fwd", backwards)]
    )
    (site,) = read_missed(path)
    assert site.count == 3


def test_nothing_missed_is_a_file_too(tmp_path: Path) -> None:
    """An empty list says that nothing missed."""
    path = tmp_path / "missed.yml"
    write_missed(path, [])
    assert read_missed(path) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, 2]\n", "missed.yml:1:1: error: this is not a file of missed sites"),
        ("version: 2\nmissed: []\n", "missed.yml:1:10: error: version 2 of the file is not known"),
        (
            "version: 1\nmissed:\n  - {layer: wx, pass: fwd, facts: {}}\n",
            "missed.yml:3:13: error: layer is 'wx', not wi, wo or null (at missed[0].layer)",
        ),
        (
            "version: 1\nmissed:\n  - {layer: wi, pass: bwd, facts: {}}\n",
            "missed.yml:3:23: error: pass is 'bwd', not fwd, dlhs or drhs",
        ),
        (
            "version: 1\nmissed:\n  - {layer: wi, pass: fwd, facts: {a: [1]}}\n",
            "missed.yml:3:35: error: facts is {'a': [1]}, not a mapping of names to plain values",
        ),
        (
            "version: 1\nmissed:\n  - {layer: wi, pass: fwd, facts: {}, count: 0}\n",
            "missed.yml:3:46: error: count is 0, not an integer of 1 or more",
        ),
        (
            "version: 1\nmissed:\n  - {layer: wi, pass: fwd, facts: {}, tile: 1}\n",
            "missed.yml:3:45: error: unknown key 'tile'; known are count, facts, instead, layer",
        ),
        ("version: 1\nmissed: [wi]\n", "missed.yml:2:10: error: an entry is a mapping"),
        ("version: 1\nmissed: [\n", "missed.yml:3:1: error:"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    """Each problem has its place and says what would be right."""
    path = tmp_path / "missed.yml"
    path.write_text(text)
    with pytest.raises(MissedFileError) as error:
        read_missed(path)
    assert expected in str(error.value)


def test_all_problems_in_one_run(tmp_path: Path) -> None:
    """Two wrong entries give two problems, each once."""
    path = tmp_path / "missed.yml"
    path.write_text("version: 1\nmissed:\n  - {pass: x, facts: {}}\n  - {pass: y, facts: {}}\n")
    with pytest.raises(MissedFileError) as error:
        read_missed(path)
    assert [problem.path for problem in error.value.problems] == [
        "missed[0].pass",
        "missed[1].pass",
    ]


def test_missing_file(tmp_path: Path) -> None:
    """An unreadable file is a problem with its name, not a traceback."""
    with pytest.raises(MissedFileError, match=r"none\.yml: error: cannot be read: No such file"):
        read_missed(tmp_path / "none.yml")


def test_only_the_core_is_imported() -> None:
    """A training process that writes the file imports nothing for it."""
    code = (
        "import sys, tilepolicy.tuning.missed\n"
        "heavy = {'jax', 'tokamax', 'typer', 'rich', 'joblib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
