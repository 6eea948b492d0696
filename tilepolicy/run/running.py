"""Run a MaxText program in this process under a policy, without changing it.

Everything that can be wrong with policy and config is found before the program starts; then it
runs as ``__main__`` with the settings it honours on its command line, inside ``apply``.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tilepolicy import configs, entries
from tilepolicy.entries import Entry
from tilepolicy.errors import ConfigError, Problem, StrictError
from tilepolicy.facts.devices import normalize_device
from tilepolicy.resolution import Resolution
from tilepolicy.resolve import resolver
from tilepolicy.run import handover
from tilepolicy.run.handover import Handover
from tilepolicy.run.modules import require_program
from tilepolicy.run.reporting import ReportFiles, write_report
from tilepolicy.scope import Scope, apply

if TYPE_CHECKING:
    from tilepolicy.configs.values import ConfigValues
    from tilepolicy.policy import Policy
    from tilepolicy.session import Session

__all__ = ["Job", "Program", "prepare", "read_program", "run"]

_DEVICE_VARIABLE: Final = "TPU_ACCELERATOR_TYPE"
_ENVIRONMENT_PREFIX: Final = "M_"
_INTERRUPTED: Final = 128 + signal.SIGINT
"""What a shell sees of a python that was interrupted."""


@dataclass(frozen=True)
class Program:
    """A program that exists, and its config.

    Attributes:
        entry: the program with its arguments.
        values: its MaxText config as MaxText would read it; None for a program without one.
    """

    entry: Entry
    values: ConfigValues | None


@dataclass(frozen=True)
class Job:
    """A program that is ready to start.

    Attributes:
        entry: the program and the config that it reads.
        scope: the policy in force while it runs.
        resolution: all settings; None for a program without a MaxText config.
        handed: what MaxText's own config is told.
        environment: the ``M_KEY`` variables among these: MaxText refuses a key that is set both
            there and on the command line.
        warnings: what is wrong without stopping it.
    """

    entry: Entry
    scope: Scope
    resolution: Resolution | None = None
    handed: Handover = field(default_factory=lambda: Handover({}))
    environment: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[Problem, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The program's arguments: the user's, then what is handed over."""
        appended = [
            f"{key}={value}"
            for key, value in self.handed.settings.items()
            if _variable(key) not in self.environment
        ]
        return (*self.entry.arguments, *appended)


def read_program(module: str, arguments: Sequence[str] = ()) -> Program:
    """Find a program and read its config; nothing of MaxText is imported.

    Args:
        module: dotted name of the program.
        arguments: its arguments.

    Raises:
        MissingLibraryError: there is no such program.
        ConfigError: with every problem of the config.
    """
    require_program(module)
    entry = entries.find(module, arguments)
    if entry.config is None:
        return Program(entry, None)
    return Program(entry, configs.read(entry.config, entry.overrides))


def prepare(
    policy: Policy, program: Program, *, device: str | None = None, strict: bool = False
) -> Job:
    """Resolve a program's config under a policy and get everything ready.

    Args:
        policy: the policy.
        program: what :func:`read_program` gave.
        device: device name, where config and environment do not say it.
        strict: refuse a config in which a chosen setting has no effect, and fail at the end for
            what ``apply(strict=True)`` does not accept.

    Raises:
        TilepolicyError: with every problem of config, policy and installed libraries.
    """
    entry, values = program.entry, program.values
    if entry.config is None or values is None:
        return Job(entry, apply(policy, device=device, strict=strict))
    device = device or _local_device(values)
    resolution = resolver(policy, values, device=device).resolution()
    silent = handover.ignored(resolution, severity="error" if strict else "warning")
    if strict and silent:
        raise ConfigError(silent)
    handed = handover.plan(resolution, values, routes_loss=entry.pretraining_loss)
    scope = apply(
        policy, config=entry.config, overrides=entry.overrides, device=device, strict=strict
    )
    environment = {
        _variable(key): str(value)
        for key, value in handed.settings.items()
        if _variable(key) in os.environ
    }
    return Job(entry, scope, resolution, handed, environment, (*resolution.warnings, *silent))


def run(job: Job, files: ReportFiles | None = None) -> int:
    """Run the program to its end, and report.

    Args:
        job: what :func:`prepare` gave.
        files: where the report goes besides standard error.

    Returns:
        The program's exit code; 1 if it raised, or ended well but a strict scope did not; 130 if
        it was interrupted.

    Raises:
        TilepolicyError: the scope cannot be entered; the program has not started.
    """
    session: Session | None = None
    code = 0
    try:
        with ExitStack() as stack:
            stack.enter_context(_environment(job.environment))
            if job.entry.compiles_for_another_machine:
                stack.enter_context(_cross_compiling(job))
            session = stack.enter_context(job.scope)
            code = _execute(job.entry.module, job.arguments)
    except StrictError as error:
        if code == 0:  # of a program that failed, nothing more is expected
            sys.stderr.write(f"{error}\n")
            code = 1
    finally:
        if session is not None:
            write_report(job, session, files or ReportFiles())
    return code


def _execute(module: str, arguments: Sequence[str]) -> int:
    """Run a module as ``python -m`` does, and give its exit code."""
    argv = sys.argv
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        return _exit_code(leaving)
    except Exception:  # noqa: BLE001 - the program's own error: shown as python shows it
        traceback.print_exc()
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()  # where it was, for whoever interrupts a run that hangs
        return _INTERRUPTED
    finally:
        sys.argv = argv
    return 0


def _exit_code(leaving: SystemExit) -> int:
    """The exit code that python makes of a ``SystemExit``."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _variable(key: str) -> str:
    return _ENVIRONMENT_PREFIX + key.upper()


def _local_device(values: ConfigValues) -> str | None:
    """The accelerator that Cloud TPU names in the environment, for a run on this machine."""
    on_tpu = values.get("hardware") in (None, "tpu")
    if values.get("compile_topology") or not on_tpu:
        return None
    return normalize_device(os.environ.get(_DEVICE_VARIABLE, ""))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.update(before)


@contextmanager
def _cross_compiling(job: Job) -> Iterator[None]:
    """Let Tokamax lower for the topology of the config instead of this machine's device."""
    uses_tokamax = job.resolution is not None and job.resolution.backend.startswith("tokamax")
    if not uses_tokamax:
        yield
        return
    import tokamax

    with tokamax.config.cross_compile(True):
        yield
