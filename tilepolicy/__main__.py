"""``tilepolicy`` and ``python -m tilepolicy``.

Start-up makes some hundred thousand objects that live as long as the process: the collector, off
until a command's modules are imported, has nothing to find among them (see ``benchmarks/cli.py``).
"""

from __future__ import annotations

import gc

__all__ = ["main"]


def main() -> None:
    """Runs the command line and exits.

    Raises:
        SystemExit: always, with the exit code.
    """
    gc.disable()
    from tilepolicy.cli import main as run

    run()


if __name__ == "__main__":
    main()
