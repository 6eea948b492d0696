"""What ``tilepolicy run`` reports at the end: what MaxText was told, and what really ran."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilepolicy.errors import ConfigError, Problem
from tilepolicy.files import write_atomically
from tilepolicy.session import reporting as session_report

if TYPE_CHECKING:
    from tilepolicy.run import Job
    from tilepolicy.session import Session

__all__ = ["ReportFiles", "report_text", "write_report"]


@dataclass(frozen=True)
class ReportFiles:
    """Files that a run writes at its end.

    Attributes:
        report: the report: JSON if the name ends in ``.json``, else text.
        missed: the sites that no rule decided, for ``tilepolicy tune``.
    """

    report: Path | None = None
    missed: Path | None = None

    def require_writable(self) -> None:
        """Make their folders, so that nothing is found to be missing after a long run.

        Raises:
            ConfigError: one of them cannot be written.
        """
        problems = [
            Problem(code="cannot-write", message=f"cannot write {path}: {reason}")
            for path in (self.report, self.missed)
            if path is not None and (reason := _obstacle(path))
        ]
        if problems:
            raise ConfigError(problems)


def _obstacle(path: Path) -> str:
    """Why a file cannot be written; empty if it can."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    if path.is_dir():
        return "it is a folder"
    return "" if os.access(path.parent, os.W_OK) else "its folder may not be written to"


def write_report(job: Job, session: Session, files: ReportFiles) -> None:
    """Write the report to standard error and to the files; of several processes the first does.

    A file that cannot be written any more is named on standard error: the exit code of a run says
    how the program ended.
    """
    if not _is_first_process():
        return
    text = report_text(job, session, as_json=False)
    sys.stderr.write(text)
    try:
        if files.report is not None:
            as_json = files.report.suffix == ".json"
            content = report_text(job, session, as_json=True) if as_json else text
            write_atomically(files.report, content)
        if files.missed is not None:
            session.write_missed(files.missed)
    except OSError as error:
        sys.stderr.write(f"cannot write {error.filename}: {error.strerror}\n")


def _is_first_process() -> bool:
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return True
    return bool(jax.process_index() == 0)


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
