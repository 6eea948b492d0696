"""One run of ``tune``: what there is to tune, and the file that comes of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilepolicy.errors import Problem, VerifyError
from tilepolicy.facts.devices import normalize_device
from tilepolicy.files import write_atomically
from tilepolicy.policy import Policy
from tilepolicy.tuning.journal import library_versions
from tilepolicy.tuning.missed import read_missed
from tilepolicy.tuning.targets import ModelConfig, default_device, find_targets, model_configs
from tilepolicy.tuning.tpus import TPUS, tpu
from tilepolicy.tuning.tune import TunedSite, TuneItem, plan, plan_missed
from tilepolicy.tuning.tuned_policy import Heading, prove, tuned_policy_text

__all__ = ["TuneJob", "extends_for", "job_for_config", "job_for_missed"]


@dataclass(frozen=True, slots=True)
class TuneJob:
    """What there is to tune.

    Attributes:
        source: the config's or the file's name.
        device: normalised name.
        named_device: device or topology as the user named it.
        models: the models of the config; empty for recorded misses.
        items: the sites.
        problems: of resolving the config's other settings.
        scoped_vmem_limit_kib: as given; None for the config's or the device's own.
    """

    source: str
    device: str
    named_device: str
    models: tuple[ModelConfig, ...]
    items: tuple[TuneItem, ...]
    problems: tuple[Problem, ...] = ()
    scoped_vmem_limit_kib: int | None = None

    def write(self, tuned: Sequence[TunedSite], output: Path, extends: Sequence[str]) -> int:
        """Write the policy in one step, then load it and resolve every site with it.

        Args:
            tuned: what was found.
            output: the file.
            extends: policies whose rules are tried after the new ones.

        Returns:
            Sites that get their tile from the file.

        Raises:
            VerifyError: there is nothing to write, or a site does not get its tile.
            OSError: the folder does not exist or cannot be written to.
        """
        name = re.sub(r"[^A-Za-z0-9._+-]+", "-", f"{Path(self.source).stem}-{self.device}")
        heading = Heading(
            name.lstrip("-._+") or "tuned",
            tuple(extends),
            Path(self.source).name,
            library_versions(),
        )
        write_atomically(output, tuned_policy_text(tuned, heading))
        return prove(
            output,
            tuned,
            self.models,
            self.named_device,
            scoped_vmem_limit_kib=self.scoped_vmem_limit_kib,
        )


def job_for_config(
    config: str,
    overrides: Sequence[str],
    policy: Policy,
    device: str | None,
    *,
    only: Iterable[str] = (),
    scoped_vmem_limit_kib: int | None = None,
) -> TuneJob:
    """The sites of a config.

    Raises:
        ConfigError: with every problem of the config.
        VerifyError: no device is named, there is no compiler for it, a size is not known, or the
            config has no site to tune.
    """
    models = model_configs(config, overrides)
    named = device or default_device(models)
    found = find_targets(policy, models, named, scoped_vmem_limit_kib=scoped_vmem_limit_kib)
    items = plan(found.targets, only=only)
    if not items:
        names = ", ".join(target.site.name for target in found.targets)
        reason = f"no site is named {', '.join(only)}; there are {names}" if names else ""
        raise _nothing("; ".join(found.notes) or reason)
    return TuneJob(
        config, found.device, named, models, items, found.problems, scoped_vmem_limit_kib
    )


def job_for_missed(
    path: str | os.PathLike[str], device: str | None, *, scoped_vmem_limit_kib: int | None = None
) -> TuneJob:
    """The sites that a run recorded as missed.

    Args:
        path: the file of missed sites.
        device: device; default the one that the file names, if it is one only.
        scoped_vmem_limit_kib: ``--xla_tpu_scoped_vmem_limit_kib``; None for the default.

    Raises:
        MissedFileError: with every problem of the file.
        VerifyError: the device is not clear, there is no compiler for it, or nothing was missed.
    """
    recorded = read_missed(path)
    seen = sorted({str(site.facts["device"]) for site in recorded if "device" in site.facts})
    if device is None and len(seen) != 1:
        message = f"{os.fspath(path)} names {', '.join(seen) or 'no device'}"
        remedy = f"give --device, one of {', '.join(TPUS)}"
        raise VerifyError(Problem("no-device", message, remedy=remedy))
    named = device or seen[0]
    chip = tpu(normalize_device(named) or named)
    items = plan_missed(recorded, chip.name, scoped_vmem_limit_kib=scoped_vmem_limit_kib)
    if not items:
        raise _nothing(f"{os.fspath(path)} has no missed site on {chip.name}")
    return TuneJob(os.fspath(path), chip.name, named, (), items, (), scoped_vmem_limit_kib)


def extends_for(references: Sequence[str], output: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which of the policies that were resolved with the written file can extend, and which not.

    Shipped names stay names. A file is named relative to the written one; one outside of its
    folder cannot be extended, and has to be given next to the written file with ``--policy``.
    """
    inside, outside = [], []
    folder = output.resolve().parent
    for reference in references:
        if not Path(reference).exists():
            inside.append(reference)
        elif Path(reference).resolve().is_relative_to(folder):
            inside.append(Path(reference).resolve().relative_to(folder).as_posix())
        else:
            outside.append(reference)
    return tuple(inside), tuple(outside)


def _nothing(reason: str) -> VerifyError:
    return VerifyError(Problem("nothing-to-tune", f"there is nothing to tune: {reason}"))
