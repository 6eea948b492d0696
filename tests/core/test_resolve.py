"""Tiles: who wins, who honours them, what is refused, what is missed."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resolving import MOE, VERSIONS, ask, codes, config_file, policy, refused, resolved

import tilepolicy
from tilepolicy.errors import ConfigError, Problem
from tilepolicy.facts import Facts
from tilepolicy.policy import Policy
from tilepolicy.report import maxtext_lines
from tilepolicy.resolution import Resolution
from tilepolicy.resolve import Resolver
from tilepolicy.settings import AXES, LAYERS, PASSES, SETTINGS, tile_setting

DEFAULT = tilepolicy.load("maxtext-default")
FWD_128 = """\
gmm:
  rules:
  - name: short
    when: {pass: fwd}
    tile: {batch_seq: 128, embed_dim: 128, mlp_dim: 128}
    reason: measured
"""
TOKAMAX_V1 = {**MOE, "use_tokamax_gmm": True}


def warned(resolution: Resolution, code: str) -> list[Problem]:
    """The warnings of one code."""
    return [problem for problem in resolution.warnings if problem.code == code]


def test_every_setting_of_the_release_is_listed_in_order() -> None:
    """A resolution has every setting of MaxText 0.2.5, in the order of the table."""
    assert list(resolved(DEFAULT, MOE).settings) == list(SETTINGS)


def test_older_releases_lack_the_newer_settings() -> None:
    """Settings that a release lacks are left out, or not honoured where a policy sets one."""
    resolution = resolved(DEFAULT, MOE, versions={**VERSIONS, "maxtext": "0.2.3"})
    assert not any(name.startswith("eval_") for name in resolution.settings)
    gathering = resolution.settings["vocab_tiling_ag_once"]
    assert gathering.honoured.by is None
    assert gathering.honoured.why == "MaxText 0.2.3 has no such key; it came with 0.2.4"


def test_deepseek3_policy_gives_the_table_of_the_proposal() -> None:
    """The 18 knobs are 128, 256 and 512 for fwd, dlhs and drhs on every axis of wi and wo."""
    resolution = resolved(
        tilepolicy.load("deepseek3-671b-v6e"), "examples/deepseek3-671b.yml", versions=VERSIONS
    )
    sizes = {"fwd": 128, "dlhs": 256, "drhs": 512}
    expected = {
        f"{tile_setting(layer, pass_, axis)}={sizes[pass_]}"
        for layer in LAYERS
        for pass_ in PASSES
        for axis in AXES
    }
    printed = {line for line in maxtext_lines(resolution) if "_tile_" in line}
    assert printed == expected
    assert len(printed) == 18


def test_a_config_beats_a_rule_and_a_lock_beats_both(tmp_path: Path) -> None:
    """Lock > config > rule > default, for each axis on its own, losers in that order."""
    text = FWD_128 + (
        "locks:\n  - name: keep\n    when: {layer: wi, pass: fwd}\n    tile: {mlp_dim: 256}\n"
    )
    config = config_file(tmp_path, {**MOE, "wi_tile_fwd_embed_dim": 512})
    found = resolved(policy(tmp_path, text), config).settings
    kinds = {axis: found[f"wi_tile_fwd_{axis}"].origin.kind for axis in AXES}
    assert kinds == {"batch_seq": "rule", "embed_dim": "config", "mlp_dim": "lock"}
    assert [loser.kind for loser in found["wi_tile_fwd_mlp_dim"].origin.lost] == [
        "rule",
        "default",
    ]
    assert [loser.value for loser in found["wi_tile_fwd_embed_dim"].origin.lost] == [128, 1024]
    assert found["wi_tile_dlhs_mlp_dim"].origin.kind == "default"


@settings(max_examples=40, deadline=None)
@given(lock=st.booleans(), explicit=st.booleans(), rule=st.booleans())
def test_the_strongest_of_what_is_there_decides(
    tmp_path_factory: pytest.TempPathFactory, lock: bool, explicit: bool, rule: bool
) -> None:
    """Whatever combination proposes a tile, the strongest decides it; a lock needs agreement."""
    folder = tmp_path_factory.mktemp("p")
    text = ""
    if rule:
        text += "gmm:\n  rules:\n  - {name: r, when: {layer: wo}, tile: {embed_dim: 256}}\n"
    if lock:
        text += "locks:\n  - {name: l, when: {layer: wo}, tile: {embed_dim: 128}}\n"
    config = {**MOE, **({"wo_tile_drhs_embed_dim": 128} if explicit else {})}
    setting = resolved(policy(folder, text), config).settings["wo_tile_drhs_embed_dim"]
    kind = "lock" if lock else "config" if explicit else "rule" if rule else "default"
    value = {"lock": 128, "config": 128, "rule": 256, "default": 1024}[kind]
    assert (setting.origin.kind, setting.value) == (kind, value)


def test_a_tile_lock_against_the_config_is_an_error(tmp_path: Path) -> None:
    """A config's tile that a lock forbids names both places."""
    text = "locks:\n  - {name: keep, when: {layer: wi}, tile: {embed_dim: 256}}\n"
    config = config_file(tmp_path, {**MOE, "wi_tile_fwd_embed_dim": 512})
    (problem,) = refused(policy(tmp_path, text), config)
    assert problem.code == "lock-contradiction"
    assert f"lock 'keep' at {tmp_path}/p.yml:4 keeps it at 256" in problem.message


