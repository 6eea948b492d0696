"""Make an environment for each MaxText release, test tilepolicy with it, and print a table.

    python scripts/maxtext_versions.py [--releases 0.2.4 0.2.5] [--folder FOLDER] [--only-make]

Each environment takes about 4 GB of disk and a minute or two to fill (seconds from a warm cache of
``uv``, which is used where it is installed), each test run a few minutes on two idle cores. The
project's checks run with the newest release alone; run this one before a release of tilepolicy,
and after a change to anything in ``tilepolicy/adapters/maxtext*.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ("0.2.4", "0.2.5")
TESTS = (
    "tests/maxtext/test_maxtext_api.py",
    "tests/maxtext/test_maxtext_engine.py",
    "tests/maxtext/test_maxtext_losses.py",
    "tests/maxtext/test_maxtext_real_engine.py",
)


def make(release: str, folder: Path) -> Path:
    """An environment with tilepolicy and a MaxText release; kept if it is there already.

    Returns:
        Its Python.
    """
    home = folder / f"maxtext-{release}"
    python = home / "bin" / "python"
    uv = shutil.which("uv")
    if not python.exists():
        maker = [uv, "venv", "--quiet", "--python", sys.executable] if uv else None
        subprocess.run([*(maker or [sys.executable, "-m", "venv"]), str(home)], check=True)
    pip = (
        [uv, "pip", "install", "--quiet", "--python", str(python)]
        if uv
        else [str(python), "-m", "pip", "install", "--quiet"]
    )
    subprocess.run([*pip, f"maxtext[tpu]=={release}", "-e", f"{ROOT}[verify,test]"], check=True)
    return python


def test(python: Path) -> str:
    """What pytest says of the MaxText tests in an environment, in one line."""
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stdout)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]]
    return re.sub(r"[=]+", "", lines[-1]).strip()


def signatures(python: Path) -> list[str]:
    """The functions that tilepolicy attaches to in an environment's MaxText, as they are there."""
    code = (
        "from tilepolicy.adapters import maxtext_api as api\n"
        "for target in api.verified(api.installed_version()):\n"
        "    print(f'{target.name}({api.read_signature(target)})')"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def main() -> int:
    """Make, test, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", nargs="+", default=list(RELEASES))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tilepolicy")
    parser.add_argument("--only-make", action="store_true", help="print the Pythons and stop")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    pythons = {release: make(release, options.folder) for release in options.releases}
    if options.only_make:
        print("\n".join(str(python) for python in pythons.values()))
        return 0
    verdicts = {release: test(python) for release, python in pythons.items()}
    for release, verdict in verdicts.items():
        print(f"maxtext {release}: {verdict}")
        for line in signatures(pythons[release]):
            print(f"    {line}")
    return 1 if any("failed" in v or "error" in v for v in verdicts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
