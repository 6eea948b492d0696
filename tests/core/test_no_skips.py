"""A test that cannot run fails: a missing extra must not pass for a success."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SKIPPING = {
    "in a test": "import pytest\ndef test_it():\n    pytest.skip('no maxtext')\n",
    "by a marker": "import pytest\n@pytest.mark.skip(reason='no maxtext')\ndef test_it(): pass\n",
    "a whole file": "import pytest\npytest.importorskip('no_such_library', reason='no maxtext')\n",
}


def test_a_skip_is_a_failure(tmp_path: Path) -> None:
    """However a test skips itself; the reason is shown."""
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    for number, source in enumerate(SKIPPING.values()):
        (tmp_path / f"test_skipping_{number}.py").write_text(source)
    options = "-q --continue-on-collection-errors -p no:cacheprovider -p no:tilepolicy"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(), "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "1 failed, 2 errors in" in done.stdout
    assert done.stdout.count("no test may be skipped here: ") >= len(SKIPPING)
