"""What the verifier compiles is built from names that every supported Tokamax release has."""

from __future__ import annotations

from typing import Any, get_args

import jax
import pytest
from moe import array, tpu

from tilepolicy.settings import Pass
from tilepolicy.tuning.kernels import KernelOptions, _through_vjp, _tokamax_v2, build_kernel
from tilepolicy.tuning.sites import GmmTile

TILE = GmmTile(256, 128, 128)
SHAPES = {"fwd": (512, 1024), "dlhs": (512, 512), "drhs": (4, 512, 1024)}


@pytest.mark.parametrize("pass_", get_args(Pass))
def test_v1_is_built_with_a_tile(pass_: Pass) -> None:
    """Every pass can be traced with an explicit tile, to a result of its shape."""
    check(build_kernel("tokamax_v1", pass_, TILE, KernelOptions()), pass_)


@pytest.mark.parametrize("pass_", get_args(Pass))
def test_v2_is_built_with_a_tile(pass_: Pass) -> None:
    """The same for Tokamax's own v2, which stands in where MaxText's copy is not installed."""
    check(_through_vjp(_tokamax_v2(pass_, TILE, KernelOptions()), pass_), pass_)


def check(kernel: Any, pass_: Pass) -> None:
    arguments = array(512, 512), array(4, 512, 1024), array(4, dtype="int32"), array(512, 1024)
    with tpu():
        traced = jax.jit(kernel).trace(*arguments)
    assert jax.tree.leaves(traced.out_info)[0].shape == SHAPES[pass_]
