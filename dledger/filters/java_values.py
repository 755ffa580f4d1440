"""How texts become numbers and truth values, and how values of two kinds compare: as in Java.

Spec: docs/internals/protocol/semantics.md, section 7.
"""

from __future__ import annotations

import re
from typing import Final

MIN_INT: Final = -(1 << 31)
MAX_INT: Final = (1 << 31) - 1
MIN_LONG: Final = -(1 << 63)
MAX_LONG: Final = (1 << 63) - 1

UNALIGNED: Final = -1
"""What values of kinds that have nothing in common compare as."""

# Java counts every decimal digit of the basic plane, in whatever script.
_INTEGER: Final = re.compile(r"[+-]?0*(\d{1,19})")
_DECIMAL: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?")
_HEXADECIMAL: Final = re.compile(
    r"([+-]?0[xX](?:[0-9a-fA-F]+(?:\.[0-9a-fA-F]*)?|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?"
)
_NAMED: Final = re.compile(r"[+-]?(NaN|Infinity)")
_JAVA_BLANKS: Final = "".join(map(chr, range(33)))


class ValueUnreadableError(ValueError):
    """A text is not the number it is compared with, or two kinds never compare."""


def integer(text: str, *, is_wide: bool) -> int:
    """Return what ``Integer.valueOf``, or with *is_wide* ``Long.valueOf``, makes of *text*.

    Raises:
        ValueUnreadableError: It is none, or out of range.
    """
    if _INTEGER.fullmatch(text) is None or (not text.isascii() and max(text) > "\uffff"):
        raise ValueUnreadableError(f"{text[:32]!r} is no integer")
    digits = text.lstrip("+-")
    value = int(digits.lstrip("0") or "0")
    if text[0] == "-":
        value = -value
    low, high = (MIN_LONG, MAX_LONG) if is_wide else (MIN_INT, MAX_INT)
    if not low <= value <= high:
        raise ValueUnreadableError(f"{text[:32]!r} is out of range")
    return value


def double(text: str) -> float:
    """Return what ``Double.valueOf`` makes of *text*.

    Raises:
        ValueUnreadableError: It is no number.
    """
    trimmed = text.strip(_JAVA_BLANKS)
    if _DECIMAL.fullmatch(trimmed):
        return float(trimmed.rstrip("fFdD"))
    if _NAMED.fullmatch(trimmed):
        return float(trimmed)
    found = _HEXADECIMAL.fullmatch(trimmed)
    if found is None:
        raise ValueUnreadableError(f"{text[:32]!r} is no number")
    try:
        return float.fromhex(found[1])
    except OverflowError:
        return float("-inf" if trimmed[0] == "-" else "inf")


def boolean(text: str) -> bool:
    """Return what ``Boolean.valueOf`` makes of *text*: everything but ``true`` is false."""
    return text.lower() == "true"


def compare_doubles(left: float, right: float) -> int:
    """Compare as ``Double.compare`` does: NaN is the greatest and equals itself, -0.0 < 0.0."""
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right and left != 0.0:
        return 0
    return _rank(left) - _rank(right)


def _rank(value: float) -> int:
    """Order what ``<`` cannot: -0.0, 0.0, NaN."""
    if value != value:
        return 2
    return 1 if str(value)[0] != "-" else 0
