"""Which messages of a stretch of a queue match, by their properties.

Spec: docs/internals/protocol/semantics.md, section 7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from commitlog.errors import CorruptRecordError
from commitlog.properties import PROPERTY_RETRY_TOPIC, get_property
from commitlog.queue_unit import Units
from commitlog.record import record_properties
from dledger.filters.errors import DamagedMessageError
from dledger.filters.expression import Expression

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
