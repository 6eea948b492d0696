"""Loading policies: examples, extends, packs, merging, lint, URLs, large policies."""

from __future__ import annotations

import builtins
import gc
import os
import sys
import types
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tilepolicy import policy
from tilepolicy.errors import MissingLibraryError, PolicyError
from tilepolicy.model import Tile, VocabSettings
from tilepolicy.model.factnames import FACTS
from tilepolicy.policy import packs
from tilepolicy.policy.policyfiles import check_text
from tilepolicy.policy.references import locate

EXAMPLES = Path(__file__).parents[1] / "examples"
VALID = sorted((EXAMPLES / "valid").glob("*.yml"))
INVALID = sorted((EXAMPLES / "invalid").glob("*.yml"))


def write(folder: Path, name: str, body: str = "", *, title: str = "x") -> Path:
    """A policy file with a head and a body."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"version: 1\nname: {title}\n{body}", "utf-8")
    return path


def codes(error: PolicyError) -> list[str]:
    """Codes of the problems of an error."""
    return [problem.code for problem in error.problems]


def test_there_are_examples() -> None:
    """The parametrized tests below are about something."""
    assert len(VALID) >= 3
    assert len(INVALID) >= 25


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_valid_examples_load(path: Path) -> None:
    """Each valid example loads and has the name of its file."""
    assert policy.load(path).name == path.stem


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_invalid_examples_say_what_stands_beside_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each invalid example fails with exactly the text of the file beside it."""
    monkeypatch.chdir(path.parent)
    with pytest.raises(PolicyError) as caught:
        policy.load(path.name)
    assert f"{caught.value}\n" == path.with_suffix(".txt").read_text("utf-8")
    for problem in caught.value.problems:
        assert problem.place is not None
        assert problem.place.line is not None
        assert problem.place.column is not None


@pytest.mark.parametrize("name", sorted(packs.builtin_policies()))
def test_shipped_policies_load_by_name(name: str) -> None:
    """Each shipped policy loads by its name, which is also the name inside the file."""
    loaded = policy.load(name)
    assert (loaded.name, loaded.files[0]) == (name, name)


def test_the_reference_is_about_this_language() -> None:
    """The documentation's policy is valid, and it lists every fact and every key of ``vocab``."""
    text = (Path(__file__).parents[2] / "docs" / "policy.md").read_text("utf-8")
    first = text.split("```yaml\n")[1].split("```")[0]
    assert check_text(first, "policy.md") == ()
    for name in (*FACTS, *VocabSettings.model_fields, *Tile.model_fields):
        assert f"`{name}`" in text, name


def test_the_default_policy_is_shipped() -> None:
    """The policy that counts without any other is among the shipped ones."""
    assert "maxtext-default" in packs.builtin_policies()


def test_own_rules_come_before_inherited_ones(tmp_path: Path) -> None:
    """Rules, locks and settings of the extending file are tried first, then those it names."""
    rule = "gmm: {{rules: [{{name: {0}, tile: {{batch_seq: {1}}}}}]}}\n"
    write(
        tmp_path, "low.yml", rule.format("low", 128) + "vocab: {loss: sparse, min_chunk_tokens: 8}"
    )
    write(
        tmp_path, "mid.yml", rule.format("mid", 256) + "vocab: {loss: online}\nextends: [low.yml]"
    )
    top = write(tmp_path, "top.yml", rule.format("top", 512) + "extends: [mid.yml]")
    loaded = policy.load(top)
    assert [r.name for r in loaded.gmm.rules] == ["top", "mid", "low"]
    choice = loaded.gmm.lookup({}).tile["batch_seq"]
    assert (choice.value, choice.origin.name) == (512, "top")
    assert [(lost.name, lost.value) for lost in choice.origin.lost] == [("mid", 256), ("low", 128)]
    assert (loaded.vocab.loss, loaded.vocab.min_chunk_tokens) == ("online", 8)
    assert str(loaded.places["vocab.loss"]) == f"{tmp_path / 'mid.yml'}:4:9"
    assert "vocab.max_chunk_bytes" not in loaded.places
    assert loaded.files == tuple(str(tmp_path / f"{n}.yml") for n in ("top", "mid", "low"))


