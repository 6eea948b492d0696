"""Reports of ``verify``, with a stand-in for the compiler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_compiler import FakeTpuCompiler
from small_moe import TOKAMAX, run, write_config, write_rules

from tilepolicy import policy
from tilepolicy.report import plain
from tilepolicy.tuning import batch
from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.compiler import CompileRequest, CompileVerdict
from tilepolicy.tuning.sites import GmmTile
from tilepolicy.tuning.targets import model_configs
from tilepolicy.tuning.verify import VerifyReport, verify
from tilepolicy.tuning.verify_report import verify_blocks, verify_json

BIG = "wi_tile_fwd_batch_seq: 1024\nmax_target_length: 4096\nbase_emb_dim: 4096\n"
"""With the knobs' 1024 x 1024 a tile beyond v5p's 16 MiB, for wi.fwd only."""


def big_config(folder: Path, more: str = "") -> Path:
    """The small config with a tile that does not fit v5p."""
    path = write_config(folder, more)
    text = path.read_text()
    for line in ("max_target_length: 2048\n", "base_emb_dim: 1024\n"):
        text = text.replace(line, "")
    path.write_text(text.replace("base_moe_mlp_dim: 512", "base_moe_mlp_dim: 2048") + BIG)
    return path


def verified(
    path: Path, *devices: str, fake: FakeTpuCompiler | None = None, **how: object
) -> VerifyReport:
    """A report under the default policy."""
    policies = [policy.load(p) for p in (*how.pop("policies", ()), "maxtext-default")]  # type: ignore[misc]  # paths
    return verify(
        policy.combine(policies),
        model_configs(str(path)),
        devices or ("v6e",),
        Compiler(run=fake or FakeTpuCompiler()),
        config=path.name,
        libraries={"libtpu": "0"},
        **how,  # type: ignore[arg-type]  # the test's own words
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTpuCompiler:
    """The stand-in for what the commands compile with."""
    compiler = FakeTpuCompiler()
    monkeypatch.setattr(batch, "compile_many", compiler)
    return compiler


def test_everything_fits(tmp_path: Path) -> None:
    """Six sites on each device; kernels that several sites share are compiled once."""
    fake = FakeTpuCompiler()
    report = verified(write_config(tmp_path), "v6e", "v7x", fake=fake)
    assert report.ok
    assert [device.device for device in report.devices] == ["v6e", "v7x"]
    assert [len(device.sites) for device in report.devices] == [6, 6]
    assert len(fake.requests) == 12


def test_a_tile_that_does_not_fit(tmp_path: Path) -> None:
    """The site is named, with used and available bytes and two ways out, confirmed by compiling."""
    report = verified(big_config(tmp_path), "v5p")
    assert not report.ok
    failed = [site for site in report.devices[0].sites if not site.ok]
    assert [site.target.name for site in failed] == ["wi.fwd"]
    (site,) = failed
    assert site.outcome == "does-not-fit"
    assert site.verdict.available_bytes == 16 * 2**20
    assert site.smaller is not None
    assert site.smaller.changed("wi") == ("embed_dim",)
    assert site.higher is not None
    assert site.higher.scoped_vmem_limit_kib is not None


def test_a_shared_kernel_is_named_by_each_layer(tmp_path: Path) -> None:
    """With embed = mlp both layers run one kernel; the axis to change has another name in each."""
    path = write_config(tmp_path)
    text = path.read_text().replace("base_moe_mlp_dim: 512", "base_moe_mlp_dim: 2048")
    text = text.replace("base_emb_dim: 1024", "base_emb_dim: 2048")
    rows = "".join(f"{layer}_tile_fwd_batch_seq: 1024\n" for layer in ("wi", "wo"))
    path.write_text(text + rows)
    fake = FakeTpuCompiler()
    sites = verify_json(verified(path, "v5p", fake=fake))["devices"][0]["sites"]
    failed = {site["layer"]: site["suggestions"][0] for site in sites if site["pass"] == "fwd"}
    assert failed["wi"]["changed"] == ["embed_dim"]
    assert failed["wo"]["changed"] == ["mlp_dim"]
    assert failed["wi"]["tile"] == {"batch_seq": 1024, "embed_dim": 512, "mlp_dim": 1024}
    assert failed["wo"]["tile"] == {"batch_seq": 1024, "embed_dim": 1024, "mlp_dim": 512}


def test_suggestions_can_be_left_out(tmp_path: Path) -> None:
    """Without a search each kernel is compiled once, and nothing is suggested."""
    fake = FakeTpuCompiler()
    report = verified(big_config(tmp_path), "v5p", fake=fake, suggest=False)
    assert len(fake.requests) == 6
    assert all(site.smaller is None for site in report.devices[0].sites)


def test_another_tile_than_asked_for_fails(tmp_path: Path) -> None:
    """A kernel that compiles, but not with the tile that was resolved, is a failure."""

    class Stubborn(FakeTpuCompiler):
        def verdict(self, request: CompileRequest) -> CompileVerdict:
            return replace(super().verdict(request), tile=GmmTile(128, 128, 128))

    report = verified(write_config(tmp_path), fake=Stubborn())
    assert not report.ok
    assert {site.outcome for site in report.devices[0].sites} == {"other-tile"}
    text = plain(verify_blocks(report))
    assert "the compiled kernel has 128 x 128 x 128" in text


def test_the_librarys_own_choice_is_shown(tmp_path: Path) -> None:
    """Where nothing decides, the tile is read back, and its origin is the kernel."""
    report = verified(write_config(tmp_path, TOKAMAX))
    assert report.ok
    site = verify_json(report)["devices"][0]["sites"][0]
    assert site["tile"] is None
    assert site["compiled_tile"] == {"batch_seq": 128, "embed_dim": 128, "mlp_dim": 128}
    assert "the kernel's own choice" in plain(verify_blocks(report))


def test_a_partial_tile_is_completed_by_the_library(tmp_path: Path) -> None:
    """The decided axis is compiled together with what the library chose for the others."""
    rules = write_rules(tmp_path, "layer: wi, pass: fwd => embed_dim: 512")
    fake = FakeTpuCompiler()
    report = verified(write_config(tmp_path, TOKAMAX), fake=fake, policies=(rules,))
    site = report.devices[0].sites[0]
    assert site.target.request.tile == GmmTile(128, 512, 128)
    assert site.ok
    assert fake.requests[0].tile is None


def test_a_policy_decides(tmp_path: Path) -> None:
    """The rule's tile is what is compiled, and its origin is in the report."""
    rules = write_rules(
        tmp_path, "layer: wi, pass: fwd => batch_seq: 256, embed_dim: 512, mlp_dim: 128"
    )
    report = verified(write_config(tmp_path), policies=(rules,))
    site = verify_json(report)["devices"][0]["sites"][0]
    assert site["tile"] == {"batch_seq": 256, "embed_dim": 512, "mlp_dim": 128}
    assert site["origin"]["mlp_dim"]["kind"] == "rule"
    assert site["origin"]["mlp_dim"]["file"].endswith("p.yml")


