"""The command line: finds a command, runs it, and turns problems into text and an exit code.

Exit codes: 0 fine, 1 a problem in a policy, a config or a result, 2 usage or a missing library.

A command's module is imported when the command is asked for, so that ``tilepolicy resolve`` does
not pay for the others and ``--help`` lists the ones whose libraries are not installed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from tilepolicy import __version__
from tilepolicy.errors import MissingLibraryError, TilepolicyError

__all__ = ["COLLECTED", "COMMANDS", "app", "main"]

COMMANDS: Final[dict[str, str]] = {
    "resolve": "resolve",
    "explain": "explain",
    "diff": "diff",
    "validate": "validate",
    "lock": "lock",
    "run": "run",
    "verify": "verify",
    "tune": "tune",
    "import": "importing",
    "export": "exporting",
    "schema": "schema",
    "doctor": "doctor",
}
"""Command to its module in ``tilepolicy.commands``; each has ``register(app)``."""

COLLECTED: Final = frozenset({"run", "tune", "verify"})
"""Commands that run or compile programs, with the collector of cycles on: see ``__main__``."""

EXIT_PROBLEM: Final = 1
EXIT_USAGE: Final = 2


class _LazyGroup(TyperGroup):
    """A group whose commands are imported one by one, when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002 - click's own signature
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401, ARG002 - same
        if cmd_name not in COMMANDS:
            return None
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        import_module(f"tilepolicy.commands.{COMMANDS[cmd_name]}").register(single)
        if cmd_name in COLLECTED:
            gc.enable()
        return get_command(single)


app = typer.Typer(
    name="tilepolicy",
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilepolicy {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: tilepolicy resolve examples/deepseek3-671b.yml --device v6e")
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Which tile and vocabulary-tiling values a MaxText run will really use, and why."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; problems go to standard error.

    Args:
        arguments: what follows the program's name; ``sys.argv`` when None.

    Raises:
        SystemExit: always, with the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        app(arguments, prog_name="tilepolicy")
    except TilepolicyError as error:
        from tilepolicy.report import render_problems

        sys.stderr.write(render_problems(error.problems, "text"))
        sys.exit(EXIT_USAGE if isinstance(error, MissingLibraryError) else EXIT_PROBLEM)
