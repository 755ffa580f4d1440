"""Retention: old segments are given up, by a record in the log, so that all replicas agree.

The leader looks at whole segments from the oldest on and moves the floor past those that are
too old, or too much. The floor never passes a delayed message that was not delivered, one with a
time of its own included, a half message without a decision, and never what this leader has not
saved in a checkpoint. Each replica removes its files once it has saved the moved floor itself.
A topic may keep its messages for a shorter time: then its queues begin later.

What stands in the way of the floor does not stand there for ever: delayed messages are delivered,
and half messages given up, within `TransactionCheckService`'s patience.

Spec: store fact sheet, section 12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from commitlog.errors import DiskFullError
from commitlog.mark import Anchor
from dledger.errors import ReplicationError
from dledger.group_api import BrokerGroup
from dledger.services.delay_level import queue_of_level
from dledger.services.topic_retention import queue_floors
from dledger.state.names import SCHEDULE_TOPIC, TIMER_TOPIC
from dledger.state.state_record import FloorChange, QueueFloorsChange, state_batch
from remoting.seams import Clock

log = structlog.get_logger(__name__)

HOUR_MS: Final = 3_600_000
DAY_HOURS: Final = 24

CHECK_INTERVAL_S: Final = 10.0
"""RocketMQ's interval; sooner would find nothing new."""

SEGMENTS_PER_PASS: Final = 10
"""As in RocketMQ: removing files is not free."""


NEVER_RATIO: Final = 2.0
"""A disk use that no disk reaches."""


class SegmentedLog(Protocol):
    """What retention asks of the log."""

    first_index: int
    first_position: int
    last_index: int
    end_position: int

    def position_at(self, index: int) -> int:
        """Return where an entry starts."""

    def anchor_at(self, index: int) -> Anchor:
        """Return the anchor of a log that would begin with entry *index*."""


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """How much is kept."""

    segment_bytes: int
    reserved_hours: int = 72
    delete_hours: tuple[int, ...] = (4,)
    """Hours of the day, UTC, at which expired segments go while the disk is not full."""
    keep_bytes: int = 0
    """Bytes of log that are kept at most, whole segments; 0: no limit."""
    check_interval_s: float = CHECK_INTERVAL_S
    expire_anytime_ratio: float = 0.75
    """Disk use from which expired segments go at any hour."""
    force_ratio: float = 0.85
    """Disk use from which the oldest segments go although they have not expired."""


def force_ratio_of(percent: int, *, is_enabled: bool) -> float:
    """Return the disk use from which segments go by force: one no disk has, when none may."""
    return percent / 100 if is_enabled else NEVER_RATIO


def segment_starts(entry_log: SegmentedLog, segment_bytes: int) -> Iterator[int]:
    """Yield the index of the first entry of each segment after the first, oldest first."""
    base = entry_log.first_position - entry_log.first_position % segment_bytes + segment_bytes
    low = entry_log.first_index
    while base < entry_log.end_position:
        high = entry_log.last_index
        while low < high:
            middle = (low + high) // 2
            if entry_log.position_at(middle) < base:
                low = middle + 1
            else:
                high = middle
        if entry_log.position_at(low) < base:
            return
        yield low
        base += segment_bytes


def choose_floor(
    entry_log: SegmentedLog,
    settings: RetentionSettings,
    *,
    now_ms: int,
    disk_ratio: float,
    limit_position: int,
) -> Anchor | None:
    """Return the furthest floor that the settings ask for; None when nothing should go.

    Args:
        now_ms: Wall time, as store times are.
        disk_ratio: Used part of the disk, 0 to 1.
        limit_position: The floor stays at or before this byte.
    """
    hour = now_ms // HOUR_MS % DAY_HOURS
    at_any_hour = disk_ratio >= settings.expire_anytime_ratio or hour in settings.delete_hours
    forced = disk_ratio >= settings.force_ratio
    expired_before_ms = now_ms - settings.reserved_hours * HOUR_MS
    chosen: Anchor | None = None
    for count, index in enumerate(segment_starts(entry_log, settings.segment_bytes)):
        anchor = entry_log.anchor_at(index)
        too_much = 0 < settings.keep_bytes <= entry_log.end_position - anchor.position
        expired = at_any_hour and anchor.prev_store_time_ms < expired_before_ms
        if count >= SEGMENTS_PER_PASS or anchor.position > limit_position:
            break
        if not (too_much or expired or forced):
            break
        chosen = anchor
    return chosen


