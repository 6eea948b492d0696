"""Sizes in bytes as people write them: ``128MiB`` is 134,217,728, ``128MB`` is 128,000,000."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

__all__ = ["UNITS", "BytesError", "parse_bytes", "show_bytes"]

UNITS: Final = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGTP", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}

_SIZE: Final = re.compile(r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,18})?) ?(?P<unit>[A-Za-z]+)")


class BytesError(ValueError):
    """A text is no size; the remedy says what to write."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def parse_bytes(text: str) -> int:
    """The number of bytes that a text with a unit says.

    Raises:
        BytesError: no number with a unit, an unknown unit, or no whole number of bytes.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise BytesError(f"{text!r} is no size in bytes", "write a number with a unit: 128MiB")
    number, unit = Fraction(match["number"]), match["unit"]
    if unit not in UNITS:
        raise BytesError(f"{unit!r} is no unit of bytes", _unit_remedy(match["number"], unit))
    size = number * UNITS[unit]
    if size.denominator != 1:
        raise BytesError(f"{text} is no whole number of bytes", "write a smaller unit")
    return int(size)


def _unit_remedy(number: str, unit: str) -> str:
    """Both readings of a sloppy unit (``MB`` and ``MiB`` differ by 5 per cent)."""
    alike = [known for known in UNITS if known != "B" and known[0].lower() == unit[0].lower()]
    if not alike:
        return f"write one of {', '.join(UNITS)}"
    return "write " + " or ".join(
        f"{number}{known} ({show_bytes(int(Fraction(number) * UNITS[known]))})" for known in alike
    )


def show_bytes(size: int) -> str:
    """A size for people: ``134,217,728 bytes``."""
    return f"{size:,} bytes"
