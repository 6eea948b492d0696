"""What resolutions and problems look like: golden files, one for each format."""

from __future__ import annotations

import io
import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from report_samples import MISSING_LIBRARY, PROBLEMS, UNKNOWN_KEY, sample_resolution

from tilepolicy.report import (
    draw,
    plain,
    render_problems,
    render_resolution,
    resolution_blocks,
    setting_blocks,
)
from tilepolicy.report.blocks import wants_rich

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str, text: str) -> None:
    """Compares with a golden file; writes it when it is missing, and then fails."""
    path = GOLDEN / name
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path.name} did not exist and was written; read it, then run again")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("form", ["json", "yaml", "maxtext"])
def test_machine_formats_are_stable(form: str) -> None:
    """The machine-readable forms of a resolution are byte for byte what they were."""
    golden(f"resolution.{form}", render_resolution(sample_resolution(), form))  # type: ignore[arg-type]


@pytest.mark.parametrize("explain", [False, True], ids=["plain", "explain"])
def test_piped_table_is_aligned_text(explain: bool) -> None:
    """Piped, a table is aligned text: one row a site, unread values in parentheses."""
    blocks = resolution_blocks(sample_resolution(), title="c.yml", explain=explain)
    golden(f"table-{'explain' if explain else 'plain'}.txt", plain(blocks))


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [100, 160])
def test_terminal_table_fits_its_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """On a terminal the table is drawn with rich and no line is wider than the terminal."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    stream = _Terminal()
    draw(resolution_blocks(sample_resolution(), title="c.yml"), stream)
    text = "".join(part for part in stream.getvalue().replace("\x1b[1m", "").split("\x1b[0m"))
    text = text.replace("\x1b[2m", "").replace("\x1b[1;2m", "")
    assert max(len(line) for line in text.splitlines()) <= width
    golden(f"table-{width}.txt", "\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def test_a_dumb_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that can nothing, and a pipe, get plain text."""
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_rich(_Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert wants_rich(_Terminal())
    assert not wants_rich(io.StringIO())


def test_yaml_and_json_say_the_same() -> None:
    """The YAML form has exactly the content of the JSON form."""
    resolution = sample_resolution()
    assert yaml.safe_load(render_resolution(resolution, "yaml")) == json.loads(
        render_resolution(resolution, "json")
    )


def test_maxtext_lines_leave_out_what_maxtext_does_not_read() -> None:
    """Only MaxText's own knobs that the backend honours are printed for its command line."""
    lines = render_resolution(sample_resolution(), "maxtext").splitlines()
    assert "num_vocab_tiling=32" in lines
    assert "vocab_tiling_ag_once=true" in lines
    assert "wi_tile_dlhs_batch_seq=256" in lines
    assert not any(
        line.startswith(("wi_tile_dlhs_embed", "loss", "wi_tile_fwd_input")) for line in lines
    )


def test_one_setting_in_full() -> None:
    """One setting shows its summary, origin, reader and every loser."""
    settings = sample_resolution().settings
    text = plain(setting_blocks("num_vocab_tiling", settings["num_vocab_tiling"]))
    golden("setting.txt", text)


@pytest.mark.parametrize("form", ["text", "json", "sarif", "github"])
def test_problem_formats_are_stable(form: str) -> None:
    """Every form of problems is byte for byte what it was, with place, remedy and path."""
    golden(f"problems.{form}", render_problems(PROBLEMS, form))  # type: ignore[arg-type]


@pytest.mark.parametrize(("form", "text"), [("text", ""), ("github", ""), ("json", "[]\n")])
def test_no_problem_prints_no_problem(form: str, text: str) -> None:
    """Without problems text and annotations are empty, JSON is an empty list."""
    assert render_problems((), form) == text  # type: ignore[arg-type]


def test_sarif_has_the_required_shape() -> None:
    """Results point at the driver's rules, regions count from 1, files are encoded URIs."""
    log = json.loads(render_problems(PROBLEMS, "sarif"))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0"
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert [rules[result["ruleIndex"]] for result in run["results"]] == [p.code for p in PROBLEMS]
    physical = run["results"][1]["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"]["uri"] == "dir%20with%20space/p.yml"
    assert physical["region"] == {"startLine": 7, "startColumn": 3}
    assert "locations" not in run["results"][2]


def test_annotations_escape_what_github_would_read() -> None:
    """New lines, per cent, colons and commas cannot end an annotation early."""
    (line,) = render_problems((UNKNOWN_KEY,), "github").splitlines()
    assert line == (
        "::error file=dir with space/p.yml,line=7,col=3,title=tilepolicy%3A unknown-key::"
        "unknown key 'tiel' (at gmm.rules[0])%0Aremedy: did you mean 'tile'?"
    )
    (line,) = render_problems((MISSING_LIBRARY,), "github").splitlines()
    assert line.startswith("::error title=tilepolicy%3A missing-library::jax is not installed")


def test_samples_satisfy_the_resolution_schema() -> None:
    """The JSON form is what the published schema describes."""
    from tilepolicy.schemas import schema

    jsonschema.validate(
        json.loads(render_resolution(sample_resolution(), "json")), schema("resolution")
    )
