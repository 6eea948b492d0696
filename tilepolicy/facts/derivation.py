"""Facts of a config: what a decision may depend on, computed as MaxText computes it.

Sizes are those of one device and one microbatch. A fact that cannot be known is absent, and
:attr:`Facts.missing` names the config keys (or options) that would make it known; nothing is
guessed. ``docs/facts.md`` lists the facts.

Names that need care:

``tokens_per_device``
    ``per_device_batch_size × max_target_length``: the number that MaxText divides by
    ``num_vocab_tiling``. Gradient accumulation does not change it: the batch size is that of one
    microbatch.
``logit_rows_per_device``
    rows of the logits that a device really holds. Devices along tensor axes share their tokens, so
    with ``ici_tensor_parallelism=4`` a device holds four times ``tokens_per_device`` rows of a
    quarter of the vocabulary: the bytes are rows × ``vocab_per_device`` × ``logits_itemsize``.
``batch_seq``
    rows of the grouped matmul as it is called, padding included (:mod:`tilepolicy.facts.sites`).
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from tilepolicy.backends import backend_of
from tilepolicy.configs.values import ConfigValues
from tilepolicy.errors import ConfigError, Problem
from tilepolicy.facts.devices import (
    DEFAULT_SCOPED_VMEM_KIB,
    DEVICES,
    normalize_device,
    parse_device,
)
from tilepolicy.facts.layout import Layout, Unknown, layout_of
from tilepolicy.facts.sites import (
    SiteSizes,
    eval_has_own_rules,
    expert_axes,
    padded_rows,
    site_sizes,
)
from tilepolicy.objectives import trainer_of
from tilepolicy.resolution import FactValue
from tilepolicy.settings import Layer, Pass, Phase

__all__ = ["DEVICES", "Facts", "derive", "normalize_device", "site"]

_DECISIVE: Final = ("device", "tokens_per_device", "vocab_per_device")
_LIBRARIES: Final = ("jax", "tokamax")
_VMEM_FLAG: Final = re.compile(r"--?xla_tpu_scoped_vmem_limit_kib=(\d+)")


@dataclass(frozen=True)
class Facts:
    """What is known about a config, and what is not.

    Attributes:
        values: fact to value; config keys under their own names, without nulls and lists.
        missing: fact to the config keys or options of which one would have to be set for it.
        sites: sizes of the grouped matmuls by layer and phase.
        problems: contradictions found on the way, as warnings: MaxText will refuse the mesh.
    """

    values: Mapping[str, FactValue]
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sites: Mapping[tuple[Layer, Phase], SiteSizes] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @property
    def undecided(self) -> dict[str, tuple[str, ...]]:
        """What is missing of the facts that settings are decided by, training only.

        The rest of :attr:`missing` (numbers of devices and shards) only informs.
        """
        return {
            name: keys
            for name, keys in self.missing.items()
            if name in _DECISIVE or name.startswith(("wi.", "wo."))
        }


def derive(
    values: ConfigValues,
    device: str | None = None,
    *,
    devices: int | None = None,
    versions: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Facts:
    """Derive the facts of a config.

    Args:
        values: the config, from :func:`tilepolicy.configs.read`.
        device: device or topology name (``v6e``, ``v5p-128``); default the config's
            ``compile_topology``, or its ``hardware`` where that is ``cpu`` or ``gpu``.
        devices: number of devices of one slice; default that of the topology. A number given here
            or by ``device`` is the whole job, unless the config sets its number of slices.
        versions: ``maxtext``, ``tokamax`` and ``jax``; default the installed ones, and for
            MaxText the release whose defaults the config was read with.
        env: environment whose ``LIBTPU_INIT_ARGS`` may set the scoped VMEM limit; None for none.

    Raises:
        ConfigError: ``device`` is not the name of a known device.
    """
    known: dict[str, FactValue] = {
        key: value for key, value in values.items() if isinstance(value, bool | int | float | str)
    }
    missing: dict[str, tuple[str, ...]] = {}
    known |= _versions(values, versions)
    known["backend"] = backend_of(values)
    known["trainer"] = trainer_of(values)
    device_name, count, whole = _device(values, device)
    known |= _device_facts(device_name, known, env or {})
    if device_name is None:
        missing["device"] = ("compile_topology", "--device")
    if devices is not None:
        count, whole = devices, True
    layout = layout_of(values, count, whole=whole)
    _put(known, missing, _batch_facts(values, layout))
    sites = _sites(values, layout, known, missing)
    problems = (_mesh_problem(layout),) if layout.mesh.problem else ()
    return Facts(known, missing, sites, problems)


def _put(
    known: dict[str, FactValue],
    missing: dict[str, tuple[str, ...]],
    facts: Mapping[str, FactValue | Unknown],
) -> None:
    for name, value in facts.items():
        if isinstance(value, Unknown):
            missing[name] = value.keys
            known.pop(name, None)
        else:
            known[name] = value


def _versions(values: ConfigValues, given: Mapping[str, str] | None) -> dict[str, FactValue]:
    if given is not None:
        return {"maxtext": values.release, **given}
    found: dict[str, FactValue] = {"maxtext": values.release}
    for library in _LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _device(values: ConfigValues, device: str | None) -> tuple[str | None, int | None, bool]:
    """Device name, devices of one slice (None where nothing tells), whether ``device`` told."""
    topology = values.get("compile_topology")
    spec = parse_device(topology) if isinstance(topology, str) and topology else None
    if device is not None:
        named = parse_device(device)
        if named is None:
            raise ConfigError(
                Problem(
                    "unknown-device",
                    f"{device!r} is not a device",
                    None,
                    "use v4, v5e, v5p, v6e, v7x, cpu, gpu or a topology such as v5p-128",
                )
            )
        if named.devices is None and spec is not None and spec.device == named.device:
            return named.device, spec.devices, False
        return named.device, named.devices, named.devices is not None
    if spec is not None:
        return spec.device, spec.devices, False
    hardware = str(values.get("hardware", ""))
    return (normalize_device(hardware) if hardware != "tpu" else None), None, False


def _device_facts(
    device: str | None, known: Mapping[str, FactValue], env: Mapping[str, str]
) -> dict[str, FactValue]:
    facts: dict[str, FactValue] = {}
    if device is not None:
        facts["device"] = device
    flags = f"{known.get('compile_xla_flags', '')} {env.get('LIBTPU_INIT_ARGS', '')}"
    if match := _VMEM_FLAG.search(flags):
        facts["scoped_vmem_limit_kib"] = int(match[1])
    elif device in DEFAULT_SCOPED_VMEM_KIB:
        facts["scoped_vmem_limit_kib"] = DEFAULT_SCOPED_VMEM_KIB[device]
    return facts


def _batch_facts(values: ConfigValues, layout: Layout) -> dict[str, FactValue | Unknown]:
    """Tokens and vocabulary of one device."""
    facts: dict[str, FactValue | Unknown] = {
        "num_devices": layout.num_devices,
        "num_slices": layout.num_slices,
        "tokens_per_device": _nominal_tokens(values, "per_device_batch_size"),
        "vocab_per_device": layout.vocab_per_device(),
        "logit_rows_per_device": layout.logit_rows(),
    }
    wide = values.get("cast_logits_to_fp32") or values.get("logits_dot_in_fp32")
    facts["logits_itemsize"] = 4 if wide or values.get("dtype") == "float32" else 2
    for axis in ("data", "fsdp", "fsdp_transpose", "tensor", "expert"):
        facts[f"{axis}_shards"] = layout.shards((axis,))
    facts["expert_parallelism"] = layout.shards(expert_axes(values))
    facts["eval_tiles_read"] = eval_has_own_rules(layout)
    return facts


def _nominal_tokens(values: ConfigValues, batch_key: str) -> int | Unknown:
    batch, length = values.get(batch_key), values.get("max_target_length")
    if not isinstance(batch, int | float) or not batch > 0:
        return Unknown((batch_key,))
    if not isinstance(length, int) or length < 1:
        return Unknown(("max_target_length",))
    tokens = Fraction(batch).limit_denominator(1 << 20) * length
    return int(tokens) if tokens.denominator == 1 else Unknown((batch_key, "max_target_length"))


def _sites(
    values: ConfigValues,
    layout: Layout,
    known: Mapping[str, FactValue],
    missing: dict[str, tuple[str, ...]],
) -> dict[tuple[Layer, Phase], SiteSizes]:
    if known["backend"] == "none":
        return {}
    sites: dict[tuple[Layer, Phase], SiteSizes] = {}
    for phase in ("train", "eval"):
        for layer in ("wi", "wo"):
            sizes = site_sizes(values, layout, layer, phase)
            sites[layer, phase] = sizes
            prefix = "" if phase == "train" else "eval."
            for fact, value in sizes.sizes().items():
                if isinstance(value, Unknown):
                    missing[f"{prefix}{layer}.{fact}"] = value.keys
    return sites


def _mesh_problem(layout: Layout) -> Problem:
    return Problem(
        "mesh",
        str(layout.mesh.problem),
        None,
        "change a parallelism, or name the right topology",
        severity="warning",
    )


def site(
    facts: Facts,
    layer: Layer,
    pass_: Pass,
    phase: Phase = "train",
    *,
    pad_to: int | None = None,
) -> dict[str, FactValue]:
    """The facts of one grouped matmul as ``resolve`` predicts them.

    The facts of the config, and on top of them ``layer``, ``pass``, ``phase``, ``batch_seq``,
    ``embed_dim``, ``mlp_dim``, ``num_groups``, ``rows_per_group``, ``rows`` (``batch_seq`` before
    padding), ``dtype`` and ``weight_dtype`` (of the two operands), as far as they are known.

    Args:
        facts: facts of the config.
        layer: ``wi`` or ``wo``.
        pass_: ``fwd``, ``dlhs`` or ``drhs``.
        phase: ``train`` or ``eval``.
        pad_to: tile to whose multiple the rows are padded: the resolved
            ``wi_tile_fwd_batch_seq`` (``eval_…`` where evaluation has tiles of its own). Default
            the config's value.
    """
    found = dict(facts.values) | {"layer": layer, "pass": pass_, "phase": phase}
    for name in ("dtype", "weight_dtype"):
        found.pop(name, None)
    sizes = facts.sites.get((layer, phase))
    if sizes is None:
        return found
    found |= {name: v for name, v in sizes.sizes().items() if not isinstance(v, Unknown)}
    tile = pad_to if pad_to is not None else sizes.pad_to
    if isinstance(sizes.rows, int) and isinstance(tile, int) and tile > 0:
        found["batch_seq"] = padded_rows(sizes.rows, tile)
        if isinstance(sizes.num_groups, int):
            found["rows_per_group"] = int(found["batch_seq"]) // sizes.num_groups
    return found
