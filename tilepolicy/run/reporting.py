"""What ``tilepolicy run`` reports at the end: what MaxText was told, and what really ran."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tilepolicy.session import reporting as session_report
from tilepolicy.tuning.missed import MissedSite

if TYPE_CHECKING:
    from tilepolicy.run import Job
    from tilepolicy.session import Session

__all__ = ["missed_sites", "report_text"]


def report_text(job: Job, session: Session, *, as_json: bool) -> str:
    """The report of a finished run.

    Args:
        job: what was run.
        session: what its scope saw.
        as_json: as indented JSON instead of lines.
    """
    if not as_json:
        return "\n".join(_lines(job, session)) + "\n"
    data = session_report.as_data(session)
    data["run"] = {
        "module": job.entry.module,
        "arguments": list(job.arguments),
        "handed_over": dict(job.handed.settings),
        "routed": job.handed.routed,
        "warnings": [str(problem) for problem in job.warnings],
    }
    if job.resolution is not None:
        from tilepolicy.report import resolution_json

        data["resolution"] = resolution_json(job.resolution)
    return json.dumps(data, indent=2) + "\n"


def _lines(job: Job, session: Session) -> Iterator[str]:
    yield f"tilepolicy run {job.entry.module}"
    told = " ".join(f"{key}={value}" for key, value in job.handed.settings.items())
    yield f"handed to MaxText: {told or 'nothing'}"
    if job.handed.routed:
        yield f"  {job.handed.routed}"
    yield session.report()


def missed_sites(session: Session) -> list[MissedSite]:
    """The grouped matmuls that no rule decided, as ``tilepolicy tune`` reads them."""
    return [
        MissedSite(
            layer=lookup.layer,
            pass_=lookup.pass_,
            facts={name: value for name, value in lookup.facts if value is not None},
            phase=lookup.phase,
            count=count,
            instead=lookup.miss,
        )
        for lookup, count in session.misses.items()
        if lookup.pass_ is not None
    ]
