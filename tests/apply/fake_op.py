"""A Tokamax op of our own, for rules under ``ops``.

Annotations are evaluated here: Tokamax builds the form of its cache keys from them.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from tokamax._src.ops import op as op_lib


@dataclasses.dataclass(frozen=True)
class Config:
    """The op's config."""

    block: int = 16
    fused: bool = False
    stages: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeOp(op_lib.Op):
    """Returns its argument; the heuristic asks for three stages."""

    config_cls: ClassVar[type] = Config
    config: Config | None = None

    def _fwd(self, x: jax.Array, *, return_residuals: bool, config: Config) -> Any:
        del return_residuals, config
        return x, None

    def _get_heuristics_config(self, ba: Any) -> Config:
        del ba
        return Config(stages=3)
