"""The grouped-matmul kernels as functions of arrays, in the form in which a train step calls them.

jax, tokamax and MaxText are imported on demand: only the compiler's child process calls these.
Tokamax's op classes come from :mod:`tilepolicy.adapters.tokamax_upstream`, which finds them in
every release that it knows and else names what is missing: the public ``tokamax.ops.tpu`` exists
only from 0.0.17 on. MaxText's names are public ones (``maxtext.kernels.megablox``). The calls
follow ``gmm`` in ``layers/moe.py`` and ``kernels/megablox/ops.py`` of MaxText 0.2.5: default
precision, results in the activations' type (weight gradients in the weights'), gradients through
``jax.vjp`` where the kernel's own rule chooses the operands' layout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilepolicy.axes import Kernel
from tilepolicy.errors import MissingLibraryError, Problem
from tilepolicy.settings import Pass
from tilepolicy.tuning.sites import Backend, GmmTile

__all__ = ["KernelOptions", "build_kernel", "missing_libraries"]

type _Array = Any
"""A ``jax.Array``; jax is imported on demand, and its own functions are not typed strictly."""

type _Gmm = Callable[[_Array, _Array, _Array], _Array]
"""lhs ``[m, k]``, rhs ``[g, k, n]``, group_sizes ``[g]`` -> ``[m, n]``."""

_INSTALL = {
    "jax": "pip install 'tilepolicy[verify]'",
    "tokamax": "pip install 'tilepolicy[verify]'",
    "libtpu": "pip install 'tilepolicy[verify]'",
    "maxtext": "pip install 'tilepolicy[maxtext]'",
}


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Fields of a kernel's config that tile no axis; None leaves the kernel's default."""

    input_buffer_count: int | None = None
    combine_scopes: bool | None = None
    bucket_base: int | None = None

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the named fields that are set."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def missing_libraries(backend: Backend) -> tuple[Problem, ...]:
    """What compiling this backend needs and is not installed, one problem per library.

    MaxText's vendored v2 is compiled where MaxText is installed, tokamax's own v2 otherwise, so
    that only megablox needs MaxText.
    """
    needed = ["jax", "tokamax", "libtpu"] + (["maxtext"] if backend == "megablox" else [])
    return tuple(
        Problem(
            code="missing-library",
            message=f"compiling {backend} kernels needs {name}, which is not installed",
            remedy=_INSTALL[name],
        )
        for name in needed
        if importlib.util.find_spec(name) is None
    )


def build_kernel(
    backend: Backend, pass_: Pass, tile: GmmTile | None, options: KernelOptions
) -> Callable[..., _Array]:
    """The computation of one pass: ``f(lhs, rhs, group_sizes, dout)``.

    lhs is ``[m, k]``, rhs ``[g, k, n]``, group_sizes ``[g]`` int32, dout ``[m, n]``; the result
    is ``[m, n]`` for fwd, ``[m, k]`` for dlhs and ``[g, k, n]`` for drhs. Operands that a pass
    does not use are dropped by jit.

    Args:
        backend: MaxText's path.
        pass_: ``fwd``, ``dlhs`` or ``drhs``.
        tile: tile by forward axes; None for what the library would choose by itself.
        options: further fields of the kernel's config.

    Raises:
        MissingLibraryError: the backend's library is not installed.
    """
    if problems := missing_libraries(backend):
        raise MissingLibraryError(problems)
    if backend == "tokamax_v1":
        return _tokamax_v1(pass_, tile, options)
    if backend == "megablox":
        return _through_vjp(_maxtext_gmm(pass_, tile, v2=False), pass_)
    if importlib.util.find_spec("maxtext") is not None:
        return _through_vjp(_maxtext_gmm(pass_, tile, v2=True), pass_)
    return _through_vjp(_tokamax_v2(pass_, tile, options), pass_)


