"""Options and steps that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tilepolicy.errors import Problem
    from tilepolicy.policy import Policy
    from tilepolicy.resolution import Resolution
    from tilepolicy.resolve import Resolver

__all__ = [
    "DEFAULT_POLICY",
    "AllowOutsideOption",
    "ConfigArgument",
    "DeviceOption",
    "OverridesArgument",
    "PolicyOption",
    "load_policies",
    "prepare",
    "print_warnings",
    "resolve_config",
    "split_overrides",
    "write_output",
    "writing",
]

DEFAULT_POLICY = "maxtext-default"


def _policy_names(incomplete: str) -> list[str]:
    """Shell completion: the names of installed policies (files complete on their own)."""
    from tilepolicy.policy.packs import named_policies

    return [named.name for named in named_policies() if named.name.startswith(incomplete)]


def _device_names(incomplete: str) -> list[str]:
    """Shell completion: the devices that tilepolicy knows."""
    from tilepolicy.facts.devices import DEVICES

    return [name for name in DEVICES if name.startswith(incomplete)]


ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="MaxText config file.", show_default=False)
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="As on MaxText's command line."),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        "-p",
        metavar="POLICY",
        help="Path, URL or shipped name; several are tried in this order. "
        f"Default: {DEFAULT_POLICY}.",
        autocompletion=_policy_names,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        "-d",
        metavar="DEVICE",
        help="Target, v6e; default: the config's compile_topology.",
        autocompletion=_device_names,
    ),
]
AllowOutsideOption = Annotated[
    bool,
    typer.Option("--allow-outside", help="Let `extends` leave the policy's own folder."),
]


def load_policies(references: Sequence[str] | None, *, allow_outside: bool = False) -> Policy:
    """The named policies as one, tried in the order given; the default policy for none.

    Raises:
        PolicyError: with every problem of every policy.
    """
    from tilepolicy import policy

    names = list(references or [DEFAULT_POLICY])
    loaded = [policy.load(name, allow_outside=allow_outside) for name in names]
    return loaded[0] if len(loaded) == 1 else policy.combine(loaded)


def prepare(
    config: str,
    overrides: Sequence[str] | None,
    policies: Sequence[str] | None,
    device: str | None,
    *,
    allow_outside: bool = False,
) -> Resolver:
    """A resolver for one config under the named policies.

    Raises:
        TilepolicyError: with every problem of the policies and of the config.
    """
    from tilepolicy import configs
    from tilepolicy.gathering import Gathering
    from tilepolicy.resolve import resolver

    with Gathering() as problems:
        with problems.of_one():
            policy = load_policies(policies, allow_outside=allow_outside)
        with problems.of_one():
            values = configs.read(config, tuple(overrides or ()))
    return resolver(policy, values, device=device)


def resolve_config(
    config: str,
    overrides: Sequence[str] | None,
    policies: Sequence[str] | None,
    device: str | None,
    *,
    allow_outside: bool = False,
) -> Resolution:
    """The resolution of one config under the named policies.

    Raises:
        TilepolicyError: with every problem of the policies and the config.
    """
    return prepare(config, overrides, policies, device, allow_outside=allow_outside).resolution()


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Files and ``KEY=VALUE`` arguments; a file whose name holds ``=`` counts as a file.

    Raises:
        typer.BadParameter: there is no file.
    """
    files = [text for text in arguments if "=" not in text or Path(text).is_file()]
    if not files:
        raise typer.BadParameter("no config is named, only KEY=VALUE arguments")
    return files, tuple(text for text in arguments if text not in files)


def print_warnings(problems: Iterable[Problem]) -> None:
    """Writes problems to standard error, so that piped output stays clean."""
    for problem in problems:
        sys.stderr.write(f"{problem}\n")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failure to write ``path`` into a usage error.

    Raises:
        typer.BadParameter: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise typer.BadParameter(f"cannot write {path}: {reason}") from error


def write_output(text: str) -> None:
    """Writes a command's result to standard output."""
    sys.stdout.write(text)
