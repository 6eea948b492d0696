"""The policy that ``tune`` writes: one rule per site, and the proof that it is loaded and hit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tilepolicy import policy as policies
from tilepolicy.errors import Problem, VerifyError
from tilepolicy.formats.yamltext import comment, flow, scalar
from tilepolicy.resolution import FieldChoice
from tilepolicy.resolve.tiles import TileResolver
from tilepolicy.settings import AXES
from tilepolicy.tuning.targets import ModelConfig, find_targets
from tilepolicy.tuning.tpus import tpu
from tilepolicy.tuning.tune import TunedSite

__all__ = ["Heading", "prove", "tuned_policy_text"]

_SIZES: Final = (*AXES, "num_groups")
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Heading:
    """What stands above the rules.

    Attributes:
        name: name of the policy.
        extends: policies whose rules are tried after these.
        source: what was tuned: the config's name, or the file of missed sites.
        libraries: versions of what the verdicts depend on.
    """

    name: str
    extends: tuple[str, ...]
    source: str
    libraries: Mapping[str, str]


def tuned_policy_text(tuned: Sequence[TunedSite], heading: Heading) -> str:
    """The policy's text: for each site with a tile one rule, whose reason says how it was found.

    Sites with equal conditions (a student and a teacher of one size) share the first's rule.

    Raises:
        VerifyError: no site has a tile.
    """
    rules: dict[str, list[str]] = {}
    for site in tuned:
        if site.best is not None:
            rules.setdefault(flow(_when(site)), _rule(site, heading.libraries))
    if not rules:
        raise VerifyError(
            Problem("nothing-tuned", "no site has a tile that fits, so there is no policy to write")
        )
    libraries = ", ".join(f"{name} {version}" for name, version in heading.libraries.items())
    head = f"Written by tilepolicy tune for {heading.source}\nCompiled with {libraries}"
    lines = ["version: 1", f"name: {scalar(heading.name)}"]
    if heading.extends:
        lines.append(f"extends: [{', '.join(scalar(name) for name in heading.extends)}]")
    lines += ["gmm:", "  rules:", *(line for rule in rules.values() for line in rule)]
    return comment(head) + "\n".join(lines) + "\n"


def _rule(site: TunedSite, libraries: Mapping[str, str]) -> list[str]:
    item, best = site.item, site.best
    if best is None:
        return []
    gmm = item.site
    sizes = f"{gmm.batch_seq}x{gmm.embed_dim}x{gmm.mlp_dim}"
    name = f"{gmm.name} {sizes} in {gmm.num_groups} on {item.now.device}"
    tile = best.tile.to_policy(gmm.layer)
    free: dict[str, int] = {axis: tile[axis] for axis in AXES if axis not in item.fixed}
    return [
        f"    - name: {scalar(name)}",
        f"      when: {flow(_when(site))}",
        f"      tile: {flow(free)}",
        f"      reason: {scalar(_reason(site, libraries))}",
    ]


def _when(site: TunedSite) -> dict[str, int | str]:
    item, gmm = site.item, site.item.site
    when: dict[str, int | str] = {
        "device": item.now.device,
        "backend": gmm.backend,
        "layer": gmm.layer,
        "pass": gmm.pass_,
    }
    if gmm.phase == "eval" or item.facts.get("eval_tiles_read"):
        when["phase"] = gmm.phase
    when |= {
        "batch_seq": gmm.batch_seq,
        "embed_dim": gmm.embed_dim,
        "mlp_dim": gmm.mlp_dim,
        "num_groups": gmm.num_groups,
        "dtype": gmm.dtype,
    }
    limit = item.now.scoped_vmem_limit_kib
    if limit is not None and limit != tpu(item.now.device).scoped_vmem_limit_kib:
        when["scoped_vmem_limit_kib"] = f">={limit}"
    return when


def _reason(site: TunedSite, libraries: Mapping[str, str]) -> str:
    """How the tile was found: compiler, VMEM, cost formula now and before, place in the order."""
    best, verdict = site.best, site.verdict
    if best is None or verdict is None:
        return ""
    text = f"compiled with libtpu {libraries.get('libtpu', '?')}"
    if verdict.used_bytes is not None and verdict.available_bytes is not None:
        used, limit = verdict.used_bytes / _MIB, verdict.available_bytes / _MIB
        text += f": {used:.1f} of {limit:.1f} MiB VMEM"
    text += f"; cost formula {best.seconds * 1e3:.3f} ms"
    if site.now_seconds is not None and site.now_tile != best.tile:
        text += f", before ({site.now_tile}) {site.now_seconds * 1e3:.3f} ms"
    if site.measured_seconds is not None:
        text += f"; measured {site.measured_seconds * 1e3:.3f} ms by tokamax"
    order = next(i for i, c in enumerate(site.item.candidates, 1) if c.tile == best.tile)
    return f"{text}; candidate {order} of {len(site.item.candidates)}"


def prove(
    path: str | os.PathLike[str],
    tuned: Sequence[TunedSite],
    models: Sequence[ModelConfig],
    device: str,
    *,
    scoped_vmem_limit_kib: int | None = None,
) -> int:
    """Load the written file and resolve every tuned site with it.

    Args:
        path: the file.
        tuned: what was found.
        models: the configs that were tuned; empty for recorded misses.
        device: device as the user named it.
        scoped_vmem_limit_kib: as it was tuned.

    Returns:
        Sites whose tile comes from the file.

    Raises:
        PolicyError: the file is not a policy.
        VerifyError: a site does not get the tile that was found for it, or not from the file.
    """
    loaded = policies.load(path)
    file = os.fspath(path)
    resolver = TileResolver(loaded, None, {})
    by_name: dict[str, Mapping[str, FieldChoice]] = {}
    if models:
        found = find_targets(loaded, models, device, scoped_vmem_limit_kib=scoped_vmem_limit_kib)
        by_name = {target.name: target.choices for target in found.targets}
    problems, hits = [], 0
    for site in tuned:
        if site.best is None:
            continue
        gmm = site.item.site
        choices = (
            by_name[site.item.name]
            if models
            else resolver.tile(gmm.layer, gmm.pass_, site.item.facts, gmm.phase).fields
        )
        wrong = _differences(site, choices, file)
        problems += wrong
        hits += not wrong
    if problems:
        raise VerifyError(problems)
    return hits


def _differences(site: TunedSite, choices: Mapping[str, FieldChoice], file: str) -> list[Problem]:
    if site.best is None:
        return []
    wanted = site.best.tile.to_policy(site.item.site.layer)
    wrong = []
    for axis in AXES:
        choice = choices[axis]
        origin = choice.origin
        from_file = origin.file is not None and Path(origin.file).resolve() == Path(file).resolve()
        if choice.value != wanted[axis] or not (from_file or axis in site.item.fixed):
            source = f"{origin.kind} {origin.name}".strip()
            message = (
                f"{site.item.name}: {axis} is {choice.value} from {source}, "
                f"not {wanted[axis]} from the file that was written"
            )
            wrong.append(Problem("not-hit", message))
    return wrong
