"""Resolve every YAML file under MaxText's ``configs`` folder and count how they end.

    python scripts/sweep_maxtext_configs.py [--device v6e] [--policy P] [CONFIGS_FOLDER]

Each file must either resolve, name exactly the facts that are missing, or be refused with a
problem that has a place. A traceback ends the sweep's success: exit 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tilepolicy.configs import read
from tilepolicy.configs.files import find_maxtext_configs
from tilepolicy.errors import TilepolicyError
from tilepolicy.facts import derive
from tilepolicy.policy import Policy, load


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one file ended: ``resolved``, ``missing facts``, ``refused`` or ``traceback``."""

    kind: str
    detail: str = ""


def outcome(policy: Policy, path: Path, device: str) -> Outcome:
    """Read one config and resolve it under a policy."""
    try:
        values = read(path, env={})
        missing = derive(values, device).undecided
        policy.resolve(values, device=device)
    except TilepolicyError as error:
        codes = sorted({problem.code for problem in error.problems})
        placeless = [problem for problem in error.problems if problem.place is None]
        kind = "traceback" if placeless else "refused"
        return Outcome(kind, f"{', '.join(codes)}: {error.problems[0].message}")
    except Exception as error:  # noqa: BLE001 - a traceback is what the sweep looks for
        return Outcome("traceback", f"{type(error).__name__}: {error}")
    if missing:
        return Outcome(
            "missing facts", "; ".join(f"{name}: {keys}" for name, keys in missing.items())
        )
    return Outcome("resolved")


def main() -> None:
    """Print one line for each file and the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--device", default="v6e")
    parser.add_argument("--policy", default="maxtext-default")
    parser.add_argument("--quiet", action="store_true", help="print the counts only")
    arguments = parser.parse_args()
    folder = arguments.folder or find_maxtext_configs()
    if folder is None:
        sys.exit("MaxText is not installed: name its configs folder")
    policy = load(arguments.policy)
    counts: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.y*ml")):
        result = outcome(policy, path, arguments.device)
        counts[result.kind] += 1
        if not arguments.quiet:
            print(f"{result.kind:14} {path.relative_to(folder)}  {result.detail}")
    print(f"{counts.total()} files: {', '.join(f'{n} {kind}' for kind, n in counts.items())}")
    sys.exit(1 if counts["traceback"] else 0)


if __name__ == "__main__":
    main()
