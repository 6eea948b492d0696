"""The policy that ``tune`` writes, its proof, and the command around it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_compiler import FakeTpuCompiler
from small_moe import TOKAMAX, run, write_config, write_rules

from tilepolicy import policy
from tilepolicy.errors import VerifyError
from tilepolicy.resolve.tiles import TileResolver
from tilepolicy.tuning import batch
from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.missed import MissedSite, write_missed
from tilepolicy.tuning.sites import GmmTile
from tilepolicy.tuning.tune import TunedSite, tune
from tilepolicy.tuning.tune_job import extends_for, job_for_config, job_for_missed
from tilepolicy.tuning.tuned_policy import Heading, prove, tuned_policy_text

HEADING = Heading("tuned", ("maxtext-default",), "moe.yml", {"libtpu": "0.0.52"})
FACTS = {
    "device": "v6e",
    "backend": "tokamax_v1",
    "batch_seq": 4096,
    "embed_dim": 1024,
    "mlp_dim": 512,
    "num_groups": 8,
    "dtype": "bfloat16",
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTpuCompiler:
    """The stand-in for what the commands compile with."""
    compiler = FakeTpuCompiler()
    monkeypatch.setattr(batch, "compile_many", compiler)
    return compiler


def found(path: Path, device: str = "v6e") -> tuple[TunedSite, ...]:
    """What the search finds for a config."""
    job = job_for_config(str(path), (), policy.load("maxtext-default"), device)
    return tune(job.items, Compiler(run=FakeTpuCompiler()))


def test_one_rule_per_site(tmp_path: Path) -> None:
    """The text is a policy whose rules hold for these sites only, and say how they were found."""
    text = tuned_policy_text(found(write_config(tmp_path, TOKAMAX)), HEADING)
    path = tmp_path / "t.yml"
    path.write_text(text)
    rules = policy.load(path).document.gmm.rules
    assert len(rules) >= 6
    assert rules[0].name == "wi.fwd 4096x1024x512 in 8 on v6e"
    assert "compiled with libtpu 0.0.52" in str(rules[0].reason)
    assert "before (128x128x128)" in str(rules[0].reason)
    assert text.startswith(
        "# Written by tilepolicy tune for moe.yml\n# Compiled with libtpu 0.0.52\n"
    )
    assert "candidate 1 of " in text


def test_rules_hold_for_recorded_facts(tmp_path: Path) -> None:
    """The rule answers the very lookup that missed, and no other shape."""
    path = tmp_path / "missed.yml"
    write_missed(path, [MissedSite("wo", "dlhs", FACTS)])
    job = job_for_missed(path, None)
    tuned = tune(job.items, Compiler(run=FakeTpuCompiler()))
    output = tmp_path / "t.yml"
    assert job.write(tuned, output, ("maxtext-default",)) == 1
    resolver = TileResolver(policy.load(output), None, {})
    assert resolver.tile("wo", "dlhs", FACTS).decided.keys() >= {"batch_seq", "embed_dim"}
    assert not resolver.tile("wo", "dlhs", FACTS | {"batch_seq": 8192}).decided
    assert not resolver.tile("wo", "dlhs", FACTS | {"device": "v5e"}).decided


def test_equal_conditions_are_one_rule(tmp_path: Path) -> None:
    """A student and a teacher of one size share a rule."""
    tuned = found(write_config(tmp_path, TOKAMAX))
    twice = (*tuned, replace(tuned[0], item=replace(tuned[0].item, role="teacher")))
    assert tuned_policy_text(twice, HEADING) == tuned_policy_text(tuned, HEADING)


def test_a_higher_limit_is_a_condition(tmp_path: Path) -> None:
    """Tiles that need more VMEM than the default are not used without it."""
    job = job_for_config(
        str(write_config(tmp_path, TOKAMAX)),
        (),
        policy.load("maxtext-default"),
        "v5e",
        scoped_vmem_limit_kib=65536,
    )
    tuned = tune(job.items, Compiler(run=FakeTpuCompiler()))
    assert 'scoped_vmem_limit_kib: ">=65536"' in tuned_policy_text(tuned, HEADING)
    assert job.write(tuned, tmp_path / "t.yml", ()) == 6


def test_nothing_found_is_no_policy(tmp_path: Path) -> None:
    """Without any tile there is no file to write."""
    tuned = tuple(replace(s, best=None) for s in found(write_config(tmp_path, TOKAMAX)))
    with pytest.raises(VerifyError, match="no site has a tile that fits"):
        tuned_policy_text(tuned, HEADING)


def test_the_proof_finds_a_tile_that_is_not_used(tmp_path: Path) -> None:
    """If the written file gave another tile than was found, the command would fail and say so."""
    config = write_config(tmp_path, TOKAMAX)
    job = job_for_config(str(config), (), policy.load("maxtext-default"), "v6e")
    tuned = tune(job.items, Compiler(run=FakeTpuCompiler()))
    first = tuned[0]
    assert first.best is not None
    lying = replace(first.best, tile=GmmTile(128, 128, 128))
    output = tmp_path / "t.yml"
    job.write(tuned, output, ())
    with pytest.raises(VerifyError, match=r"wi\.fwd: embed_dim is 1024 from rule .*, not 128 from"):
        prove(output, (replace(first, best=lying),), job.models, "v6e")


def test_the_proof_wants_the_tile_from_the_file(tmp_path: Path) -> None:
    """A tile that another source happens to give is no hit."""
    job = job_for_config(
        str(write_config(tmp_path)), (), policy.load("maxtext-default"), "v6e", only=("wo.fwd",)
    )
    (site,) = tune(job.items, Compiler(run=FakeTpuCompiler()))
    assert site.best is not None
    default = replace(site, best=replace(site.best, tile=GmmTile(512, 1024, 1024)))
    other = write_rules(tmp_path, "layer: wi => batch_seq: 128")
    with pytest.raises(VerifyError, match=r"wo\.fwd: batch_seq is 512 from default, not 512 from"):
        prove(other, (default,), job.models, "v6e")


def test_extends_names_what_can_be_reached(tmp_path: Path) -> None:
    """Shipped names stay, files below the folder become relative, others have to be given."""
    (tmp_path / "sub").mkdir()
    inside = write_rules(tmp_path / "sub", "layer: wi => batch_seq: 128")
    outside = write_rules(tmp_path, "layer: wi => batch_seq: 128", name="q")
    output = tmp_path / "sub" / "out.yml"
    assert extends_for(["maxtext-default", str(inside), str(outside)], output) == (
        ("maxtext-default", "p.yml"),
        (str(outside),),
    )


def test_command_writes_a_policy_that_is_hit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: FakeTpuCompiler
) -> None:
    """Plan, progress, result, proof; no journal is left."""
    config, output = write_config(tmp_path, TOKAMAX), tmp_path / "tuned.yml"
    code, out, err = run(capsys, ["tune", config, "-d", "v6e", "-o", output])
    assert code == 0
    assert "12 compiles if the first wave fits" in out
    assert "6 of 6 tuned sites get their tile from it" in out
    assert "[1/2] v6e wi.fwd 128x128x128: fits (1.0 s)" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["moe.yml", "tuned.yml"]
    before = len(fake.requests)
    code, out, _ = run(capsys, ["verify", config, "-d", "v6e", "--policy", output])
    assert code == 0
    assert len(fake.requests) == before + 6


def test_command_shows_the_plan_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: FakeTpuCompiler
) -> None:
    """A dry run compiles and writes nothing."""
    config = write_config(tmp_path, TOKAMAX)
    code, out, _ = run(capsys, ["tune", config, "-d", "v6e", "--dry-run"])
    assert code == 0
    assert "compiles if the first wave fits" in out
    assert fake.requests == []
    assert list(tmp_path.iterdir()) == [config]


def test_command_goes_on_after_an_interrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run says what is known, compiles the rest, and ends as one run would have."""
    config, output = write_config(tmp_path, TOKAMAX), tmp_path / "tuned.yml"
    monkeypatch.setattr(batch, "compile_many", FakeTpuCompiler(interrupt_after=5))
    code, _, _ = run(capsys, ["tune", config, "-d", "v6e", "-o", output])
    assert code == 130
    assert not output.exists()
    assert (tmp_path / "tuned.yml.journal").exists()
    rest = FakeTpuCompiler()
    monkeypatch.setattr(batch, "compile_many", rest)
    code, out, _ = run(capsys, ["tune", config, "-d", "v6e", "-o", output])
    assert code == 0
    assert "5 verdicts are known from an interrupted run" in out
    assert len(rest.requests) == 7
    whole = tmp_path / "whole.yml"
    monkeypatch.setattr(batch, "compile_many", FakeTpuCompiler())
    run(capsys, ["tune", config, "-d", "v6e", "-o", whole])
    assert whole.read_text() == output.read_text()


