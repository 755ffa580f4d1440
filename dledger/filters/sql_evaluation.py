"""From the tree of an expression to a function over a message's properties.

Each node becomes a closure; what can be decided when it is made is decided there. None is unknown.
A value that cannot be read as the kind it is compared with ends the whole evaluation.

Spec: docs/internals/protocol/semantics.md, section 7.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Final, TypeAlias

from dledger.filters.java_values import (
    UNALIGNED,
    ValueUnreadableError,
    boolean,
    compare_doubles,
    double,
    integer,
)
from dledger.filters.sql_tree import (
    All,
    AnyOf,
    Cast,
    Compare,
    Comparison,
    Constant,
    Find,
    In,
    IsNull,
    Negate,
    Node,
    Not,
    Property,
    Search,
    Value,
)

Lookup: TypeAlias = Callable[[str], str | None]
"""Returns a property by name, or None where the message has none."""

Evaluation: TypeAlias = Callable[[Lookup], Value]
"""Raises `ValueUnreadableError` when the message cannot match."""

_TESTS: Final[dict[Comparison, Callable[[int, int], bool]]] = {
    Comparison.EQUAL: operator.eq,
    Comparison.NOT_EQUAL: operator.ne,
    Comparison.LESS: operator.lt,
    Comparison.LESS_OR_EQUAL: operator.le,
    Comparison.GREATER: operator.gt,
    Comparison.GREATER_OR_EQUAL: operator.ge,
}
_EQUALITIES: Final = frozenset({Comparison.EQUAL, Comparison.NOT_EQUAL})


def evaluation(node: Node) -> Evaluation:
    """Return the function that evaluates *node*; it calls itself as deep as the tree is."""
    match node:
        case Property(name):
            return lambda lookup: lookup(name)
        case Constant(value):
            return lambda _lookup: value
        case Negate():
            return _negated(node)
        case Cast(operand):
            return _cast(operand.name)
        case Not():
            return _opposite(node)
        case All(operands):
            return _all([evaluation(operand) for operand in operands])
        case AnyOf(operands):
            return _any([evaluation(operand) for operand in operands])
        case Compare():
            return _equality(node) if node.how in _EQUALITIES else _order(node)
        case IsNull(operand):
            return _absence(evaluation(operand))
        case In():
            return _membership(node)
        case Find():
            return _search(node)


# ---------------------------------------------------------------------------------- logic


def _cast(name: str) -> Evaluation:
    # Every property is a text, and a text is not the truth value true.
    return lambda lookup: None if lookup(name) is None else False


def _opposite(node: Not) -> Evaluation:
    operand = evaluation(node.operand)

    def opposite(lookup: Lookup) -> Value:
        value = operand(lookup)
        return None if value is None else value is False

    return opposite


def _absence(operand: Evaluation) -> Evaluation:
    return lambda lookup: operand(lookup) is None


def _all(operands: list[Evaluation]) -> Evaluation:
    def every(lookup: Lookup) -> Value:
        result: Value = True
        for operand in operands:
            value = operand(lookup)
            if value is False:
                return False
            if value is None:
                result = None
        return result

    return every


def _any(operands: list[Evaluation]) -> Evaluation:
    def some(lookup: Lookup) -> Value:
        result: Value = False
        for operand in operands:
            value = operand(lookup)
            if value is True:
                return True
            if value is None:
                result = None
        return result

    return some


# ---------------------------------------------------------------------------------- operands


def _negated(node: Negate) -> Evaluation:
    operand = evaluation(node.operand)

    def negated(lookup: Lookup) -> Value:
        value = operand(lookup)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return -value

    return negated


def _is_wide(node: Node) -> bool:
    if isinstance(node, Negate):
        return _is_wide(node.operand)
    return isinstance(node, Constant) and node.is_wide


def _membership(node: In) -> Evaluation:
    name, texts, negated = node.operand.name, node.texts, node.negated

    def among(lookup: Lookup) -> Value:
        value = lookup(name)
        return None if value is None else (value in texts) is not negated

    return among


def _search(node: Find) -> Evaluation:
    operand, text, negated = evaluation(node.operand), node.text, node.negated
    is_found = {
        Search.CONTAINS: str.__contains__,
        Search.STARTS_WITH: str.startswith,
        Search.ENDS_WITH: str.endswith,
    }[node.how]

    def search(lookup: Lookup) -> Value:
        value = operand(lookup)
        # Neither there nor not there: what is no text, and what is looked for is nothing.
        if not text or not isinstance(value, str):
            return False
        return is_found(value, text) is not negated

    return search


# ---------------------------------------------------------------------------------- comparisons


def _equality(node: Compare) -> Evaluation:
    left, right = evaluation(node.left), evaluation(node.right)
    wide_left, wide_right = _is_wide(node.left), _is_wide(node.right)
    wanted = node.how is Comparison.EQUAL

    def equality(lookup: Lookup) -> Value:
        first, second = left(lookup), right(lookup)
        if first is None:
            return None
        if second is None:
            return not wanted
        if isinstance(first, str) and isinstance(second, str):
            return (first == second) is wanted
        return (_compared(first, second, wide_left, wide_right) == 0) is wanted

    return equality


def _order(node: Compare) -> Evaluation:
    left, right = evaluation(node.left), evaluation(node.right)
    wide_left, wide_right = _is_wide(node.left), _is_wide(node.right)
    test = _TESTS[node.how]

    def order(lookup: Lookup) -> Value:
        first, second = left(lookup), right(lookup)
        if first is None or second is None:
            return None
        if isinstance(first, str) and isinstance(second, str):
            return test(compare_doubles(double(first), double(second)), 0)
        return test(_compared(first, second, wide_left, wide_right), 0)

    return order


def _compared(
    left: str | float | bool, right: str | float | bool, wide_left: bool, wide_right: bool
) -> int:
    """Compare two values, at most one of them a text, which is read as what the other is."""
    if isinstance(left, str):
        if isinstance(right, bool):
            left = boolean(left)
        elif isinstance(right, int):
            left = integer(left, is_wide=wide_right)
        else:
            assert isinstance(right, float)
            left = double(left)
    elif isinstance(right, str):
        if isinstance(left, bool):
            raise ValueUnreadableError("a truth value left of a text")
        right = integer(right, is_wide=wide_left) if isinstance(left, int) else double(right)
    if isinstance(left, bool) is not isinstance(right, bool):
        return UNALIGNED
    if isinstance(left, float) or isinstance(right, float):
        return compare_doubles(float(left), float(right))
    return (left > right) - (left < right)
