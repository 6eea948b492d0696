"""Resolve every YAML file under MaxText's ``configs`` folder and count how they end.

    python scripts/sweep_maxtext_configs.py [--device v6e] [--devices 8] [CONFIGS_FOLDER]

Each file must either resolve, name exactly the facts that are missing, or be refused with a
problem that has a place. A traceback ends the sweep's success: exit 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tilepolicy.config_files import find_maxtext_configs
from tilepolicy.configs import read
from tilepolicy.errors import TilepolicyError
from tilepolicy.facts import derive
from tilepolicy.guards import check


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one file ended: ``resolved``, ``missing facts``, ``refused`` or ``traceback``."""

    kind: str
    detail: str = ""


def outcome(path: Path, device: str, devices: int | None) -> Outcome:
    """Read one config, derive its facts and check the guards."""
    try:
        values = read(path, env={})
        facts = derive(values, device, devices=devices)
        problems = check(values, facts)
    except TilepolicyError as error:
        codes = sorted({problem.code for problem in error.problems})
        placeless = [problem for problem in error.problems if problem.place is None]
        kind = "traceback" if placeless else "refused"
        return Outcome(kind, f"{', '.join(codes)}: {error.problems[0].message}")
    except Exception as error:  # noqa: BLE001 - a traceback is what the sweep looks for
        return Outcome("traceback", f"{type(error).__name__}: {error}")
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        return Outcome("refused", f"{errors[0].code}: {errors[0].message}")
    if missing := facts.undecided:
        return Outcome(
            "missing facts", "; ".join(f"{name}: {keys}" for name, keys in missing.items())
        )
    return Outcome("resolved")


def main() -> None:
    """Print one line for each file and the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--device", default="v6e")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--quiet", action="store_true", help="print the counts only")
    arguments = parser.parse_args()
    folder = arguments.folder or find_maxtext_configs()
    if folder is None:
        sys.exit("MaxText is not installed: name its configs folder")
    counts: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.y*ml")):
        result = outcome(path, arguments.device, arguments.devices)
        counts[result.kind] += 1
        if not arguments.quiet:
            print(f"{result.kind:14} {path.relative_to(folder)}  {result.detail}")
    print(f"{counts.total()} files: {', '.join(f'{n} {kind}' for kind, n in counts.items())}")
    sys.exit(1 if counts["traceback"] else 0)


if __name__ == "__main__":
    main()