def test_a_policy_that_several_extend_comes_after_all_of_them(tmp_path: Path) -> None:
    """In a diamond the common base is read once and tried last."""
    write(tmp_path, "base.yml", "vocab: {loss: sparse}")
    write(tmp_path, "left.yml", "extends: [base.yml]")
    write(tmp_path, "right.yml", "extends: [base.yml]\nvocab: {loss: online}")
    top = write(tmp_path, "top.yml", "extends: [left.yml, right.yml]")
    loaded = policy.load(top)
    assert [Path(file).stem for file in loaded.files] == ["top", "left", "right", "base"]
    assert loaded.vocab.loss == "online"


def test_a_chain_of_diamonds_does_not_explode(tmp_path: Path) -> None:
    """Fourteen diamonds on top of each other are 29 files, not 16,384 paths."""
    write(tmp_path, "d0.yml")
    for i in range(1, 15):
        for side in "lr":
            write(tmp_path, f"{side}{i}.yml", f"extends: [d{i - 1}.yml]" if i == 1 else "")
        write(tmp_path, f"d{i}.yml", f"extends: [l{i}.yml, r{i}.yml, d{i - 1}.yml]")
    assert len(policy.load(tmp_path / "d14.yml").files) == 43


def test_the_digest_is_that_of_the_merged_meaning(tmp_path: Path) -> None:
    """Inherited or written out, here or in another folder, with or without comments: one digest."""
    rule = "{{name: {0}, when: {{layer: {1}}}, tile: {{batch_seq: 512}}}}"
    first, second = rule.format("a", "wi"), rule.format("b", "[wo]")
    write(tmp_path, "base.yml", f"gmm: {{rules: [{second}]}}\nvocab: {{max_chunk_bytes: 1MiB}}")
    write(tmp_path, "split.yml", f"extends: [base.yml]\ngmm: {{rules: [{first}]}}", title="p")
    whole = write(
        tmp_path / "elsewhere",
        "whole.yml",
        f"# a comment\nvocab: {{max_chunk_bytes: 1048576, min_chunk_tokens: 64}}\n"
        f"gmm: {{on_miss: report, rules: [{first}, {second}]}}",
        title="p",
    )
    assert policy.load(tmp_path / "split.yml").digest == policy.load(whole).digest
    assert policy.load(tmp_path / "base.yml").digest != policy.load(whole).digest


def test_problems_of_all_files_come_in_one_run(tmp_path: Path) -> None:
    """A broken file does not hide the problems of the files it extends."""
    write(tmp_path, "base.yml", "vocab: {loss: wrong}")
    top = write(tmp_path, "top.yml", "extends: [base.yml, gone.yml]\nvocab: {min_chunk_tokens: 0}")
    with pytest.raises(PolicyError) as caught:
        policy.load(top)
    assert [(p.code, Path(str(p.place)).name) for p in caught.value.problems] == [
        ("not-found", "top.yml:3:21"),
        ("impossible-value", "top.yml:4:27"),
        ("unknown-value", "base.yml:3:15"),
    ]


def test_a_cycle_names_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle is shown as a chain, at the entry that closes it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    write(tmp_path, "a.yml", "extends: [b.yml]")
    write(tmp_path, "b.yml", "extends: [sub/../a.yml]")
    with pytest.raises(PolicyError) as caught:
        policy.load("a.yml")
    (problem,) = caught.value.problems
    assert str(problem.place) == "b.yml:3:11"
    assert problem.message == "extends goes in a circle: a.yml extends b.yml extends a.yml"


def test_a_long_chain_is_refused(tmp_path: Path) -> None:
    """Files that extend each other without end are stopped."""
    for i in range(20):
        write(tmp_path, f"p{i}.yml", f"extends: [p{i + 1}.yml]")
    with pytest.raises(PolicyError, match="more than 16 levels deep"):
        policy.load(tmp_path / "p0.yml")


@pytest.mark.parametrize("how", ["parent", "absolute", "symlink", "symlinked folder"])
def test_a_policy_cannot_reach_outside_its_folder(tmp_path: Path, how: str) -> None:
    """Only a file below the extending file's own folder is read, links resolved."""
    secret = write(tmp_path, "secret.yml", "vocab: {loss: online}")
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "link.yml").symlink_to(secret)
    (folder / "linked").symlink_to(tmp_path)
    name = {
        "parent": "../secret.yml",
        "absolute": str(secret),
        "symlink": "link.yml",
        "symlinked folder": "linked/secret.yml",
    }[how]
    top = write(folder, "top.yml", f"extends: [{name}]")
    with pytest.raises(PolicyError, match="lies outside the folder") as caught:
        policy.load(top)
    assert codes(caught.value) == ["outside"]
    assert policy.load(top, allow_outside=True).vocab.loss == "online"


