"""Which messages a pull gets, and from which member the consumer reads next.

The arithmetic between a consume queue and the log has steps of its own, so that a worker thread can
touch old pages: `find_messages` reads the consume queue and decides, `MessageRange.join` touches
the log. A filter over properties has to touch the log to decide: `read_units` and `judge` are the
two halves of `find_messages` with such a filter.

The leader serves readers of recent messages. A reader that is further behind than what is taken to
be in memory would make the leader read its disk: it is sent to a follower that is alive and has
almost everything, RocketMQ's `whichBrokerWhenConsumeSlowly` first. A follower keeps such a reader
and sends it back to the leader when it has caught up.

Spec: docs/internals/protocol/remoting.md, sections 8.1 and 8.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from commitlog.entry import parse_header
from commitlog.errors import MQError
from commitlog.queue_unit import Units
from dledger.broker_id import LEADER_ID, follower_id
from dledger.broker_settings import ReadLimits
from dledger.filters.property_filter import PropertyFilter, scan
from dledger.group_api import BrokerGroup
from dledger.state.configs import SubscriptionGroupConfig
from remoting.seams import Clock

MIN_SCAN_UNITS = 800
"""Units read in one pull when a filter matches nothing: 16,000 bytes of consume queue."""

SCAN_FACTOR = 20
"""Units read for each requested message, when that is more."""


class GetStatus(StrEnum):
    """RocketMQ's GetMessageStatus: the remark of a pull answer."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"


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


ALIVE_MS = 2_000
"""A follower that has confirmed nothing for so long is not recommended: longer than an election."""

CAUGHT_UP_BYTES = 16 << 20
"""How far a follower may be behind and still be recommended: more than is on its way under load,
less than a reader gets through in a second."""

FOLLOWERS_AGE_S = 1.0
"""How old what is known of the followers may be: slow readers pull hundreds of times a second."""


class ReadSuggestion:
    """Answers the `suggestWhichBrokerId` of pulls."""

    def __init__(
        self,
        group: BrokerGroup,
        *,
        own_id: int,
        recent_bytes: int,
        slave_read_enable: bool,
        clock: Clock,
    ) -> None:
        self._group = group
        self._own_id = own_id
        self._recent_bytes = recent_bytes
        self._slave_read_enable = slave_read_enable
        self._clock = clock
        self._followers_since_s: float | None = None
        self._followers: frozenset[int] = frozenset()

    def broker_id(self, config: SubscriptionGroupConfig, behind_bytes: int) -> int:
        """Return where a group's next pull should go.

        Args:
            config: The consumer group.
            behind_bytes: From the last message it was given to the end of the log.
        """
        if not self._slave_read_enable:
            return LEADER_ID
        slow = behind_bytes > self._recent_bytes
        wanted = config.which_broker_when_consume_slowly if slow else config.broker_id
        if self._group.leadership is None:
            return self._own_id if slow or wanted == self._own_id else LEADER_ID
        if wanted == LEADER_ID:
            return LEADER_ID
        followers = self._followers_now()
        if wanted in followers:
            return wanted
        return min(followers) if slow and followers else LEADER_ID

    def _followers_now(self) -> frozenset[int]:
        now = self._clock.monotonic()
        if self._followers_since_s is None or now - self._followers_since_s >= FOLLOWERS_AGE_S:
            self._followers_since_s = now
            status = self._group.status()
            self._followers = frozenset(
                follower_id(name)
                for name, row in status.get("peers", {}).items()
                if self._has_almost_everything(row)
            )
        return self._followers

    def _has_almost_everything(self, row: Mapping[str, Any]) -> bool:
        match_index, acked_ms_ago = row["match_index"], row["acked_ms_ago"]
        if not (row["connected"] and row["voter"] and match_index) or acked_ms_ago is None:
            return False
        if acked_ms_ago > ALIVE_MS:
            return False
        log = self._group.log
        try:
            has_up_to = parse_header(log.frame(match_index)).position
        except MQError:
            # Below what is kept here, or damaged: it is far behind, or that is unknown.
            return False
        return log.end_position - has_up_to <= CAUGHT_UP_BYTES
