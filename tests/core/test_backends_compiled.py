"""The rules about legal tiles, held against the TPU compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from legality_cases import COMPILED, SIZES

from tilepolicy.settings import Pass
from tilepolicy.tuning.compiler import CompileRequest
from tilepolicy.tuning.pool import close_compilers, compile_many
from tilepolicy.tuning.sites import Backend, GmmTile, Site

pytestmark = [pytest.mark.compiled, pytest.mark.maxtext]


@pytest.fixture(autouse=True, scope="module")
def warm() -> Iterator[None]:
    """One compiler for the whole module."""
    yield
    close_compilers()


@pytest.mark.parametrize(("backend", "pass_", "tile", "axis"), COMPILED)
def test_the_compiler_agrees(
    backend: Backend, pass_: Pass, tile: tuple[int, int, int], axis: str | None
) -> None:
    """The compiler accepts a tile exactly where no axis of it is called illegal."""
    site = Site("wi", pass_, *SIZES.values(), 4, backend=backend)
    request = CompileRequest(site, "v6e", GmmTile(*tile))
    (verdict,) = compile_many([request], timeout_seconds=240.0)
    assert verdict.fits == (axis is None), verdict.message
