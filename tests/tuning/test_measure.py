"""``--measure``: what tokamax's autotuner is asked, and what is made of its answer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tokamax
from fake_compiler import FakeTpuCompiler
from tokamax.ops import tpu as tpu_ops

from tilepolicy.settings import PASSES, Pass
from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.candidates import rank
from tilepolicy.tuning.compiler import CompileRequest
from tilepolicy.tuning.measure import measure, measured
from tilepolicy.tuning.sites import Backend, GmmTile, Site
from tilepolicy.tuning.tpus import tpu
from tilepolicy.tuning.tune import TunedSite, TuneItem, tune

SITE = Site("wi", "fwd", 4096, 1024, 512, 8)


class Asked(dict[str, Any]):
    """What the autotuner was asked, and the times that it answers with."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """In place of the device: the larger the tile, the slower."""
    seen = Asked()

    def autotune(bound: Any, configs: set[Any], **how: Any) -> Any:
        seen.update(bound=bound, configs=configs, **how)
        times = {
            config: SimpleNamespace(median_evaluation_time_ms=config.tile_m * 1e-2)
            for config in configs
            if config.tile_k != 384
        }
        return SimpleNamespace(prune_errors=lambda: times)

    monkeypatch.setattr(tokamax.BoundArguments, "autotune", autotune)
    return seen


def found(pass_: Pass = "fwd", backend: Backend = "tokamax_v1") -> TunedSite:
    """A site with what the search found for it."""
    site = replace(SITE, pass_=pass_, backend=backend)
    request = CompileRequest(site, "v6e", None)
    item = TuneItem("s", "", request, 4096, {}, candidates=rank(site, tpu("v6e")))
    (tuned,) = tune([item], Compiler(run=FakeTpuCompiler()))
    return tuned


@pytest.mark.parametrize("pass_", PASSES)
def test_the_call_of_the_pass_is_bound(asked: Asked, pass_: Pass) -> None:
    """Operands, dimension numbers and result type of fwd, dlhs and drhs, nothing cached."""
    times = measure(found(pass_), [GmmTile(128, 256, 512)], 60)
    assert times == {GmmTile(128, 256, 512): pytest.approx(1.28e-3)}
    bound = asked["bound"]
    assert isinstance(bound.op, tpu_ops.RaggedDot)
    lhs, rhs = SITE.shape.operands(pass_)
    assert (bound.args[0].shape, bound.args[1].shape) == (lhs, rhs)
    assert bound.arguments["preferred_element_type"] == "bfloat16"
    (config,) = asked["configs"]
    assert (config.tile_m, config.tile_k, config.tile_n) == (128, 256, 512)
    assert asked["cache_results"] is False
    assert asked["timeout"] == 60


def test_v2_takes_the_contracted_axis_first(asked: Asked) -> None:
    """Its config of dlhs is (m, n, k) of the forward problem."""
    measure(found("dlhs", "tokamax_v2"), [GmmTile(128, 256, 512)], 60)
    (config,) = asked["configs"]
    assert isinstance(asked["bound"].op, tpu_ops.V2RaggedDot)
    assert (config.tile_m, config.tile_k, config.tile_n) == (128, 512, 256)


def test_the_fastest_wins(asked: Asked) -> None:
    """The site gets the fastest tile of its shortlist, with its time; failures are left out."""
    site = found()
    tiles = [c.tile for c in site.item.candidates if c.tile.m in (128, 256)][:6]
    result = measured(site, tiles, 60)
    assert result.best is not None
    assert result.best.tile.m == min(tile.m for tile in tiles)
    assert result.measured_seconds == pytest.approx(result.best.tile.m * 1e-5)
    assert result.verdict is not None
    assert result.verdict.tile == result.best.tile
    assert len(asked["configs"]) == len(tiles)


@pytest.mark.usefixtures("asked")
def test_what_cannot_be_measured_stays() -> None:
    """Megablox is not tokamax's, and a site without a tile has nothing to measure."""
    megablox = found(backend="megablox")
    assert measured(megablox, megablox.shortlist, 60) is megablox
    nothing = replace(found(), shortlist=())
    assert measured(nothing, (), 60) is nothing
