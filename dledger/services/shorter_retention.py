"""What a change of settings would give up: whether less is kept afterwards, and what goes now."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from commitlog.errors import OffsetOutOfRangeError
from dledger.group_api import BrokerGroup
from dledger.services.retention import (
    Look,
    SegmentedLog,
    choose_floor,
    first_since,
    force_ratio,
    segment_starts,
)
from dledger.settings_tables import StoreTable
from dledger.state.names import STATE_TOPIC
from dledger.state.tables import QueueBounds
from remoting.protocol.confirmation import GivenUp, given_up

QUEUES_COUNTED: Final = 1024
"""Queues looked at for one answer: each takes some reads, and everything waits meanwhile."""


def keeps_less(before: StoreTable, after: StoreTable) -> bool:
    """Tell whether messages may go under *after* that *before* keeps. Pure.

    The hours for expired segments, and how full the disk is meanwhile, are no such change: what
    has expired goes within a day in any case.
    """
    no_limit = float("inf")
    return (
        (after.keep_bytes or no_limit) < (before.keep_bytes or no_limit)
        or after.file_reserved_time < before.file_reserved_time
        or force_ratio(after) < force_ratio(before)
    )


def lost_to_settings(
    group: BrokerGroup,
    entry_log: SegmentedLog,
    after: StoreTable,
    look: Look,
    change: str,
) -> GivenUp:
    """Return what goes under the settings *after*, all passes of retention together."""
    look = replace(look, is_hour=True, limit_position=entry_log.end_position)
    chosen = choose_floor(entry_log, after, look, segments_max=None)
    if chosen is None:
        return GivenUp(change=change)
    floor, _ = chosen
    counts, uncounted = _messages_before(group, floor.position)
    starts = segment_starts(entry_log, after.mapped_file_size_commit_log)
    gone = (index for index in starts if index <= floor.first_index)
    return given_up(
        change,
        counts,
        uncounted_queues=uncounted,
        segments=sum(1 for _ in gone),
        size_bytes=floor.position - entry_log.first_position,
        newest_ms=floor.prev_store_time_ms,
    )


def lost_to_topic(
    group: BrokerGroup, topic: str, keeps_ms: int, now_ms: int, change: str
) -> GivenUp:
    """Return what goes when *topic* keeps its messages for *keeps_ms* only."""
    queues = [(name, queue_id) for name, queue_id in group.state.queues if name == topic]
    gone = 0
    for name, queue_id in queues[:QUEUES_COUNTED]:
        first = first_since(group, name, queue_id, now_ms - keeps_ms)
        gone += first - group.state.min_offset(name, queue_id)
    return given_up(
        change,
        {topic: gone} if gone else {},
        uncounted_queues=max(0, len(queues) - QUEUES_COUNTED),
        newest_ms=now_ms - keeps_ms if gone else 0,
    )


def has_messages(group: BrokerGroup, topic: str, queue_nums: int) -> bool:
    """Tell whether *topic* holds any message now."""
    state = group.state
    return any(
        state.max_offset(topic, queue_id) > state.min_offset(topic, queue_id)
        for queue_id in range(queue_nums)
    )


def _messages_before(group: BrokerGroup, position: int) -> tuple[dict[str, int], int]:
    """Return how many messages of each topic stand before *position*, and queues not counted."""
    counts: dict[str, int] = {}
    queues = [
        (key, bounds)
        for key, bounds in group.state.queues.items()
        if key[0] != STATE_TOPIC and bounds.max_offset > bounds.min_offset
    ]
    uncounted = max(0, len(queues) - QUEUES_COUNTED)
    for (topic, queue_id), bounds in queues[:QUEUES_COUNTED]:
        try:
            first = _first_at(group, topic, queue_id, bounds, position)
        except OffsetOutOfRangeError:
            uncounted += 1  # a snapshot is being refilled here
            continue
        if first > bounds.min_offset:
            counts[topic] = counts.get(topic, 0) + first - bounds.min_offset
    return counts, uncounted


def _first_at(
    group: BrokerGroup, topic: str, queue_id: int, bounds: QueueBounds, position: int
) -> int:
    """Return the first offset of a queue whose message stands at or after *position*."""
    queue = group.queues.queue(topic, queue_id)
    low, high = bounds.min_offset, bounds.max_offset
    while low < high:
        middle = (low + high) // 2
        if int(queue.read(middle, 1)[0]["phy_offset"]) < position:
            low = middle + 1
        else:
            high = middle
    return low
