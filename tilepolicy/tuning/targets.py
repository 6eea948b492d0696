"""The grouped matmuls of a config that there are to compile, with the tiles they would run with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tilepolicy import configs, facts
from tilepolicy.backends import honoured
from tilepolicy.configs.values import ConfigValues
from tilepolicy.errors import ConfigError, Problem, VerifyError
from tilepolicy.policy import Policy
from tilepolicy.resolution import FactValue, FieldChoice
from tilepolicy.resolve import Resolver
from tilepolicy.resolve.sites import Site as ResolvedSite
from tilepolicy.resolve.sites import resolve_sites
from tilepolicy.settings import AXES, Axis
from tilepolicy.tuning.compiler import CompileRequest
from tilepolicy.tuning.kernels import KernelOptions
from tilepolicy.tuning.sites import BACKENDS, GmmTile, Site
from tilepolicy.tuning.tpus import TPUS, tpu

__all__ = ["ModelConfig", "Target", "Targets", "default_device", "find_targets", "model_configs"]

_OPTIONS: Final = ("input_buffer_count", "combine_scopes", "bucket_base")
_WANTED: Final = (*AXES, "num_groups", "dtype")
_ROLES: Final = {"student": "student_overrides", "teacher": "teacher_overrides"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model that a config trains or runs.

    Attributes:
        role: ``student`` or ``teacher`` of a distillation; empty for the one model of any other
            config.
        values: its config.
    """

    role: str
    values: ConfigValues


@dataclass(frozen=True, slots=True)
class Target:
    """One grouped matmul with the tile that it would run with.

    Attributes:
        role: as in :class:`ModelConfig`.
        request: what to compile. Its tile is None where the library chooses.
        choices: field to value and origin, defaults included.
        rows: rows of the call before padding.
        facts: facts of the config and the call.
        partial: axes that are decided where the library chooses the others.
    """

    role: str
    request: CompileRequest
    choices: Mapping[str, FieldChoice]
    rows: int
    facts: Mapping[str, FactValue]
    partial: Mapping[Axis, int] = field(default_factory=dict)

    @property
    def site(self) -> Site:
        """The grouped matmul."""
        return self.request.site

    @property
    def name(self) -> str:
        """``wi.fwd``, ``teacher wo.fwd``."""
        return f"{self.role} {self.site.name}".strip()

    def completed(self, library: GmmTile) -> Target:
        """This target with the axes that nothing decided taken from the library's own tile."""
        tile = library.to_policy(self.site.layer) | {str(a): v for a, v in self.partial.items()}
        whole = GmmTile.of_policy(self.site.layer, tile)
        return replace(self, request=replace(self.request, tile=whole), partial={})


@dataclass(frozen=True, slots=True)
class Targets:
    """What there is to compile for one device.

    Attributes:
        device: normalised name.
        targets: the grouped matmuls.
        notes: why a model has none.
        problems: what is wrong or worth a warning in resolving the other settings; tiles can be
            compiled all the same.
    """

    device: str
    targets: tuple[Target, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]


def model_configs(config: configs.Config, overrides: Sequence[str] = ()) -> tuple[ModelConfig, ...]:
    """The models of a config: one, or the student and the teacher of a distillation.

    MaxText's ``train_distill`` reads the same config twice, with ``student_overrides`` and with
    ``teacher_overrides`` as keyword arguments, which beat the file and the command line.

    Raises:
        ConfigError: with every problem of the config.
    """
    values = configs.read(config, overrides)
    if not isinstance(config, str | os.PathLike):
        return (ModelConfig("", values),)
    roles = []
    for role, key in _ROLES.items():
        given = values.get(key)
        if isinstance(given, Mapping) and given:
            keywords: dict[str, Any] = {"base_config": os.fspath(config), **given}
            roles.append(ModelConfig(role, configs.read(keywords, overrides)))
    return tuple(roles) or (ModelConfig("", values),)


def default_device(models: Sequence[ModelConfig]) -> str:
    """The ``compile_topology`` of the first model that has one.

    Raises:
        VerifyError: no model has one, so that a device has to be named.
    """
    for model in models:
        topology = model.values.get("compile_topology")
        if isinstance(topology, str) and topology:
            return topology
    raise VerifyError(
        Problem(
            code="no-device",
            message="the config does not say for which TPU to compile",
            remedy=f"give --device, one of {', '.join(TPUS)}",
        )
    )