def _through_vjp(gmm: _Gmm, pass_: Pass) -> Callable[..., _Array]:
    import jax

    def fwd(lhs: _Array, rhs: _Array, sizes: _Array, dout: _Array) -> _Array:
        del dout
        return gmm(lhs, rhs, sizes)

    def dlhs(lhs: _Array, rhs: _Array, sizes: _Array, dout: _Array) -> _Array:
        return jax.vjp(lambda x: gmm(x, rhs, sizes), lhs)[1](dout)[0]

    def drhs(lhs: _Array, rhs: _Array, sizes: _Array, dout: _Array) -> _Array:
        return jax.vjp(lambda w: gmm(lhs, w, sizes), rhs)[1](dout)[0]

    return {"fwd": fwd, "dlhs": dlhs, "drhs": drhs}[pass_]


def _tokamax_v1(pass_: Pass, tile: GmmTile | None, options: KernelOptions) -> Callable[..., _Array]:
    """The v1 op; its explicit config covers one call only, so a pass is called by itself."""
    import jax

    ragged_dot = _op_class("tokamax_v1")
    if tile is None:
        return _through_vjp(_plain(ragged_dot()), pass_)
    config = ragged_dot.config_cls(
        tile_m=tile.m,
        tile_k=tile.k,
        tile_n=tile.n,
        **options.given("input_buffer_count", "combine_scopes"),
    )
    op = ragged_dot(config=config)
    if pass_ == "fwd":
        return _through_vjp(_plain(op), "fwd")
    # The calls that the op's own backward rule makes (``vjp`` in tokamax's ragged_dot/base.py).
    contracting = ([1], [2]) if pass_ == "dlhs" else ([0], [0])
    lax: Any = jax.lax  # its dataclasses are untyped
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracting, ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0] if pass_ == "dlhs" else [],
    )

    def backward(lhs: _Array, rhs: _Array, sizes: _Array, dout: _Array) -> _Array:
        left, right, result = (dout, rhs, lhs) if pass_ == "dlhs" else (lhs, dout, rhs)
        return op(
            left,
            right,
            group_sizes=sizes,
            ragged_dot_dimension_numbers=dimensions,
            precision=jax.lax.Precision.DEFAULT,
            preferred_element_type=result.dtype,
        )

    return backward


def _tokamax_v2(pass_: Pass, tile: GmmTile | None, options: KernelOptions) -> _Gmm:
    ragged_dot = _op_class("tokamax_v2")
    if tile is None:
        return _plain(ragged_dot())
    tile_m, tile_k, tile_n = tile.walk(pass_)
    config = ragged_dot.config_cls(
        tile_m=tile_m, tile_k=tile_k, tile_n=tile_n, **options.given("bucket_base")
    )
    field = {"fwd": "config", "dlhs": "dlhs_config", "drhs": "drhs_config"}[pass_]
    return _plain(ragged_dot(**{field: config}))


def _op_class(kernel: Kernel) -> Any:  # noqa: ANN401 - upstream class
    from tilepolicy.adapters import tokamax_upstream

    return tokamax_upstream.load().op_class(kernel)


def _plain(op: Callable[..., _Array]) -> _Gmm:
    import jax

    def gmm(lhs: _Array, rhs: _Array, sizes: _Array) -> _Array:
        return op(
            lhs,
            rhs,
            group_sizes=sizes,
            precision=jax.lax.Precision.DEFAULT,
            preferred_element_type=lhs.dtype,
        )

    return gmm


def _maxtext_gmm(pass_: Pass, tile: GmmTile | None, *, v2: bool) -> _Gmm:
    from maxtext.kernels import megablox

    if tile is None and not v2:
        raise ValueError("megablox always runs with the tiles of MaxText's config")
    # The other passes are traced, then dropped as unused: they get a tile that any legal m takes.
    tiling = {"fwd": _spare(tile), "dlhs": _spare(tile), "drhs": _spare(tile)}
    if tile is not None:
        tiling[pass_] = tile.walk(pass_)

    def gmm(lhs: _Array, rhs: _Array, sizes: _Array) -> _Array:
        return megablox.gmm(
            lhs,
            rhs,
            sizes,
            preferred_element_type=lhs.dtype,
            tiling=(*tiling["fwd"], *tiling["dlhs"], *tiling["drhs"]),
            use_tokamax_backend=v2,
            use_gmm_v2=v2,
            use_gmm_v2_heuristic_tiling=v2 and tile is None,
        )

    return gmm


def _spare(tile: GmmTile | None) -> tuple[int, int, int]:
    return (tile.m if tile is not None else 128, 128, 128)
