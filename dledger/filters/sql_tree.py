"""An SQL92 expression as a tree: which operands stand where, and what values they have, as in Java.

Spec: docs/internals/protocol/semantics.md, section 7.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from dledger.filters.errors import ExpressionIllegalError

# -------------------------------------------------------------------------------- values as in Java


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

    Raises ValueUnreadableError: it is none, or out of range.
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

    Raises ValueUnreadableError: it is no number.
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


# ---------------------------------------------------------------------------------- the tree


MAX_DEPTH: Final = 64
"""Operators inside operators: evaluation calls as deep, and Python's stack has about a thousand."""

SHOWN_CHARS: Final = 32
"""Length up to which a word is shown that cannot stand where it does."""

Value: TypeAlias = "str | int | float | bool | None"
"""What an operand may be while a message is looked at; None is unknown."""


class Comparison(StrEnum):
    """How two operands are compared."""

    EQUAL = "="
    NOT_EQUAL = "<>"
    LESS = "<"
    LESS_OR_EQUAL = "<="
    GREATER = ">"
    GREATER_OR_EQUAL = ">="


class Search(StrEnum):
    """Where a text is looked for in another."""

    CONTAINS = "CONTAINS"
    STARTS_WITH = "STARTSWITH"
    ENDS_WITH = "ENDSWITH"


class Property(msgspec.Struct, frozen=True):
    """A property of the message, by name."""

    name: str


class Constant(msgspec.Struct, frozen=True):
    """A literal; None is NULL.

    *is_wide*: a number that Java's int cannot hold: properties beside it are read as long.
    """

    value: Value
    is_wide: bool = False


class Negate(msgspec.Struct, frozen=True):
    """Minus a number; of anything else unknown."""

    operand: Node


class Cast(msgspec.Struct, frozen=True):
    """A property where a truth value is wanted."""

    operand: Property


class Not(msgspec.Struct, frozen=True):
    """The opposite; of unknown unknown."""

    operand: Node


class All(msgspec.Struct, frozen=True):
    """AND over two or more."""

    operands: tuple[Node, ...]


class AnyOf(msgspec.Struct, frozen=True):
    """OR over two or more."""

    operands: tuple[Node, ...]


class Compare(msgspec.Struct, frozen=True):
    """Two operands compared."""

    how: Comparison
    left: Node
    right: Node


class IsNull(msgspec.Struct, frozen=True):
    """Whether an operand is unknown."""

    operand: Node


class In(msgspec.Struct, frozen=True):
    """Whether a property is one of some texts."""

    operand: Property
    texts: frozenset[str]
    negated: bool


class Find(msgspec.Struct, frozen=True):
    """Whether a text is found in an operand."""

    how: Search
    operand: Node
    text: str
    negated: bool


Node: TypeAlias = (
    "Property | Constant | Negate | Cast | Not | All | AnyOf | Compare | IsNull | In | Find"
)


def truth(node: Node) -> Node:
    """Return *node* as something that is true, false or unknown.

    Raises ExpressionIllegalError: a number, a text or a negated number never is.
    """
    if isinstance(node, Property):
        return Cast(node)
    if isinstance(node, Negate) or (
        isinstance(node, Constant) and not isinstance(node.value, bool | None)
    ):
        raise ExpressionIllegalError("a number or a text stands where true or false is wanted")
    return node


def equality(how: Comparison, left: Node, right: Node) -> Compare:
    """Return ``left = right`` or ``left <> right``.

    Raises ExpressionIllegalError: one of them is NULL, or TRUE or FALSE stands left of another kind
    of literal.
    """
    for operand in (left, right):
        if isinstance(operand, Constant) and operand.value is None:
            raise ExpressionIllegalError(f"NULL cannot be compared with {how}: write IS NULL")
    if (
        isinstance(left, Constant)
        and isinstance(right, Constant)
        and isinstance(left.value, bool)
        and not isinstance(right.value, bool)
    ):
        raise ExpressionIllegalError(
            f"TRUE and FALSE cannot be compared with {_shown(right.value)}"
        )
    return Compare(how, left, right)


def order(how: Comparison, left: Node, right: Node) -> Compare:
    """Return ``left < right`` or one of its like.

    Raises ExpressionIllegalError: a literal is not a number.
    """
    for operand in (left, right):
        if isinstance(operand, Constant) and not _is_number(operand.value):
            raise ExpressionIllegalError(
                f"{how} compares numbers, not {_shown(operand.value)}; texts have = and <>"
            )
    return Compare(how, left, right)


def between(operand: Node, low: Node, high: Node, *, negated: bool) -> Node:
    """Return ``operand [NOT] BETWEEN low AND high``.

    Raises:
        ExpressionIllegalError: A literal is not a number, or two literals are the wrong way round.
    """
    if negated:
        outside = (
            order(Comparison.LESS, operand, low),
            order(Comparison.GREATER, operand, high),
        )
        _check_bounds(low, high)
        return AnyOf(outside)
    inside = (
        order(Comparison.GREATER_OR_EQUAL, operand, low),
        order(Comparison.LESS_OR_EQUAL, operand, high),
    )
    _check_bounds(low, high)
    return All(inside)


def membership(operand: Node, texts: frozenset[str], *, negated: bool) -> In:
    """Return ``operand [NOT] IN (texts)``.

    Raises ExpressionIllegalError: the operand is no property.
    """
    if not isinstance(operand, Property):
        raise ExpressionIllegalError("only a property can stand before IN")
    return In(operand, texts, negated)


def _check_bounds(low: Node, high: Node) -> None:
    if not (isinstance(low, Constant) and isinstance(high, Constant)):
        return
    if (
        isinstance(low.value, int | float)
        and isinstance(high.value, int | float)
        and low.value > high.value
    ):
        raise ExpressionIllegalError(
            f"BETWEEN {low.value} AND {high.value}: the smaller one comes first"
        )


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Value) -> str:
    if value is None:
        return "NULL"
    return str(value).upper() if isinstance(value, bool) else repr(value)[:SHOWN_CHARS]


def children(node: Node) -> tuple[Node, ...]:
    """Return the operands of *node*."""
    match node:
        case Property() | Constant():
            return ()
        case Compare():
            return (node.left, node.right)
        case All() | AnyOf():
            return node.operands
        case _:
            return (node.operand,)
