"""The table of settings against the config keys of every MaxText release."""

from __future__ import annotations

import pytest

from tilepolicy.configs.keys import nearest_release, release_keys
from tilepolicy.settings import (
    AXES,
    LATEST_MAXTEXT,
    LAYERS,
    MAXTEXT_RELEASES,
    PASSES,
    SETTINGS,
    settings_of_release,
    tile_setting,
)


@pytest.mark.parametrize("release", MAXTEXT_RELEASES)
def test_table_is_what_the_release_has(release: str) -> None:
    """A release has exactly the settings that its base.yml has, with the defaults of the table."""
    base = release_keys(release).base
    theirs = {name: base[name] for name in SETTINGS if name in base}
    ours = {
        name: setting.default
        for name, setting in settings_of_release(release).items()
        if setting.since is not None
    }
    assert ours == theirs


@pytest.mark.parametrize(
    ("release", "count"),
    [("0.2.0", 22), ("0.2.3", 22), ("0.2.4", 23), ("0.2.5", 29), ("0.3.0", 29), ("0.1.9", 22)],
)
def test_number_of_settings(release: str, count: int) -> None:
    """ag_once came with 0.2.4 and the six eval tiles with 0.2.5; others have the nearest's."""
    assert len(settings_of_release(release)) == count


def test_tile_settings_are_18_and_6() -> None:
    """Every layer, pass and axis has its train knob, and fwd its eval knob."""
    train = {tile_setting(la, p, a) for la in LAYERS for p in PASSES for a in AXES}
    evaluation = {tile_setting(layer, "fwd", a, "eval") for layer in LAYERS for a in AXES}
    assert {name for name, s in SETTINGS.items() if s.is_tile} == train | evaluation
    assert (len(train), len(evaluation)) == (18, 6)


@pytest.mark.parametrize(
    ("version", "release"),
    [(None, LATEST_MAXTEXT), ("0.2.3", "0.2.3"), ("0.2.3.post1", "0.2.3"), ("1.0", LATEST_MAXTEXT)],
)
def test_nearest_release(version: str | None, release: str) -> None:
    """An unknown version has the keys of the last known release before it."""
    assert nearest_release(version) == release


def test_release_before_the_first_known() -> None:
    """A version older than all known ones has the keys of the oldest."""
    assert nearest_release("0.1.0") == MAXTEXT_RELEASES[0]


def test_table_knows_model_and_rl_keys() -> None:
    """Keys of the pydantic model, of reinforcement learning and of base.yml are all known."""
    keys = release_keys("0.2.5")
    assert all(keys.knows(key) for key in ("vocab_size", "max_prompt_length", "grpo_beta"))
    assert not keys.knows("num_vocab_tilling")
    assert "deepseek3-671b" in keys.models


@pytest.mark.maxtext
def test_shipped_table_is_that_of_the_installed_release() -> None:
    """The installed base.yml has the digest of the table and parses to its values."""
    import hashlib

    from tilepolicy import source
    from tilepolicy.configs.files import find_maxtext_configs

    folder = find_maxtext_configs()
    assert folder is not None, "MaxText is not installed"
    raw = (folder / "base.yml").read_bytes()
    keys = release_keys(LATEST_MAXTEXT)
    assert hashlib.sha256(raw).hexdigest() == keys.base_sha256
    document = source.parse(raw, "base.yml", "maxtext")
    assert document.problems == ()
    assert document.value == keys.base
