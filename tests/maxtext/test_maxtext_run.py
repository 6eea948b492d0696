"""``tilepolicy run``: the command line, exit codes, and what a program sees. No MaxText runs."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilepolicy import scope
from tilepolicy.cli import main
from tilepolicy.errors import StrictError

POLICY = """version: 1
name: p
vocab: {loss: upstream, num_vocab_tiling: 4}
engine: {cache_pure_state: false}
"""
CONFIG = """base_config: base.yml
decoder_block: llama2
per_device_batch_size: 1
max_target_length: 1024
vocab_size: 32000
hardware: cpu
"""
PROGRAM = """
import json, os, sys
import tilepolicy.scope

def see(file):
    session = tilepolicy.scope.current()
    seen = {
        "argv": sys.argv,
        "name": __name__,
        "policy": None if session is None else session.inputs.policy.name,
        "environment": {k: v for k, v in os.environ.items() if k.startswith("M_")},
    }
    with open(file, "w") as out:
        json.dump(seen, out)

see("seen.json")
if "block" in sys.argv:
    os.makedirs("folder/r.json/full")
if "leave" in sys.argv:
    sys.exit(7)
if "say" in sys.argv:
    sys.exit("no good")
if "interrupt" in sys.argv:
    raise KeyboardInterrupt
if "raise" in sys.argv:
    raise RuntimeError("in the program")
