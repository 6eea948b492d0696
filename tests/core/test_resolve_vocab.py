"""Vocabulary settings: automatic tiling, the loss, gathering once, and releases with a defect."""

from __future__ import annotations

from pathlib import Path

import pytest
from resolving import MOE, VERSIONS, config_file, policy, refused, resolved

import tilepolicy
from tilepolicy.report import maxtext_lines

DEFECTIVE = {**VERSIONS, "maxtext": "0.2.4"}
LARGE = {"vocab_size": 129280, "per_device_batch_size": 1, "max_target_length": 8192}


@pytest.mark.parametrize(
    ("tokens", "vocab", "tiles"),
    [
        (8192, 262144, 64),
        (8192, 129280, 32),
        (8192, 32000, 1),
        (3000, 128256, 12),
        (512, 65536, 1),
        (2048, 151936, 16),
    ],
)
def test_automatic_tiling_of_the_documented_examples(tokens: int, vocab: int, tiles: int) -> None:
    """The six documented examples come out of a config, with the arithmetic as the reason."""
    config = {
        "vocab_size": vocab,
        "per_device_batch_size": 1,
        "max_target_length": tokens,
        "cast_logits_to_fp32": True,
    }
    setting = resolved(tilepolicy.load("maxtext-default"), config).settings["num_vocab_tiling"]
    assert setting.value == tiles
    assert setting.origin.kind == "auto"
    assert setting.origin.reason.startswith(f"logits {tokens} tokens × {vocab} × 4 B = ")


@pytest.mark.parametrize("written", [-1, "auto"])
def test_an_automatic_value_in_a_config_is_not_explicit(written: object) -> None:
    """-1 and auto in a config ask for the automatic choice."""
    config = {**LARGE, "num_vocab_tiling": written}
    setting = resolved(tilepolicy.load("maxtext-default"), config).settings["num_vocab_tiling"]
    assert (setting.value, setting.origin.kind) == (32, "auto")


def test_an_explicit_number_wins_and_the_automatic_one_stays_visible(tmp_path: Path) -> None:
    """An explicit number beats auto, which is kept as a loser with its arithmetic."""
    config = config_file(tmp_path, {**LARGE, "num_vocab_tiling": 4})
    origin = (
        resolved(tilepolicy.load("maxtext-default"), config).settings["num_vocab_tiling"].origin
    )
    assert (origin.kind, origin.file, origin.line) == ("config", config, 5)
    assert [(loser.kind, loser.value) for loser in origin.lost] == [("auto", 32), ("default", 1)]
    assert "126.25 MiB a chunk" in origin.lost[0].reason


def test_block_diffusion_locks_one_tile() -> None:
    """With auto, block diffusion resolves to 1 with the lock's reason."""
    config = {**LARGE, "training_objective": "block_diffusion"}
    setting = resolved(tilepolicy.load("maxtext-default"), config).settings["num_vocab_tiling"]
    assert (setting.value, setting.origin.kind) == (1, "lock")
    assert setting.origin.reason == "block-diffusion losses need the whole logits tensor"
    assert [(loser.kind, loser.value) for loser in setting.origin.lost] == [("auto", 1)]
    assert "32 is the smallest power of two" in setting.origin.lost[0].reason


def test_an_explicit_value_against_a_lock_names_both_places(tmp_path: Path) -> None:
    """An explicit 2 under block diffusion is one error with the config's and the lock's place."""
    values = {**LARGE, "training_objective": "block_diffusion", "num_vocab_tiling": 2}
    config = config_file(tmp_path, values)
    (problem,) = refused(tilepolicy.load("maxtext-default"), config)
    assert problem.code == "lock-contradiction"
    assert problem.place is not None
    assert (problem.place.file, problem.place.line) == (config, 6)
    assert problem.place.text == "num_vocab_tiling: 2"
    assert problem.message == (
        "num_vocab_tiling is 2 here, but lock 'block diffusion keeps one vocabulary tile' at "
        "maxtext-default:13 keeps it at 1: block-diffusion losses need the whole logits tensor"
    )


