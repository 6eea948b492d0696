"""Run a MaxText program in this process under a policy, without changing it."""

from tilepolicy.run.reporting import ReportFiles
from tilepolicy.run.running import Job, Program, prepare, read_program, run

__all__ = ["Job", "Program", "ReportFiles", "prepare", "read_program", "run"]