def test_all_problems_come_in_one_run(tmp_path: Path) -> None:
    """A contradiction, a broken rule of MaxText and an illegal tile are reported together."""
    config = config_file(
        tmp_path,
        {
            **MOE,
            "training_objective": "block_diffusion",
            "num_vocab_tiling": 2,
            "use_gmm_v2": True,
            "wo_tile_dlhs_batch_seq": 4095,
        },
    )
    found = refused(DEFAULT, config)
    assert codes(found) == ["lock-contradiction", "gmm-v2-needs-tokamax", "illegal-tile"]
    assert all(problem.place is not None and problem.place.text for problem in found)


def test_an_illegal_tile_of_a_rule_has_the_rules_place(tmp_path: Path) -> None:
    """A rule's tile that the backend refuses is an error at the rule."""
    text = "gmm:\n  rules:\n  - {name: odd, when: {pass: dlhs}, tile: {batch_seq: 4095}}\n"
    found = refused(policy(tmp_path, text), MOE)
    assert codes(found) == ["illegal-tile", "illegal-tile"]
    assert str(found[0].place) == f"{tmp_path}/p.yml:5"
    assert found[0].path == "wi_tile_dlhs_batch_seq"


def test_costly_padding_is_said(tmp_path: Path) -> None:
    """A batch tile that pads more than a tenth of the rows is worth a warning with numbers."""
    text = (
        "gmm:\n  rules:\n  - {name: wide, when: {layer: wi, pass: fwd}, tile: {batch_seq: 3072}}\n"
    )
    (problem,) = warned(resolved(policy(tmp_path, text), MOE), "costly-padding")
    assert problem.message == (
        "wi fwd: 4096 rows are padded by 2048 to a multiple of 3072: "
        "33.3 % of the rows of every grouped matmul are padding"
    )


def test_rules_see_the_rows_after_padding(tmp_path: Path) -> None:
    """The rows that rules match are those that the resolved tile of wi fwd pads to."""
    text = """\
gmm:
  rules:
  - {name: pad, when: {layer: wi, pass: fwd}, tile: {batch_seq: 3072}}
  - {name: padded, when: {layer: wo, batch_seq: 6144}, tile: {embed_dim: 256}}
"""
    resolution = resolved(policy(tmp_path, text), MOE)
    assert resolution.settings["wo_tile_drhs_embed_dim"].value == 256
    assert (resolution.facts["wi.rows"], resolution.facts["wi.batch_seq"]) == (4096, 6144)


def test_padding_that_never_settles_is_said(tmp_path: Path) -> None:
    """Two rules that each pad the rows into the other's range are a warning, not a hang."""
    text = """\
gmm:
  rules:
  - {name: a, when: {layer: wi, pass: fwd, batch_seq: 4096}, tile: {batch_seq: 3072}}
  - {name: b, when: {layer: wi, pass: fwd, batch_seq: 6144}, tile: {batch_seq: 4096}}
"""
    assert warned(resolved(policy(tmp_path, text), TOKAMAX_V1), "unsettled-padding")


