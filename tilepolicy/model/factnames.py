"""The facts that a ``when`` may name, and what kind of value each has.

A fact is either derived by tilepolicy (the table here), or a key of MaxText's config under its
own name, or, for other ops, an argument of the call (``arg.NAME`` and so on).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from tilepolicy.backends import BACKENDS
from tilepolicy.configs.keys import release_keys
from tilepolicy.facts.devices import DEVICES
from tilepolicy.objectives import TRAINERS
from tilepolicy.settings import LAYERS, MAXTEXT_RELEASES, PASSES

__all__ = ["BACKENDS", "DTYPES", "FACTS", "Fact", "Kind", "closest", "find_fact", "suggest_fact"]

Kind = Literal["count", "number", "name", "flag", "version", "any"]

DTYPES: Final = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int2",
    "int4",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint2",
    "uint4",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
)


class Fact(NamedTuple):
    """One fact.

    Attributes:
        name: as a ``when`` names it.
        kind: ``count`` (an integer >= 0), ``number``, ``name`` (text), ``flag`` (true or false),
            ``version``, or ``any`` where MaxText itself takes several kinds.
        summary: one sentence for documents and schemas.
        choices: all values of a name that has a closed list; empty otherwise.
    """

    name: str
    kind: Kind
    summary: str
    choices: tuple[str, ...] = ()


def _facts() -> dict[str, Fact]:
    facts = [
        Fact("layer", "name", "Which grouped matmul of the MoE layer.", LAYERS),
        Fact("pass", "name", "Forward, gradient of lhs, or gradient of rhs.", PASSES),
        Fact("phase", "name", "Training or evaluation.", ("train", "eval")),
        Fact("device", "name", "Accelerator, in any common spelling.", DEVICES),
        Fact("backend", "name", "Path that MaxText takes for the grouped matmuls.", BACKENDS),
        Fact("trainer", "name", "MaxText trainer that the config is for.", TRAINERS),
        Fact("dtype", "name", "Type of the activations (lhs).", DTYPES),
        Fact("weight_dtype", "name", "Type of the weights (rhs).", DTYPES),
        Fact("batch_seq", "count", "Rows of the call, padding counted."),
        Fact("embed_dim", "count", "Model width, per shard."),
        Fact("mlp_dim", "count", "Width of the expert's MLP, per shard, fused weights counted."),
        Fact("num_groups", "count", "Experts, per shard."),
        Fact("rows_per_group", "count", "batch_seq // num_groups."),
        Fact("rows", "count", "Rows of the call before padding."),
        Fact("tokens_per_device", "count", "Tokens of one microbatch, per device."),
        Fact("logit_rows_per_device", "count", "Rows of the logits that a device holds."),
        Fact("vocab_per_device", "count", "Vocabulary, per shard."),
        Fact("logits_itemsize", "count", "Bytes of one logit: 4 if cast to float32, else 2."),
        Fact("num_devices", "count", "Devices of the whole job."),
        Fact("num_slices", "count", "Slices of the job."),
        Fact("data_shards", "count", "Size of the data axis of the mesh."),
        Fact("fsdp_shards", "count", "Size of the fsdp axis of the mesh."),
        Fact("fsdp_transpose_shards", "count", "Size of the fsdp_transpose axis of the mesh."),
        Fact("tensor_shards", "count", "Size of the tensor axis of the mesh."),
        Fact("expert_shards", "count", "Size of the expert axis of the mesh."),
        Fact("expert_parallelism", "count", "Devices over which experts are spread."),
        Fact("eval_tiles_read", "flag", "Whether MaxText reads the eval_* tiles."),
        Fact("scoped_vmem_limit_kib", "count", "Limit of one kernel's VMEM, in KiB."),
        Fact("maxtext", "version", "Installed MaxText release."),
        Fact("tokamax", "version", "Installed Tokamax release."),
        Fact("jax", "version", "Installed jax release."),
    ]
    return {fact.name: fact for fact in facts}


FACTS: Final[Mapping[str, Fact]] = _facts()

# What an op's adapter says of one argument: its size along an axis, its rank, its type, its value.
_ARGUMENT: Final = re.compile(r"arg\.[a-z_][a-z0-9_]*(?:\.(?P<what>dim[0-9]|rank|dtype))?")
_ARGUMENT_KINDS: Final[Mapping[str | None, Kind]] = {"rank": "count", "dtype": "name", None: "any"}


def find_fact(name: str, *, arguments: bool = False) -> Fact | None:
    """The fact of that name.

    Args:
        name: derived fact, MaxText config key, or ``arg.…``.
        arguments: whether arguments of a call are facts here (rules of ``ops``).
    """
    if (fact := FACTS.get(name)) is not None:
        return fact
    if arguments and (match := _ARGUMENT.fullmatch(name)) is not None:
        kind = _ARGUMENT_KINDS.get(match["what"], "count")
        choices = DTYPES if match["what"] == "dtype" else ()
        return Fact(name, kind, "Argument of the call.", choices)
    return _config_key(name)


def suggest_fact(name: str) -> str | None:
    """The fact whose name is closest to one that does not exist."""
    keys = {key for release in MAXTEXT_RELEASES for key in release_keys(release).names()}
    return closest(name, FACTS) or closest(name, sorted(keys))


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name most like ``name``, or None when none is near."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.7)
    return found[0] if found else None


@lru_cache(maxsize=4096)
def _config_key(name: str) -> Fact | None:
    """A key of some MaxText release; the latest that has it tells its kind."""
    for release in reversed(MAXTEXT_RELEASES):
        keys = release_keys(release)
        if keys.knows(name):
            default = keys.base.get(name, keys.fields.get(name))
            return Fact(name, _kind(default), f"MaxText's config key {name}.")
    return None


def _kind(default: object) -> Kind:
    """Kind of a config key by its default; MaxText types its fields by it too."""
    if isinstance(default, bool):
        return "flag"
    if isinstance(default, int | float):
        return "number"
    return "any"
