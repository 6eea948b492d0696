"""The front of the command line: commands, help, completion, exit codes, missing libraries."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from cli_calls import Command

from tilepolicy import __version__
from tilepolicy.__main__ import main as start
from tilepolicy.cli import COMMANDS
from tilepolicy.errors import MissingLibraryError, Problem


def test_version(cli: Command) -> None:
    """--version prints the version and exits with 0."""
    ran = cli("--version")
    assert (ran.code, ran.out) == (0, f"tilepolicy {__version__}\n")


def test_help_lists_every_command(cli: Command) -> None:
    """--help lists all commands, those with libraries of their own included."""
    ran = cli("--help")
    assert ran.code == 0
    assert [name for name in COMMANDS if f" {name} " not in ran.out] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_an_example(cli: Command, command: str) -> None:
    """Each command's help has an example of that command."""
    ran = cli(command, "--help")
    assert ran.code == 0
    assert f"Example: tilepolicy {command}" in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("reslve", "c.yml"), "No such command 'reslve'"),
        (("resolve",), "Missing argument"),
        (("resolve", "c.yml", "--fromat", "json"), "No such option"),
        (("resolve", "c.yml", "--format", "xml"), "'xml' is not one of"),
        (("explain", "examples/gemma3-12b.yml", "num_vocab_tilling"), "did you mean"),
        (("diff", "maxtext-default"), "give a second policy and --config, or one lock"),
        (("lock", "a=1"), "no config is named"),
    ],
)
def test_usage_errors_exit_with_2(cli: Command, arguments: tuple[str, ...], hint: str) -> None:
    """A wrong command line says what is wrong on standard error, and exits with 2."""
    ran = cli(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert hint in " ".join(ran.err.replace("│", " ").split())


def test_problems_exit_with_1(cli: Command, tmp_path: Path) -> None:
    """A problem of a config goes to standard error with its place, and exits with 1."""
    config = tmp_path / "c.yml"
    config.write_text("base_config: base.yml\nnum_vocab_tilling: 2\n", encoding="utf-8")
    ran = cli("resolve", str(config))
    assert (ran.code, ran.out) == (1, "")
    assert f"{config}:2:1: error: " in ran.err
    assert "  2 | num_vocab_tilling: 2\n      ^\n" in ran.err
    assert "did you mean num_vocab_tiling?" in ran.err


def test_problems_of_policy_and_config_come_together(cli: Command, tmp_path: Path) -> None:
    """A broken policy does not hide what is wrong with the config."""
    config, policy = tmp_path / "c.yml", tmp_path / "p.yml"
    config.write_text("base_config: base.yml\nnum_vocab_tilling: 2\n", encoding="utf-8")
    policy.write_text("version: 1\nname: p\nvocabulary: {}\n", encoding="utf-8")
    ran = cli("resolve", str(config), "--policy", str(policy))
    assert ran.code == 1
    assert f"{policy}:3:1: error: " in ran.err
    assert f"{config}:2:1: error: " in ran.err


@pytest.mark.parametrize("missing", ["c.yml", "no/such/config.yml"])
def test_a_config_that_is_not_there(cli: Command, missing: str) -> None:
    """A config that does not exist is a problem with its name, not a traceback."""
    ran = cli("resolve", missing)
    assert ran.code == 1
    assert missing in ran.err
    assert "Traceback" not in ran.err


def test_a_missing_library_exits_with_2(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose library is missing says how to install it, and exits with 2."""

    def register(app: typer.Typer) -> None:
        @app.command("verify")
        def verify() -> None:
            remedy = "pip install 'tilepolicy[verify]'"
            raise MissingLibraryError(Problem("missing-library", "no libtpu", remedy=remedy))

    monkeypatch.setattr(import_module("tilepolicy.commands.verify"), "register", register)
    ran = cli("verify")
    assert ran.code == 2
    assert "remedy: pip install 'tilepolicy[verify]'" in ran.err


def completions(words: str) -> list[str]:
    """What bash would offer after ``words``."""
    environment = {
        **os.environ,
        "_TILEPOLICY_COMPLETE": "complete_bash",
        "COMP_WORDS": f"tilepolicy {words}",
        "COMP_CWORD": str(len(words.split(" "))),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from tilepolicy.cli import main; main()"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("res", "resolve"),
        ("resolve --pol", "--policy"),
        ("resolve c.yml --policy maxt", "maxtext-default"),
        ("resolve c.yml --device v6", "v6e"),
        ("resolve c.yml --format max", "maxtext"),
        ("explain c.yml num_v", "num_vocab_tiling"),
        ("schema pol", "policy"),
    ],
)
def test_shell_completion(words: str, offered: str) -> None:
    """Bash completes commands, options, policies, devices, formats and settings."""
    assert offered in completions(words)


def test_module_runs_too() -> None:
    """`python -m tilepolicy` is the same program."""
    done = subprocess.run(
        [sys.executable, "-m", "tilepolicy", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"tilepolicy {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_collector_is_off_but_for_running_and_compiling(cli: Command, command: str) -> None:
    """Only commands that run or compile programs turn the collector of cycles on."""
    gc.disable()
    try:
        cli(command, "--help")
        assert gc.isenabled() is (command in ("run", "tune", "verify"))
    finally:
        gc.enable()


@pytest.mark.parametrize("collected", [False, True])
def test_the_end_collects_only_where_the_command_did(
    monkeypatch: pytest.MonkeyPatch, *, collected: bool
) -> None:
    """Where the collector stayed off, the interpreter's end finds nothing to collect either."""

    def command() -> None:
        assert not gc.isenabled()
        if collected:
            gc.enable()
        sys.exit(3)

    monkeypatch.setattr("tilepolicy.cli.main", command)
    before = gc.get_freeze_count()
    try:
        with pytest.raises(SystemExit, match="3"):
            start()
        assert (gc.get_freeze_count() == before) is collected
    finally:
        gc.unfreeze()
        gc.enable()
