"""Delivery of delayed messages, on the leader.

Each level is first in, first out. One entry holds the messages that became due *and* the level's
new progress, and a level has one entry in flight: whatever happens to the leader, a message is
delivered exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import trio

from dledger.commitlog.errors import CorruptRecordError, InvariantBroken, StoreError
from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.group_api import BrokerGroup, QueueTouched
from dledger.remoting.seams import Clock
from dledger.services.delayed_message import (
    Delivery,
    RealQueue,
    deliver,
    queue_of_level,
    same_queue,
)
from dledger.services.leader_loop import RETRY_S, Fate, LeaderLoop
from dledger.services.stored_record import StoredRecords
from dledger.state.state_record import DelayProgressChange
from dledger.waiting import Wakeup

MAX_DELIVERIES_PER_ENTRY = 128
"""Messages of one delivery entry, 10 ms or so: a leader sends heartbeats between two of them."""

MAX_DELIVERY_BYTES = 1 << 20
"""Bytes of one delivery entry, one message at least: an entry must stay far below a segment."""

NAME = "delay_levels"
"""In dead letters, logs and metrics."""

LEAST_SLEEP_S = 0.0005
"""A wait below half a millisecond is over: wall time has whole milliseconds."""

LONGEST_SLEEP_S = 60.0
"""The wall clock is read again after this long, in case it was set during the wait."""


@dataclass(eq=False, repr=False)
class ScheduleMessageService:
    """Moves due messages of the schedule topic to their real queues.

    Args:
        is_deleting: Whether the removal of a topic is in flight; its level waits until it is
            applied, since no queue offset can be assigned in that topic before.
        entry_bytes_max: Largest entry of the group. What is delivered together takes half of it at
            most, so that the progress and what encoding adds have space; one message always fits,
            as the settings are checked.
    """

    _group: BrokerGroup
    _clock: Clock
    _levels_ms: Sequence[int]
    is_deleting: Callable[[str], bool] = lambda _topic: False
    real_queue: RealQueue = same_queue
    entry_bytes_max: int = 2 * MAX_DELIVERY_BYTES

    def __post_init__(self) -> None:
        self.name = NAME
        self._delivery_bytes_max = min(MAX_DELIVERY_BYTES, self.entry_bytes_max // 2)
        self._wake: dict[int, Wakeup] = {}
        self._seen: dict[int, SeenTimes] = {}
        self._loop = LeaderLoop(self._group, self._clock, NAME, is_deleting=self.is_deleting)
        self._building = trio.Lock()
        """In one turn of the event loop one level builds its entry, however many are due."""

    async def run(self) -> None:
        """Deliver until cancelled. Run it inside the leadership's nursery, once per leadership.

        Raises:
            InvariantBroken: The applied progress contradicts what this leader delivered.
        Cancellation: An entry in flight may still be stored; the next leader goes on behind it.
        """
        leadership = self._group.leadership
        if leadership is None:
            return
        with self._loop.listening(self._on_applied):
            await self._loop.settle()
            await self._deliver_levels(leadership.term)

    async def _deliver_levels(self, term: int) -> None:
        levels = self._levels()
        self._wake = {level: Wakeup() for level in levels}
        self._seen = {level: SeenTimes() for level in levels}
        async with trio.open_nursery() as nursery:
            for level in self._wake:
                nursery.start_soon(self._deliver_level, level, term)

    def _levels(self) -> list[int]:
        """Return the levels that are configured, and those of old whose messages wait still."""
        state, found = self._group.state, set(range(1, len(self._levels_ms) + 1))
        for queue_id, bounds in state.queues_of.get(SCHEDULE_TOPIC, {}).items():
            waits = bounds.max_offset > bounds.min_offset
            if waits and state.delay_progress.get(queue_id + 1, 0) < bounds.max_offset:
                found.add(queue_id + 1)
        return sorted(found)

    def _on_applied(self, touched: Sequence[QueueTouched]) -> None:
        for topic, queue_id, max_offset in touched:
            if topic == SCHEDULE_TOPIC:
                level = queue_id + 1
                if level in self._wake:
                    self._seen[level].note(max_offset, self._clock.monotonic())
                    self._wake[level].set()

    async def _deliver_level(self, level: int, term: int) -> None:
        queue_id = queue_of_level(level)
        state = self._group.state
        # The applied state holds all there can ever be from earlier leaders: leadership begins
        # only after this leader's own first entry was applied.
        next_offset = state.delay_progress.get(level, 0)
        seen = self._seen[level]
        while True:
            max_offset = state.max_offset(SCHEDULE_TOPIC, queue_id)
            seen.note(max_offset, self._clock.monotonic())
            if next_offset >= max_offset:
                await self._wake[level].wait()
                continue
            units = self._units(queue_id, next_offset, max_offset, MAX_DELIVERIES_PER_ENTRY)
            count, wait_s = self._count_due(seen, next_offset, units)
            if not count:
                await self._clock.sleep(min(wait_s, LONGEST_SLEEP_S))
                continue
            async with self._building:
                deliveries = self._build(level, next_offset, units[:count])
            if not deliveries:
                await self._wake[level].wait_or(self._clock, RETRY_S)
                continue
            from_offset, to_offset = next_offset, next_offset + len(deliveries)
            fate = await self._loop.store_deliveries(
                deliveries,
                DelayProgressChange(level, from_offset, to_offset),
                term=term,
            )
            if fate is Fate.LEADERSHIP_OVER:
                return
            if fate is Fate.NOT_STORED:
                await self._loop.pause()
                continue
            applied = state.delay_progress.get(level, 0)
            if applied != to_offset:
                raise InvariantBroken(
                    f"delay level {level} stands at {applied} after delivering up to {to_offset}"
                )
            next_offset = to_offset

    def _count_due(
        self, seen: SeenTimes, first: int, units: npt.NDArray[np.void]
    ) -> tuple[int, float]:
        """Return how many messages from *first* on are due, and how long the next one waits."""
        now_ms, now_s = self._clock.wall_ms(), self._clock.monotonic()
        records = StoredRecords(self._group)
        for count, (position, _, due_ms) in enumerate(units.tolist()):
            wait_s = (due_ms - now_ms) / 1000
            # Float seconds: less than a millisecond to go cannot be waited for on every clock.
            if wait_s >= LEAST_SLEEP_S:
                # No longer than its delay after it was seen, whatever the date is by now.
                delay_s = (due_ms - _stored_ms(records, position)) / 1000
                wait_s = min(wait_s, seen.since_s(first + count, now_s) + delay_s - now_s)
            if wait_s >= LEAST_SLEEP_S:
                return count, wait_s
        return len(units), 0.0

    def _units(
        self, queue_id: int, first: int, max_offset: int, count: int
    ) -> npt.NDArray[np.void]:
        queue = self._group.queues.queue(SCHEDULE_TOPIC, queue_id)
        units = queue.read(first, min(max_offset - first, count))
        if not len(units):
            raise InvariantBroken(
                f"schedule queue {queue_id} has no unit {first}, its end is {max_offset}"
            )
        return units

    def _build(self, level: int, first: int, units: npt.NDArray[np.void]) -> list[Delivery]:
        """Return what goes into one entry, in order; empty when the first one has to wait."""
        deliveries: list[Delivery] = []
        size = 0
        records = StoredRecords(self._group)
        for offset, (position, unit_size, _) in enumerate(units.tolist(), first):
            if deliveries and (size + unit_size > self._delivery_bytes_max or records.is_tired):
                break
            delivery = self._loop.build(
                records,
                position,
                partial(_delivered, self.real_queue, position, queue_of_level(level), offset),
            )
            if delivery is None or self.is_deleting(delivery.topic):
                break
            deliveries.append(delivery)
            size += unit_size
        return deliveries


def _delivered(
    real_queue: RealQueue, position: int, queue_id: int, offset: int, records: StoredRecords
) -> Delivery:
    record = records.read(position)
    if (record.topic, record.queue_id, record.queue_offset) != (SCHEDULE_TOPIC, queue_id, offset):
        raise CorruptRecordError(f"another record than message {offset} stands at {position}")
    return deliver(record, real_queue)


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
