"""One grouped matmul of a train step, and the tile it runs with, in plain terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

from tilepolicy.axes import GmmShape, forward_axes
from tilepolicy.settings import Layer, Pass, Phase

__all__ = ["BACKENDS", "ITEMSIZES", "Backend", "GmmTile", "Site"]

Backend = Literal["tokamax_v1", "tokamax_v2", "tokamax_v2_heuristic", "megablox"]
"""The grouped-matmul paths of MaxText that run a tiled Pallas kernel."""

BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)

ITEMSIZES: Final[Mapping[str, int]] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of the element types whose kernels can be compiled and costed here.

Quantised operands carry scales next to their values, which a site does not describe.
"""


class GmmTile(NamedTuple):
    """Tile sizes along m, k and n of the *forward* problem lhs ``[m, k]`` x rhs ``[g, k, n]``.

    The names do not flip between passes: in dlhs, ``n`` tiles the contracted axis and ``k`` the
    columns of the output. This is also how tokamax v1 reads its ``Config``.
    """

    m: int
    k: int
    n: int

    @classmethod
    def of_policy(cls, layer: Layer, tile: Mapping[str, int]) -> GmmTile:
        """From policy names (``batch_seq``, ``embed_dim``, ``mlp_dim``); others are ignored."""
        m, k, n = forward_axes(layer)
        return cls(tile[m], tile[k], tile[n])

    def to_policy(self, layer: Layer) -> dict[str, int]:
        """The tile by policy names."""
        return dict(zip(forward_axes(layer), self, strict=True))

    def walk(self, pass_: Pass) -> tuple[int, int, int]:
        """``(rows, contracted, columns)`` of fwd and dlhs, ``(m, k, n)`` of drhs.

        This is the order of ``tile_m, tile_k, tile_n`` that every kernel writes into its
        profiling metadata, and of the configs of v2 and megablox.
        """
        return (self.m, self.n, self.k) if pass_ == "dlhs" else (self.m, self.k, self.n)

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


@dataclass(frozen=True, slots=True)
class Site:
    """One grouped matmul as one device runs it.

    Attributes:
        layer: ``wi`` or ``wo``.
        pass_: ``fwd``, ``dlhs`` or ``drhs``.
        batch_seq: rows m of the call, padding included.
        embed_dim: size of the embedding axis on this device.
        mlp_dim: size of the MLP axis on this device (doubled for wi where MaxText fuses gate
            and up).
        num_groups: experts whose weights are on this device.
        dtype: element type of the activations.
        weight_dtype: element type of the weights; that of the activations when empty.
        backend: the path of MaxText that runs it.
        phase: ``train`` or ``eval``.
    """

    layer: Layer
    pass_: Pass
    batch_seq: int
    embed_dim: int
    mlp_dim: int
    num_groups: int
    dtype: str = "bfloat16"
    weight_dtype: str = ""
    backend: Backend = "tokamax_v1"
    phase: Phase = "train"

    @property
    def shape(self) -> GmmShape:
        """The forward problem behind the site."""
        sizes = {
            "batch_seq": self.batch_seq,
            "embed_dim": self.embed_dim,
            "mlp_dim": self.mlp_dim,
        }
        m, k, n = (sizes[axis] for axis in forward_axes(self.layer))
        return GmmShape(m, k, n, self.num_groups)

    @property
    def weights(self) -> str:
        """Element type of the weights."""
        return self.weight_dtype or self.dtype

    @property
    def name(self) -> str:
        """``wi.fwd``, or ``eval wi.fwd``: how listings name the site."""
        prefix = "eval " if self.phase == "eval" else ""
        return f"{prefix}{self.layer}.{self.pass_}"