class TestTokamaxV1:
    """Tokamax chooses its own tiles, so only a scope reaches them and a default is no decision."""

    def test_a_default_is_left_to_tokamax(self) -> None:
        """A knob that nothing decides is not honoured; as padding MaxText still reads one."""
        found = resolved(DEFAULT, TOKAMAX_V1).settings
        assert found["wi_tile_dlhs_embed_dim"].honoured.by is None
        assert found["wi_tile_dlhs_embed_dim"].honoured.why == (
            "nothing decides it, so the tile is left to Tokamax"
        )
        assert found["wi_tile_fwd_batch_seq"].honoured.by == "maxtext"

    def test_a_rule_takes_effect_by_apply(self, tmp_path: Path) -> None:
        """A decided tile is honoured by apply, and MaxText is told only the padding."""
        resolution = resolved(policy(tmp_path, FWD_128), TOKAMAX_V1)
        assert resolution.settings["wo_tile_fwd_mlp_dim"].honoured.by == "apply"
        lines = [line for line in maxtext_lines(resolution) if "_tile_" in line]
        assert lines == ["wi_tile_fwd_batch_seq=128"]

    def test_kernel_fields_are_listed(self, tmp_path: Path) -> None:
        """A decided field of Tokamax's config that no knob has is listed with its origin."""
        text = "gmm:\n  rules:\n  - {name: b, when: {layer: wi}, tile: {input_buffer_count: 3}}\n"
        setting = resolved(policy(tmp_path, text), TOKAMAX_V1).settings[
            "wi_tile_drhs_input_buffer_count"
        ]
        assert (setting.value, setting.honoured.by, setting.origin.name) == (3, "apply", "b")
        elsewhere = resolved(policy(tmp_path, text), MOE).settings[
            "wi_tile_drhs_input_buffer_count"
        ]
        assert elsewhere.honoured.by is None

    def test_a_miss_says_what_happens_instead(self, tmp_path: Path) -> None:
        """Sites that nothing decides share one warning: sizes, fallback, nearest rule, remedy."""
        text = """\
gmm:
  rules:
  - {name: far, when: {batch_seq: 65536}, tile: {batch_seq: 512, embed_dim: 512, mlp_dim: 512}}
"""
        (problem,) = warned(resolved(policy(tmp_path, text), TOKAMAX_V1), "no-match")
        assert problem.message == (
            "no rule decides the tile of wi fwd, wi dlhs, wi drhs, wo fwd, wo dlhs, wo drhs "
            "(batch_seq 4096, embed_dim 2048, mlp_dim 4096, num_groups 8, rows_per_group 512, "
            "bfloat16, v6e): Tokamax uses its shipped cache or its heuristic, 128 × 128 × 128 on "
            f"v6e; nearest: rule 'far' ({tmp_path}/p.yml:5): batch_seq 4096 is not 65536"
        )
        assert problem.remedy is not None
        assert "tilepolicy tune" in problem.remedy


def test_a_miss_can_be_an_error(tmp_path: Path) -> None:
    """`on_miss: error` refuses a config with a site that nothing decides."""
    text = (
        "gmm:\n  on_miss: error\n  rules:\n  - {name: a, when: {layer: wi}, tile: {mlp_dim: 512}}\n"
    )
    (problem,) = refused(policy(tmp_path, text), MOE)
    assert problem.code == "no-match"
    assert "wo fwd, wo dlhs, wo drhs" in problem.message
    assert "MaxText's defaults 512 × 1024 × 1024 are used" in problem.message


def test_maxtexts_defaults_are_no_miss_under_a_policy_without_rules() -> None:
    """The shipped default policy has no tile rules, and does not warn of each site."""
    assert not warned(resolved(DEFAULT, MOE), "no-match")


def test_a_dense_model_has_no_sites(tmp_path: Path) -> None:
    """Without experts the knobs are listed as not honoured, and nothing is missed or illegal."""
    dense = {"vocab_size": 32000, "per_device_batch_size": 1, "max_target_length": 2048}
    resolution = resolved(policy(tmp_path, FWD_128), dense)
    assert resolution.backend == "none"
    assert resolution.settings["wi_tile_fwd_embed_dim"].honoured.by is None
    assert resolution.warnings == ()


def test_rules_that_need_unknown_facts_are_named(tmp_path: Path) -> None:
    """A rule that depends on an unknown device is passed over, and a warning says what to set."""
    text = "gmm:\n  rules:\n  - {name: on v6e, when: {device: v6e}, tile: {mlp_dim: 512}}\n"
    config = config_file(tmp_path, {**MOE, "compile_topology": "''"})
    (problem,) = warned(resolved(policy(tmp_path, text), config), "undecidable-rule")
    assert str(problem) == (
        f"{config}: warning: rule 'on v6e' was passed over: device is not known (at gmm.rules) "
        "[undecidable-rule]\n  remedy: set compile_topology or --device"
    )


def test_zero1_is_listed_and_says_when_it_has_no_axis() -> None:
    """shard_optimizer_over_data is off by default; switched on without a data axis it warns."""
    setting = resolved(DEFAULT, MOE).settings["shard_optimizer_over_data"]
    assert (setting.value, setting.origin.kind) == (False, "default")
    idle = {**MOE, "shard_optimizer_over_data": True, "ici_fsdp_parallelism": 1,
            "ici_data_parallelism": 1, "ici_tensor_parallelism": 4}  # fmt: skip
    assert warned(resolved(DEFAULT, idle), "zero1-without-data")


def test_engine_cache_comes_from_the_policy(tmp_path: Path) -> None:
    """engine.cache_pure_state is automatic unless a policy says otherwise."""
    assert resolved(DEFAULT, MOE).settings["engine.cache_pure_state"].origin.kind == "auto"
    given = policy(tmp_path, "engine: {cache_pure_state: false}\n")
    setting = resolved(given, MOE).settings["engine.cache_pure_state"]
    assert (setting.value, setting.origin.kind, setting.origin.line) == (False, "rule", 3)


