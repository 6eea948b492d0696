"""`validate`, `lock`, `diff`, `schema` and `doctor` as a user sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cli_calls import DEEPSEEK, ROOT, Command

from tilepolicy import doctor
from tilepolicy.doctor import Finding
from tilepolicy.schemas import SCHEMAS, schema_text

MIXTRAL = "examples/mixtral-8x7b.yml"


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A policy with two mistakes."""
    path = tmp_path / "wrong.yml"
    path.write_text("version: 1\nname: wrong\nvocab: {loss: best}\ntiles: {}\n", encoding="utf-8")
    return path


def test_validate_says_what_each_file_is(cli: Command) -> None:
    """Policies and configs are told apart by their content, and all shipped ones are valid."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "policies").glob("*.yml"))
    ran = cli("validate", *files, DEEPSEEK)
    assert ran.code == 0
    assert f"{DEEPSEEK}: config, valid" in ran.out
    assert [f"{name}: policy, valid" for name in files] == ran.out.splitlines()[: len(files)]


def test_validate_reports_all_mistakes_of_all_files(cli: Command, wrong: Path) -> None:
    """One wrong file does not hide the next; the exit code is 1."""
    ran = cli("validate", str(wrong), DEEPSEEK, "no-such-file.yml")
    assert ran.code == 1
    assert f"{wrong}: policy, INVALID" in ran.out
    assert f"{DEEPSEEK}: config, valid" in ran.out
    assert "no-such-file.yml: unreadable, INVALID" in ran.out
    assert f"{wrong}:3:15: error: " in ran.out
    assert f"{wrong}:4:1: error: " in ran.out
    assert "no-such-file.yml: error: cannot be read: No such file or directory" in ran.out
    assert ran.out.endswith("3 errors\n")


def test_validate_for_github(cli: Command, wrong: Path) -> None:
    """`--format github` prints annotations and nothing else."""
    ran = cli("validate", str(wrong), "--format", "github")
    assert ran.code == 1
    assert all(line.startswith(f"::error file={wrong},line=") for line in ran.out.splitlines())
    assert len(ran.out.splitlines()) == 2


@pytest.mark.parametrize("form", ["json", "sarif"])
def test_validate_for_programs(cli: Command, wrong: Path, form: str) -> None:
    """JSON and SARIF parse, and have one entry for each mistake."""
    document = json.loads(cli("validate", str(wrong), "--format", form).out)
    found = document if form == "json" else document["runs"][0]["results"]
    assert len(found) == 2


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("version: 1\nname: x\n", "policy"),
        ("gmm: {rules: []}\n", "policy"),
        ("base_config: base.yml\n", "config"),
        ("- 1\n", "unreadable"),
        ("", "unreadable"),
        ("a: [\n", "unreadable"),
        ("tiles_lock: 1\nconfigs: []\n", "lock"),
    ],
)
def test_kinds_by_content(cli: Command, tmp_path: Path, text: str, kind: str) -> None:
    """What a file is taken for, also where it is not valid."""
    path = tmp_path / "x.yml"
    path.write_text(text, encoding="utf-8")
    assert cli("validate", str(path)).out.startswith(f"{path}: {kind}, ")


def test_validate_does_not_blame_a_file_for_what_is_not_installed(
    cli: Command, tmp_path: Path
) -> None:
    """A size that cannot be known here is a warning to validate, and an error to resolve."""
    path = tmp_path / "c.yml"
    path.write_text("base_config: base.yml\nper_device_batch_size: 0\n", encoding="utf-8")
    ran = cli("validate", str(path))
    assert ran.code == 0
    assert "[missing-fact]" in ran.out
    assert cli("resolve", str(path)).code == 1


@pytest.fixture
def lock(cli: Command, tmp_path: Path) -> Path:
    """A lock of two examples."""
    path = tmp_path / "tiles.lock.yml"
    ran = cli("lock", DEEPSEEK, MIXTRAL, "--output", str(path))
    assert (ran.code, ran.out) == (0, f"{path}: 58 settings of 2 configs\n")
    return path


def test_a_lock_records_values_digest_and_versions(lock: Path) -> None:
    """The lock has every value with its reader, the policy's digest, and relative paths."""
    document = yaml.safe_load(lock.read_text(encoding="utf-8"))
    first = document["configs"][0]
    assert (lock.parent / first["config"]).resolve() == (ROOT / DEEPSEEK).resolve()
    assert first["resolved"]["settings"]["num_vocab_tiling"] == {"value": 32, "by": "maxtext"}
    assert len(first["resolved"]["digest"]) == 64
    assert first["resolved"]["versions"]["maxtext"]


def test_a_lock_equals_today(cli: Command, lock: Path) -> None:
    """A fresh lock does not differ from today."""
    ran = cli("diff", str(lock))
    assert ran.code == 0
    assert ran.out.count("no setting differs (29 compared)") == 2


def test_a_lock_shows_what_changed(cli: Command, lock: Path) -> None:
    """A recorded value that is not today's is shown with both values, and exits with 1."""
    document = yaml.safe_load(lock.read_text(encoding="utf-8"))
    resolved = document["configs"][0]["resolved"]
    resolved["settings"]["num_vocab_tiling"]["value"] = 16
    resolved["versions"]["maxtext"] = "0.2.4"
    lock.write_text(yaml.safe_dump(document), encoding="utf-8")
    ran = cli("diff", str(lock))
    assert ran.code == 1
    row = next(line for line in ran.out.splitlines() if line.startswith("num_vocab_tiling"))
    assert row.split()[:4] == ["num_vocab_tiling", "16", "32", "maxtext"]
    assert "  maxtext  0.2.4 → " in ran.out
    assert ran.out.count("no setting differs") == 1


