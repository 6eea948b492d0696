"""What an unquoted YAML scalar means, in a policy and in a MaxText config.

YAML 1.1 (which PyYAML and so most of the field reads) and YAML 1.2 disagree on ``0512``, ``on``,
``1e3`` and more. A policy accepts only what both read alike. A MaxText config means what
MaxText makes of it, which reads it with OmegaConf. OmegaConf 2.4 was seen to read PyYAML's 1.1 with
two changes: exponents need neither point nor sign (``1e3`` is 1000.0), and dates stay text.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

__all__ = ["Atom", "Dialect", "Odd", "ScalarReader"]

type Atom = str | int | float | bool | None
Dialect = Literal["policy", "maxtext"]

_TAG: Final = "tag:yaml.org,2002:"
_TYPES: Final[dict[str, type | None]] = {"bool": bool, "int": int, "float": float, "null": None}

# Longer numbers are never meant, and Python refuses to convert very long ones.
_MAX_NUMBER_LENGTH: Final = 100

_PLAIN_INT: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_PLAIN_FLOAT: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+][0-9]+)?")
_CONSTANTS: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}
# Numbers for YAML 1.2 that YAML 1.1 takes for text.
_ONLY_12: Final = re.compile(
    r"[-+]?(?:[0-9]+|0o[0-7]+|(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+)"
)
_OMEGACONF_FLOAT: Final = re.compile(
    r"""[-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9_]*)?[eE][-+]?[0-9]+
      | \.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?""",
    re.X,
)


class Odd(NamedTuple):
    """Why a scalar is refused.

    Attributes:
        code: problem code.
        message: what is wrong.
        remedy: what to write instead.
    """

    code: str
    message: str
    remedy: str


class _Yaml11(SafeConstructor, Resolver):
    """PyYAML's own reading of one scalar."""

    def __init__(self) -> None:
        SafeConstructor.__init__(self)
        Resolver.__init__(self)

    def kind(self, text: str) -> str:
        """``int``, ``float``, ``bool``, ``null``, ``str``, ``timestamp``, ``merge``, ``value``."""
        tag: str = self.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        return tag.removeprefix(_TAG)

    def value(self, kind: str, text: str) -> Atom:
        """The value of a text as a bool, an int, a float or null."""
        node = yaml.ScalarNode(_TAG + kind, text)
        value: Atom = self.construct_object(node)
        return value


class ScalarReader:
    """Reads unquoted scalars of one dialect; remembers those it has seen."""

    def __init__(self, dialect: Dialect) -> None:
        self._read = _maxtext if dialect == "maxtext" else _policy
        self._yaml11 = _Yaml11()
        self._seen: dict[str, Atom | Odd] = {}

    def read(self, text: str) -> Atom | Odd:
        """The value of an unquoted scalar, or why it is refused."""
        try:
            return self._seen[text]
        except KeyError:
            value = self._seen[text] = self._read(text, self._yaml11)
            return value


def _policy(text: str, yaml11: _Yaml11) -> Atom | Odd:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0].isalpha() and text.lower() not in SafeConstructor.bool_values:
        return text
    if (odd := _too_long(text, yaml11)) is not None:
        return odd
    if _PLAIN_INT.fullmatch(text):
        return int(text)
    if _PLAIN_FLOAT.fullmatch(text):
        return float(text)
    kind = yaml11.kind(text)
    if kind in _TYPES:
        return _read_differently(text, yaml11.value(kind, text))
    if _ONLY_12.fullmatch(text):
        return _read_differently(text, text)
    return text


def _maxtext(text: str, yaml11: _Yaml11) -> Atom | Odd:
    if (odd := _too_long(text, yaml11)) is not None:
        return odd
    kind = yaml11.kind(text)
    if kind in _TYPES:
        return yaml11.value(kind, text)
    if kind in ("merge", "value"):
        message = f"MaxText cannot read an unquoted {text!r}"
        return Odd("not-a-value", message, f'quote it: "{text}"')
    if _OMEGACONF_FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def _too_long(text: str, yaml11: _Yaml11) -> Odd | None:
    if len(text) <= _MAX_NUMBER_LENGTH:
        return None
    if yaml11.kind(text) not in _TYPES and not _ONLY_12.fullmatch(text):
        return None
    message = f"a number of {len(text)} characters is not supported"
    return Odd("number-too-long", message, "write a shorter number, or quote it if it is text")


def _read_differently(text: str, read: Atom) -> Odd:
    """Explain a scalar that the two versions of YAML, or a reader and YAML, see differently."""
    if isinstance(read, bool):
        word = "true" if read else "false"
        message = f"{text} is {word} in YAML 1.1 and text in YAML 1.2"
        return Odd("ambiguous-scalar", message, f"write {word}, or quote it if it is text")
    if isinstance(read, float) and not abs(read) < float("inf"):
        return Odd("ambiguous-scalar", f"{text} is not a finite number", "write a finite number")
    as_read = "as text" if isinstance(read, str) else f"as {read}"
    message = f"{text} is not a plain decimal number: YAML 1.1 reads it {as_read}"
    choices = list(dict.fromkeys([*_meant(text), *([] if isinstance(read, str) else [str(read)])]))
    return Odd(
        "ambiguous-scalar", message, f"write {' or '.join(choices)}, or quote it if it is text"
    )


def _meant(text: str) -> list[str]:
    """The decimal number that the author of a scalar most likely meant."""
    bare = text.replace("_", "").lower()
    try:
        if bare.lstrip("+-").startswith("0o"):
            return [str(int(bare, 8))]
        if bare.lstrip("+-").isdigit():
            return [str(int(bare))]
        number = float(bare)
    except ValueError:
        return []
    return [str(int(number)) if number.is_integer() and "." not in bare else str(number)]
