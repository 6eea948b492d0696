"""Every private name of MaxText that tilepolicy touches, with the releases it was verified in.

Nothing here imports MaxText: signatures are read from its source files, so that a scope can
refuse an unknown MaxText before the program has spent its minute on importing it.

What the table below says was read in the wheels of 0.2.0 to 0.2.5.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from tilepolicy import installed
from tilepolicy.adapters.maxtext_types import Foreign
from tilepolicy.errors import AdapterError, MissingLibraryError, Problem

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

__all__ = [
    "CROSS_ENTROPY",
    "ENGINE",
    "ENGINE_MODULE",
    "LINEN_TILED_LOSS",
    "NNX_TILED_LOSS",
    "SIGNATURES",
    "Target",
    "compiled_kernels",
    "drop_pure_state",
    "engine_state",
    "head_method",
    "installed_version",
    "is_output_head",
    "keeps_pure_state",
    "module_path",
    "own_cache",
    "physical_spec",
    "physical_specs",
    "pretrain_loss_config",
    "read_signature",
    "require",
    "update_kernel",
    "verified",
]

DISTRIBUTION: Final = "maxtext"
ENGINE_MODULE: Final = "maxtext.training_engine.maxtext_engine"
ENGINE_CLASS: Final = "MaxTextTrainingEngine"
_PRETRAIN_MODULE: Final = "maxtext.trainers.pre_train.train"
_PRETRAIN_LOSS: Final = "loss_fn"

OUTPUT_HEAD_NAMES: Final = frozenset(
    {"token_embedder", "shared_embedding", "decoder_norm", "logits_dense"}
)
"""Submodules whose parameters turn hidden states into logits, in every release."""


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """A function of MaxText that is replaced or called.

    Attributes:
        module: dotted module name.
        name: attribute of the module, or ``Class.method``.
    """

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


CROSS_ENTROPY: Final = Target("maxtext.utils.max_utils", "cross_entropy_with_logits")
NNX_TILED_LOSS: Final = Target("maxtext.utils.vocabulary_tiling", "vocab_tiling_nnx_loss")
LINEN_TILED_LOSS: Final = Target("maxtext.utils.vocabulary_tiling", "vocab_tiling_linen_loss")


def _engine(method: str) -> Target:
    return Target(ENGINE_MODULE, f"{ENGINE_CLASS}.{method}")


ENGINE: Final[Mapping[str, Target]] = {
    method: _engine(method)
    for method in (
        "fwd_bwd",
        "update",
        "_refresh_pure_state",
        "_disable_pure_state",
        "_invalidate_pure_state",
    )
}

_CROSS_ENTROPY = "logits, targets, z_loss=0.0"
_LINEN = "hidden_states, data, config, model, params, is_train"
_NNX = "model, hidden_states, data, config, is_train"
_LINEN_ONLY: Final = {CROSS_ENTROPY: _CROSS_ENTROPY, LINEN_TILED_LOSS: _LINEN}
_BOTH: Final = {**_LINEN_ONLY, NNX_TILED_LOSS: _NNX}

SIGNATURES: Final[Mapping[str, Mapping[Target, str]]] = {
    "0.2.0": _LINEN_ONLY,
    "0.2.1": _LINEN_ONLY,
    "0.2.2": _LINEN_ONLY,
    "0.2.3": _BOTH,
    "0.2.4": {
        **_BOTH,
        ENGINE["fwd_bwd"]: "self, payload",
        ENGINE["update"]: "self",
    },
    "0.2.5": {
        CROSS_ENTROPY: _CROSS_ENTROPY,
        NNX_TILED_LOSS: _NNX,
        ENGINE["_refresh_pure_state"]: "self",
        ENGINE["_disable_pure_state"]: "self, reason",
        ENGINE["_invalidate_pure_state"]: "self",
    },
}
"""Release to the functions that tilepolicy attaches to and their parameters in that release."""

NEWEST: Final = tuple(SIGNATURES)[-1]


def installed_version() -> str | None:
    """Version of the installed MaxText; None when there is none. Imports nothing of it."""
    return installed.installed_version(DISTRIBUTION)


def verified(version: str) -> Mapping[Target, str]:
    """The functions to attach to in a release; a release not listed is held to the newest one."""
    return SIGNATURES.get(version, SIGNATURES[NEWEST])


def own_cache(version: str) -> bool:
    """Whether this release's training engine keeps its split state between steps by itself."""
    return ENGINE["_refresh_pure_state"] in verified(version)


def head_method(version: str) -> str:
    """The model's method from hidden states to logits; it got its present name with 0.2.3."""
    old = version in {"0.2.0", "0.2.1", "0.2.2"}
    return "logits_from_hidden_states" + ("" if old else "_for_vocab_tiling")


def is_output_head(path: tuple[object, ...]) -> bool:
    """Whether a parameter path (jax key path, or plain names) belongs to the output head."""
    return any(_key_name(part) in OUTPUT_HEAD_NAMES for part in path)


