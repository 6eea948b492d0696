"""What each MaxText release has in its ``base.yml``: a shipped table, read on demand.

The table (``data/maxtext_keys.json``) is written from the wheels by ``scripts/maxtext_keys.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

from tilepolicy.settings import LATEST_MAXTEXT, MAXTEXT_RELEASES

__all__ = ["COMPUTED", "OLD_KEYS", "ReleaseKeys", "nearest_release", "release_keys"]

COMPUTED: Final = "?"
"""Stands in the table for a default that MaxText computes when it builds its model."""

OLD_KEYS: Final[Mapping[str, str]] = {
    "tile_batch_seq": "the six {wi,wo}_tile_{fwd,dlhs,drhs}_batch_seq",
    "tile_activation_dim": "the six {wi,wo}_tile_{fwd,dlhs,drhs}_embed_dim",
    "tile_embed_dim": "the six {wi,wo}_tile_{fwd,dlhs,drhs}_embed_dim",
    "tile_weight_dim": "the six {wi,wo}_tile_{fwd,dlhs,drhs}_mlp_dim",
    "tile_mlp_dim": "the six {wi,wo}_tile_{fwd,dlhs,drhs}_mlp_dim",
}
"""Keys of before November 2025, still in recipes, and what took their place."""


class ReleaseKeys(NamedTuple):
    """The config keys of one MaxText release.

    Attributes:
        release: ``0.2.5``.
        base_sha256: digest of its ``configs/base.yml``.
        base: key to its value in ``base.yml``.
        fields: defaults of the pydantic model that differ from ``base``, or that it lacks:
            what holds for a config that does not build on ``base.yml``.
        rl: further keys of the configs of reinforcement learning.
        models: names of the models that have a file of their own.
    """

    release: str
    base_sha256: str
    base: Mapping[str, object]
    fields: Mapping[str, object]
    rl: frozenset[str]
    models: tuple[str, ...]

    def knows(self, key: str) -> bool:
        """Whether the release accepts this key in a config."""
        return key in self.base or key in self.fields or key in self.rl or key == "base_config"

    def names(self) -> tuple[str, ...]:
        """Every key that the release accepts, sorted: for suggestions."""
        return tuple(sorted({*self.base, *self.fields, *self.rl, "base_config"}))


@cache
def _table() -> dict[str, ReleaseKeys]:
    text = resources.files("tilepolicy").joinpath("data/maxtext_keys.json").read_text("utf-8")
    releases: dict[str, ReleaseKeys] = {}
    base: dict[str, object] = {}
    fields: dict[str, object] = {}
    for release, step in json.loads(text)["releases"].items():
        base = {k: v for k, v in base.items() if k not in step["removed"]} | step["set"]
        gone = step["fields_removed"]
        fields = {k: v for k, v in fields.items() if k not in gone} | step["fields"]
        releases[release] = ReleaseKeys(
            release, step["base_sha256"], base, fields, frozenset(step["rl"]), tuple(step["models"])
        )
    return releases


def nearest_release(version: str | None) -> str:
    """The known release whose keys stand for ``version``; the latest for None or a later one."""
    if version is None or version in MAXTEXT_RELEASES:
        return version or LATEST_MAXTEXT
    wanted = _numbers(version)
    older = [release for release in MAXTEXT_RELEASES if _numbers(release) <= wanted]
    return older[-1] if older else MAXTEXT_RELEASES[0]


def release_keys(version: str | None = None) -> ReleaseKeys:
    """The keys of a release, or of the nearest known one at or before it."""
    return _table()[nearest_release(version)]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