def find_targets(
    policy: Policy,
    models: Sequence[ModelConfig],
    device: str,
    *,
    scoped_vmem_limit_kib: int | None = None,
) -> Targets:
    """Resolve each model for a device and list its grouped matmuls.

    Args:
        policy: the policy.
        models: from :func:`model_configs`.
        device: device or topology name.
        scoped_vmem_limit_kib: overrides the limit of the config's flags and of the device.

    Raises:
        ConfigError: the device is not known.
        VerifyError: there is no offline compiler for the device, or a size is not known.
    """
    targets: list[Target] = []
    notes: list[str] = []
    unknown: list[Problem] = []
    found: dict[Problem, None] = {}
    name = device
    for model in models:
        known = _facts(model.values, device, scoped_vmem_limit_kib)
        name = tpu(str(known.values["device"])).name
        resolver = Resolver(policy, model.values, known)
        found |= dict.fromkeys(p for p in _problems(resolver) if not _told(p, model))
        limit = scoped_vmem_limit_kib or _flagged_limit(known, name)
        backend = str(known.values["backend"])
        if backend not in BACKENDS:
            notes.append(_untiled(backend, model, known))
            continue
        for site in _sites(resolver, model.role):
            if missing := [fact for fact in _WANTED if fact not in site.facts]:
                unknown.append(_unknown(site, missing, known))
            else:
                targets.append(_target(model.role, site, name, limit))
    if unknown:
        raise VerifyError(unknown)
    return Targets(name, tuple(targets), tuple(notes), tuple(found))


def _told(problem: Problem, model: ModelConfig) -> bool:
    """Whether a problem is answered by resolving a distillation's models one by one."""
    return bool(model.role) and problem.code == "distillation-student"


def _facts(values: ConfigValues, device: str, limit: int | None) -> facts.Facts:
    """The facts of a config; a limit that the command names goes before that of the flags."""
    known = facts.derive(values, device, env=os.environ)
    if limit is None:
        return known
    return replace(known, values={**known.values, "scoped_vmem_limit_kib": limit})


def _problems(resolver: Resolver) -> tuple[Problem, ...]:
    try:
        return resolver.resolution().warnings
    except ConfigError as error:
        return error.problems


def _flagged_limit(known: facts.Facts, device: str) -> int | None:
    """The limit that the config's or the environment's flags set; None for the device's own."""
    limit = known.values.get("scoped_vmem_limit_kib")
    changed = isinstance(limit, int) and limit != tpu(device).scoped_vmem_limit_kib
    return limit if changed and isinstance(limit, int) else None


def _sites(resolver: Resolver, role: str) -> Iterator[ResolvedSite]:
    """Training, and evaluation where it has tiles of its own; a teacher only runs forward."""
    has_eval = bool(resolver.facts.values.get("eval_tiles_read"))
    for site in resolve_sites(resolver):
        if site.phase == "eval" and not has_eval:
            continue
        if role != "teacher" or site.pass_ == "fwd":
            yield site


def _target(role: str, site: ResolvedSite, device: str, limit: int | None) -> Target:
    known: Mapping[str, Any] = site.facts
    fields = site.verdict.fields
    gmm = Site(
        layer=site.layer,
        pass_=site.pass_,
        batch_seq=known["batch_seq"],
        embed_dim=known["embed_dim"],
        mlp_dim=known["mlp_dim"],
        num_groups=known["num_groups"],
        dtype=known["dtype"],
        weight_dtype=known.get("weight_dtype", ""),
        backend=known["backend"],
        phase=site.phase,
    )
    tile, partial = _asked_tile(gmm, fields)
    options = {name: fields[name].value for name in _OPTIONS if name in fields}
    request = CompileRequest(gmm, device, tile, KernelOptions(**options), limit)  # type: ignore[arg-type]  # the model has checked their types
    return Target(role, request, fields, known["rows"], known, partial)


def _asked_tile(
    site: Site, fields: Mapping[str, FieldChoice]
) -> tuple[GmmTile | None, dict[Axis, int]]:
    """The whole tile; or None and the axes that are decided while the library chooses the rest."""
    sizes = {axis: fields[axis].value for axis in AXES}
    whole = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
    if site.backend == "tokamax_v2_heuristic":
        return None, {}
    if site.backend == "tokamax_v1":
        # A default is no decision there: tokamax looks the tile up itself.
        whole = {a: size for a, size in whole.items() if fields[a].origin.kind != "default"}
        if len(whole) < len(AXES):
            return None, whole
    return GmmTile.of_policy(site.layer, {str(axis): size for axis, size in whole.items()}), {}


def _untiled(backend: str, model: ModelConfig, known: facts.Facts) -> str:
    why = honoured("wi_tile_fwd_embed_dim", backend, known.values).why
    role = f"{model.role}: " if model.role else ""
    return f"{role}no kernel to compile: backend {backend}; {why}"


def _unknown(site: ResolvedSite, missing: Sequence[str], known: facts.Facts) -> Problem:
    prefix = "eval." if site.phase == "eval" else ""
    names = [f"{prefix}{site.layer}.{fact}" for fact in ("rows", *missing)]
    needed = sorted({key for name in names for key in known.missing.get(name, ())})
    remedy = f"give {', '.join(needed)}" if needed else None
    if "dtype" in missing:
        remedy = "compile without quantization: quantised kernels are not verified"
    return Problem(
        code="unknown-size",
        message=f"{site}: {', '.join(missing)} is not known, so there is nothing to compile",
        remedy=remedy,
    )
