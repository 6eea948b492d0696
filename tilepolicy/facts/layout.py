"""How MaxText lays a config out over devices: mesh, axis rules, and the share of one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final, NamedTuple

from tilepolicy import source
from tilepolicy.configs.values import ConfigValues
from tilepolicy.facts.sharding import Mesh, Rules, build_mesh, parse_rules, partition
from tilepolicy.settings import Phase

__all__ = ["Layout", "Unknown", "layout_of"]

_LOGITS: Final = ("activation_embed_and_logits_batch_sequence", "activation_vocab")
_COUNT_KEYS: Final = ("compile_topology", "--device TOPOLOGY")


class Unknown(NamedTuple):
    """A size that is not known.

    Attributes:
        keys: config keys or options of which one would have to be set or changed.
    """

    keys: tuple[str, ...]


class Layout(NamedTuple):
    """A config's devices, mesh and axis rules.

    Attributes:
        values: the config.
        num_devices: all devices; None if not known.
        num_slices: slices; None if not known.
        mesh: the mesh.
        rules: logical axis rules of each phase.
        unknown: keys that keep the mesh or its rules from being known at all.
    """

    values: ConfigValues
    devices: int | None
    slices: int | None
    mesh: Mesh
    rules: dict[Phase, Rules]
    unknown: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int | Unknown:
        """All devices of all slices."""
        if self.devices is not None and self.slices is not None:
            return self.devices * self.slices
        if self.mesh.unknown or self.unknown:
            keys = (*_COUNT_KEYS, "compile_topology_num_slices")
            return Unknown(keys if self.devices is None else keys[2:])
        return math.prod(self.mesh.sizes.values())

    @property
    def num_slices(self) -> int | Unknown:
        """Slices of the job."""
        if self.slices is not None:
            return self.slices
        return Unknown(("compile_topology_num_slices", "num_slices"))

    def shards(self, axes: Sequence[str]) -> int | Unknown:
        """Into how many parts mesh axes cut a dimension."""
        if self.unknown:
            return Unknown(self.unknown)
        size = self.mesh.size(axes)
        return size if size is not None else Unknown(self.mesh.missing(axes))

    def axes_of(self, names: Sequence[str | None], phase: Phase) -> tuple[tuple[str, ...], ...]:
        """The mesh axes of each dimension of an array with these logical axes."""
        return partition(names, self.rules[phase])

    def share(self, per_device: Fraction, axes: Sequence[str]) -> Fraction | Unknown:
        """What one device holds of a total of ``devices × per_device`` cut by mesh axes.

        That is ``per_device`` times the devices that share the same part: the product of all
        *other* mesh axes. So the size of an axis that is "the rest" (-1) is not needed when it is
        among ``axes``.
        """
        others = [axis for axis in self.mesh.axes if axis not in axes]
        replicas = self.shards(others)
        return replicas if isinstance(replicas, Unknown) else per_device * replicas

    def vocab_per_device(self) -> int | Unknown:
        """Vocabulary entries of the logits on one device."""
        vocab = self.values.get("vocab_size")
        shards = self.shards(self.axes_of(_LOGITS, "train")[1])
        if not isinstance(vocab, int) or vocab < 1:
            return Unknown(("vocab_size",))
        return shards if isinstance(shards, Unknown) else -(-vocab // shards)

    def logit_rows(self) -> int | Unknown:
        """Rows of the logits of one microbatch on one device."""
        batch = batch_of(self.values, "train")
        length = self.values.get("max_target_length")
        if batch is None or not isinstance(length, int):
            return Unknown(("per_device_batch_size", "max_target_length"))
        rows = self.share(batch * length, self.axes_of(_LOGITS, "train")[0])
        if isinstance(rows, Unknown) or rows.denominator == 1:
            return rows if isinstance(rows, Unknown) else int(rows)
        return Unknown(("per_device_batch_size", "max_target_length"))


def batch_of(values: ConfigValues, phase: Phase) -> Fraction | None:
    """``per_device_batch_size`` of a phase; evaluation has the train one unless it sets its own."""
    size = values.get("per_device_batch_size")
    if phase == "eval":
        size = values.get("eval_per_device_batch_size") or size
    if not isinstance(size, int | float) or not size > 0:
        return None
    return Fraction(size).limit_denominator(1 << 20)


def layout_of(
    values: ConfigValues, devices_per_slice: int | None, *, whole: bool = False
) -> Layout:
    """The layout of a config.

    Args:
        values: the config.
        devices_per_slice: devices of one slice, from a topology or an option; None if not known.
        whole: whether that is one slice, where the config does not set a number of slices.
    """
    devices = devices_per_slice
    if values.get("internal_compile"):
        devices = _positive(values.get("internal_compile_num_devices"))
    slices = _positive(values.get("num_slices")) or _positive(
        values.get("compile_topology_num_slices")
    )
    if slices is None and (whole or values.get("hardware") == "cpu"):
        slices = 1
    axes, rules, unknown = _mesh_and_rules(values)
    mesh = build_mesh(values, axes, devices, slices)
    return Layout(values, devices, slices, mesh, rules, unknown)


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _mesh_and_rules(
    values: ConfigValues,
) -> tuple[tuple[str, ...], dict[Phase, Rules], tuple[str, ...]]:
    """Mesh axes, rules of each phase, and the keys whose file is missing."""
    axes = _names(values.get("mesh_axes"))
    rules = parse_rules(values.get("logical_axis_rules"))
    unknown: list[str] = []
    custom = _custom_mesh(values, "custom_mesh_and_rule", unknown)
    if custom is not None:
        axes = _names(custom.get("mesh_axes")) or axes
        rules = (
            parse_rules(custom["logical_axis_rules"]) if "logical_axis_rules" in custom else rules
        )
    evaluation = _custom_mesh(values, "custom_mesh_and_rule_for_eval", unknown)
    eval_rules = rules
    if evaluation is not None and "logical_axis_rules" in evaluation:
        eval_rules = parse_rules(evaluation["logical_axis_rules"])
    return axes, {"train": rules, "eval": eval_rules}, tuple(unknown)


def _names(raw: object) -> tuple[str, ...]:
    return tuple(str(name) for name in raw) if isinstance(raw, list | tuple) else ()


def _custom_mesh(
    values: ConfigValues, key: str, unknown: list[str]
) -> dict[str, source.Plain] | None:
    """A custom mesh's file in MaxText's folder; None where the config names none."""
    name = values.get(key)
    if not name or name == "default":
        return None
    folder = values.maxtext_configs
    path = folder / "custom_mesh_and_rule" / f"{name}.yml" if folder is not None else None
    if path is None or not path.is_file():
        unknown.append(key)
        return None
    document = source.parse(path.read_bytes(), str(path), "maxtext")
    return document.value if isinstance(document.value, dict) else None