def test_two_locks(cli: Command, lock: Path, tmp_path: Path) -> None:
    """Two locks are compared config by config; one that only a side has is a difference."""
    other = tmp_path / "other.lock.yml"
    assert cli("lock", DEEPSEEK, "--output", str(other)).code == 0
    ran = cli("diff", str(lock), str(other))
    assert ran.code == 1
    assert "only in A" in ran.out


def test_locks_keep_what_was_asked(cli: Command, tmp_path: Path) -> None:
    """Arguments, policies and device are recorded, so that `diff` asks the same again."""
    policy = tmp_path / "p.yml"
    policy.write_text("version: 1\nname: p\nvocab: {num_vocab_tiling: 8}\n", encoding="utf-8")
    path = tmp_path / "t.lock.yml"
    ran = cli("lock", DEEPSEEK, "wi_tile_fwd_mlp_dim=256", "-p", str(policy), "-d", "v6e-256",
              "-o", str(path))  # fmt: skip
    assert ran.code == 0
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["configs"][0]["policies"] == ["p.yml"]
    assert cli("diff", str(path)).code == 0
    policy.write_text("version: 1\nname: p\nvocab: {num_vocab_tiling: 4}\n", encoding="utf-8")
    assert cli("diff", str(path)).code == 1


@pytest.mark.parametrize(
    "text", ["tiles_lock: 2\nconfigs: []\n", "tiles_lock: 1\n", "tiles_lock: 1\nconfigs: [1]\n"]
)
def test_a_broken_lock_is_a_problem_with_a_remedy(cli: Command, tmp_path: Path, text: str) -> None:
    """A lock of another version or shape is refused without a traceback."""
    path = tmp_path / "t.lock.yml"
    path.write_text(text, encoding="utf-8")
    for command in ("diff", "validate"):
        ran = cli(command, str(path))
        assert ran.code == 1
        assert "[broken-lock]" in ran.out + ran.err
        assert "write it again with `tilepolicy lock`" in ran.out + ran.err


def test_a_failed_lock_leaves_the_old_one(cli: Command, tmp_path: Path) -> None:
    """A config that does not resolve writes nothing, and leaves no temporary file."""
    path = tmp_path / "tiles.lock.yml"
    path.write_text("old", encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    ran = cli("lock", DEEPSEEK, "no-such.yml", "-o", str(path), "-p", "maxtext-default")
    assert ran.code == 1
    assert path.read_text(encoding="utf-8") == "old"
    assert sorted(tmp_path.iterdir()) == before


def test_two_policies_under_a_config(cli: Command) -> None:
    """Two policies are compared setting by setting; the same policy twice does not differ."""
    ran = cli("diff", "maxtext-default", "deepseek3-671b-v6e", "--config", DEEPSEEK)
    assert ran.code == 1
    rows = [line.split()[:3] for line in ran.out.splitlines() if "_tile_" in line]
    assert ["wo_tile_dlhs_embed_dim", "1024", "256"] in rows
    assert ["wo_tile_drhs_batch_seq", "512", "512"] not in rows
    same = cli("diff", "maxtext-default", "maxtext-default", "--config", DEEPSEEK)
    assert same.code == 0


@pytest.mark.parametrize("kind", SCHEMAS)
def test_schema_prints_and_writes_the_same(cli: Command, tmp_path: Path, kind: str) -> None:
    """`schema KIND` prints the schema; with --output it goes to a file."""
    path = tmp_path / "s.json"
    assert cli("schema", kind).out == schema_text(kind)
    assert cli("schema", kind, "--output", str(path)).out == ""
    assert path.read_text(encoding="utf-8") == schema_text(kind)


def test_doctor_shows_versions_policies_and_configs(cli: Command) -> None:
    """Doctor lists what is installed, the shipped policies, and what works."""
    ran = cli("doctor")
    assert ran.code == 0
    assert "deepseek3-671b-v6e, maxtext-default" in ran.out
    topics = {finding["topic"] for finding in json.loads(cli("doctor", "-f", "json").out)}
    assert topics == {"version", "works", "policies", "config"}


def test_doctor_without_libraries_gives_remedies(
    cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not installed is missing, with its install line, and is no failure."""
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    ran = cli("doctor")
    assert ran.code == 0
    for extra in ("tokamax", "verify", "maxtext"):
        assert f"remedy: pip install 'tilepolicy[{extra}]'" in ran.out


def test_doctor_fails_on_what_does_not_work(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed library that is too old is a problem, and exits with 1."""
    real = doctor._version

    def version(library: str) -> str | None:
        return "0.0.12" if library == "tokamax" else real(library) or "1.0"

    monkeypatch.setattr(doctor, "_version", version)
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["apply"] == Finding(
        "works",
        "apply",
        "problem",
        "tokamax 0.0.12 has no overlays of its config lookup",
        "pip install 'tokamax>=0.0.14'",
    )
    assert cli("doctor").code == 1


@pytest.mark.parametrize(
    "arguments", [("lock", DEEPSEEK), ("schema", "policy")], ids=["lock", "schema"]
)
def test_an_unwritable_output_is_a_usage_error(
    cli: Command, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """A folder that does not exist is named, without a traceback, and exits with 2."""
    ran = cli(*arguments, "--output", str(tmp_path / "none" / "f"))
    assert ran.code == 2
    assert "cannot write" in " ".join(ran.err.replace("│", " ").split())
