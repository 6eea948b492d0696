"""Tile axes: policy names to each kernel's names and to MaxText's tuple positions, and back.

A policy names the axis of the layer (``batch_seq``, ``embed_dim``, ``mlp_dim``), because kernel
names flip between layers, passes and kernel versions. With the forward problem
lhs ``[m, k]`` x rhs ``[g, k, n]``, wi has k = embed and n = mlp, wo has k = mlp and n = embed:

====  =====================  ========================  ====================================
pass  tokamax v1 tile_k / n  tokamax v2, megablox t_k  contracts
====  =====================  ========================  ====================================
fwd   k / n                  k / n                     k
dlhs  k / n (forward names)  n / k                     n
drhs  k / n                  k / n                     m
====  =====================  ========================  ====================================

Read in tokamax 0.0.17 (``pallas_mosaic_tpu.py``: dlhs hands the backend
``(tile_m, tile_n, tile_k)``; ``pallas_mosaic_tpu_v2.py`` hands it the config as it is) and in
``layers/moe.py`` of MaxText 0.2.0 to 0.2.5. Until 0.2.1 MaxText put the knobs in the order
(batch_seq, embed_dim, mlp_dim) into every tuple, so that a knob did not always tile the axis of
its name: :func:`knob_axis` says which axis it really tiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

from tilepolicy.settings import LATEST_MAXTEXT, Axis, Layer, Pass

__all__ = [
    "KERNELS",
    "KERNEL_EXTRA_FIELDS",
    "GmmShape",
    "Kernel",
    "axis_fields",
    "forward_axes",
    "from_kernel",
    "kernel_axes",
    "knob_axis",
    "layer_facts",
    "maxtext_tuple_axes",
    "maxtext_tuple_knobs",
    "to_kernel",
]

Kernel = Literal["tokamax_v1", "tokamax_v2", "megablox"]
"""``megablox`` is any kernel that takes MaxText's 9-tuple, its vendored gmm_v2 included."""

KERNELS: Final[tuple[Kernel, ...]] = get_args(Kernel)

KERNEL_EXTRA_FIELDS: Final[Mapping[Kernel, Mapping[str, type]]] = {
    "tokamax_v1": {"input_buffer_count": int, "combine_scopes": bool},
    "tokamax_v2": {"bucket_base": int},
    "megablox": {},
}
"""Fields of a kernel's config that tile no axis; they keep their own name in a policy."""

_AXIS_FIELDS: Final = ("tile_m", "tile_k", "tile_n")
_FORWARD: Final[dict[Layer, tuple[Axis, Axis, Axis]]] = {
    "wi": ("batch_seq", "embed_dim", "mlp_dim"),
    "wo": ("batch_seq", "mlp_dim", "embed_dim"),
}
_LAST_WITH_NAMES_IN_ONE_ORDER: Final = (0, 2, 1)


def forward_axes(layer: Layer) -> tuple[Axis, Axis, Axis]:
    """The axes of m, k and n of the layer's forward problem."""
    return _FORWARD[layer]


def kernel_axes(kernel: Kernel, layer: Layer, pass_: Pass) -> tuple[Axis, Axis, Axis]:
    """The axes that the kernel's ``(tile_m, tile_k, tile_n)`` tile, in that order."""
    m, k, n = _FORWARD[layer]
    if pass_ == "dlhs" and kernel != "tokamax_v1":
        return m, n, k
    return m, k, n


def axis_fields(kernel: Kernel, layer: Layer, pass_: Pass) -> dict[Axis, str]:
    """Policy axis to the kernel's field: ``{"batch_seq": "tile_m", "embed_dim": "tile_k", …}``."""
    return dict(zip(kernel_axes(kernel, layer, pass_), _AXIS_FIELDS, strict=True))


def to_kernel[V](tile: Mapping[str, V], kernel: Kernel, layer: Layer, pass_: Pass) -> dict[str, V]:
    """Rename the axes of a policy tile to the kernel's fields; other fields keep their name.

    Raises:
        ValueError: a field is neither an axis nor a field of this kernel.
    """
    names = _names(kernel, layer, pass_)
    _refuse_unknown(tile, names, kernel)
    return {names[field]: value for field, value in tile.items()}


def from_kernel[V](
    config: Mapping[str, V], kernel: Kernel, layer: Layer, pass_: Pass
) -> dict[str, V]:
    """Rename a kernel's fields to policy names: the inverse of :func:`to_kernel`.

    Raises:
        ValueError: a field is not one of this kernel's.
    """
    names = {theirs: ours for ours, theirs in _names(kernel, layer, pass_).items()}
    _refuse_unknown(config, names, kernel)
    return {names[field]: value for field, value in config.items()}


