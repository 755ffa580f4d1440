"""Which messages of a stretch of a queue match an SQL92 expression, by their properties.

An expression becomes a function over a message's properties: each node of its tree a closure; what
can be decided when it is made is decided there. None is unknown. A value that cannot be read as the
kind it is compared with ends the whole evaluation.

Spec: docs/internals/protocol/semantics.md, section 7.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol, TypeAlias

from dledger.commitlog.errors import CorruptRecordError
from dledger.commitlog.properties import PROPERTY_RETRY_TOPIC, decode_properties, get_property
from dledger.commitlog.queue_unit import Units
from dledger.commitlog.record import record_properties
from dledger.filters.errors import DamagedMessageError, ExpressionIllegalError
from dledger.filters.sql_grammar import MAX_EXPRESSION_CHARS, parse_sql
from dledger.filters.sql_tree import (
    MAX_DEPTH,
    UNALIGNED,
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
    ValueUnreadableError,
    boolean,
    children,
    compare_doubles,
    double,
    integer,
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
            return _joined([evaluation(operand) for operand in operands], deciding=False)
        case AnyOf(operands):
            return _joined([evaluation(operand) for operand in operands], deciding=True)
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


def _joined(operands: list[Evaluation], *, deciding: bool) -> Evaluation:
    """Return AND where False decides whatever the others are, OR where True does."""

    def join(lookup: Lookup) -> Value:
        result: Value = not deciding
        for operand in operands:
            value = operand(lookup)
            if value is deciding:
                return deciding
            if value is None:
                result = None
        return result

    return join


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


SEARCHED_NAMES: Final = 4
"""Up to this number of names it is cheaper to search the raw properties than to decode them all."""

MAX_CACHED_CHARS: Final = 512 * 1024
"""Text of all expressions kept; what is compiled of it takes some fifty times as much memory."""


class Expression:
    """A compiled expression. Immutable; equal texts give expressions that say the same.

    *cost*: how many operands and operators it has: what looking at one message costs.
    """

    __slots__ = ("_evaluate", "_searches", "cost", "names", "text")

    def __init__(self, text: str) -> None:
        """Compile *text*.

        Raises ExpressionIllegalError: it is no expression, or too large or deep.
        """
        tree = parse_sql(text)
        names, self.cost = _measured(tree)
        self.text = text
        self.names = frozenset(names)
        self._evaluate = evaluation(tree)
        self._searches = (
            {name: name.encode() for name in names} if len(names) <= SEARCHED_NAMES else None
        )

    def matches(self, properties: bytes) -> bool:
        """Tell whether a message with these encoded properties matches: only true is a match."""
        searches = self._searches
        if searches is None:
            lookup: Lookup = decode_properties(properties).get
        else:
            lookup = _searching(properties, searches)
        try:
            return self._evaluate(lookup) is True
        except ValueUnreadableError:
            return False

    def admits(self, _record: memoryview, properties: bytes) -> bool:
        """Tell whether a record matches: by its properties alone."""
        return self.matches(properties)


def _searching(properties: bytes, names: Mapping[str, bytes]) -> Lookup:
    def lookup(name: str) -> str | None:
        value = get_property(properties, names[name])
        return None if value is None else value.decode("utf-8", "replace")

    return lookup


def _measured(tree: Node) -> tuple[set[str], int]:
    """Return the names in a tree and the number of its nodes; no calls as deep as it is.

    Raises ExpressionIllegalError: it is too deep.
    """
    names: set[str] = set()
    count = 0
    level = [tree]
    for _ in range(MAX_DEPTH):
        count += len(level)
        names.update(node.name for node in level if isinstance(node, Property))
        level = [child for node in level for child in children(node)]
        if not level:
            return names, count
    raise ExpressionIllegalError(f"more than {MAX_DEPTH} operators stand inside each other")


class ExpressionCache:
    """Expressions by their text, and why a text is none. The least recently used leave first."""

    def __init__(self, max_chars: int = MAX_CACHED_CHARS) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._compiled: OrderedDict[str, Expression | str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, text: str) -> Expression:
        """Return the expression. Raises ExpressionIllegalError: *text* is none."""
        found = self._compiled.get(text)
        if found is None:
            found = self._compile(text)
        else:
            self._compiled.move_to_end(text)
        if isinstance(found, str):
            raise ExpressionIllegalError(found)
        return found

    def _compile(self, text: str) -> Expression | str:
        made: Expression | str
        try:
            made = Expression(text)
        except ExpressionIllegalError as error:
            made = str(error)
        if len(text) <= MAX_EXPRESSION_CHARS:
            self._compiled[text] = made
            self._chars += len(text)
            while self._chars > self._max_chars:
                self._chars -= len(self._compiled.popitem(last=False)[0])
        return made


MAX_SCAN_COST: Final = 16_000
"""Operands and operators evaluated in one pull, reading a message counted as `MESSAGE_COST`: so
long, some ten milliseconds, no other request is served."""

MESSAGE_COST: Final = 8
"""What finding the properties of a message costs beside evaluating."""

MAX_SCAN_PROPERTIES_BYTES: Final = 512 * 1024
"""Properties read in one pull: long ones cost more than the count of messages shows."""

MAX_SCANNED_UNITS: Final = MAX_SCAN_COST // MESSAGE_COST
"""More messages than any expression is asked about in one pull."""

_RETRY_TOPIC: Final = PROPERTY_RETRY_TOPIC.encode()


class PropertyFilter(Protocol):
    """Decides over messages by their properties."""

    @property
    def cost(self) -> int:
        """What one message costs at most, in operands and operators."""

    def admits(self, record: memoryview, properties: bytes) -> bool:
        """Tell whether a stored record, which has these encoded properties, matches."""


class RetryFilter:
    """Judges retries by what the group wants of the topic they come from.

    *expressions*: by original topic. Retries from other topics match.
    """

    __slots__ = ("_expressions", "cost")

    def __init__(self, expressions: Mapping[str, Expression]) -> None:
        self._expressions = {topic.encode(): made for topic, made in expressions.items()}
        self.cost = max((made.cost for made in expressions.values()), default=1)

    def matches(self, properties: bytes) -> bool:
        """Tell whether the original topic's expression lets the message pass."""
        topic = get_property(properties, _RETRY_TOPIC)
        expression = None if topic is None else self._expressions.get(topic)
        return expression is None or expression.matches(properties)

    def admits(self, _record: memoryview, properties: bytes) -> bool:
        """Tell whether a record matches: by its properties alone."""
        return self.matches(properties)


