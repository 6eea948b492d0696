"""``tilepolicy verify``: compile each kernel of a config with the TPU compiler, without a TPU."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from tilepolicy.commands.common import (
    AllowOutsideOption,
    ConfigArgument,
    OverridesArgument,
    PolicyOption,
    load_policies,
    write_output,
)

__all__ = ["Format", "register", "verify"]


class Format(StrEnum):
    """How a report is shown."""

    TABLE = "table"
    JSON = "json"


def verify(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            "-d",
            metavar="DEVICE",
            help="v5e, v5p, v6e, v7x or a topology (v6e-8); repeat it. "
            "Default: the config's compile_topology.",
        ),
    ] = None,
    policy: PolicyOption = None,
    scoped_vmem_limit_kib: Annotated[
        int | None,
        typer.Option(min=1, metavar="KIB", help="As XLA's --xla_tpu_scoped_vmem_limit_kib."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Limit of each compile.")
    ] = 300.0,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Compiles at a time.")] = 1,
    suggest: Annotated[
        bool,
        typer.Option(help="Search, by compiling, for the smallest change of a tile that fits."),
    ] = True,
    form: Annotated[Format, typer.Option("--format", "-f", help="How to show it.")] = Format.TABLE,
    allow_outside: AllowOutsideOption = False,
) -> None:
    """Compile each resolved grouped matmul for TPUs, on a machine without one.

    Reads the tile back from the compiled program, and reports the VMEM that it takes. Exit code 1
    when a kernel does not compile or carries another tile. tokamax v1 takes a policy's tiles only
    inside `tilepolicy.apply` or `tilepolicy run`.
    """
    from tilepolicy.commands.tune_steps import show_progress
    from tilepolicy.report import draw
    from tilepolicy.tuning.batch import Compiler
    from tilepolicy.tuning.journal import library_versions
    from tilepolicy.tuning.pool import close_compilers
    from tilepolicy.tuning.targets import default_device, model_configs
    from tilepolicy.tuning.verify import verify as run
    from tilepolicy.tuning.verify_report import verify_blocks, verify_json

    models = model_configs(config, overrides or ())
    try:
        report = run(
            load_policies(policy, allow_outside=allow_outside),
            models,
            device or [default_device(models)],
            Compiler(jobs=jobs, timeout_seconds=timeout, progress=show_progress),
            config=config,
            libraries=library_versions(),
            scoped_vmem_limit_kib=scoped_vmem_limit_kib,
            suggest=suggest,
        )
    finally:
        close_compilers()
    if form is Format.JSON:
        write_output(json.dumps(verify_json(report), indent=2) + "\n")
    else:
        draw(verify_blocks(report))
    raise typer.Exit(0 if report.ok else 1)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "verify",
        epilog="Example: tilepolicy verify examples/deepseek3-671b.yml --device v6e --device v7x",
    )(verify)