@pytest.mark.parametrize("name", ["x" * 5000 + ".yml", '"a\\0b.yml"', "/" + "y/" * 3000 + "z.yml"])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    """A name that the system refuses to look up is a problem at its place, no traceback."""
    top = write(tmp_path, "top.yml", f"extends: [{name}]")
    with pytest.raises(PolicyError) as caught:
        policy.load(top)
    assert codes(caught.value)[-1] in ("not-found", "outside")
    assert {str(problem.place) for problem in caught.value.problems} == {f"{top}:3:11"}


def test_special_files_are_not_read_through_extends(tmp_path: Path) -> None:
    """A device or a pipe is no policy file, even below the folder."""
    os.mkfifo(tmp_path / "pipe.yml")
    top = write(tmp_path, "top.yml", "extends: [pipe.yml]")
    with pytest.raises(PolicyError, match="there is no file"):
        policy.load(top)


def test_a_file_that_is_missing_or_a_folder(tmp_path: Path) -> None:
    """What the user names must exist and be a file."""
    with pytest.raises(PolicyError, match=r"there is no file .*gone\.yml"):
        policy.load(tmp_path / "gone.yml")
    (tmp_path / "folder.yml").mkdir()
    with pytest.raises(PolicyError, match=r"there is no file .*folder\.yml"):
        policy.load(tmp_path / "folder.yml")


def test_an_unknown_name_suggests_a_known_one() -> None:
    """A misspelt name is answered with the nearest shipped policy."""
    with pytest.raises(PolicyError, match="did you mean maxtext-default"):
        policy.load("maxtext-defaults")
    with pytest.raises(PolicyError, match=r"known names: .*maxtext-default"):
        policy.load("qqq")


class FakeEntry:
    """An entry point of a policy pack."""

    def __init__(self, name: str, load: Any) -> None:
        self.name, self.value, self.load = name, f"{name}_pack:policies", load


def install(monkeypatch: pytest.MonkeyPatch, *entries: FakeEntry) -> None:
    """Make these packs the only foreign ones."""
    monkeypatch.setattr(packs, "_foreign_entries", lambda: entries)


def test_a_pack_offers_named_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of another package loads and is extended by its name."""
    offered = write(tmp_path / "pack", "team.yml", "vocab: {loss: online}", title="team")
    install(monkeypatch, FakeEntry("team", lambda: lambda: {"team-moe": offered}))
    assert policy.load("team-moe").files == ("team-moe",)
    top = write(tmp_path, "top.yml", "extends: [team-moe]")
    assert policy.load(top).vocab.loss == "online"
    assert {"team-moe", "maxtext-default"} <= {named.name for named in packs.named_policies()}


def test_two_packs_with_one_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is guessed when two packages offer one name, the shipped names included."""
    file = write(tmp_path, "p.yml")
    both = [FakeEntry(name, lambda: lambda: {"same": file}) for name in ("one", "two")]
    install(monkeypatch, *both)
    with pytest.raises(PolicyError, match="the policy 'same' is offered by one and two"):
        policy.load("same")
    install(monkeypatch, FakeEntry("bad", lambda: lambda: {"maxtext-default": file}))
    with pytest.raises(PolicyError, match="'maxtext-default' is offered by"):
        packs.named_policies()


