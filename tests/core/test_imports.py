"""What importing the core costs: nothing of jax, tokamax, MaxText, typer or rich."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tilepolicy

EXAMPLE = Path(__file__).parents[2] / "examples/gemma3-12b.yml"
FOREIGN = ("jax", "jaxlib", "tokamax", "maxtext", "typer", "rich", "libtpu", "joblib", "flax")
CORE = (
    "tilepolicy",
    "tilepolicy.configs",
    "tilepolicy.doctor",
    "tilepolicy.explanation",
    "tilepolicy.facts",
    "tilepolicy.guards",
    "tilepolicy.lockfile",
    "tilepolicy.policy",
    "tilepolicy.report",
    "tilepolicy.report.changes",
    "tilepolicy.report.formats",
    "tilepolicy.report.table",
    "tilepolicy.resolve",
    "tilepolicy.schemas",
    "tilepolicy.resolve.snapshot",
    "tilepolicy.validation",
    "tilepolicy.vocab",
)
PACKAGE = Path(tilepolicy.__file__).parent
# Packages whose modules the core is made of; the others need an extra or draw for people.
CORE_PACKAGES = ("configs", "facts", "match", "model", "policy", "resolve", "source")
PUBLIC = sorted(
    path.relative_to(PACKAGE.parent).with_suffix("").as_posix()
    for folder in ("", *CORE_PACKAGES)
    for path in (PACKAGE / folder).glob("*.py")
    if path.stem not in ("__main__", "cli", "pytest_plugin")
)


def loaded_after(*statements: str) -> set[str]:
    """The foreign libraries that are loaded after some statements in a fresh process."""
    code = "\n".join([*statements, "import json, sys", "print(json.dumps(sorted(sys.modules)))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = json.loads(done.stdout.splitlines()[-1])
    return {name.partition(".")[0] for name in modules} & set(FOREIGN)


def test_core_loads_no_foreign_library() -> None:
    """Importing every core module loads none of the foreign libraries."""
    assert loaded_after(*(f"import {name}" for name in CORE)) == set()


def test_this_test_can_fail() -> None:
    """The same check sees a foreign library that is loaded."""
    assert loaded_after("import typer") >= {"typer"}


def test_resolving_in_python_loads_no_foreign_library(tmp_path: Path) -> None:
    """Loading a policy and resolving a config for a device stays in the core."""
    config = tmp_path / "c.yml"
    config.write_text("base_config: base.yml\nvocab_size: 129280\n", encoding="utf-8")
    assert (
        loaded_after(
            "import tilepolicy",
            f"tilepolicy.load('maxtext-default').resolve({str(config)!r}, device='v6e')",
        )
        == set()
    )


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_loads_no_jax(option: str) -> None:
    """Listing every command imports its module, and none of those imports jax."""
    code = f"import sys; sys.argv = ['tilepolicy', '{option}']; from tilepolicy.cli import main"
    ran = "try: main()\nexcept SystemExit: pass"
    assert not loaded_after(code, ran) & {"jax", "jaxlib", "tokamax", "maxtext", "libtpu", "joblib"}


def test_a_piped_table_loads_no_rich() -> None:
    """A table that goes into a pipe is drawn without rich."""
    code = (
        f"import sys; sys.argv = ['tilepolicy', 'resolve', {str(EXAMPLE)!r}]; "
        "from tilepolicy.cli import main"
    )
    assert "rich" not in loaded_after(code, "try: main()\nexcept SystemExit: pass")


@pytest.mark.parametrize("name", tilepolicy.__all__)
def test_public_names_are_there(name: str) -> None:
    """Every public name of the package can be looked up."""
    assert getattr(tilepolicy, name) is not None


@pytest.mark.parametrize("module", PUBLIC)
def test_public_modules_list_their_names(module: str) -> None:
    """Each module of the core has a sorted `__all__` whose names exist."""
    found = import_module(module.replace("/", ".").removesuffix(".__init__"))
    names = list(found.__all__)
    assert names == sorted(names, key=_order)
    assert all(hasattr(found, name) for name in names)


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as ruff sorts them."""
    rank = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return rank, name


def test_unknown_public_name() -> None:
    """A name that the package does not have is an AttributeError that says which."""
    with pytest.raises(AttributeError, match="has no attribute 'aply'"):
        _ = tilepolicy.aply  # type: ignore[attr-defined]
