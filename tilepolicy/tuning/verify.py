"""``tilepolicy verify``: each kernel of a config compiled for each device, and what that says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from tilepolicy.errors import Problem
from tilepolicy.policy import Policy
from tilepolicy.resolution import PolicyIdentity
from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.compiler import CompileVerdict, Status
from tilepolicy.tuning.smaller import Suggestion, fitting_limit, smallest_change
from tilepolicy.tuning.targets import ModelConfig, Target, find_targets

__all__ = [
    "DeviceReport",
    "Outcome",
    "SiteReport",
    "VerifyReport",
    "verify",
]

Outcome = Status | Literal["other-tile"]
"""``other-tile``: it compiled, but not with the tile that was asked for."""

_SEARCHED: Final = ("does-not-fit", "rejected", "failed", "timeout")


@dataclass(frozen=True, slots=True)
class SiteReport:
    """What came of one grouped matmul.

    Attributes:
        target: the grouped matmul and its tile.
        verdict: what the compiler said.
        smaller: the smallest change of the tile that fits, for one that does not.
        higher: the scoped VMEM limit under which the tile as it is fits, for one that does not.
    """

    target: Target
    verdict: CompileVerdict
    smaller: Suggestion | None = None
    higher: Suggestion | None = None

    @property
    def outcome(self) -> Outcome:
        """The verdict, held against what was asked for."""
        asked = self.target.request.tile
        if self.verdict.fits and asked is not None and self.verdict.tile != asked:
            return "other-tile"
        return self.verdict.status

    @property
    def ok(self) -> bool:
        """Whether the kernel compiles with the tile that was asked for."""
        return self.outcome == "fits"


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Everything about one device.

    Attributes:
        device: normalised name.
        sites: the grouped matmuls.
        notes: why a model has none.
        problems: of the resolution of the other settings.
    """

    device: str
    sites: tuple[SiteReport, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every site compiles and the config resolves."""
        wrong = any(problem.severity == "error" for problem in self.problems)
        return not wrong and all(site.ok for site in self.sites)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Everything about one config under one policy.

    Attributes:
        config: the config as the user named it.
        policy: which policy.
        libraries: versions of what the verdicts depend on.
        devices: one report per device, in the order asked for.
    """

    config: str
    policy: PolicyIdentity
    libraries: Mapping[str, str]
    devices: tuple[DeviceReport, ...]

    @property
    def ok(self) -> bool:
        """Whether every site compiles on every device."""
        return all(device.ok for device in self.devices)


def verify(
    policy: Policy,
    models: Sequence[ModelConfig],
    devices: Sequence[str],
    compiler: Compiler,
    *,
    config: str,
    libraries: Mapping[str, str],
    scoped_vmem_limit_kib: int | None = None,
    suggest: bool = True,
) -> VerifyReport:
    """Compile each site's kernel for each device.

    Args:
        policy: the policy.
        models: from :func:`tilepolicy.tuning.targets.model_configs`.
        devices: device names, at least one.
        compiler: how to compile.
        config: the config's name, for the report.
        libraries: versions, for the report.
        scoped_vmem_limit_kib: overrides the config's flags and the devices' defaults.
        suggest: search for the smallest change that fits.

    Raises:
        ConfigError: a device is not known.
        VerifyError: there is no offline compiler for a device, a size is not known, or the
            compiler does not start.
        MissingLibraryError: jax, tokamax, libtpu or MaxText is not installed.
    """
    found = [
        find_targets(policy, models, device, scoped_vmem_limit_kib=scoped_vmem_limit_kib)
        for device in devices
    ]
    every = [target for device in found for target in device.targets]
    completed = _completed(every, compiler)
    verdicts = compiler.verdicts(target.request for target in completed.values())
    advice = _advice(verdicts, compiler) if suggest else {}
    reports = []
    for device in found:
        sites = []
        for target in device.targets:
            whole = completed[id(target)]
            key = whole.request.identity
            verdict = replace(verdicts[key], request=whole.request)
            sites.append(SiteReport(whole, verdict, *advice.get(key, (None, None))))
        reports.append(DeviceReport(device.device, tuple(sites), device.notes, device.problems))
    identity = PolicyIdentity(policy.name, policy.digest, policy.files)
    return VerifyReport(config, identity, libraries, tuple(reports))


def _completed(targets: Sequence[Target], compiler: Compiler) -> dict[int, Target]:
    """Each target by its id; where a policy decides some axes only, the library's own for the rest.

    Where the library's own tile does not even compile, its error still names the tile.
    """
    partial = [target for target in targets if target.partial]
    own = compiler.verdicts(target.request for target in partial)
    whole = {id(target): target for target in targets}
    for target in partial:
        tile = own[target.request.identity].tile
        if tile is not None:
            whole[id(target)] = target.completed(tile)
    return whole


type _Advice = tuple[Suggestion | None, Suggestion | None]


def _advice(verdicts: Mapping[str, CompileVerdict], compiler: Compiler) -> dict[str, _Advice]:
    """For each kernel that does not compile: the smallest change, and the limit that it needs."""
    advice: dict[str, _Advice] = {}
    for identity, verdict in verdicts.items():
        request = verdict.request
        tile = request.tile or verdict.tile
        if verdict.status not in _SEARCHED or tile is None:
            continue
        smaller = smallest_change(request, tile, compiler)
        exhausted = verdict.status == "does-not-fit"
        advice[identity] = (smaller, fitting_limit(request, tile, compiler) if exhausted else None)
    return advice
