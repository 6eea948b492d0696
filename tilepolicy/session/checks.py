"""What a strict scope does not accept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from tilepolicy import axes
from tilepolicy.axes import Kernel
from tilepolicy.errors import Place, Problem, StrictError
from tilepolicy.resolution import Resolution
from tilepolicy.settings import AXES, tile_setting

if TYPE_CHECKING:
    from tilepolicy.session import Lookup, Session

__all__ = ["check_strict", "strict_problems"]


def check_strict(session: Session) -> None:
    """Fail with everything that a strict scope does not accept.

    Raises:
        StrictError: with one problem for each.
    """
    problems = list(strict_problems(session))
    if problems:
        raise StrictError(problems)


def strict_problems(session: Session) -> Iterator[Problem]:
    """Misses, rules never hit, and tiles in use that differ from the resolution."""
    for lookup, count in session.misses.items():
        yield Problem(
            code="miss",
            message=f"{lookup.site} fell through {count} times: {lookup.miss}",
            remedy="add a rule for it",
        )
    for rule in session.rules_never_hit:
        yield Problem(
            code="never-hit",
            message=f"the rule {rule.name!r} was never hit",
            place=None if rule.file is None else Place(rule.file, rule.line),
            remedy="delete it, or correct its conditions",
        )
    resolution = None if session.inputs is None else session.inputs.resolution
    if resolution is not None:
        for lookup in session.lookups:
            yield from _differences(lookup, resolution)


def _differences(lookup: Lookup, resolution: Resolution) -> Iterator[Problem]:
    """Axes of a call whose tile is not the one that was resolved for its layer and pass."""
    if lookup.layer is None or lookup.pass_ is None or not lookup.config:
        return
    kernel = cast("Kernel", dict(lookup.facts)["backend"])
    used = axes.from_kernel(dict(lookup.config), kernel, lookup.layer, lookup.pass_)
    for axis in AXES:
        name = tile_setting(lookup.layer, lookup.pass_, axis, lookup.phase)
        setting = resolution.settings.get(name)
        if setting is None or setting.honoured.by != "apply" or setting.origin.kind == "default":
            continue
        if used[axis] != setting.value:
            yield Problem(
                code="differs-from-resolution",
                message=f"{lookup.site} runs with {axis} = {used[axis]}, but {name} was resolved "
                f"to {setting.value}",
                remedy="the call's sizes are not those that the config predicts: see the report",
            )
