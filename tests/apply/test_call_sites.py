"""MaxText's functions that tell the layer of a call: the shipped names, and a user's own."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilepolicy import CallSites
from tilepolicy.context.layers import MAXTEXT_CALL_SITES

KNOWN = (*MAXTEXT_CALL_SITES.wi, *MAXTEXT_CALL_SITES.wo)


def grouped_matmuls(node: ast.AST, inside: str = "") -> Iterator[tuple[str, str]]:
    """(innermost known function, name of its ``tiling`` argument) of each ``gmm_fn`` call."""
    for child in ast.iter_child_nodes(node):
        here = inside
        if isinstance(child, ast.FunctionDef) and child.name in KNOWN:
            here = child.name
        if isinstance(child, ast.Call) and getattr(child.func, "id", "") == "gmm_fn":
            tiling = next(k.value for k in child.keywords if k.arg == "tiling")
            assert isinstance(tiling, ast.Name)
            yield here, tiling.id
        yield from grouped_matmuls(child, here)


@pytest.mark.maxtext
def test_the_installed_maxtext_has_the_functions() -> None:
    """Every grouped matmul of ``layers/moe.py`` is in the function that stands for its layer."""
    found = importlib.util.find_spec("maxtext")
    assert found is not None
    assert found.submodule_search_locations
    source = Path(found.submodule_search_locations[0]) / "layers" / "moe.py"
    assert source.as_posix().endswith(MAXTEXT_CALL_SITES.file)
    calls = list(grouped_matmuls(ast.parse(source.read_text(encoding="utf-8"))))
    assert len(calls) >= 3
    assert set(calls) == {("gmm_up", "wi_tile_size"), ("_moe_body", "wo_tile_size")}


def test_a_function_is_known_by_name_and_file() -> None:
    """Names of wi and wo functions, in files whose path ends as stated."""
    code = grouped_matmuls.__code__
    assert CallSites(wi=("grouped_matmuls",), wo=()).layer_of(code) == "wi"
    assert (
        CallSites(wi=(), wo=("grouped_matmuls",), file="test_call_sites.py").layer_of(code) == "wo"
    )
    assert CallSites(wi=("grouped_matmuls",), wo=(), file="moe.py").layer_of(code) is None
    assert CallSites(wi=("other",), wo=()).layer_of(code) is None
