"""The dialect of MaxText's configs, held against OmegaConf itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf._yaml import get_yaml_loader

from tilepolicy.source import parse

pytestmark = pytest.mark.maxtext

SCALARS = (
    "0512 1_024 12:30 on off yes No 1e3 1E3 0x10 0x_1 .5 1. 1.5e3 "
    "1.5e+3 1_0.5 1_0e3 1__0 1__0e3 _1 08 09 0o17 0b11 0b1_1 +5 -5 +1e3 "
    "-1e-3 1e 1e+ .5e3 .5e+3 .5_1 ._5 .inf -.inf .nan ~ null Null nUll "
    "true True tRue 2026-11-30 1:2:3 1:2:3.5 190:20:30 00 0 -0 0_0 1_000_000 10_000.5 1_000.5_5 "
    "1_e3 1_.5 1._5 1.e3 1.e+3 0.0.17 1e400 -1_2 0777 -010 0_7 +.5 -.5 -.5e3 "
    "e3 1e3_0 5_ 5_.0 12e03 0e0 0x 0b = << y n 12:60 "
)


def configs() -> list[Path]:
    """Every YAML file under the installed MaxText's configs."""
    spec = importlib.util.find_spec("maxtext")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return sorted(Path(spec.submodule_search_locations[0], "configs").rglob("*.yml"))


def omegaconf(text: str) -> Any:
    """What OmegaConf makes of a text."""
    return yaml.load(text, Loader=get_yaml_loader())  # noqa: S506  # it is a safe loader


def test_every_shipped_config_reads_as_maxtext_reads_it() -> None:
    """Values, their types and their order are OmegaConf's, in all files of MaxText."""
    files = configs()
    assert len(files) > 100
    for path in files:
        document = parse(path.read_bytes(), path.name, "maxtext")
        assert document.problems == (), path
        assert repr(document.value) == repr(omegaconf(path.read_text("utf-8"))), path


def same(scalar: str) -> None:
    """Both readers give one value, or both refuse."""
    document = parse(f"a: {scalar}", "f.yml", "maxtext")
    try:
        wanted = omegaconf(f"a: {scalar}")
    except (yaml.YAMLError, ValueError):
        assert document.problems
    else:
        assert document.problems == ()
        assert repr(document.value) == repr(wanted)


@pytest.mark.parametrize("scalar", SCALARS.split())
def test_surprising_scalars_read_as_maxtext_reads_them(scalar: str) -> None:
    """What a policy would refuse is read in a config as MaxText reads it."""
    same(scalar)


@given(st.text(alphabet="0123456789_.:eE+-xob", min_size=1, max_size=10))
def test_number_like_scalars_read_as_maxtext_reads_them(scalar: str) -> None:
    """Whatever is made of digits and signs is read alike, or refused by both."""
    same(scalar)


def test_merging_follows_maxtext() -> None:
    """Two merges are allowed, and the later one wins; in a list the earlier mapping wins."""
    text = "x: &x {a: 1, b: 1}\ny: &y {a: 2}\np: {<<: *x, <<: *y}\nq: {<<: [*x, *y]}\n"
    document = parse(text, "f.yml", "maxtext")
    assert document.problems == ()
    assert document.value == omegaconf(text)
