"""``tilepolicy`` and ``python -m tilepolicy``.

Most commands read some text, answer and end. They make some hundred thousand objects that live as
long as the process and hardly a cycle, so that the collector of cycles finds nothing, for a quarter
of the whole time (see ``benchmarks/cli.py``). It is off until a command turns it on, as those do
that run or compile programs.
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

    try:
        run()
    finally:
        if not gc.isenabled():
            gc.freeze()  # the end of the interpreter collects even where the collector is off


if __name__ == "__main__":
    main()
