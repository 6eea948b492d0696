"""Sizes of MaxText's mesh axes, and over how many devices a logical axis is cut.

Follows ``configs/types.py`` (mesh axes, custom meshes), ``max_utils.fill_unspecified_mesh_axes``
(-1 means the rest) and flax's ``logical_to_mesh_axes`` (rules in order, each mesh axis once).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeGuard

from tilepolicy.errors import Problem

__all__ = ["Mesh", "Rules", "build_mesh", "parse_rules", "partition"]

type Rules = Sequence[tuple[str, tuple[str, ...]]]

_KEY_OF_AXIS: Final = {"stage": "pipeline", "model": "tensor"}
_AXES_OF_SIZE_ONE: Final = ("attn_dp", "attn_dp_expert", "dcp", "pcp")


class Mesh(NamedTuple):
    """The mesh: sizes where they are known, and what is missing where they are not.

    Attributes:
        sizes: mesh axis to its number of shards; an axis of unknown size is not in it.
        unknown: mesh axis to the keys of which one would have to be set.
        problem: why the parallelism values contradict each other or the devices.
    """

    sizes: Mapping[str, int]
    unknown: Mapping[str, tuple[str, ...]]
    problem: str | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis of the mesh."""
        return (*self.sizes, *self.unknown)

    def size(self, axes: Iterable[str]) -> int | None:
        """Product of the sizes of axes; an axis that the mesh lacks counts as 1."""
        axes = tuple(axes)
        if any(axis in self.unknown for axis in axes):
            return None
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def missing(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The keys that keep :meth:`size` of these axes from being known."""
        keys = [key for axis in axes for key in self.unknown.get(axis, ())]
        return tuple(dict.fromkeys(keys))


def build_mesh(
    values: Mapping[str, object],
    mesh_axes: Sequence[str],
    devices_per_slice: int | None,
    num_slices: int | None,
) -> Mesh:
    """The mesh of a config.

    Args:
        values: the config; ``ici_*_parallelism`` and ``dcn_*_parallelism`` are read.
        mesh_axes: names of the axes, the config's or those of its custom mesh.
        devices_per_slice: devices of one slice; None if not known.
        num_slices: number of slices; None if not known.
    """
    ici = _sizes(values, "ici", mesh_axes, devices_per_slice)
    dcn = _sizes(values, "dcn", mesh_axes, num_slices)
    sizes: dict[str, int] = {}
    unknown: dict[str, tuple[str, ...]] = {}
    for axis in mesh_axes:
        inside, across = ici[axis], dcn[axis]
        if isinstance(inside, int) and isinstance(across, int):
            sizes[axis] = inside * across
        else:
            keys = (*_keys(inside), *_keys(across))
            unknown[axis] = tuple(dict.fromkeys(keys))
    problems = [
        _contradiction("ici", ici, devices_per_slice, "devices of a slice"),
        _contradiction("dcn", dcn, num_slices, "slices"),
    ]
    return Mesh(sizes, unknown, next((problem for problem in problems if problem), None))


type _Size = int | tuple[str, ...]
"""A known size, or the keys that are missing."""


def _keys(size: _Size) -> tuple[str, ...]:
    return size if isinstance(size, tuple) else ()


def _sizes(
    values: Mapping[str, object], kind: str, mesh_axes: Sequence[str], total: int | None
) -> dict[str, _Size]:
    """Sizes of the axes within a slice (``ici``) or across slices (``dcn``)."""
    given = _explicit_list(values, kind, mesh_axes)
    raw: dict[str, object] = {}
    for position, axis in enumerate(mesh_axes):
        if given is not None:
            raw[axis] = given[position]
        elif axis in _AXES_OF_SIZE_ONE:
            raw[axis] = 1
        else:
            raw[axis] = values.get(_parallelism_key(kind, axis), 1)
    numbers = {axis: size for axis, size in raw.items() if _is_count(size)}
    rest = [axis for axis, size in raw.items() if size == -1]
    sizes: dict[str, _Size] = {}
    for axis, size in raw.items():
        if _is_count(size):
            sizes[axis] = size
        elif size == -1 and len(rest) == 1 and total is not None:
            left, remainder = divmod(total, math.prod(numbers.values()))
            sizes[axis] = left if left and not remainder else (_parallelism_key(kind, axis),)
        else:
            where = "compile_topology" if kind == "ici" else "compile_topology_num_slices"
            sizes[axis] = (_parallelism_key(kind, axis), where)
    return sizes


def _is_count(size: object) -> TypeGuard[int]:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def _parallelism_key(kind: str, axis: str) -> str:
    return f"{kind}_{_KEY_OF_AXIS.get(axis, axis)}_parallelism"


def _explicit_list(
    values: Mapping[str, object], kind: str, mesh_axes: Sequence[str]
) -> Sequence[object] | None:
    """``ici_parallelism`` itself, which counts only for a mesh with axes of MaxText's own naming.

    ``types._resolve_parallelism``: the list is kept if the mesh has an axis that no
    ``*_parallelism`` key is for.
    """
    given = values.get(f"{kind}_parallelism")
    if not isinstance(given, list | tuple) or len(given) != len(mesh_axes):
        return None
    own = all(
        axis in _AXES_OF_SIZE_ONE or _parallelism_key(kind, axis) in values for axis in mesh_axes
    )
    return None if own else given


def _contradiction(
    kind: str, sizes: Mapping[str, _Size], total: int | None, what: str
) -> str | None:
    """Why MaxText's mesh creation would refuse these sizes; None if it would not."""
    if total is None:
        return None
    known = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
    product = math.prod(known.values())
    if len(known) == len(sizes) and product == total:
        return None
    named = ", ".join(
        f"{_parallelism_key(kind, axis)}={size}" for axis, size in known.items() if size != 1
    )
    if len(known) == len(sizes):
        return f"{named or 'every ' + kind + ' parallelism 1'} makes {product}, not {total} {what}"
    return f"{total} {what} cannot be divided by {named or 1} for the one axis that is -1"


def parse_rules(raw: object) -> Rules:
    """``logical_axis_rules`` of a config as (logical axis, mesh axes) in their order."""
    rules = []
    for rule in raw if isinstance(raw, list | tuple) else ():
        if isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str):
            axes = (rule[1],) if isinstance(rule[1], str) else rule[1]
            if isinstance(axes, list | tuple):
                rules.append((rule[0], tuple(axis for axis in axes if isinstance(axis, str))))
    return rules


def partition(names: Sequence[str | None], rules: Rules) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that cut each dimension of an array with these logical axes.

    As flax's ``logical_to_mesh_axes``: the rules are tried in their order; a dimension takes the
    first one of its name whose mesh axes no other dimension has taken.
    """
    taken: dict[int, tuple[str, ...]] = {}
    for name, axes in rules:
        if name not in names:
            continue
        position = names.index(name)
        free = not any(axis in used for used in taken.values() for axis in axes)
        if position not in taken and free:
            taken[position] = axes
    return tuple(taken.get(position, ()) for position in range(len(names)))


def mesh_problem(mesh: Mesh) -> Problem | None:
    """The contradiction of a mesh as an error."""
    if mesh.problem is None:
        return None
    return Problem("mesh", mesh.problem, None, "MaxText cannot build this mesh")