def test_a_lock_that_agrees_with_the_config_is_no_contradiction() -> None:
    """An explicit value equal to the lock's is fine."""
    config = {**LARGE, "training_objective": "block_diffusion", "num_vocab_tiling": 1}
    setting = resolved(tilepolicy.load("maxtext-default"), config).settings["num_vocab_tiling"]
    assert (setting.value, setting.origin.kind) == (1, "lock")


def test_a_number_in_the_policy_is_a_rule(tmp_path: Path) -> None:
    """A number that the policy sets wins against the default and has the policy's place."""
    given = policy(tmp_path, "vocab:\n  num_vocab_tiling: 8\n  loss: upstream\n")
    setting = resolved(given, LARGE).settings["num_vocab_tiling"]
    assert (setting.value, setting.origin.kind, setting.origin.line) == (8, "rule", 4)


def test_rules_set_other_settings_under_conditions(tmp_path: Path) -> None:
    """A rule with `set` decides a setting where its conditions hold, before the section's value."""
    given = policy(
        tmp_path,
        "gmm:\n  rules:\n  - name: long\n    when: {max_target_length: '>=8192'}\n"
        "    set: {num_vocab_tiling: 16}\n",
    )
    assert resolved(given, LARGE).settings["num_vocab_tiling"].value == 16
    short = {**LARGE, "max_target_length": 4096}
    assert resolved(given, short).settings["num_vocab_tiling"].origin.kind == "auto"


def test_no_working_number_says_which_lengths_would_work() -> None:
    """Where no divisor is small enough the error names the nearest lengths that can be cut."""
    config = {**LARGE, "max_target_length": 8191}
    (problem,) = refused(tilepolicy.load("maxtext-default"), config)
    assert problem.code == "no-tiling"
    assert problem.remedy == (
        "max_target_length 8190 or 8192 would work; or set vocab.loss to online"
    )


def test_online_loss_needs_no_number_of_tiles(tmp_path: Path) -> None:
    """The loss over vocabulary tiles works where the tokens cannot be cut."""
    given = policy(tmp_path, "vocab: {loss: online}\n")
    settings = resolved(given, {**LARGE, "max_target_length": 8191}).settings
    assert (settings["num_vocab_tiling"].value, settings["loss"].value) == (1, "online")


def test_an_unknown_size_is_named_and_never_guessed() -> None:
    """Automatic tiling without a length is an error that says which key would settle it."""
    (problem,) = refused(tilepolicy.load("maxtext-default"), {**LARGE, "per_device_batch_size": 0})
    assert problem.code == "missing-fact"
    assert problem.message == ("num_vocab_tiling: auto needs tokens_per_device, which is not known")
    assert problem.remedy == "set per_device_batch_size, or num_vocab_tiling itself"


def test_an_unknown_size_does_not_matter_to_an_explicit_number() -> None:
    """An explicit number needs no size."""
    config = {**LARGE, "vocab_size": 0, "num_vocab_tiling": 2}
    setting = resolved(tilepolicy.load("maxtext-default"), config).settings["num_vocab_tiling"]
    assert setting.value == 2


