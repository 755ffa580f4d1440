"""Which messages of a stretch of a queue match an SQL92 expression, by their properties.

Spec: docs/internals/protocol/semantics.md, section 7.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from commitlog.errors import CorruptRecordError
from commitlog.properties import PROPERTY_RETRY_TOPIC, decode_properties, get_property
from commitlog.queue_unit import Units
from commitlog.record import record_properties
from dledger.filters.errors import DamagedMessageError, ExpressionIllegalError
from dledger.filters.java_values import ValueUnreadableError
from dledger.filters.sql_evaluation import Lookup, evaluation
from dledger.filters.sql_grammar import MAX_EXPRESSION_CHARS, parse_sql
from dledger.filters.sql_tree import MAX_DEPTH, Node, Property, children

SEARCHED_NAMES: Final = 4
"""Up to this number of names it is cheaper to search the raw properties than to decode them all."""

MAX_CACHED_CHARS: Final = 512 * 1024
"""Text of all expressions kept; what is compiled of it takes some fifty times as much memory."""


class Expression:
    """A compiled expression. Immutable; equal texts give expressions that say the same.

    Attributes:
        text: What it was made from.
        names: The properties it reads.
        cost: How many operands and operators it has: what looking at one message costs.
    """

    __slots__ = ("_evaluate", "_searches", "cost", "names", "text")

    def __init__(self, text: str) -> None:
        """Compile *text*.

        Raises:
            ExpressionIllegalError: It is no expression, or too large or deep.
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


def _searching(properties: bytes, names: Mapping[str, bytes]) -> Lookup:
    def lookup(name: str) -> str | None:
        value = get_property(properties, names[name])
        return None if value is None else value.decode("utf-8", "replace")

    return lookup


def _measured(tree: Node) -> tuple[set[str], int]:
    """Return the names in a tree and the number of its nodes; no calls as deep as it is.

    Raises:
        ExpressionIllegalError: It is too deep.
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
    """Expressions by their text, and why a text is none. The least recently used leave first.

    Groups and topics that use the same text share what it was compiled to.
    """

    def __init__(self, max_chars: int = MAX_CACHED_CHARS) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._compiled: OrderedDict[str, Expression | str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, text: str) -> Expression:
        """Return the expression.

        Raises:
            ExpressionIllegalError: *text* is none.
        """
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

    def matches(self, properties: bytes) -> bool:
        """Tell whether a message with these encoded properties matches."""


class RetryFilter:
    """Judges retries by what the group wants of the topic they come from.

    Args:
        expressions: By original topic. Retries from other topics match.
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


class Matching(NamedTuple):
    """What a scan found.

    Attributes:
        places: The units that match, by their place among those given.
        scanned: Number of units that have been decided, from the first one on; at least one.
    """

    places: list[int]
    scanned: int


def scan(
    read: Callable[[int, int], memoryview], units: Units, wanted: int, wants: PropertyFilter
) -> Matching:
    """Return which messages match, and how far it was looked; bounded whatever is stored.

    Args:
        read: Returns the bytes at a position of the log.
        units: Consume queue units of the messages, at least one.
        wanted: Stop when this number match.
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
            properties = record_properties(read(position, size))
        except CorruptRecordError as error:
            raise DamagedMessageError(str(error), position, size) from error
        if wants.matches(properties):
            places.append(place)
            if len(places) == wanted:
                break
        left_bytes -= len(properties)
        if left_bytes <= 0:
            break
    return Matching(places, place + 1)