def test_json_has_a_stable_shape(tmp_path: Path) -> None:
    """Every key of the report; scripts depend on them."""
    data = json.loads(json.dumps(verify_json(verified(big_config(tmp_path), "v5p"))))
    assert list(data) == ["version", "ok", "config", "policy", "libraries", "devices"]
    assert data["version"] == 1
    assert list(data["policy"]) == ["name", "digest", "files"]
    (device,) = data["devices"]
    assert list(device) == ["device", "ok", "notes", "problems", "sites"]
    site = device["sites"][0]
    assert list(site) == [
        "role",
        "layer",
        "pass",
        "phase",
        "backend",
        "sizes",
        "dtype",
        "weight_dtype",
        "tile",
        "origin",
        "outcome",
        "message",
        "compiled_tile",
        "vmem",
        "compile_seconds",
        "temp_bytes",
        "bytes_accessed",
        "roofline_seconds",
        "kernel",
        "suggestions",
    ]
    assert list(site["sizes"]) == ["rows", "batch_seq", "embed_dim", "mlp_dim", "num_groups"]
    assert list(site["vmem"]) == ["used_bytes", "available_bytes"]
    assert [list(suggestion) for suggestion in site["suggestions"]] == [
        ["tile", "changed", "scoped_vmem_limit_kib", "used_bytes", "roofline_seconds"]
    ] * 2


def lines_of(report: VerifyReport) -> Iterator[str]:
    """The report's plain text, line by line."""
    return iter(plain(verify_blocks(report)).splitlines())


def test_text_names_the_failing_pass_and_the_change(tmp_path: Path) -> None:
    """What a person reads: verdict, VMEM, the change, the flag, and a sum that names the site."""
    text = list(lines_of(verified(big_config(tmp_path), "v5p")))
    row = next(line for line in text if line.startswith("wi.fwd"))
    assert "1024 x 1024 x 1024  does-not-fit" in row
    assert any(
        line.strip().startswith("smallest change that fits: embed_dim: 512 (") for line in text
    )
    assert any("or leave the tile and set --xla_tpu_scoped_vmem_limit_kib=" in t for t in text)
    assert text[-1] == "1 of 6 sites fail: wi.fwd on v5p"


def test_a_config_without_kernels(tmp_path: Path) -> None:
    """Nothing to compile is said, and is no failure."""
    report = verified(write_config(tmp_path, "sparse_matmul: false\n"))
    assert report.ok
    assert list(lines_of(report))[-1] == "no grouped-matmul kernel to compile"


def test_command_exits_by_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: FakeTpuCompiler
) -> None:
    """Exit code 0 when all fits, 1 when a site does not; progress goes to standard error."""
    code, out, err = run(capsys, ["verify", write_config(tmp_path), "-d", "v6e"])
    assert code == 0
    assert "all 6 sites fit" in out
    assert "[1/6] v6e wi.fwd 512x1024x1024: fits (1.0 s)" in err
    code, out, _ = run(capsys, ["verify", big_config(tmp_path), "-d", "v6e", "-d", "v5p"])
    assert code == 1
    assert "1 of 12 sites fail: wi.fwd on v5p" in out
    assert fake.requests


def test_command_writes_json_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: FakeTpuCompiler
) -> None:
    """Standard output is one JSON document."""
    config = write_config(tmp_path, "compile_topology: v6e-8\n")
    code, out, _ = run(capsys, ["verify", config, "--format", "json"])
    assert code == 0
    assert json.loads(out)["devices"][0]["device"] == "v6e"
    assert fake.requests


def test_command_passes_the_limit_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: FakeTpuCompiler
) -> None:
    """With a higher limit the same tile fits."""
    arguments = ["verify", big_config(tmp_path), "-d", "v5p", "--scoped-vmem-limit-kib", "24576"]
    code, _, _ = run(capsys, arguments)
    assert code == 0
    assert {request.scoped_vmem_limit_kib for request in fake.requests} == {24576}


def test_command_without_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config names none, so it is asked for."""
    code, _, err = run(capsys, ["verify", write_config(tmp_path)])
    assert code == 1
    assert "the config does not say for which TPU to compile" in err