class TestReleasesWithWrongGradients:
    """Before 0.2.5 MaxText's own tiled loss computes wrong gradients."""

    def test_auto_stays_off(self) -> None:
        """Auto resolves to 1, with the defect and the number it would have been as its reason."""
        given = tilepolicy.load("maxtext-default")
        setting = resolved(given, LARGE, versions=DEFECTIVE).settings["num_vocab_tiling"]
        assert (setting.value, setting.origin.kind) == (1, "auto")
        assert "does not multiply its hidden-state gradient" in setting.origin.reason
        assert "it would be 32" in setting.origin.reason

    def test_an_explicit_number_is_an_error(self) -> None:
        """An explicit number above 1 is refused, with the ways out."""
        given = tilepolicy.load("maxtext-default")
        config = {**LARGE, "num_vocab_tiling": 4}
        (problem,) = refused(given, config, versions=DEFECTIVE)
        assert problem.code == "broken-upstream-loss"
        assert problem.remedy is not None
        assert "allow_broken_upstream_loss" in problem.remedy

    @pytest.mark.parametrize("number", ["auto", "4"])
    def test_it_can_be_allowed(self, tmp_path: Path, number: str) -> None:
        """allow_broken_upstream_loss lets both auto and a number through."""
        given = policy(
            tmp_path,
            f"vocab: {{num_vocab_tiling: {number}, loss: upstream, "
            "allow_broken_upstream_loss: true}\n",
        )
        setting = resolved(given, LARGE, versions=DEFECTIVE).settings["num_vocab_tiling"]
        assert setting.value == (32 if number == "auto" else 4)

    def test_an_own_loss_may_be_tiled_but_only_in_a_scope(self, tmp_path: Path) -> None:
        """With tilepolicy's loss the number takes effect by apply, and is not given to MaxText."""
        given = policy(tmp_path, "vocab: {loss: chunked}\n")
        resolution = resolved(given, LARGE, versions=DEFECTIVE)
        setting = resolution.settings["num_vocab_tiling"]
        assert (setting.value, setting.honoured.by) == (32, "apply")
        assert not any(line.startswith("num_vocab") for line in maxtext_lines(resolution))


@pytest.mark.parametrize(
    ("vocab", "loss"), [(1000, "sparse"), (129280, "chunked")], ids=["one chunk", "many"]
)
def test_automatic_loss_follows_the_tiling(tmp_path: Path, vocab: int, loss: str) -> None:
    """`loss: auto` takes the loss that fits the number of chunks, and only a scope honours it."""
    settings = resolved(policy(tmp_path, ""), {**LARGE, "vocab_size": vocab}).settings
    assert settings["loss"].value == loss
    assert settings["loss"].honoured.by == "apply"


def test_automatic_loss_leaves_dpo_alone() -> None:
    """Under DPO the loss stays MaxText's, with the reason."""
    given = tilepolicy.load("maxtext-default")
    setting = resolved(given, {**LARGE, "use_dpo": True}).settings["loss"]
    assert (setting.value, setting.honoured.by) == ("upstream", "maxtext")


def test_gathering_once_is_the_default() -> None:
    """vocab_tiling_ag_once is true by default, and does nothing with one tile."""
    given = tilepolicy.load("maxtext-default")
    tiled = resolved(given, LARGE).settings["vocab_tiling_ag_once"]
    assert (tiled.value, tiled.honoured.by) == (True, "maxtext")
    whole = resolved(given, {**LARGE, "vocab_size": 1000}).settings["vocab_tiling_ag_once"]
    assert whole.honoured.by is None
    assert whole.honoured.why == "with one vocabulary tile there is nothing to gather once"


def test_gathering_once_weighs_both_numbers(tmp_path: Path) -> None:
    """`auto` shows the gathers saved and the bytes held."""
    given = policy(tmp_path, "vocab: {vocab_tiling_ag_once: auto, loss: upstream}\n")
    config = {**LARGE, "base_emb_dim": 7168, "ici_fsdp_parallelism": 8}
    setting = resolved(given, config).settings["vocab_tiling_ag_once"]
    assert setting.value is False
    assert setting.origin.reason == (
        "saves 63 all-gathers of the head a step and holds 5.18 GiB (head 129280 × 7168 × 2 B and "
        "its gradient × 4 B) > max_held_bytes 1 GiB"
    )


def test_gathering_once_without_sizes_keeps_the_default(tmp_path: Path) -> None:
    """Where the shards are not known `auto` says so and keeps tilepolicy's default."""
    given = policy(tmp_path, "vocab: {vocab_tiling_ag_once: auto, num_vocab_tiling: 8}\n")
    config = {**MOE, "ici_fsdp_parallelism": -1, "compile_topology": ""}
    setting = resolved(given, config).settings["vocab_tiling_ag_once"]
    assert setting.value is True
    assert "not known" in setting.origin.reason