def _key_name(part: object) -> str:
    for attribute in ("key", "name"):
        value = getattr(part, attribute, None)
        if value is not None:
            return str(value)
    return str(part)


def require(targets: tuple[Target, ...], version: str) -> None:
    """Hold the installed MaxText's functions against the table.

    Args:
        targets: those that are about to be replaced; of these, the ones that the release has.
        version: installed version.

    Raises:
        AdapterError: a function is missing or takes other parameters than it was verified with;
            one problem for each.
    """
    table = verified(version)
    problems = [
        _changed(target, table[target], found, version)
        for target in targets
        if target in table and (found := read_signature(target)) != table[target]
    ]
    if problems:
        raise AdapterError(problems)


def _changed(target: Target, expected: str, found: str | None, version: str) -> Problem:
    held = version if version in SIGNATURES else f"{NEWEST}, the newest release known here"
    known = sorted({release for release, table in SIGNATURES.items() if target in table})
    has = "does not have it" if found is None else f"has it as ({found})"
    return Problem(
        code="maxtext-signature",
        message=f"cannot attach to {target}({expected}) of MaxText {held}: "
        f"the installed MaxText {version} {has}",
        remedy=f"install a MaxText release that has it so ({', '.join(known)}), or set "
        "vocab.loss: upstream and engine.cache_pure_state: false in the policy",
    )


def read_signature(target: Target) -> str | None:
    """Parameters of a function as its source file has them: ``model, data, is_train=True``.

    None when the module or the function is not there.
    """
    path = module_path(target.module)
    return None if path is None else _signatures_of(path, path.stat().st_mtime_ns).get(target.name)


def module_path(module: str) -> Path | None:
    """Source file of a MaxText module, found without importing MaxText."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise MissingLibraryError(
            Problem(
                code="missing-library",
                message="MaxText is not installed",
                remedy='pip install "tilepolicy[maxtext]"',
            )
        )
    for root in spec.submodule_search_locations or ():
        path = Path(root, *inner).with_suffix(".py")
        if path.is_file():
            return path
    return None


@lru_cache(maxsize=32)
def _signatures_of(path: Path, _mtime_ns: int) -> Mapping[str, str]:
    """Every top-level function and method of a file; a changed file is read again."""
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _parameters(node.args)
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = _parameters(inner.args)
    return found


def _parameters(arguments: ast.arguments) -> str:
    """The parameters without annotations, as they would be written in a ``def``."""
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.unparse(arguments).replace(" = ", "=")


def pretrain_loss_config(frame: FrameType | None) -> object | None:
    """MaxText's config when the frame is a call of its pre-training ``loss_fn``, else None.

    The function runs under two module names: its own, and ``__main__`` when the trainer is the
    program. So it is known by its file, and the config by the name of its parameter.
    """
    if frame is None or frame.f_code.co_name != _PRETRAIN_LOSS:
        return None
    path = module_path(_PRETRAIN_MODULE)
    if path is None or not _same_file(frame.f_code.co_filename, path):
        return None
    config: object | None = frame.f_locals.get("config")
    return config


def _same_file(name: str, path: Path) -> bool:
    return Path(name) == path or Path(name).resolve() == path.resolve()


def physical_spec(mesh: Mesh, logical: tuple[str | None, ...]) -> PartitionSpec:
    """Mesh axes of an array with these logical axes, by the axis rules in force."""
    from maxtext.utils.sharding import create_sharding

    spec: PartitionSpec = create_sharding(mesh, logical).spec
    return spec


def physical_specs(mesh: Mesh, logical: Foreign) -> list[PartitionSpec]:
    """Mesh axes of each leaf of a pytree of logical specs, by the axis rules in force."""
    import jax
    from maxtext.utils.sharding import logical_to_mesh_sharding

    return [place.spec for place in jax.tree.leaves(logical_to_mesh_sharding(logical, mesh))]


def engine_state(engine: Foreign) -> Foreign:
    """The training engine's live train state; None before its first step or compile."""
    return engine._state


def compiled_kernels(engine: Foreign) -> tuple[Foreign, ...]:
    """What a training engine of 0.2.4 has compiled; replaced when its model or state is."""
    kernels = ("_compiled", "_compiled_fwd_bwd", "_compiled_update")
    return tuple(getattr(engine, name, None) for name in kernels)


def update_kernel(engine: Foreign) -> object:
    """The jitted update of a training engine of 0.2.4; None where it runs eagerly."""
    return engine._compiled_update if engine._compiled else None


def keeps_pure_state(engine: Foreign) -> bool:
    """Whether a training engine of 0.2.5 holds its split state now."""
    return engine._params_pure is not None


def drop_pure_state(engine: Foreign) -> None:
    """Make a training engine of 0.2.5 split its state in every step until it compiles again."""
    engine._invalidate_pure_state()
