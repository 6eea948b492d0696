"""Grouped matmuls of Tokamax as rules see them: the facts of a call, and what policies decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from tilepolicy import axes
from tilepolicy.axes import GmmShape, Kernel
from tilepolicy.context.active import ActivePolicy
from tilepolicy.errors import AdapterError, Problem
from tilepolicy.facts.devices import normalize_device
from tilepolicy.resolution import FactValue, FieldChoice
from tilepolicy.settings import Layer, Pass

__all__ = ["OP_NAMES", "GmmCall", "Ruling", "gmm_shape", "rule"]

OP_NAMES: Final[Mapping[Kernel, str]] = {
    "tokamax_v1": "pallas_mosaic_tpu_ragged_dot",
    "tokamax_v2": "pallas_mosaic_tpu_v2_ragged_dot",
}


@cache
def _device(device_kind: str) -> str:
    return normalize_device(device_kind) or device_kind


@dataclass(frozen=True, slots=True)
class GmmCall:
    """One grouped matmul as its lookup key shows it.

    Attributes:
        kernel: which kernel asks.
        op: the bound op.
        device_kind: jax's name of the device.
        key: Tokamax's lookup key: the call's arguments, arrays by shape and type.
        pass_: which pass.
        shape: the forward problem behind it.
        version: Tokamax's release.
    """

    kernel: Kernel
    op: Any
    device_kind: str
    key: Any
    pass_: Pass
    shape: GmmShape
    version: str

    @property
    def device(self) -> str:
        """Normalised device name; jax's own where it is not known."""
        return _device(self.device_kind)

    @property
    def dtype(self) -> str:
        """Type of the first operand."""
        return _dtype(self.key["lhs"])

    def facts(self, layer: Layer) -> dict[str, FactValue]:
        """What the call shows to a rule when it is the given layer's."""
        facts: dict[str, FactValue] = dict(axes.layer_facts(self.shape, layer))
        return facts | {
            "layer": layer,
            "pass": self.pass_,
            "dtype": self.dtype,
            "weight_dtype": _dtype(self.key["rhs"]),
            "backend": self.kernel,
            "device": self.device,
            "tokamax": self.version,
        }

    def __str__(self) -> str:
        s = self.shape
        return (
            f"{OP_NAMES[self.kernel]} {self.pass_} m={s.m} k={s.k} n={s.n} groups={s.g} "
            f"{self.dtype} on {self.device}"
        )


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the active policies together say of a call taken as one layer's.

    Attributes:
        layer: the layer.
        facts: what the rules saw.
        fields: decided fields by policy name; the inner policy's before the outer's.
        config: the decided fields by the kernel's name.
        by: for each decided field, which of the active policies decided it.
        undecidable: rules whose conditions need facts that are not known here.
        nearest: the nearest rule of the innermost policy, and why it did not match.
    """

    layer: Layer
    facts: Mapping[str, FactValue]
    fields: Mapping[str, FieldChoice]
    config: Mapping[str, object]
    by: Mapping[str, int]
    undecidable: tuple[str, ...]
    nearest: str


def gmm_shape(op: Any, key: Any, pass_: Pass) -> GmmShape:  # noqa: ANN401 - upstream types
    """The forward problem behind a call."""
    lhs, rhs = key["lhs"], key["rhs"]
    if pass_ == "drhs":
        groups = getattr(op, "num_actual_groups", None) or _length(key["group_sizes"])
    else:
        groups = rhs.shape[0]
    return GmmShape.of_operands(pass_, tuple(lhs.shape), tuple(rhs.shape), groups)


def _length(group_sizes: Any) -> int:  # noqa: ANN401 - GroupSizes or an abstract array
    return int(getattr(group_sizes, "value", group_sizes).shape[0])


def _dtype(array: Any) -> str:  # noqa: ANN401 - array, quantized array, or one to quantize
    """Name of the element type; of a quantized array that of its values."""
    return str(getattr(array, "qvalue", array).dtype.name)


def rule(call: GmmCall, layer: Layer, policies: tuple[ActivePolicy, ...]) -> Ruling:
    """Ask every active policy, inner ones first; each field is decided by the first that does.

    Raises:
        AdapterError: a decided field is not one of this kernel's.
    """
    facts = call.facts(layer)
    fields: dict[str, FieldChoice] = {}
    undecidable: dict[str, tuple[str, ...]] = {}
    nearest = ""
    by: dict[str, int] = {}
    for number, policy in enumerate(policies):
        verdict = policy.resolver.tile(layer, call.pass_, facts, policy.phase)
        for name, choice in verdict.decided.items():
            if name not in fields:
                fields[name], by[name] = choice, number
        undecidable |= verdict.undecidable
        nearest = nearest or verdict.nearest
    values: dict[str, object] = {name: choice.value for name, choice in fields.items()}
    try:
        config = axes.to_kernel(values, call.kernel, layer, call.pass_)
    except ValueError as error:
        names = ", ".join(dict.fromkeys(c.origin.name for c in fields.values()))
        raise AdapterError(
            Problem(
                code="config-refused",
                message=f"{call}, by {names}: {error}",
                remedy=f"restrict the rule with `backend`; this call's is {call.kernel}",
            )
        ) from error
    missing = tuple(f"{rule} (needs {', '.join(names)})" for rule, names in undecidable.items())
    return Ruling(layer, facts, fields, config, by, missing, nearest)
