"""Run the adapter's tests on every supported Tokamax release, and print the table.

    python scripts/tokamax_versions.py [--folder DIR] [--compiled] [RELEASE…]

Makes one environment per release with ``venv`` and ``pip``, each with a jax that the release
accepts, and keeps it for the next run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# jax's own extra names the libtpu that belongs to it.
RELEASES = {
    "0.0.14": "0.11.0",
    "0.0.15": "0.10.2",
    "0.0.16": "0.11.2",
    "0.0.17": "0.12.0.1",
}
TESTS = (
    "tests/apply/test_lookup.py",
    "tests/apply/test_adapters.py",
    "tests/apply/test_scope.py",
    "tests/apply/test_session.py",
    "tests/apply/test_session_readback.py",
    "tests/apply/test_numerics.py",
    "tests/apply/test_releases.py",
)


def environment(folder: Path, tokamax: str, jax: str) -> Path:
    """The interpreter of a release's environment, made if it is not there."""
    place = folder / f"tokamax-{tokamax}-jax-{jax}"
    python = place / "bin" / "python"
    ready = place / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        wanted = [f"tokamax=={tokamax}", f"jax[tpu]=={jax}", "pytest", "hypothesis", "joblib"]
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, *wanted, "-e", str(ROOT)], check=True)
        ready.touch()
    return python


def run(python: Path, compiled: bool) -> tuple[str, bool]:
    """The closing line of the tests, and whether all passed."""
    chosen = [] if compiled else ["-m", "not compiled"]
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *TESTS],
        cwd=ROOT,
        env=dict(os.environ) | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode:
        print("\n".join(lines[-60:]), file=sys.stderr)
    closing = re.sub(r" in [0-9.]+s.*$", "", lines[-1]).strip("= ") if lines else "no output"
    return closing, done.returncode == 0


def main() -> int:
    """Make, run, print; exit status 1 if a release failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", help="default: all")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "tokamax")
    parser.add_argument("--compiled", action="store_true", help="also with the TPU compiler")
    arguments = parser.parse_args()
    fine = True
    rows = []
    for tokamax in arguments.releases or RELEASES:
        python = environment(arguments.folder, tokamax, RELEASES[tokamax])
        closing, passed = run(python, arguments.compiled)
        fine = fine and passed
        rows.append(f"| {tokamax} | {RELEASES[tokamax]} | {closing} |")
    print("| tokamax | jax | adapter's tests |", "|---|---|---|", *rows, sep="\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