class Matching(NamedTuple):
    """What a scan found.

    Attributes:
        places: The units that match, by their place among those given.
        scanned: Number of units that have been decided, from the first one on; at least one.
        cost: What of `MAX_SCAN_COST` that took; long properties count as what they took as well.
    """

    places: list[int]
    scanned: int
    cost: int = 0


def scan(
    read: Callable[[int, int], memoryview], units: Units, wanted: int, wants: PropertyFilter
) -> Matching:
    """Return which messages match, and how far it was looked; bounded whatever is stored.

    Args:
        read: Returns the bytes at a position of the log.
    Raises:
        DamagedMessageError: A record is none.
        OffsetOutOfRangeError: One is not kept any more.
        CorruptEntryError: One is known to be damaged.
    """
    places: list[int] = []
    left_bytes = MAX_SCAN_PROPERTIES_BYTES
    limit = max(1, MAX_SCAN_COST // (MESSAGE_COST + wants.cost))
    positions = units["phy_offset"][:limit].tolist()
    sizes = units["size"][:limit].tolist()
    place = -1
    for place, (position, size) in enumerate(zip(positions, sizes, strict=True)):
        try:
            record = read(position, size)
            properties = record_properties(record)
        except CorruptRecordError as error:
            raise DamagedMessageError(str(error), position, size) from error
        left_bytes -= len(properties)
        if wants.admits(record, properties):
            places.append(place)
            if len(places) == wanted:
                break
        if left_bytes <= 0:
            break
    of_properties = (
        MAX_SCAN_COST * (MAX_SCAN_PROPERTIES_BYTES - left_bytes) // MAX_SCAN_PROPERTIES_BYTES
    )
    return Matching(
        places, place + 1, max(of_properties, (place + 1) * (MESSAGE_COST + wants.cost))
    )
