"""Short ways to policies, configs and resolutions, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import tilepolicy
from tilepolicy import configs
from tilepolicy.errors import ConfigError, Problem
from tilepolicy.policy import Policy
from tilepolicy.resolution import Resolution
from tilepolicy.resolve import Resolver, resolver

VERSIONS: Mapping[str, str] = {"maxtext": "0.2.5", "tokamax": "0.0.17", "jax": "0.12.0"}

MOE = {
    "decoder_block": "mixtral",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "base_emb_dim": 2048,
    "base_moe_mlp_dim": 4096,
    "base_mlp_dim": 4096,
    "vocab_size": 32000,
    "per_device_batch_size": 1,
    "max_target_length": 2048,
    "ici_fsdp_parallelism": 4,
    "compile_topology": "v6e-4",
    "compile_topology_num_slices": 1,
}
"""A small mixture of experts on four v6e: 4096 rows, 8 experts, embed 2048, mlp 4096."""


def policy(folder: Path, text: str, *, name: str = "p") -> Policy:
    """A policy of the given sections."""
    path = folder / f"{name}.yml"
    path.write_text(f"version: 1\nname: {name}\n{text}", encoding="utf-8")
    return tilepolicy.load(path)


def config_file(folder: Path, values: Mapping[str, object], *, name: str = "c.yml") -> str:
    """A MaxText config that builds on base.yml."""
    path = folder / name
    lines = [
        f"{key}: {_yaml(value)}" for key, value in {"base_config": "base.yml", **values}.items()
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def ask(
    given: Policy, config: configs.Config, *, versions: Mapping[str, str] = VERSIONS
) -> Resolver:
    """A resolver for a config file or mapping."""
    values = configs.read(config, env={}, release=versions["maxtext"])
    return resolver(given, values, versions=versions)


def resolved(
    given: Policy, config: configs.Config, *, versions: Mapping[str, str] = VERSIONS
) -> Resolution:
    """The resolution of a config file or mapping."""
    return ask(given, config, versions=versions).resolution()


def refused(
    given: Policy, config: configs.Config, *, versions: Mapping[str, str] = VERSIONS
) -> tuple[Problem, ...]:
    """The problems of a config that must not resolve."""
    try:
        resolved(given, config, versions=versions)
    except ConfigError as error:
        return error.problems
    raise AssertionError("it resolved")


def codes(problems: Iterable[Problem]) -> list[str]:
    """The codes of problems."""
    return [problem.code for problem in problems]
