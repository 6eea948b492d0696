"""Release versions, ordered as PEP 440 orders them; small enough to spare a dependency."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering
from typing import Final

__all__ = ["Version"]

_VERSION: Final = re.compile(
    r"""v?(?:(?P<epoch>[0-9]+)!)?(?P<release>[0-9]+(?:\.[0-9]+)*)
    (?:[-_.]?(?P<pre>alpha|beta|preview|pre|rc|a|b|c)[-_.]?(?P<pre_n>[0-9]*))?
    (?:-(?P<post_bare>[0-9]+)|[-_.]?(?P<post>post|rev|r)[-_.]?(?P<post_n>[0-9]*))?
    (?:[-_.]?(?P<dev>dev)[-_.]?(?P<dev_n>[0-9]*))?
    (?:\+[a-z0-9]+(?:[-_.][a-z0-9]+)*)?""",
    re.X,
)
_PRE: Final = {"alpha": 0, "a": 0, "beta": 1, "b": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}
_PRE_SHORT: Final = ("a", "b", "rc")
_MAX_LENGTH: Final = 100


type _Key = tuple[int, tuple[int, ...], tuple[int, int], int, tuple[int, int]]


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """A version; two spellings of one version are equal (``1.0`` and ``1.0.0``).

    A local label (``0.8.0+cuda``) is left out of comparisons: it names a build, not a release.

    Attributes:
        text: as it was written.
        key: what orders it.
    """

    text: str
    key: _Key

    @classmethod
    def parse(cls, text: str) -> Version | None:
        """The version that a text spells, or None."""
        match = _VERSION.fullmatch(text.strip().lower()) if len(text) <= _MAX_LENGTH else None
        if match is None:
            return None
        release = tuple(int(part) for part in match["release"].split("."))
        while len(release) > 1 and release[-1] == 0:
            release = release[:-1]
        key = (int(match["epoch"] or 0), release, *_suffix_key(match))
        return cls(text.strip(), key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.key == other.key

    def __lt__(self, other: Version) -> bool:
        return self.key < other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        """One spelling for all equal versions: ``1.0rc1`` and ``1.rc-1`` are ``1rc1``."""
        return _spell(*self.key)


def _suffix_key(match: re.Match[str]) -> tuple[tuple[int, int], int, tuple[int, int]]:
    """Order of what follows the release numbers: dev < pre-release < release < post-release."""
    is_post = bool(match["post"] or match["post_bare"])
    post = int(match["post_bare"] or match["post_n"] or 0) if is_post else -1
    if match["pre"]:
        pre = (_PRE[match["pre"]], int(match["pre_n"] or 0))
    else:
        # A development release of the final release comes before its pre-releases.
        pre = (-1, 0) if match["dev"] and not is_post else (3, 0)
    dev = (0, int(match["dev_n"] or 0)) if match["dev"] else (1, 0)
    return pre, post, dev


def _spell(
    epoch: int,
    release: tuple[int, ...],
    pre: tuple[int, int],
    post: int,
    dev: tuple[int, int],
) -> str:
    text = f"{epoch}!" if epoch else ""
    text += ".".join(map(str, release))
    text += f"{_PRE_SHORT[pre[0]]}{pre[1]}" if pre[0] in range(len(_PRE_SHORT)) else ""
    text += f".post{post}" if post >= 0 else ""
    return text + (f".dev{dev[1]}" if dev[0] == 0 else "")