def test_command_tunes_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: FakeTpuCompiler
) -> None:
    """Misses that a run recorded, on the device that they name."""
    record, output = tmp_path / "missed.yml", tmp_path / "t.yml"
    write_missed(record, [MissedSite("wi", "fwd", FACTS), MissedSite(None, "fwd", FACTS)])
    code, out, _ = run(capsys, ["tune", "--missed", record, "-o", output])
    assert code == 0
    assert "1 of 1 tuned sites get their tile from it" in out
    assert "does not say whether this was wi or wo" in out
    assert fake.requests


def test_command_fails_when_a_site_has_no_tile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: FakeTpuCompiler
) -> None:
    """What was found is written all the same."""
    config, output = write_config(tmp_path, TOKAMAX), tmp_path / "t.yml"
    item = job_for_config(str(config), (), policy.load("maxtext-default"), "v6e").items[0]
    fake.statuses.update({c.tile: "failed" for c in item.candidates if c.tile.n == 512})
    fake.statuses.update({c.tile: "failed" for c in item.candidates if c.tile.k == 1024})
    arguments = ["tune", config, "-d", "v6e", "-o", output, "--at-a-time", "1", "--at-most", "1"]
    code, out, _ = run(capsys, arguments)
    assert code == 1
    assert "no tried candidate compiles" in out
    assert "wo.drhs" in output.read_text() or "wi.drhs" in output.read_text()


