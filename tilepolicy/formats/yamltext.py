"""Policy text from plain values: the scalars and the one-line mappings that policies use."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

__all__ = ["comment", "flow", "scalar"]

# Line ends of Unicode, which YAML folds in a quoted text, and characters that it has only escaped.
_UNSAFE: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:[./-][A-Za-z0-9_]+)*")
# Words that some reader of YAML takes for something else than text.
_TAKEN: Final = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan"})


def scalar(value: bool | int | float | str) -> str:
    """A value as YAML, in quotes wherever plain text could be read as something else.

    Raises:
        ValueError: a float that is not finite.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = json.dumps(value, allow_nan=False)
        # YAML 1.1 takes 1e-05 for text.
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    if _PLAIN.fullmatch(value) and value.lower() not in _TAKEN:
        return value
    # JSON strings are YAML strings, but for what YAML folds or forbids; lone surrogates have no
    # encoding in either. JSON's own escapes of all but ASCII would be pairs of surrogates.
    text = json.dumps(value.encode("utf-8", "replace").decode("utf-8"), ensure_ascii=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def flow(values: Mapping[str, bool | int | float | str]) -> str:
    """A mapping on one line: ``{batch_seq: 512, embed_dim: 7168}``."""
    return "{" + ", ".join(f"{name}: {scalar(value)}" for name, value in values.items()) + "}"


def comment(text: str) -> str:
    """Lines as comments; an empty line stays a bare ``#``."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())
