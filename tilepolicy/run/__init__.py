"""Run a MaxText program in this process under a policy, without changing it."""

from tilepolicy.run.running import (
    Job,
    prepare,
    run,
)

__all__ = [
    "Job",
    "prepare",
    "run",
]