def _names(kernel: Kernel, layer: Layer, pass_: Pass) -> dict[str, str]:
    """Policy name to the kernel's name, for every field of the kernel's config."""
    axes: tuple[str, ...] = kernel_axes(kernel, layer, pass_)
    extra = KERNEL_EXTRA_FIELDS[kernel]
    return dict(zip((*axes, *extra), (*_AXIS_FIELDS, *extra), strict=True))


def _refuse_unknown(given: Mapping[str, object], known: Mapping[str, str], kernel: Kernel) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(
            f"{kernel} has no field {', '.join(unknown)}; its fields are {', '.join(known)}"
        )


def maxtext_tuple_knobs(
    layer: Layer, pass_: Pass, maxtext: str = LATEST_MAXTEXT
) -> tuple[Axis, Axis, Axis]:
    """Which knob (by the axis in its name) MaxText puts first, second and third for a pass.

    The 9-tuple of a layer is these three for fwd, dlhs and drhs, one after the other.

    Args:
        layer: ``wi`` or ``wo``.
        pass_: ``fwd``, ``dlhs`` or ``drhs``.
        maxtext: MaxText release; the order of the names changed with 0.2.2.
    """
    if _release(maxtext) <= _LAST_WITH_NAMES_IN_ONE_ORDER:
        return "batch_seq", "embed_dim", "mlp_dim"
    return maxtext_tuple_axes(layer, pass_)


def maxtext_tuple_axes(layer: Layer, pass_: Pass) -> tuple[Axis, Axis, Axis]:
    """The axes that positions one to three of the pass really tile, in every release."""
    return kernel_axes("megablox", layer, pass_)


def knob_axis(layer: Layer, pass_: Pass, knob: Axis, maxtext: str = LATEST_MAXTEXT) -> Axis:
    """The axis that a MaxText knob really tiles: that of its name from release 0.2.2 on.

    Example:
        ``knob_axis("wo", "fwd", "embed_dim", "0.2.1")`` is ``mlp_dim``.
    """
    position = maxtext_tuple_knobs(layer, pass_, maxtext).index(knob)
    return maxtext_tuple_axes(layer, pass_)[position]


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


class GmmShape(NamedTuple):
    """A grouped matmul by its forward problem lhs ``[m, k]`` x rhs ``[g, k, n]``.

    The operands of the backward passes: dlhs takes ``[m, n]`` and ``[g, k, n]`` and gives
    ``[m, k]``; drhs takes ``[m, k]`` and ``[m, n]`` and gives ``[g, k, n]``.
    """

    m: int
    k: int
    n: int
    g: int

    @classmethod
    def of_operands(
        cls, pass_: Pass, lhs: tuple[int, ...], rhs: tuple[int, ...], groups: int
    ) -> GmmShape:
        """The forward problem behind the two operands of a pass.

        Raises:
            ValueError: ranks or shared dimensions do not fit the pass.
        """
        if len(lhs) != 2 or len(rhs) != (2 if pass_ == "drhs" else 3):
            raise ValueError(f"{pass_} does not take operands of shapes {lhs} and {rhs}")
        m, other = lhs
        if pass_ == "drhs":
            shape, fits = cls(m, other, rhs[1], groups), rhs[0] == m
        elif pass_ == "dlhs":
            shape, fits = cls(m, rhs[1], other, groups), rhs == (groups, rhs[1], other)
        else:
            shape, fits = cls(m, other, rhs[2], groups), rhs == (groups, other, rhs[2])
        if not fits:
            raise ValueError(
                f"{pass_} with {groups} groups does not take operands of shapes {lhs} and {rhs}"
            )
        return shape

    def operands(self, pass_: Pass) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two operands of a pass: the inverse of :meth:`of_operands`."""
        if pass_ == "fwd":
            return (self.m, self.k), (self.g, self.k, self.n)
        if pass_ == "dlhs":
            return (self.m, self.n), (self.g, self.k, self.n)
        return (self.m, self.k), (self.m, self.n)

    def axis_sizes(self, layer: Layer) -> dict[Axis, int]:
        """Size of each policy axis when this problem is the given layer's."""
        return dict(zip(_FORWARD[layer], (self.m, self.k, self.n), strict=True))


def layer_facts(shape: GmmShape, layer: Layer) -> dict[str, int]:
    """The shape facts of a site when the problem is the given layer's.

    These are ``batch_seq``, ``embed_dim``, ``mlp_dim``, ``num_groups`` and ``rows_per_group``.
    """
    sizes = {str(axis): size for axis, size in shape.axis_sizes(layer).items()}
    return sizes | {"num_groups": shape.g, "rows_per_group": shape.m // shape.g}