def test_a_broken_pack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack that fails says which package to repair; shipped names work regardless."""

    def fail() -> Any:
        raise RuntimeError("no data")

    install(monkeypatch, FakeEntry("odd", fail))
    with pytest.raises(PolicyError, match=r"the policy pack 'odd' .* fails: RuntimeError"):
        policy.load("some-name")
    assert policy.load("maxtext-default").name == "maxtext-default"


def test_combining_tries_policies_in_order(tmp_path: Path) -> None:
    """The first policy wins where both speak; a common base counts once and last."""
    rule = "gmm: {{rules: [{{name: {0}, tile: {{batch_seq: {1}}}}}]}}\n"
    write(tmp_path, "base.yml", rule.format("base", 64))
    for name, size, loss in (("one", 128, "sparse"), ("two", 256, "online")):
        body = rule.format(name, size) + f"extends: [base.yml]\nvocab: {{loss: {loss}}}"
        write(tmp_path, f"{name}.yml", body, title=name)
    one, two = (policy.load(tmp_path / f"{name}.yml") for name in ("one", "two"))
    both = policy.combine([one, two])
    assert both.name == "one+two"
    assert [r.name for r in both.gmm.rules] == ["one", "two", "base"]
    assert both.vocab.loss == "sparse"
    assert both.digest != one.digest
    assert policy.combine([one]) is one
    with pytest.raises(ValueError, match="at least one policy"):
        policy.combine([])


def test_settings_written_as_knobs_become_tile_rules(tmp_path: Path) -> None:
    """``set`` with MaxText's tile knobs decides the tile of exactly that layer, pass and phase."""
    top = write(
        tmp_path,
        "top.yml",
        "locks: [{name: l, set: {wo_tile_drhs_mlp_dim: 64, num_vocab_tiling: 1}}]\n"
        "gmm: {rules: [{name: r, set: {eval_wi_tile_fwd_batch_seq: 32, loss: online}}]}\n",
    )
    loaded = policy.load(top)
    site = {"layer": "wo", "pass": "drhs", "phase": "train"}
    assert loaded.tile_locks.lookup(site).tile["mlp_dim"].value == 64
    assert loaded.tile_locks.lookup({**site, "phase": "eval"}).tile == {}
    assert loaded.locks.lookup({}).fields["num_vocab_tiling"].origin.kind == "lock"
    site = {"layer": "wi", "pass": "fwd", "phase": "eval"}
    assert loaded.gmm.lookup(site).tile["batch_seq"].value == 32
    assert loaded.settings.lookup({}).fields["loss"].value == "online"


def test_ops_are_indexed_by_name(tmp_path: Path) -> None:
    """Rules of one op in several files form one index."""
    op = (
        "ops: [{{op: attention, rules: [{{name: {0}, when: {{arg.q.dim0: {1}}}, "
        "config: {{b: {1}}}}}]}}]\n"
    )
    write(tmp_path, "base.yml", op.format("low", 2))
    loaded = policy.load(write(tmp_path, "top.yml", op.format("top", 1) + "extends: [base.yml]"))
    assert list(loaded.ops) == ["attention"]
    assert loaded.ops["attention"].lookup({"arg.q.dim0": 2}).fields["b"].value == 2
    assert loaded.ops["attention"].lookup({}).undecidable == {
        "top": ("arg.q.dim0",),
        "low": ("arg.q.dim0",),
    }


SHADOWED = """
gmm:
  rules:
    - {name: first, when: %s, tile: {batch_seq: 1, embed_dim: 1}}
    - {name: second, when: %s, tile: {batch_seq: 2}}
"""


@pytest.mark.parametrize(
    ("first", "second", "shadowed"),
    [
        ("{}", "{layer: wi}", True),
        ("{layer: wi}", "{layer: wi}", True),
        ("{layer: wi}", "{layer: wi, pass: fwd}", True),
        ("{layer: [wi, wo]}", "{layer: wo}", True),
        ("{layer: wi}", "{layer: [wi, wo]}", False),
        ("{layer: wi, pass: fwd}", "{layer: wi}", False),
        ('{batch_seq: ">=1024"}', "{batch_seq: 2048}", True),
        ('{batch_seq: ">=1024"}', '{batch_seq: "2048..4096"}', True),
        ('{batch_seq: ">=1024"}', '{batch_seq: "512..4096"}', False),
        ('{batch_seq: "1..9"}', '{batch_seq: "<10"}', False),
        ('{batch_seq: "<10"}', '{batch_seq: "1..9"}', True),
        ('{batch_seq: "%128"}', "{batch_seq: 256}", True),
        ('{batch_seq: "%128"}', "{batch_seq: 200}", False),
        ('{batch_seq: "%128"}', '{batch_seq: "%128"}', True),
        ('{batch_seq: [1, ">=9"]}', '{batch_seq: [1, 12, "20..30"]}', False),
        ('{batch_seq: [1, "9..12"]}', "{batch_seq: [1, 10]}", True),
        ('{model_name: "a*"}', "{model_name: ab}", True),
        ('{model_name: "a*"}', '{model_name: "ab*"}', False),
        ('{tokamax: ">=0.0.14"}', '{tokamax: "0.0.15..0.0.17"}', True),
        ('{tokamax: ">0.0.15"}', '{tokamax: "0.0.15..0.0.17"}', False),
    ],
)
def test_shadowed_rules(tmp_path: Path, first: str, second: str, shadowed: bool) -> None:
    """A rule is shadowed if an earlier one matches whenever it does and decides all its fields."""
    path = write(tmp_path, "p.yml", SHADOWED % (first, second))
    if not shadowed:
        assert len(policy.load(path).gmm) == 2
        return
    with pytest.raises(PolicyError) as caught:
        policy.load(path)
    (problem,) = caught.value.problems
    assert (problem.code, str(problem.place)) == ("shadowed", f"{path}:7:7")
    assert "'first' on line 6" in problem.message


