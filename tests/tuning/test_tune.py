"""The search of ``tune`` with a stand-in for the compiler."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from fake_compiler import STOCK, FakeTpuCompiler
from small_moe import TOKAMAX, write_config, write_rules

from tilepolicy import policy
from tilepolicy.report import plain
from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.journal import Journal
from tilepolicy.tuning.missed import MissedSite
from tilepolicy.tuning.targets import find_targets, model_configs
from tilepolicy.tuning.tune import Limits, TunedSite, TuneItem, plan, plan_missed, tune
from tilepolicy.tuning.tune_report import plan_blocks, tune_json, tuned_blocks


def planned(path: Path, *policies: Path, device: str = "v6e") -> tuple[TuneItem, ...]:
    """The plan for a config."""
    loaded = policy.combine([policy.load(p) for p in (*policies, "maxtext-default")])
    return plan(find_targets(loaded, model_configs(str(path)), device).targets)


def by_name(tuned: tuple[TunedSite, ...]) -> dict[str, TunedSite]:
    """What was found, by site."""
    return {site.item.name: site for site in tuned}


def test_the_first_candidate_that_fits_wins(tmp_path: Path) -> None:
    """Candidates are compiled in their order; the first that the compiler takes is the tile."""
    items = planned(write_config(tmp_path, TOKAMAX))
    fake = FakeTpuCompiler()
    refused = items[0].candidates[0].tile
    fake.statuses[refused] = "failed"
    site = by_name(tune(items, Compiler(run=fake)))["wi.fwd"]
    fitting = [c for c in items[0].candidates if c.tile != refused]
    assert site.best == fitting[0]
    assert site.verdict is not None
    assert site.verdict.fits
    assert site.tried >= 2
    assert site.shortlist[0] == fitting[0].tile


def test_todays_tile_is_compiled_too(tmp_path: Path) -> None:
    """What the library chooses today is read back, for a comparison by the same formula."""
    site = by_name(tune(planned(write_config(tmp_path, TOKAMAX)), Compiler(run=FakeTpuCompiler())))
    assert site["wo.drhs"].now_tile == STOCK
    before, best = site["wo.drhs"].now_seconds, site["wo.drhs"].best
    assert before is not None
    assert best is not None
    assert before > best.seconds


def test_a_wave_ends_with_a_sure_candidate(tmp_path: Path) -> None:
    """Nothing is compiled behind a candidate that surely fits."""
    items = planned(write_config(tmp_path, TOKAMAX))
    assert all(item.candidates[0].vmem.verdict == "fits" for item in items)
    fake = FakeTpuCompiler()
    tune(items, Compiler(run=fake))
    # One of today and one candidate for each site, kernels of equal shape once.
    assert len(fake.requests) == 12


def test_a_site_is_given_up_after_so_many(tmp_path: Path) -> None:
    """No candidate compiles: the search ends, the site has no tile, the others have theirs."""
    items = planned(write_config(tmp_path, TOKAMAX))
    fake = FakeTpuCompiler()
    fake.statuses.update({c.tile: "failed" for c in items[0].candidates})
    found = by_name(tune(items[:1], Compiler(run=fake), Limits(wave=2, most=5)))
    assert found["wi.fwd"].best is None
    assert found["wi.fwd"].tried == 5
    text = plain(tuned_blocks(tuple(found.values()), output="o.yml", hits=0))
    assert "no tried candidate compiles" in text


def test_the_rows_follow_the_new_row_tile(tmp_path: Path) -> None:
    """MaxText pads to wi.fwd's row tile: with a smaller one the other sites have fewer rows."""
    config = write_config(tmp_path, TOKAMAX)
    text = config.read_text().replace("max_target_length: 2048", "max_target_length: 1090")
    config.write_text(text)
    items = planned(config)
    assert {item.site.batch_seq for item in items} == {2560}
    found = by_name(tune(items, Compiler(run=FakeTpuCompiler())))
    tile = found["wi.fwd"].best
    assert tile is not None
    rows = -(-2180 // tile.tile.m) * tile.tile.m
    assert rows < 2560
    assert {site.item.site.batch_seq for site in found.values()} == {rows}
    assert {site.item.facts["batch_seq"] for site in found.values()} == {rows}
    assert all(rows % site.best.tile.m == 0 for site in found.values() if site.best)


def test_what_the_config_decides_stays(tmp_path: Path) -> None:
    """A rule would lose against an explicit value, so that candidates keep it."""
    config = write_config(tmp_path, TOKAMAX + "wo_tile_dlhs_embed_dim: 256\n")
    found = by_name(tune(planned(config), Compiler(run=FakeTpuCompiler())))
    item = found["wo.dlhs"].item
    assert item.fixed == {"embed_dim": 256}
    assert {c.tile.to_policy("wo")["embed_dim"] for c in item.candidates} == {256}


def test_a_site_that_the_config_decides_is_left_out(tmp_path: Path) -> None:
    """With all three axes explicit there is nothing to choose, and the plan says so."""
    knobs = "".join(f"wi_tile_fwd_{axis}: 256\n" for axis in ("batch_seq", "embed_dim", "mlp_dim"))
    items = planned(write_config(tmp_path, TOKAMAX + knobs))
    assert items[0].skipped == "the config decides all three axes; a rule would lose"
    text = plain(plan_blocks(items, Limits(), known=0, title="t"))
    assert items[0].skipped in text
    found = by_name(tune(items, Compiler(run=FakeTpuCompiler())))
    assert found["wi.fwd"].best is None
    assert found["wo.fwd"].best is not None


def test_heuristic_tiling_is_left_out(tmp_path: Path) -> None:
    """MaxText ignores all tiles there."""
    more = TOKAMAX + "use_gmm_v2: true\nuse_gmm_v2_heuristic_tiling: true\n"
    items = planned(write_config(tmp_path, more))
    assert {item.skipped for item in items} == {
        "use_gmm_v2_heuristic_tiling makes MaxText ignore all tiles"
    }


def test_only_named_sites(tmp_path: Path) -> None:
    """A few sites can be tuned by themselves."""
    loaded = policy.load("maxtext-default")
    targets = find_targets(loaded, model_configs(str(write_config(tmp_path))), "v6e").targets
    assert [item.name for item in plan(targets, only=("wo.drhs", "wi.fwd"))] == [
        "wi.fwd",
        "wo.drhs",
    ]


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    """What was compiled before the interrupt is not compiled again, and the result is the same."""
    items = planned(write_config(tmp_path, TOKAMAX))
    whole = tune(items, Compiler(run=FakeTpuCompiler()))
    path = tmp_path / "journal"
    with (
        Journal(path, {}) as journal,
        pytest.raises(KeyboardInterrupt),
    ):
        tune(items, Compiler(run=FakeTpuCompiler(interrupt_after=5), journal=journal))
    rest = FakeTpuCompiler()
    with Journal(path, {}) as journal:
        assert len(journal) == 5
        again = tune(items, Compiler(run=rest, journal=journal))
    assert len(rest.requests) == 7
    assert [site.best for site in again] == [site.best for site in whole]


def test_recorded_misses_are_tuned(tmp_path: Path) -> None:
    """A miss has all that a site needs; those that lack something say what."""
    facts = {
        "device": "v6e",
        "backend": "tokamax_v1",
        "batch_seq": 4096,
        "embed_dim": 1024,
        "mlp_dim": 512,
        "num_groups": 8,
        "dtype": "bfloat16",
    }
    missed = [
        MissedSite("wi", "fwd", facts),
        MissedSite("wi", "fwd", facts | {"batch_seq": 8192}),
        MissedSite(None, "fwd", facts),
        MissedSite("wo", "dlhs", {"backend": "tokamax_v1", "batch_seq": 4096}),
        MissedSite("wo", "dlhs", facts | {"backend": "ragged_dot"}),
        MissedSite("wo", "dlhs", facts | {"device": "v5e"}),
    ]
    items = plan_missed(missed, "v6e")
    assert [item.skipped for item in items] == [
        "",
        "",
        "the record does not say whether this was wi or wo",
        "the record lacks embed_dim, mlp_dim, num_groups, dtype",
        "backend ragged_dot runs no tiled kernel",
    ]
    found = tune(items, Compiler(run=FakeTpuCompiler()))
    assert [site.best is not None for site in found] == [True, True, False, False, False]
    # Recorded rows are those of the call: they are not padded again.
    assert found[1].item.site.batch_seq == 8192
    assert tmp_path.exists()


def test_plan_names_the_first_candidates(tmp_path: Path) -> None:
    """Before anything is compiled: sites, sizes, candidates, and how many compiles that means."""
    items = planned(write_config(tmp_path, TOKAMAX))
    text = plain(plan_blocks(items, Limits(), known=4, title="moe.yml for v6e"))
    assert text.startswith("moe.yml for v6e\n")
    assert re.search(r"4096 x 1024 x 512, 8 +tokamax_v1  library's own ", text)
    assert "12 compiles if the first wave fits, 78 at most" in text
    assert "4 verdicts are known from an interrupted run" in text


def test_json_of_a_result(tmp_path: Path) -> None:
    """Before and after of each site, by policy names."""
    items = planned(write_config(tmp_path, TOKAMAX))[:1]
    (site,) = tune(items, Compiler(run=FakeTpuCompiler()))
    (data,) = tune_json((site,), output="o.yml")["sites"]
    assert data["now"]["tile"] == {"batch_seq": 128, "embed_dim": 128, "mlp_dim": 128}
    assert set(data["tuned"]["tile"]) == {"batch_seq", "embed_dim", "mlp_dim"}
    assert data["tuned"]["seconds"] < data["now"]["seconds"]
    (failed,) = tune_json((replace(site, best=None),), output="o.yml")["sites"]
    assert failed["tuned"] is None


def test_a_rule_of_the_policy_can_be_improved(tmp_path: Path) -> None:
    """A tile from a policy is today's tile, not a fixed one."""
    rules = write_rules(
        tmp_path, "layer: wi, pass: fwd => batch_seq: 128, embed_dim: 128, mlp_dim: 256"
    )
    item = planned(write_config(tmp_path, TOKAMAX), rules)[0]
    assert item.now.tile == (128, 128, 256)
    assert item.fixed == {}
