"""The README keeps its promises."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from cli_calls import ROOT, Command

import tilepolicy

README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)


def test_two_lines_do_all_the_set_up() -> None:
    """One line resolves the example, one runs all tests; each makes its own environment."""
    resolve, tests = SETUP
    assert resolve.endswith(
        "tilepolicy resolve examples/deepseek3-671b.yml --policy deepseek3-671b-v6e --device v6e"
    )
    assert tests.endswith("python -m pytest")
    assert "[test,tokamax,verify,maxtext]" in tests


def test_something_usable_comes_before_line_30() -> None:
    """The first set-up line stands near the top."""
    assert README.splitlines().index(SETUP[0]) < 30


def test_ci_runs_the_same_lines() -> None:
    """CI takes both lines from the README, so that they stay true."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "README.md" in script
    assert all(line not in script for line in SETUP)


def test_links_lead_somewhere() -> None:
    """Every relative link names a file that is there."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_policy_shown_is_valid(tmp_path: Path) -> None:
    """The README's policy loads."""
    (block,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "moe-v6e.yml"
    path.write_text(block, encoding="utf-8")
    assert tilepolicy.load(path).name == "moe-v6e"


@pytest.mark.parametrize(
    "command", ["resolve", "explain", "diff", "validate", "lock", "run", "verify", "tune",
                "import", "export", "schema", "doctor"],
)  # fmt: skip
def test_every_command_is_mentioned(command: str) -> None:
    """The table of commands has them all."""
    assert f"`{command}" in README


def test_extras_that_are_named_exist() -> None:
    """Every extra that the README names is declared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"\.\[([a-z,]+)\]", README)
    assert {extra for text in named for extra in text.split(",")} <= set(
        project["optional-dependencies"]
    )


def test_commands_shown_are_accepted(cli: Command, tmp_path: Path) -> None:
    """The `tilepolicy` lines of the README run, with an example in the place of `my-config.yml`."""
    (block,) = re.findall(r"```bash\n(tilepolicy .*?)```", README, flags=re.DOTALL)
    policy = tmp_path / "my-policy.yml"
    policy.write_text("version: 1\nname: mine\nextends: [maxtext-default]\n", encoding="utf-8")
    for line in block.splitlines():
        words = line.partition("#")[0].split()[1:]
        stand_ins = {"my-config.yml": "examples/mixtral-8x7b.yml", "my-policy.yml": str(policy)}
        assert cli(*(stand_ins.get(word, word) for word in words)).code == 0
