"""A text with its file name: offsets to places, bytes to characters that YAML allows."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

from tilepolicy.errors import Place, Problem

__all__ = ["SourceText", "decode"]

# YAML 1.1, "Characters": what a stream may hold. The byte order mark is only allowed in front.
_FORBIDDEN_ASCII: Final = re.compile("[^\t\n\r\x20-\x7e]")
_LINE_BREAK: Final = re.compile(r"\r\n|\r|\n")


@cache
def _forbidden() -> re.Pattern[str]:
    """All forbidden characters; apart, for few texts need it and it is slow to compile."""
    return re.compile(
        "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
    )


@dataclass(frozen=True)
class SourceText:
    """A text and the name under which the user knows it.

    Attributes:
        file: path as the user named it.
        text: all characters, without a byte order mark.
    """

    file: str
    text: str

    @cached_property
    def _line_starts(self) -> list[int]:
        """Offset of the first character of each line; lines as editors count them."""
        return [0, *(match.end() for match in _LINE_BREAK.finditer(self.text))]

    def line(self, offset: int) -> int:
        """1-based number of the line that holds the character at ``offset``."""
        return bisect_right(self._line_starts, offset)

    def place(self, offset: int) -> Place:
        """The place of the character at ``offset`` (0-based, in characters)."""
        offset = max(0, min(offset, len(self.text)))
        line = self.line(offset)
        start = self._line_starts[line - 1]
        end = self._line_starts[line] if line < len(self._line_starts) else len(self.text)
        shown = self.text[start:end].rstrip("\r\n")
        return Place(self.file, line, offset - start + 1, shown)


def decode(text: str | bytes, file: str, max_bytes: int) -> tuple[SourceText, Problem | None]:
    """Make a source text, refusing what YAML does not allow in one.

    Args:
        text: characters, or bytes in UTF-8 with or without a byte order mark.
        file: name for places.
        max_bytes: largest size, in bytes of UTF-8.

    Returns:
        The text (what could be read of it), and the problem that makes it unusable, if any.
    """
    if len(text) > max_bytes:
        message = f"the file is larger than {max_bytes} bytes"
        problem = Problem("too-large", message, Place(file, 1, 1), "split the file")
        return SourceText(file, ""), problem
    if isinstance(text, bytes):
        body = text.removeprefix(codecs.BOM_UTF8)
        try:
            text = body.decode("utf-8")
        except UnicodeDecodeError as error:
            return _undecodable(body, file, error.start)
    source = SourceText(file, text.removeprefix("\ufeff"))
    forbidden = _FORBIDDEN_ASCII if source.text.isascii() else _forbidden()
    if (bad := forbidden.search(source.text)) is not None:
        message = f"the character U+{ord(bad.group()):04X} is not allowed in YAML"
        remedy = 'delete it, or write it as an escape inside double quotes ("\\u0000")'
        problem = Problem("bad-character", message, source.place(bad.start()), remedy)
        return source, problem
    return source, None


def _undecodable(body: bytes, file: str, start: int) -> tuple[SourceText, Problem]:
    # Invalid bytes become U+FFFD, one for each maximal part, so that what stands before the
    # first of them keeps its offsets and the line can be shown.
    source = SourceText(file, body.decode("utf-8", "replace"))
    offset = len(body[:start].decode("utf-8"))
    problem = Problem(
        "bad-encoding",
        f"the byte 0x{body[start]:02x} is not UTF-8",
        source.place(offset),
        "save the file as UTF-8",
    )
    return source, problem
