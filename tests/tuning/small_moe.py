"""A small mixture-of-experts config, whose kernels compile in a second or two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tilepolicy import cli

CONFIG = """\
base_config: base.yml
decoder_block: mixtral
base_emb_dim: 1024
base_moe_mlp_dim: 512
base_mlp_dim: 512
num_experts: 8
num_experts_per_tok: 2
vocab_size: 32000
per_device_batch_size: 1
max_target_length: 2048
dtype: bfloat16
enable_dropout: false
"""
"""4096 rows of 8 experts, embed 1024, mlp 512."""

TOKAMAX = "use_tokamax_gmm: true\n"


def write_config(folder: Path, more: str = "", name: str = "moe.yml") -> Path:
    """The config in a file, with more lines."""
    path = folder / name
    path.write_text(CONFIG + more, encoding="utf-8")
    return path


def write_rules(folder: Path, *rules: str, name: str = "p") -> Path:
    """A policy of rules, each ``WHEN => TILE``."""
    lines = ["version: 1", f"name: {name}", "gmm:", "  rules:"]
    for number, rule in enumerate(rules, 1):
        when, tile = rule.split(" => ")
        lines += [
            f"    - name: rule {number}",
            f"      when: {{{when}}}",
            f"      tile: {{{tile}}}",
        ]
    path = folder / f"{name}.yml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], arguments: Sequence[object]) -> tuple[int, str, str]:
    """Exit code, output and errors of one command."""
    with pytest.raises(SystemExit) as exited:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    code = exited.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err
