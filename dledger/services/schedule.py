"""Delivery of delayed messages, on the leader.

Each level is first in, first out. One entry holds the messages that became due *and* the level's
new progress, and a level has one entry in flight: whatever happens to the leader, a message is
delivered exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import trio

from dledger.commitlog.errors import InvariantBroken, StoreError
from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.group_api import QueueTouched
from dledger.services.delayed_message import queue_of_level
from dledger.services.leader_loop import (
    LONGEST_SLEEP_S,
    MAX_DELIVERIES_PER_ENTRY,
    RETRY_S,
    DeliveryService,
    Fate,
)
from dledger.services.stored_record import StoredRecords
from dledger.state.state_record import DelayProgressChange
from dledger.waiting import Wakeup


@dataclass(eq=False, repr=False, kw_only=True)
class ScheduleMessageService(DeliveryService):
    """Moves due messages of the schedule topic to their real queues."""

    name = "delay_levels"

    levels: int
    """How many are configured; what waits in others is delivered too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._wake: dict[int, Wakeup] = {}
        self._seen: dict[int, SeenTimes] = {}
        self._building = trio.Lock()
        """In one turn of the event loop one level builds its entry, however many are due."""

    async def _serve(self, term: int) -> None:
        known = (queue_id + 1 for queue_id in self._group.state.queues_of.get(SCHEDULE_TOPIC, ()))
        levels = sorted({*range(1, self.levels + 1), *known})
        self._wake = {level: Wakeup() for level in levels}
        self._seen = {level: SeenTimes() for level in levels}
        async with trio.open_nursery() as nursery:
            for level in levels:
                nursery.start_soon(self._deliver_level, level, term)

    def _on_applied(self, touched: Sequence[QueueTouched]) -> None:
        for topic, queue_id, max_offset in touched:
            level = queue_id + 1
            if topic == SCHEDULE_TOPIC and level in self._wake:
                self._seen[level].note(max_offset, self._clock.monotonic())
                self._wake[level].set()

    async def _deliver_level(self, level: int, term: int) -> None:
        queue_id, seen, state = queue_of_level(level), self._seen[level], self._group.state
        while True:
            # One entry at a time is in flight, and it is applied or never will be.
            first = state.delay_progress.get(level, 0)
            max_offset = state.max_offset(SCHEDULE_TOPIC, queue_id)
            seen.note(max_offset, self._clock.monotonic())
            if first >= max_offset:
                await self._wake[level].wait()
                continue
            count = min(max_offset - first, MAX_DELIVERIES_PER_ENTRY)
            units = self._group.queues.queue(SCHEDULE_TOPIC, queue_id).read(first, count).tolist()
            if not units:
                raise InvariantBroken(f"schedule queue {queue_id} has no unit {first}")
            count, wait_s = self._count_due(seen, first, units)
            if not count:
                await self._clock.sleep(min(wait_s, LONGEST_SLEEP_S))
                continue
            async with self._building:
                due = ((offset, *unit[:2]) for offset, unit in enumerate(units[:count], first))
                entry = self._entry_of(due, partial(self._delivered, queue_id), in_order=True)
            if not entry.chosen:
                await self._wake[level].wait_or(self._clock, RETRY_S)
                continue
            progress = DelayProgressChange(level, first, first + len(entry.chosen))
            fate = await self._loop.store_deliveries(entry.deliveries, progress, term=term)
            if fate is Fate.LEADERSHIP_OVER:
                return
            if fate is Fate.NOT_STORED:
                await self._loop.pause()

    def _count_due(
        self, seen: SeenTimes, first: int, units: Sequence[tuple[int, int, int]]
    ) -> tuple[int, float]:
        """Return how many messages from *first* on are due, and how long the next one waits."""
        now_ms, now_s = self._clock.wall_ms(), self._clock.monotonic()
        records = StoredRecords(self._group)
        for count, (position, _, due_ms) in enumerate(units):
            wait_ms = due_ms - now_ms
            if wait_ms > 0:
                # No longer than its delay after it was seen, whatever the date is by now.
                delay_ms = due_ms - _stored_ms(records, position)
                seen_ms = round(1000 * (now_s - seen.since_s(first + count, now_s)))
                wait_ms = min(wait_ms, delay_ms - seen_ms)
            if wait_ms > 0:
                return count, wait_ms / 1000
        return len(units), 0.0


def _stored_ms(records: StoredRecords, position: int) -> int:
    try:
        return records.read(position).store_timestamp_ms
    except StoreError:
        return 0  # being repaired, or set aside; it may wait for the clock alone


class SeenTimes:
    """When this leader first saw the messages of a level, within `GRANULARITY_S`, never too early.

    The guard against a wall clock that was set back, or that is behind the former leader's: no
    message waits for longer than the level's delay after having been seen. A message is stored
    before it is seen, so this is never early in true time.
    """

    GRANULARITY_S = 1.0
    """Bounds the memory: two hours of the longest level are 7,200 items."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float, int]] = deque()

    def note(self, max_offset: int, monotonic: float) -> None:
        """Remember that every offset below *max_offset* is there by now."""
        if self._marks:
            began, _, seen_to = self._marks[-1]
            if max_offset <= seen_to:
                return
            if monotonic - began < self.GRANULARITY_S:
                # The later time counts for all of them: too late is safe, too early is not.
                self._marks[-1] = (began, monotonic, max_offset)
                return
        self._marks.append((monotonic, monotonic, max_offset))

    def since_s(self, offset: int, monotonic: float) -> float:
        """Return when *offset* was seen, or now; what is below it is not asked for any more."""
        while self._marks and self._marks[0][2] <= offset:
            self._marks.popleft()
        return self._marks[0][1] if self._marks else monotonic
