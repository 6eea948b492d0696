"""What every foreign format is read into: entries, entries without use, and problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tilepolicy.axes import GmmShape, Kernel
from tilepolicy.errors import Place, Problem, TilepolicyError
from tilepolicy.resolution import FactValue, SettingValue
from tilepolicy.settings import Pass

__all__ = ["FormatError", "GmmCall", "ImportReport", "MeasuredEntry", "Unusable", "merge"]


class FormatError(TilepolicyError):
    """A foreign file is malformed, or cannot say what was asked for."""


@dataclass(frozen=True, slots=True)
class GmmCall:
    """A grouped matmul whose tiles the ``gmm`` part of a policy can say.

    Attributes:
        kernel: whose field names the tile has.
        pass_: which pass.
        shape: the forward problem.
    """

    kernel: Kernel
    pass_: Pass
    shape: GmmShape


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEntry:
    """One configuration that somebody measured, or tuned, for one call of a kernel.

    Attributes:
        op: the op's class name in snake case (``pallas_mosaic_tpu_ragged_dot``).
        device: policy name of the device (``v6e``); None when the format does not name it.
        facts: what the call was, by policy fact name; without device, pass and shape. Text may be
            a condition (``"49..192"``).
        config: the kernel's own field names and values.
        place: where the entry stands.
        source: what measured it, for origins: ``tpu_v6_lite/pallas_mosaic_tpu_ragged_dot``.
        kind: the device as the format names it; tells GPUs apart, which policies do not.
        gmm: the grouped matmul; None for entries that only a rule of ``ops`` can say.
        median_ms: median of the measured times in milliseconds; None when none is recorded.
        arguments: the format's own description of the call, as it was read.
        record: the format's own benchmark record, as it was read.
    """

    op: str
    device: str | None
    facts: Mapping[str, FactValue]
    config: Mapping[str, SettingValue]
    place: Place
    source: str
    kind: str = ""
    gmm: GmmCall | None = None
    median_ms: float | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
    record: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unusable:
    """An entry that was read and understood, but gives no tile.

    Attributes:
        op: the op's class name in snake case.
        device: as in :class:`MeasuredEntry`.
        reason: why, without details of the entry, so that equal reasons can be counted.
        place: where the entry stands.
    """

    op: str
    device: str | None
    reason: str
    place: Place


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Everything that was found in one source.

    Attributes:
        entries: usable entries, in the order of the source.
        unusable: entries that give no tile, each with its reason.
        problems: what is malformed; nothing should be written while one of them is an error.
    """

    entries: tuple[MeasuredEntry, ...] = ()
    unusable: tuple[Unusable, ...] = ()
    problems: tuple[Problem, ...] = ()

    def raise_errors(self) -> None:
        """Raise every problem at once if one of them is an error.

        Raises:
            FormatError: the source is malformed.
        """
        if any(problem.severity == "error" for problem in self.problems):
            raise FormatError(self.problems)


def merge(reports: Iterable[ImportReport]) -> ImportReport:
    """One report of several, in their order."""
    held = tuple(reports)
    return ImportReport(
        entries=tuple(entry for report in held for entry in report.entries),
        unusable=tuple(one for report in held for one in report.unusable),
        problems=tuple(problem for report in held for problem in report.problems),
    )
