"""`resolve` and `explain` as a user sees them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from cli_calls import DEEPSEEK, ROOT, Command

from tilepolicy.schemas import schema

GOLDEN = Path(__file__).parent / "golden"
POLICY = ("--policy", "deepseek3-671b-v6e", "--device", "v6e")
# What a golden file says holds for the latest MaxText, installed or not.
VOLATILE = ("maxtext", "tokamax", "jax")


def stable(document: dict[str, object]) -> dict[str, object]:
    """A resolution without the versions that happen to be installed."""
    facts = document["facts"]
    assert isinstance(facts, dict)
    kept = {name: value for name, value in facts.items() if name not in VOLATILE}
    return {**document, "facts": kept}


def test_json_is_stable(cli: Command) -> None:
    """The JSON of an example, byte for byte, and as the schema says."""
    ran = cli("resolve", DEEPSEEK, *POLICY, "--format", "json")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    jsonschema.validate(document, schema("resolution"))
    expected = json.loads((GOLDEN / "deepseek3.json").read_text(encoding="utf-8"))
    assert stable(document) == expected
    assert list(document["settings"]) == list(expected["settings"])


def test_yaml_says_the_same(cli: Command) -> None:
    """YAML and JSON have the same content."""
    as_yaml = cli("resolve", DEEPSEEK, *POLICY, "--format", "yaml").out
    as_json = cli("resolve", DEEPSEEK, *POLICY, "--format", "json").out
    assert yaml.safe_load(as_yaml) == json.loads(as_json)


def test_maxtext_lines_are_stable(cli: Command) -> None:
    """The lines for MaxText's command line, byte for byte."""
    ran = cli("resolve", DEEPSEEK, *POLICY, "--format", "maxtext")
    assert ran.out == (GOLDEN / "deepseek3.maxtext").read_text(encoding="utf-8")


@pytest.mark.maxtext
def test_maxtext_itself_accepts_the_lines(cli: Command, tmp_path: Path) -> None:
    """MaxText's own pyconfig takes the printed lines and has the 18 tiles and the vocabulary's."""
    from maxtext.configs import pyconfig

    lines = cli("resolve", DEEPSEEK, *POLICY, "--format", "maxtext").out.split()
    config = pyconfig.initialize(
        [
            "",
            str(ROOT / DEEPSEEK),
            "run_name=accepted",
            f"base_output_directory={tmp_path}",
            "skip_jax_distributed_system=True",
            "enable_checkpointing=False",
            *lines,
        ]
    )
    for line in lines:
        name, value = line.split("=")
        assert str(getattr(config, name)).lower() == value


def test_arguments_count_as_explicit(cli: Command) -> None:
    """KEY=VALUE wins over a rule, and its place is the command line."""
    ran = cli("resolve", DEEPSEEK, "wi_tile_fwd_mlp_dim=256", *POLICY, "--format", "json")
    origin = json.loads(ran.out)["settings"]["wi_tile_fwd_mlp_dim"]["origin"]
    assert (origin["kind"], origin["file"]) == ("config", "<command line>")
    assert origin["lost"][0]["value"] == 128


def test_explain_shows_losers_and_arithmetic(cli: Command) -> None:
    """--explain adds what lost, and the whole arithmetic."""
    short = cli("resolve", DEEPSEEK, *POLICY).out
    long = cli("resolve", DEEPSEEK, *POLICY, "--explain").out
    assert "logits 8192 tokens × 129280" not in short
    assert "logits 8192 tokens × 129280" in long
    assert "over default 512: a rule goes before MaxText's default" in long


def test_warnings_do_not_mix_with_piped_output(cli: Command) -> None:
    """Warnings of a machine-readable form go to standard error."""
    ran = cli("resolve", "examples/gpt-oss-20b.yml", "--format", "maxtext")
    assert ran.code == 0
    assert "no-match" in ran.err
    assert all("=" in line for line in ran.out.splitlines())


def test_several_policies_are_tried_in_order(cli: Command, tmp_path: Path) -> None:
    """The first policy's rules go before the second's."""
    for name, size in (("one", 256), ("two", 512)):
        (tmp_path / f"{name}.yml").write_text(
            f"version: 1\nname: {name}\n"
            f"gmm: {{rules: [{{name: {name}, tile: {{embed_dim: {size}}}}}]}}\n",
            encoding="utf-8",
        )
    paths = [str(tmp_path / "one.yml"), str(tmp_path / "two.yml")]
    values = []
    for first, second in (paths, paths[::-1]):
        ran = cli("resolve", DEEPSEEK, "-p", first, "-p", second, "-f", "json")
        values.append(json.loads(ran.out)["settings"]["wo_tile_drhs_embed_dim"]["value"])
    assert values == [256, 512]


def test_a_locked_value_fails_with_both_places(cli: Command, tmp_path: Path) -> None:
    """Block diffusion with an explicit 2 exits with 1 and names the config's and lock's place."""
    config = tmp_path / "c.yml"
    config.write_text(
        "base_config: base.yml\ntraining_objective: block_diffusion\nnum_vocab_tiling: 2\n",
        encoding="utf-8",
    )
    ran = cli("resolve", str(config))
    assert ran.code == 1
    assert f"{config}:3:" in ran.err
    assert "maxtext-default:13" in ran.err
    assert ran.err.endswith("1 error\n")


def test_explain_one_setting(cli: Command) -> None:
    """`explain` shows one setting in full, with the verdict of each rule that could decide it."""
    ran = cli("explain", DEEPSEEK, "wi_tile_dlhs_embed_dim", *POLICY)
    assert ran.code == 0
    assert ran.out == (GOLDEN / "explain.txt").read_text(encoding="utf-8")
