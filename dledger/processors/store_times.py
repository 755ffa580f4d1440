"""Store times of messages in a queue, and the offset that belongs to a time."""

from __future__ import annotations

from dledger.commitlog.record import STORED_MS_BYTES, stored_ms_of
from dledger.group_api import BrokerGroup


def starts_in_memory(group: BrokerGroup, topic: str, queue_id: int, recent_bytes: int) -> bool:
    """Return whether a queue still has its first message, and that in memory."""
    bounds = group.state.queues.get((topic, queue_id))
    if bounds is None or bounds.max_offset == 0:
        return True
    if bounds.min_offset > 0:
        return False
    unit = group.queues.queue(topic, queue_id).read(0, 1)
    behind = group.log.end_position - int(unit["phy_offset"][0])
    return behind <= recent_bytes


def store_time_at(group: BrokerGroup, topic: str, queue_id: int, offset: int) -> int:
    """Return when the message at *offset* was stored, ms since the epoch.

    Raises OffsetOutOfRangeError: it is not kept any more.
    """
    unit = group.queues.queue(topic, queue_id).read(offset, 1)
    return stored_ms_of(group.log.read(int(unit["phy_offset"][0]), STORED_MS_BYTES))


def search_offset(
    group: BrokerGroup, topic: str, queue_id: int, timestamp_ms: int, *, upper: bool
) -> int:
    """Return the offset at a store time.

    *upper*: the last message stored at or before *timestamp_ms* (the first one when all are later),
    instead of the first stored at or after it (the end when all are earlier).
    """
    bounds = group.state.queues.get((topic, queue_id))
    if bounds is None or bounds.max_offset <= bounds.min_offset:
        return 0
    # Store times never go back along a queue, across leaders too.
    low, high = bounds.min_offset, bounds.max_offset
    while low < high:
        middle = (low + high) // 2
        stored = store_time_at(group, topic, queue_id, middle)
        if stored < timestamp_ms or (upper and stored == timestamp_ms):
            low = middle + 1
        else:
            high = middle
    return max(bounds.min_offset, low - 1) if upper else low