"""


type Run = Callable[..., tuple[int, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a policy, a config and a program."""
    (tmp_path / "p.yml").write_text(POLICY)
    (tmp_path / "my.yml").write_text(CONFIG)
    (tmp_path / "my_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("my_program", None)


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``tilepolicy run`` and gives its exit code and standard error."""
    assert folder.is_dir()

    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["run", *arguments])
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().err

    return call


def seen(folder: Path) -> dict[str, object]:
    """What the program saw."""
    return json.loads((folder / "seen.json").read_text())


def test_the_program_runs_as_main_inside_the_scope(folder: Path, run: Run) -> None:
    """It sees its own arguments, then what is handed over, and the policy in force."""
    argv, path = list(sys.argv), list(sys.path)
    code, err = run("-p", "p.yml", "-m", "my_program", "my.yml", "vocab_size=64000")
    assert code == 0
    found = seen(folder)
    assert found["name"] == "__main__"
    assert found["policy"] == "p"
    assert found["argv"] == [
        str(folder / "my_program.py"),
        "my.yml",
        "vocab_size=64000",
        "num_vocab_tiling=4",
        "vocab_tiling_ag_once=True",
    ]
    assert "handed to MaxText: num_vocab_tiling=4 vocab_tiling_ag_once=True" in err
    assert (sys.argv, sys.path) == (argv, path)
    assert scope.current() is None


@pytest.mark.parametrize(("word", "code"), [("leave", 7), ("say", 1), ("raise", 1), ("stay", 0)])
def test_the_programs_exit_code_is_passed_on(run: Run, word: str, code: int) -> None:
    """Its own code, 1 for a text and for an exception, as python does."""
    found, err = run("-p", "p.yml", "-m", "my_program", word)
    assert found == code
    if word == "say":
        assert "no good\n" in err
    if word == "raise":
        assert "Traceback (most recent call last)" in err
        assert "RuntimeError: in the program" in err


def test_options_after_the_module_are_the_programs(folder: Path, run: Run) -> None:
    """``-m MODULE`` ends tilepolicy's options, also for ``--report`` and ``-m``."""
    given = ["--strict", "--report", "x", "-m", "other", "--", "-p"]
    assert run("-p", "p.yml", "-m", "my_program", *given)[0] == 0
    assert seen(folder)["argv"] == [str(folder / "my_program.py"), *given]
    assert not (folder / "x").exists()


def test_a_wrong_policy_stops_it_with_2(folder: Path, run: Run) -> None:
    """The program does not start."""
    (folder / "p.yml").write_text("version: 1\nname: p\nvocab: {los: sparse}\n")
    code, err = run("-p", "p.yml", "-m", "my_program", "my.yml")
    assert code == 2
    assert "p.yml:3:" in err
    assert not (folder / "seen.json").exists()


def test_a_wrong_config_stops_it_with_2(folder: Path, run: Run) -> None:
    """Every problem is shown, and the program does not start."""
    code, err = run("-p", "p.yml", "-m", "my_program", "my.yml", "max_target_length=1023", "x=1")
    assert code == 2
    assert "has no key 'x'" in err
    assert not (folder / "seen.json").exists()


def test_problems_of_policy_config_and_report_come_together(folder: Path, run: Run) -> None:
    """One run shows them all, and the program does not start."""
    (folder / "p.yml").write_text("version: 1\nname: p\nvocab: {los: sparse}\n")
    (folder / "file").touch()
    code, err = run("-p", "p.yml", "--report", "file/r", "-m", "my_program", "my.yml", "x=1")
    assert code == 2
    assert "p.yml:3:" in err
    assert "has no key 'x'" in err
    assert "cannot write file/r: " in err
    assert "3 errors" in err
    assert not (folder / "seen.json").exists()


@pytest.mark.parametrize(
    ("module", "message", "remedy"),
    [
        ("no_such_program.train", "there is no module named 'no_such_program'", ""),
        ("my_package.trian", "no module named 'my_package.trian'", "did you mean train?"),
        (
            "my_package.inner.trian",
            "no module named 'my_package.inner.trian'",
            "did you mean train?",
        ),
        ("my_package", "no module named 'my_package.__main__'", "is a package; name the program"),
        ("my_program.py", "no module named 'my_program.py'", "name it without .py"),
        ("--strict", "there is no module named '--strict'", ""),
    ],
)
def test_a_missing_program_stops_it_with_2(
    folder: Path, run: Run, module: str, message: str, remedy: str
) -> None:
    """Before anything of it is imported."""
    (folder / "my_package" / "inner").mkdir(parents=True)
    (folder / "my_package" / "inner" / "train.py").touch()
    (folder / "my_package" / "__init__.py").write_text("")
    (folder / "my_package" / "train.py").write_text("1 / 0")
    code, err = run("-p", "p.yml", "-m", module)
    assert code == 2
    assert message in err
    assert remedy in err
    assert not (folder / "seen.json").exists()


def test_a_package_may_say_itself_where_its_modules_are(folder: Path, run: Run) -> None:
    """What only the imported package knows is found too."""
    (folder / "moved").mkdir()
    (folder / "elsewhere").mkdir()
    (folder / "moved" / "__init__.py").write_text("__path__.append('elsewhere')")
    (folder / "elsewhere" / "train.py").write_text("raise SystemExit(9)")
    try:
        assert run("-p", "p.yml", "-m", "moved.train")[0] == 9
    finally:
        sys.modules.pop("moved", None)


def test_minus_m_needs_a_module(run: Run) -> None:
    """As for python."""
    code, err = run("-p", "p.yml", "-m")
    assert code == 2
    assert "requires an argument" in err


@pytest.mark.parametrize("flag", [["-mmy_program"], ["--module=my_program"], ["-m", "my_program"]])
def test_the_module_ends_the_options_however_written(
    folder: Path, run: Run, flag: list[str]
) -> None:
    """Attached to its flag or after it."""
    assert run("-p", "p.yml", *flag, "--strict", "-m", "x")[0] == 0
    assert seen(folder)["argv"] == [str(folder / "my_program.py"), "--strict", "-m", "x"]


def test_an_interrupt_is_the_programs(folder: Path, run: Run) -> None:
    """The exit code and traceback of an interrupted python; what was seen till then is reported."""
    code, err = run("-p", "p.yml", "--report", "r.json", "-m", "my_program", "my.yml", "interrupt")
    assert code == 130
    assert "KeyboardInterrupt\n" in err
    assert "tilepolicy run my_program\n" in err
    assert json.loads((folder / "r.json").read_text())["run"]["module"] == "my_program"
    assert scope.current() is None


def test_a_setting_without_effect_is_named_and_strict_refuses_it(folder: Path, run: Run) -> None:
    """A tile on a path that reads none."""
    (folder / "p.yml").write_text(
        POLICY + "gmm: {rules: [{name: r, when: {layer: wi}, tile: {batch_seq: 256}}]}\n"
    )
    moe = [
        "decoder_block=mixtral",
        "num_experts=8",
        "num_experts_per_tok=2",
        "base_moe_mlp_dim=1024",
        "sparse_matmul=False",
    ]
    arguments = ("-p", "p.yml", "-m", "my_program", "my.yml", *moe)
    code, err = run(*arguments)
    assert code == 0
    assert "warning: wi_tile_fwd_batch_seq = 256 has no effect" in err
    (folder / "seen.json").unlink()
    code, err = run("--strict", *arguments)
    assert code == 2
    assert "error: wi_tile_fwd_batch_seq = 256 has no effect" in err
    assert not (folder / "seen.json").exists()


def test_a_key_of_the_environment_is_changed_there(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MaxText refuses a key that is set both as M_KEY and on the command line."""
    monkeypatch.setenv("M_NUM_VOCAB_TILING", "-1")
    assert run("-p", "p.yml", "-m", "my_program", "my.yml")[0] == 0
    found = seen(folder)
    assert found["environment"] == {"M_NUM_VOCAB_TILING": "4"}
    assert found["argv"][2:] == ["vocab_tiling_ag_once=True"]
    assert os.environ["M_NUM_VOCAB_TILING"] == "-1"


def test_the_report_is_written_as_text_and_as_json(folder: Path, run: Run) -> None:
    """Also when the program fails."""
    arguments = ("-p", "p.yml", "-m", "my_program", "my.yml")
    assert run("--report", "r.txt", *arguments)[0] == 0
    assert "tilepolicy run my_program\n" in (folder / "r.txt").read_text()
    assert run("--report", "r.json", *arguments, "raise")[0] == 1
    data = json.loads((folder / "r.json").read_text())
    assert data["run"]["module"] == "my_program"
    assert data["run"]["handed_over"] == {"num_vocab_tiling": 4, "vocab_tiling_ag_once": True}
    assert data["resolution"]["settings"]["num_vocab_tiling"]["value"] == 4
    assert data["adapters"]


def test_a_report_goes_into_a_folder_made_for_it(folder: Path, run: Run) -> None:
    """Made before the start; a file that cannot be written at the end changes no exit code."""
    arguments = ("--report", "folder/r.json", "-p", "p.yml", "-m", "my_program", "my.yml")
    code, err = run(*arguments, "block", "leave")
    assert code == 7
    assert "cannot write" in err
    shutil.rmtree(folder / "folder")
    assert run(*arguments)[0] == 0
    assert (folder / "folder" / "r.json").is_file()


def test_missed_sites_are_written_for_tune(folder: Path, run: Run) -> None:
    """An empty list says that nothing missed."""
    from tilepolicy.tuning.missed import read_missed

    assert run("-p", "p.yml", "--record-missed", "missed.yml", "-m", "my_program")[0] == 0
    assert read_missed(folder / "missed.yml") == ()


def test_a_strict_run_that_ends_badly_exits_with_1(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program ended well, but what it did is not what was resolved."""
    from tilepolicy.session import Session

    def fail(_session: Session) -> None:
        raise StrictError("a rule was never hit")

    monkeypatch.setattr(Session, "check_strict", fail)
    code, err = run("--strict", "-p", "p.yml", "-m", "my_program", "my.yml")
    assert code == 1
    assert "a rule was never hit" in err
    code, err = run("--strict", "-p", "p.yml", "-m", "my_program", "my.yml", "leave")
    assert code == 7, "a program that fails keeps its own code"
    assert "a rule was never hit" not in err


def test_an_unknown_maxtext_stops_it_with_2(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MaxText whose functions are not the verified ones is refused before the start."""
    from tilepolicy.adapters import maxtext_api as api

    (folder / "p.yml").write_text("version: 1\nname: p\nvocab: {loss: sparse}\n")
    monkeypatch.setattr(api, "read_signature", lambda _target: "something, else")
    code, err = run("-p", "p.yml", "-m", "my_program", "my.yml")
    assert code == 2
    assert "cannot attach to maxtext.utils.max_utils.cross_entropy_with_logits" in err
    assert not (folder / "seen.json").exists()