def test_command_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: FakeTpuCompiler
) -> None:
    """Standard output is one JSON document, the plan goes to standard error."""
    config, output = write_config(tmp_path, TOKAMAX), tmp_path / "t.yml"
    code, out, err = run(capsys, ["tune", config, "-d", "v6e", "-o", output, "-f", "json"])
    assert code == 0
    assert len(json.loads(out)["sites"]) == 6
    assert "compiles if the first wave fits" in err
    assert fake.requests


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a CONFIG or --missed FILE, one of the two"),
        (["CONFIG", "--missed", "m.yml"], "give a CONFIG or --missed FILE, one of the two"),
        (["CONFIG"], "give the policy file to write with --output, or --dry-run"),
        (["CONFIG", "-o", "CONFIG"], "exists; --force replaces it"),
    ],
)
def test_command_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Options that do not go together are usage errors."""
    config = str(write_config(tmp_path, TOKAMAX))
    given = [config if argument == "CONFIG" else argument for argument in arguments]
    code, _, err = run(capsys, ["tune", *given])
    assert code == 2
    assert message.split(";")[0] in " ".join(err.split())


@pytest.mark.parametrize(
    ("more", "arguments", "message"),
    [
        (
            "sparse_matmul: false\n",
            [],
            "there is nothing to tune: no kernel to compile: backend de",
        ),
        (
            TOKAMAX,
            ["--only", "wi.bwd"],
            "no site is named wi.bwd; there are wi.fwd, wi.dlhs, wi.dr",
        ),
    ],
)
def test_nothing_to_tune(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: str,
    arguments: list[str],
    message: str,
) -> None:
    """The reason is named, and no file is written."""
    output = tmp_path / "t.yml"
    config = write_config(tmp_path, more)
    code, _, err = run(capsys, ["tune", config, "-d", "v6e", "-o", output, *arguments])
    assert code == 1
    assert message in err
    assert not output.exists()


def test_measure_needs_the_tpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without one, --measure is refused before anything is compiled."""
    output = tmp_path / "t.yml"
    config = write_config(tmp_path, TOKAMAX)
    code, _, err = run(capsys, ["tune", config, "-d", "v6e", "-o", output, "--measure"])
    assert code == 1
    assert "--measure needs a TPU v6 lite, but jax sees cpu" in err
    assert "leave --measure out" in err


def test_a_record_of_several_devices_needs_one(tmp_path: Path) -> None:
    """Which one to tune for has to be said; a device that missed nothing has nothing to tune."""
    record = tmp_path / "m.yml"
    write_missed(
        record, [MissedSite("wi", "fwd", FACTS), MissedSite("wi", "fwd", FACTS | {"device": "v5e"})]
    )
    with pytest.raises(VerifyError, match=r"names v5e, v6e \[no-device\]"):
        job_for_missed(record, None)
    assert len(job_for_missed(record, "TPU v5 lite").items) == 1
    with pytest.raises(VerifyError, match="has no missed site on v7x"):
        job_for_missed(record, "v7x")