class RetentionService:
    """Moves the floor, leader only.

    Args:
        saved_index: Newest entry that this replica's checkpoint covers.
        disk_ratio: Used part of the disk now.
    """

    def __init__(
        self,
        group: BrokerGroup,
        entry_log: Callable[[], SegmentedLog],
        settings: RetentionSettings,
        *,
        clock: Clock,
        levels: int,
        saved_index: Callable[[], int],
        disk_ratio: Callable[[], float],
    ) -> None:
        self.is_deleting: Callable[[str], bool] = lambda _topic: False
        """Topics whose removal is in flight; their queues are left alone."""
        self._group = group
        self._entry_log = entry_log
        self.settings = settings
        self._clock = clock
        self._levels = levels
        self._saved_index = saved_index
        self._disk_ratio = disk_ratio
        self.wanted_position = 0
        """Where the floor would be if no half message stood in the way."""
        self._at_any_hour = False

    def expire_soon(self) -> None:
        """Let segments that have expired go at the next check, whatever the hour."""
        self._at_any_hour = True

    async def run(self) -> None:
        """Check every interval until cancelled. Run it inside the leadership's nursery."""
        while True:
            await self._clock.sleep(self.settings.check_interval_s)
            await self.check()
            await self.check_topics()

    async def check(self) -> Anchor | None:
        """Move the floor once, if something should go; return the new floor."""
        limit = self._limit_position()
        floor = self._choose(limit)
        oldest_half = self._group.state.transactions.oldest_position
        self.wanted_position = 0
        if floor is not None and oldest_half is not None and oldest_half < floor.position:
            self.wanted_position = floor.position
            floor = self._choose(oldest_half)
        self._at_any_hour = False
        if floor is None or floor.first_index <= self._group.state.floor.first_index:
            return None
        try:
            await self._group.submit(state_batch(FloorChange(floor)))
        except (ReplicationError, DiskFullError) as error:
            log.warning("floor_not_moved", error=str(error))
            return None
        log.info("floor_moved", first_index=floor.first_index, position=floor.position)
        return floor

    async def check_topics(self) -> None:
        """Let the queues of topics with a retention of their own begin later, where they should."""
        floors = queue_floors(self._group, self._clock.wall_ms(), is_deleting=self.is_deleting)
        if not floors:
            return
        try:
            await self._group.submit(state_batch(QueueFloorsChange(floors)))
        except (ReplicationError, DiskFullError) as error:
            log.warning("queue_floors_not_moved", error=str(error))
        else:
            log.info("queue_floors_moved", queues=len(floors))

    def _choose(self, limit_position: int) -> Anchor | None:
        disk_ratio = self._disk_ratio()
        if self._at_any_hour:
            disk_ratio = max(disk_ratio, self.settings.expire_anytime_ratio)
        return choose_floor(
            self._entry_log(),
            self.settings,
            now_ms=self._clock.wall_ms(),
            disk_ratio=disk_ratio,
            limit_position=limit_position,
        )

    def _limit_position(self) -> int:
        entry_log, state = self._entry_log(), self._group.state
        saved = self._saved_index()
        if saved < entry_log.first_index:
            return 0
        limit = entry_log.position_at(saved)
        for level in self._waiting_levels():
            queue_id = queue_of_level(level)
            offset = state.delay_progress.get(level, 0)
            if offset < state.max_offset(SCHEDULE_TOPIC, queue_id):
                unit = self._group.queues.queue(SCHEDULE_TOPIC, queue_id).read(offset, 1)[0]
                limit = min(limit, int(unit["phy_offset"]))
        waits = state.timers.lowest
        if waits is not None:
            unit = self._group.queues.queue(TIMER_TOPIC, 0).read(waits, 1)[0]
            limit = min(limit, int(unit["phy_offset"]))
        return limit

    def _waiting_levels(self) -> list[int]:
        """Return the delay levels, those that are configured no more included."""
        found = set(range(1, self._levels + 1))
        found.update(
            queue_id + 1 for topic, queue_id in self._group.state.queues if topic == SCHEDULE_TOPIC
        )
        return sorted(found)
