"""Measure tiles with tokamax's autotuner, where there is a TPU."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilepolicy.adapters import tokamax_upstream
from tilepolicy.errors import Problem, VerifyError
from tilepolicy.settings import Pass
from tilepolicy.tuning.sites import GmmTile
from tilepolicy.tuning.tpus import tpu
from tilepolicy.tuning.tune import TunedSite

__all__ = ["check_device", "measure", "measured"]

_DIMENSIONS: Mapping[Pass, tuple[tuple[list[int], list[int]], list[int]]] = {
    "fwd": (([1], [1]), [0]),
    "dlhs": (([1], [2]), [0]),
    "drhs": (([0], [0]), []),
}
"""Contracting dimensions, and the group dimension of rhs, of each pass."""


def check_device(device: str) -> None:
    """Make sure that jax sees a TPU of the kind to tune for.

    Raises:
        MissingLibraryError: jax is not installed.
        VerifyError: there is no such TPU.
    """
    jax: Any = importlib.import_module("jax")
    kinds = sorted({d.device_kind for d in jax.devices()})
    if tpu(device).kind not in kinds:
        raise VerifyError(
            Problem(
                code="no-tpu",
                message=f"--measure needs a {tpu(device).kind}, but jax sees {', '.join(kinds)}",
                remedy="run it on a machine with that TPU, or leave --measure out",
            )
        )


def measured(site: TunedSite, shortlist: Sequence[GmmTile], timeout_seconds: float) -> TunedSite:
    """The site with the fastest of the tiles of its shortlist, and the times in its facts.

    The site is returned as it is when it has no tile, or when its kernel is not tokamax's.
    """
    times = measure(site, shortlist, timeout_seconds)
    by_tile = {candidate.tile: candidate for candidate in site.item.candidates}
    if not times or site.verdict is None:
        return site
    fastest = min(times, key=lambda tile: times[tile])
    request = replace(site.verdict.request, tile=fastest)
    return replace(
        site,
        best=by_tile[fastest],
        verdict=replace(site.verdict, request=request, tile=fastest),
        measured_seconds=times[fastest],
    )


def measure(
    site: TunedSite, shortlist: Sequence[GmmTile], timeout_seconds: float
) -> dict[GmmTile, float]:
    """Median seconds of each tile, by tokamax's autotuner; tiles that fail are left out.

    Args:
        site: the grouped matmul; rows are spread over groups at random, as tokamax does it.
        shortlist: tiles that the compiler accepted.
        timeout_seconds: limit of each compile.
    """
    jax: Any = importlib.import_module("jax")
    tokamax: Any = importlib.import_module("tokamax")
    upstream = tokamax_upstream.load()
    gmm = site.item.site
    if gmm.backend not in ("tokamax_v1", "tokamax_v2") or not shortlist:
        return {}
    contracting, group = _DIMENSIONS[gmm.pass_]
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracting, ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=group,
    )
    lhs, rhs = gmm.shape.operands(gmm.pass_)
    left, right = gmm.dtype, gmm.dtype if gmm.pass_ == "drhs" else gmm.weights
    sizes = jax.ShapeDtypeStruct((gmm.num_groups,), "int32")
    if gmm.backend == "tokamax_v1":
        op: Any = upstream.op_class("tokamax_v1")()
        configs = {
            op.config_cls(tile_m=tile.m, tile_k=tile.k, tile_n=tile.n): tile for tile in shortlist
        }
    else:
        op = upstream.op_class("tokamax_v2")(num_actual_groups=gmm.num_groups)
        configs = {
            op.config_cls(tile_m=m, tile_k=k, tile_n=n): tile
            for tile in shortlist
            for m, k, n in (tile.walk(gmm.pass_),)
        }
    bound = op.bind(
        jax.ShapeDtypeStruct(lhs, left),
        jax.ShapeDtypeStruct(rhs, right),
        group_sizes=tokamax.RaggedDotGroupSizes(sizes, gmm.batch_seq),
        ragged_dot_dimension_numbers=dimensions,
        precision=jax.lax.Precision.DEFAULT,
        preferred_element_type=gmm.weights if gmm.pass_ == "drhs" else gmm.dtype,
    )
    data = bound.autotune(set(configs), cache_results=False, timeout=timeout_seconds)
    return {
        configs[config]: record.median_evaluation_time_ms * 1e-3
        for config, record in data.prune_errors().items()
    }