def test_several_rules_together_can_shadow(tmp_path: Path) -> None:
    """Each field may be taken by another earlier rule; a table takes none for certain."""
    rules = (
        "gmm: {rules: [{name: a, tile: {batch_seq: 1}}, {name: b, tile: {embed_dim: 1}},"
        " {name: c, tile: {batch_seq: 2, embed_dim: 2}}]}"
    )
    with pytest.raises(PolicyError, match="the rule 'c' never decides"):
        policy.load(write(tmp_path, "p.yml", rules))
    table = (
        "gmm: {rules: [{name: a, table: {nearest: {batch_seq: 2},"
        " points: [{at: {batch_seq: 8}, tile: {batch_seq: 1}}]}},"
        " {name: b, tile: {batch_seq: 2}}]}"
    )
    assert len(policy.load(write(tmp_path, "t.yml", table)).gmm) == 2


def test_an_inherited_rule_may_be_overridden_whole(tmp_path: Path) -> None:
    """Overriding is what extends is for, so it is no shadowing."""
    write(tmp_path, "base.yml", "gmm: {rules: [{name: a, tile: {batch_seq: 1}}]}")
    top = write(
        tmp_path, "t.yml", "extends: [base.yml]\ngmm: {rules: [{name: a, tile: {batch_seq: 2}}]}"
    )
    assert len(policy.load(top).gmm) == 2


def test_a_url_needs_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fsspec a URL fails with the line that installs it."""
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "fsspec":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingLibraryError, match="pip install fsspec"):
        policy.load("gs://bucket/p.yml")


def test_a_url_is_read_with_what_it_extends() -> None:
    """A policy behind a URL may extend its neighbours, but nothing above its folder."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/team/p.yml", b"version: 1\nname: p\nextends: [sub/q.yml]\n")
    memory.pipe("/team/sub/q.yml", b"version: 1\nname: q\nvocab: {loss: online}\n")
    memory.pipe("/team/bad.yml", b"version: 1\nname: bad\nextends: [../p.yml]\n")
    loaded = policy.load("memory://team/p.yml")
    assert loaded.files == ("memory://team/p.yml", "memory://team/sub/q.yml")
    assert loaded.vocab.loss == "online"
    with pytest.raises(PolicyError, match="lies outside the folder"):
        policy.load("memory://team/bad.yml")
    with pytest.raises(PolicyError, match=r"memory://team/gone.yml cannot be read"):
        policy.load("memory://team/gone.yml")


def test_a_url_whose_protocol_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fsspec says of a missing protocol library is passed on."""
    fake = types.ModuleType("fsspec")

    def opened(url: str, mode: str) -> Any:
        raise ImportError(f"{url} ({mode}): please install gcsfs")

    fake.open = opened  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, "fsspec", fake)
    with pytest.raises(MissingLibraryError, match="install gcsfs"):
        policy.load("gs://bucket/p.yml")


def test_names_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slash or a YAML suffix makes a path; a file in the working folder may have any name."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "plain")
    assert locate("plain").path is not None
    assert locate("maxtext-default").resource is not None
    with pytest.raises(PolicyError, match=r"there is no file \./maxtext-default"):
        locate("./maxtext-default")


def test_a_load_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    """On stays on, off stays off, also after an error."""
    broken = tmp_path / "broken.yml"
    broken.write_text("version: 2\n")
    for setting in (gc.enable, gc.disable):
        setting()
        try:
            before = gc.isenabled()
            policy.load("maxtext-default")
            assert gc.isenabled() is before
            with pytest.raises(PolicyError):
                policy.load(broken)
            assert gc.isenabled() is before
        finally:
            gc.enable()