def test_facts_show_what_decisions_could_depend_on(tmp_path: Path) -> None:
    """Facts hold derived sizes, explicit keys and keys that rules ask for, not all 900 keys."""
    text = "gmm:\n  rules:\n  - {name: a, when: {remat_policy: full}, tile: {mlp_dim: 512}}\n"
    facts = resolved(policy(tmp_path, text), MOE).facts
    assert {"remat_policy", "num_experts", "wi.embed_dim", "device", "maxtext"} <= facts.keys()
    assert "checkpoint_period" not in facts


class TestAtRunTime:
    """The same rules answer call by call, without a config too."""

    CALL: ClassVar = {"batch_seq": 4096, "embed_dim": 2048, "mlp_dim": 4096, "dtype": "bfloat16"}

    def without_config(self, given: Policy) -> Resolver:
        """A resolver that knows only the device."""
        return Resolver(given, None, {"device": "v6e"})

    def test_rules_match_what_the_call_shows(self, tmp_path: Path) -> None:
        """Rules on shapes and passes hold without a config; the rest is of kind default."""
        resolver = self.without_config(policy(tmp_path, FWD_128))
        verdict = resolver.tile("wi", "fwd", self.CALL)
        assert {axis: verdict.fields[axis].value for axis in AXES} == dict.fromkeys(AXES, 128)
        other = resolver.tile("wi", "drhs", self.CALL)
        assert not other.decided
        assert other.nearest.startswith("rule 'short'")

    def test_rules_on_the_config_are_undecidable(self, tmp_path: Path) -> None:
        """A rule that needs a config fact is reported with the fact that is missing."""
        text = "gmm:\n  rules:\n  - {name: a, when: {num_experts: 8}, tile: {mlp_dim: 512}}\n"
        verdict = self.without_config(policy(tmp_path, text)).tile("wi", "fwd", self.CALL)
        assert verdict.undecidable == {"a": ("num_experts",)}

    def test_answers_are_remembered_by_call(self, tmp_path: Path) -> None:
        """Asking again with equal facts gives the same object; other facts another."""
        resolver = self.without_config(policy(tmp_path, FWD_128))
        first = resolver.tile("wi", "fwd", dict(self.CALL))
        assert resolver.tile("wi", "fwd", dict(self.CALL)) is first
        assert resolver.tile("wi", "fwd", {**self.CALL, "batch_seq": 512}) is not first

    def test_facts_of_a_call_go_before_those_of_the_config(self, tmp_path: Path) -> None:
        """The actual rows of a call decide, not the predicted ones."""
        text = "gmm:\n  rules:\n  - {name: a, when: {batch_seq: 640}, tile: {mlp_dim: 512}}\n"
        resolver = ask(policy(tmp_path, text), MOE)
        assert resolver.tile("wi", "fwd", {**self.CALL, "batch_seq": 640}).decided
        assert not resolver.tile("wi", "fwd", self.CALL).decided

    def test_evaluation_uses_the_train_knobs_unless_it_has_rules_of_its_own(
        self, tmp_path: Path
    ) -> None:
        """An explicit train knob holds in evaluation too, as MaxText reads it there."""
        resolver = ask(policy(tmp_path, ""), {**MOE, "wo_tile_fwd_mlp_dim": 256})
        assert resolver.tile("wo", "fwd", self.CALL, "eval").fields["mlp_dim"].value == 256

    def test_other_ops(self, tmp_path: Path) -> None:
        """Rules of another op answer by its name; an op without rules has no field."""
        text = """\
ops:
- op: flash_attention
  rules:
  - {name: long, when: {arg.q.dim1: '>=4096'}, config: {block_q: 512}}
"""
        resolver = self.without_config(policy(tmp_path, text))
        verdict = resolver.op("flash_attention", {"arg.q.dim1": 8192})
        assert verdict.fields["block_q"].value == 512
        assert resolver.op("flash_attention", {"arg.q.dim1": 8192}) is verdict
        assert resolver.op("flash_attention", {"arg.q.dim1": 128}).fields == {}
        assert resolver.op("other", {}).fields == {}

    def test_there_is_no_resolution_without_a_config(self) -> None:
        """A whole resolution needs a config; the error says what to ask instead."""
        with pytest.raises(TypeError, match="without one, ask tile"):
            Resolver(DEFAULT, None, Facts({})).resolution()


def test_unknown_devices_are_refused() -> None:
    """A device that nobody knows is an error that lists the known ones."""
    with pytest.raises(ConfigError, match="'v9' is not a device"):
        DEFAULT.resolve(MOE, device="v9")
