"""Which messages a pull gets: the arithmetic between a consume queue and the log.

Steps of their own, so that touching old pages can be left to a worker thread: `find_messages` reads
the consume queue and decides, `MessageRange.join` touches the log. A filter over properties has to
touch the log to decide: `read_units` and `judge` are the two halves of `find_messages` with one.

Spec: remoting fact sheet, section 8.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from commitlog.consume_queue import Units
from dledger.filters.property_filter import PropertyFilter, scan
from dledger.group_api import BrokerGroup

MIN_SCAN_UNITS = 800
"""Units looked at in one pull when a filter matches nothing: 16,000 bytes of consume queue."""

SCAN_FACTOR = 20
"""Units looked at for each message asked for, when that is more."""


class GetStatus(StrEnum):
    """RocketMQ's GetMessageStatus: the remark of a pull answer."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much one pull may carry; at least one message always fits."""

    max_messages: int
    max_bytes: int


@dataclass(slots=True)
class MessageRange:
    """What a pull found. ``slices`` are (position, bytes), neighbours in the log merged."""

    status: GetStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    slices: Sequence[tuple[int, int]] = ()
    count: int = 0

    def join(self, group: BrokerGroup) -> Buffer:
        """Return the records back to back: a view of the segment when they are one piece."""
        read = group.log.read
        if len(self.slices) == 1:
            return read(*self.slices[0])
        return b"".join([read(position, size) for position, size in self.slices])

    def join_copied(self, group: BrokerGroup) -> bytes:
        """Return the records back to back, every page touched."""
        read = group.log.read
        return b"".join([read(position, size) for position, size in self.slices])


def find_messages(
    group: BrokerGroup,
    topic: str,
    queue_id: int,
    offset: int,
    limits: ReadLimits,
    codes: npt.NDArray[np.int64] | None,
) -> MessageRange:
    """Return what a pull from *offset* gets, without touching the log.

    Args:
        codes: Tag hashes that match, or None for all messages.
    """
    wanted = max(1, limits.max_messages)
    most = wanted if codes is None else max(MIN_SCAN_UNITS, SCAN_FACTOR * wanted)
    found = read_units(group, topic, queue_id, offset, most)
    if isinstance(found, MessageRange):
        return found
    units, next_offset = found.units, offset + len(found.units)
    if codes is None:
        return _chosen(found, None, next_offset, limits)
    if len(codes) == 1:
        matching = np.flatnonzero(units["tags_code"] == codes[0])
    else:
        matching = np.flatnonzero(np.isin(units["tags_code"], codes))
    if len(matching) > wanted:
        matching = matching[:wanted]
        next_offset = offset + int(matching[-1]) + 1
    return _chosen(found, matching, next_offset, limits)


@dataclass(frozen=True, slots=True)
class UnitRange:
    """Units of a queue from one offset on, at least one, and the bounds of the queue."""

    units: Units
    offset: int
    min_offset: int
    max_offset: int


def read_units(
    group: BrokerGroup, topic: str, queue_id: int, offset: int, most: int
) -> UnitRange | MessageRange:
    """Return up to *most* units from *offset* on, or what a pull gets where there are none."""
    bounds = group.state.queues.get((topic, queue_id))
    if bounds is None or not bounds.max_offset:
        return MessageRange(GetStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
    low, high = bounds.min_offset, bounds.max_offset
    if offset < low:
        return MessageRange(GetStatus.OFFSET_TOO_SMALL, low, low, high)
    if offset == high:
        return MessageRange(GetStatus.OFFSET_OVERFLOW_ONE, offset, low, high)
    if offset > high:
        return MessageRange(GetStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
    units = group.queues.queue(topic, queue_id).read(offset, min(high - offset, most))
    if not len(units):
        return MessageRange(GetStatus.OFFSET_FOUND_NULL, offset, low, high)
    return UnitRange(units, offset, low, high)


def judge(
    group: BrokerGroup, found: UnitRange, limits: ReadLimits, wants: PropertyFilter
) -> MessageRange:
    """Return what of *found* a pull gets; touches the log.

    Raises:
        DamagedMessageError, OffsetOutOfRangeError, CorruptEntryError: As `scan`.
    """
    matching = scan(group.log.read, found.units, max(1, limits.max_messages), wants)
    places = np.array(matching.places, np.int64)
    return _chosen(found, places, found.offset + matching.scanned, limits)


def _chosen(
    found: UnitRange,
    matching: npt.NDArray[np.int64] | None,
    next_offset: int,
    limits: ReadLimits,
) -> MessageRange:
    """Return as many of the units at *matching*, or of all, as the limits allow."""
    offset, low, high = found.offset, found.min_offset, found.max_offset
    if matching is not None and not len(matching):
        return MessageRange(GetStatus.NO_MATCHED_MESSAGE, next_offset, low, high)
    units = found.units if matching is None else found.units[matching]
    sizes = units["size"].astype(np.int64)
    ends = sizes.cumsum()
    count = len(units)
    if int(ends[-1]) > limits.max_bytes:
        count = max(1, int(ends.searchsorted(limits.max_bytes, side="right")))
        last = count - 1 if matching is None else int(matching[count - 1])
        next_offset = offset + last + 1
    positions = units["phy_offset"].astype(np.int64)
    # In one piece as long as a record begins where the one before ended.
    gaps = np.flatnonzero(positions[1:count] != positions[: count - 1] + sizes[: count - 1])
    slices: list[tuple[int, int]] = []
    start = 0
    for gap in (*gaps.tolist(), count - 1):
        before = int(ends[start - 1]) if start else 0
        slices.append((int(positions[start]), int(ends[gap]) - before))
        start = gap + 1
    return MessageRange(GetStatus.FOUND, next_offset, low, high, slices, count)
