"""Retention: old segments are given up, by a record in the log, so that all replicas agree.

The leader looks at whole segments from the oldest on and moves the floor past those that are
too old, or too much. The floor never passes a delayed message that was not delivered, and never
what this leader has not saved in a checkpoint. Each replica removes its files once it has saved
the moved floor itself.

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
from dledger.state.names import SCHEDULE_TOPIC
from dledger.state.state_record import FloorChange, state_batch
from remoting.seams import Clock

log = structlog.get_logger(__name__)

HOUR_MS: Final = 3_600_000
DAY_HOURS: Final = 24

CHECK_INTERVAL_S: Final = 10.0
"""RocketMQ's interval; sooner would find nothing new."""

EXPIRE_ANYTIME_RATIO: Final = 0.75
"""Disk use from which expired segments go at any hour."""

FORCE_RATIO: Final = 0.85
"""Disk use from which the oldest segments go although they have not expired."""

SEGMENTS_PER_PASS: Final = 10
"""As in RocketMQ: removing files is not free."""


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
    at_any_hour = disk_ratio >= EXPIRE_ANYTIME_RATIO or hour in settings.delete_hours
    forced = disk_ratio >= FORCE_RATIO
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
        self._group = group
        self._entry_log = entry_log
        self._settings = settings
        self._clock = clock
        self._levels = levels
        self._saved_index = saved_index
        self._disk_ratio = disk_ratio

    async def run(self) -> None:
        """Check every interval until cancelled. Run it inside the leadership's nursery."""
        while True:
            await self._clock.sleep(self._settings.check_interval_s)
            await self.check()

    async def check(self) -> Anchor | None:
        """Move the floor once, if something should go; return the new floor."""
        floor = choose_floor(
            self._entry_log(),
            self._settings,
            now_ms=self._clock.wall_ms(),
            disk_ratio=self._disk_ratio(),
            limit_position=self._limit_position(),
        )
        if floor is None or floor.first_index <= self._group.state.floor.first_index:
            return None
        try:
            await self._group.submit(state_batch(FloorChange(floor)))
        except (ReplicationError, DiskFullError) as error:
            log.warning("floor_not_moved", error=str(error))
            return None
        log.info("floor_moved", first_index=floor.first_index, position=floor.position)
        return floor

    def _limit_position(self) -> int:
        entry_log, state = self._entry_log(), self._group.state
        saved = self._saved_index()
        if saved < entry_log.first_index:
            return 0
        limit = entry_log.position_at(saved)
        for level in range(1, self._levels + 1):
            queue_id = queue_of_level(level)
            offset = state.delay_progress.get(level, 0)
            if offset < state.max_offset(SCHEDULE_TOPIC, queue_id):
                unit = self._group.queues.queue(SCHEDULE_TOPIC, queue_id).read(offset, 1)[0]
                limit = min(limit, int(unit["phy_offset"]))
        return limit
