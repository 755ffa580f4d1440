"""Messages whose time is over: reads pass them over as those that a filter leaves out.

Decision: docs/internals/decisions/0024-time-to-live.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from msgspec.structs import replace

from dledger.commitlog.java_hash import raw_tags_code
from dledger.commitlog.properties import PROPERTY_EXPIRE_AFTER_MS, PROPERTY_TAGS, get_property
from dledger.commitlog.record import stored_ms_of
from dledger.filters.property_filter import PropertyFilter
from dledger.state.topics import TopicConfig

EXPIRES_ATTRIBUTE: Final = "message.expires"
"""Of a topic: ``true`` from the first message on that expires."""

EXPIRE_MARK: Final = PROPERTY_EXPIRE_AFTER_MS.encode()

MAX_EXPIRE_MS: Final = 1 << 53
"""Beyond all times; JSON's numbers are exact up to here."""

MAX_DIGITS: Final = 20
"""Of the number, zeros before it included."""

_TAGS: Final = PROPERTY_TAGS.encode()


def expires(attributes: Mapping[str, str]) -> bool:
    """Whether a topic with these attributes may have messages that expire."""
    return attributes.get(EXPIRES_ATTRIBUTE) == "true"


def marked(config: TopicConfig) -> TopicConfig | None:
    """Return how a topic has to be put so that its reads look for messages that expired.

    Returns:
        None: it is so already.
    """
    if expires(config.attributes):
        return None
    return replace(config, attributes={**config.attributes, EXPIRES_ATTRIBUTE: "true"})


def expire_after_ms(properties: bytes) -> int | None:
    """Return after how many milliseconds a message expires; None: it never does.

    Raises ValueError: the property is no number from 1 to `MAX_EXPIRE_MS`.
    """
    value = get_property(properties, EXPIRE_MARK)
    if value is None:
        return None
    if not value.isdigit() or len(value) > MAX_DIGITS or not 0 < int(value) <= MAX_EXPIRE_MS:
        raise ValueError(
            f"{PROPERTY_EXPIRE_AFTER_MS} is a number of milliseconds from 1 to {MAX_EXPIRE_MS},"
            f" not {value[:32].decode('utf-8', 'replace')!r}"
        )
    return int(value)


def is_expired(properties: bytes, stored_ms: int, now_ms: int) -> bool:
    """Whether a message's time is over; one whose property cannot be read never expires."""
    try:
        after_ms = expire_after_ms(properties)
    except ValueError:
        return False
    return after_ms is not None and now_ms - stored_ms >= after_ms


class LivingFilter:
    """Lets messages pass that have not expired and that another filter wants."""

    __slots__ = ("_codes", "_now_ms", "_wants", "cost", "passed_over")

    def __init__(
        self,
        now_ms: Callable[[], int],
        codes: Collection[int] | None = None,
        wants: PropertyFilter | None = None,
    ) -> None:
        self.cost = 1 if wants is None else wants.cost + 1
        self.passed_over = 0
        self._now_ms = now_ms
        self._codes = None if codes is None else frozenset(codes)
        self._wants = wants

    def admits(self, record: memoryview, properties: bytes) -> bool:
        """Whether a message passes; counts those that have expired."""
        if self._codes is not None:
            tags = get_property(properties, _TAGS)
            if (0 if tags is None else raw_tags_code(tags)) not in self._codes:
                return False
        if self._wants is not None and not self._wants.admits(record, properties):
            return False
        if EXPIRE_MARK in properties and is_expired(
            properties, stored_ms_of(record), self._now_ms()
        ):
            self.passed_over += 1
            return False
        return True

    def take_passed_over(self) -> int:
        """Return `passed_over` and begin to count again."""
        count, self.passed_over = self.passed_over, 0
        return count
