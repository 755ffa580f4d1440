"""How long one topic keeps its messages: its queues begin later when they are too old.

The attribute ``retention.ms`` of a topic sets it. What is before a queue's begin is no longer
there for consumers; its bytes go with their segment. A topic keeps nothing for longer than the
log does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from commitlog.errors import CorruptEntryError, OffsetOutOfRangeError
from commitlog.record import STORE_TIMESTAMP_OFFSET, SYS_FLAG_BORN_HOST_V6, SYS_FLAG_OFFSET
from dledger.group_api import BrokerGroup
from dledger.state.state_record import QueueFloorsChange

RETENTION_ATTRIBUTE: Final = "retention.ms"

QUEUE_FLOORS_PER_ENTRY: Final = 4096
"""Queues that begin later in one entry; the next check moves more."""

DIGITS_MAX: Final = 15
"""Of that number: some ten thousand years."""

_TIME_BYTES: Final = 8
_IPV6_EXTRA_BYTES: Final = 12


def retention_ms(attributes: Mapping[str, str]) -> int | None:
    """Return what a topic's attributes say, or None where they say nothing.

    Raises:
        ValueError: What they say is no number of milliseconds.
    """
    value = attributes.get(RETENTION_ATTRIBUTE)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > DIGITS_MAX or not int(value):
        raise ValueError(f"{RETENTION_ATTRIBUTE} is a number of milliseconds, not {value!r}")
    return int(value)


def queue_floors(
    group: BrokerGroup, now_ms: int, *, is_deleting: Callable[[str], bool]
) -> QueueFloorsChange | None:
    """Return the queues that are to begin later, with their first offset kept; None: no queue.

    Args:
        now_ms: Wall time, as store times are.
        is_deleting: Topics whose removal is in flight are left alone.
    """
    found: list[tuple[str, int, int]] = []
    keeps: dict[str, int] = {}
    for topic in group.state.topics_with.get(RETENTION_ATTRIBUTE, ()):
        config = group.state.topics[topic]
        keeps_ms = retention_ms(config.attributes)
        if keeps_ms is None or is_deleting(topic):
            continue
        for queue_id in range(config.queue_nums):
            first = first_since(group, topic, queue_id, now_ms - keeps_ms)
            if first > group.state.min_offset(topic, queue_id):
                keeps[topic] = keeps_ms
                found.append((topic, queue_id, first))
                if len(found) == QUEUE_FLOORS_PER_ENTRY:
                    return QueueFloorsChange(tuple(found), now_ms, tuple(keeps.items()))
    return QueueFloorsChange(tuple(found), now_ms, tuple(keeps.items())) if found else None


def first_since(group: BrokerGroup, topic: str, queue_id: int, since_ms: int) -> int:
    """Return the first offset of a queue that was stored at *since_ms* or later."""
    low, high = group.state.min_offset(topic, queue_id), group.state.max_offset(topic, queue_id)
    kept = low
    while low < high:
        middle = (low + high) // 2
        stored_ms = _store_time(group, topic, queue_id, middle)
        if stored_ms is None:
            return kept  # it is being repaired: later
        if stored_ms < since_ms:
            low = middle + 1
        else:
            high = middle
    return low


def _store_time(group: BrokerGroup, topic: str, queue_id: int, offset: int) -> int | None:
    position = int(group.queues.queue(topic, queue_id).read(offset, 1)[0]["phy_offset"])
    try:
        flags = int.from_bytes(group.log.read(position + SYS_FLAG_OFFSET, 4), "big")
        at = STORE_TIMESTAMP_OFFSET
        if flags & SYS_FLAG_BORN_HOST_V6:
            at += _IPV6_EXTRA_BYTES
        return int.from_bytes(group.log.read(position + at, _TIME_BYTES), "big")
    except (CorruptEntryError, OffsetOutOfRangeError):
        return None
