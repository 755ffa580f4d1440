"""Delivery of messages with a time of their own, on the leader.

One entry holds the messages that became due *and* the note that they wait no longer; the leader
that decides about a message claims it first. So each is delivered exactly once, or recalled. No
message is delivered before its time by the leader's wall clock. One that waits for longer than the
roll window is stored again at the end of the log, so that retention need not keep all behind it.

Which message is due next is known from an index in memory, which a leader makes from the timer
queue when its term begins: compact arrays by hour, and the hours that have come sorted into
seconds.

Spec: docs/internals/protocol/semantics.md, section 2; docs/internals/state.md, section 6.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import trio

from dledger.commitlog.properties import TIMER_TOPIC
from dledger.group_api import QueueTouched
from dledger.services.delayed_message import Delivery, TimerClaims, real_destination, rolled_message
from dledger.services.leader_loop import (
    LONGEST_SLEEP_S,
    MAX_DELIVERIES_PER_ENTRY,
    RETRY_S,
    DeliveryService,
    DueEntry,
    Fate,
    check_place,
)
from dledger.services.stored_record import StoredRecords, decode_stored
from dledger.state.state_record import TimersChange
from dledger.waiting import Wakeup

HOUR_MS: Final = 3_600_000
SECOND_MS: Final = 1000

LOAD_UNITS: Final = 16_384
"""Units of the timer queue read in one go when a term begins, and of an hour sorted into seconds
when it comes: some 5 ms."""

ROLLED_OFFSETS: Final = 128
"""Offsets looked at in one go for messages that are to be rolled: as long as a delivery."""

Offsets = npt.NDArray[np.int64]


def _places_of(keys: Offsets) -> Iterator[tuple[int, Offsets]]:
    """Yield each of *keys* once, in order, with the places where it stands."""
    order = np.argsort(keys, kind="stable")
    found, starts = np.unique(keys[order], return_index=True)
    for key, (start, end) in zip(found.tolist(), pairwise([*starts, len(keys)]), strict=True):
        yield key, order[start:end]


class TimerIndex:
    """Offsets by time: 12 bytes for each that is hours away, 8 for each in a near second."""

    def __init__(self) -> None:
        self._far: dict[int, tuple[array[int], array[int]]] = {}
        """By hour: offsets, and when in that hour each is due."""
        self._near: dict[int, array[int]] = {}
        self._seconds: list[int] = []
        self._opened_hour = -1
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, offsets: Offsets, due_ms: Offsets) -> None:
        """Take in offsets, in ascending order, with their times."""
        self._size += len(offsets)
        near = due_ms < (self._opened_hour + 1) * HOUR_MS
        self._add_near(offsets[near], due_ms[near])
        offsets, due_ms = offsets[~near], due_ms[~near]
        for hour, places in _places_of(due_ms // HOUR_MS):
            known, within = self._far.setdefault(hour, (array("q"), array("I")))
            known.frombytes(offsets[places].astype(np.int64).tobytes())
            within.frombytes((due_ms[places] - hour * HOUR_MS).astype(np.uint32).tobytes())

    def _add_near(self, offsets: Offsets, due_ms: Offsets) -> None:
        # Rounded up: what is in a second is due when the second is.
        for second, places in _places_of(-(-due_ms // SECOND_MS)):
            self._in_second(second).frombytes(offsets[places].astype(np.int64).tobytes())

    def _in_second(self, second: int) -> array[int]:
        waiting = self._near.get(second)
        if waiting is None:
            waiting = self._near[second] = array("q")
            heappush(self._seconds, second)
        return waiting

    def open_some(self, now_ms: int) -> bool:
        """Sort some of what comes with its hour into seconds; return whether there was any."""
        hour = now_ms // HOUR_MS
        self._opened_hour = max(self._opened_hour, hour)
        come = min(self._far, default=hour + 1)
        if come > hour:
            return False
        offsets, within = self._far[come]
        some = slice(LOAD_UNITS)
        self._add_near(np.array(offsets[some]), np.array(within[some], np.int64) + come * HOUR_MS)
        del offsets[some], within[some]
        if not offsets:
            del self._far[come]
        return True

    def take(self, now_ms: int, count: int) -> list[int]:
        """Remove and return up to *count* offsets that are due, earliest first."""
        while self.open_some(now_ms):
            pass
        taken: list[int] = []
        while self._seconds and self._seconds[0] * SECOND_MS <= now_ms and len(taken) < count:
            second = self._seconds[0]
            waiting = self._near[second]
            left = count - len(taken)
            taken.extend(waiting[:left])
            del waiting[:left]
            if not waiting:
                heappop(self._seconds)
                del self._near[second]
        self._size -= len(taken)
        return taken

    def put_back(self, offsets: list[int], now_ms: int) -> None:
        """Let *offsets*, which were taken, be due again: before all that come after them."""
        if offsets:
            second = min([now_ms // SECOND_MS, *self._seconds[:1]])
            self._in_second(second)[:0] = array("q", offsets)
            self._size += len(offsets)

    def next_ms(self) -> int | None:
        """Return when to look again, never later than the next offset is due; None: no offset."""
        times = []
        if self._seconds:
            times.append(self._seconds[0] * SECOND_MS)
        if self._far:
            times.append(min(self._far) * HOUR_MS)
        return min(times, default=None)


STALE_MAX: Final = 100_000
"""What was recalled and stands in the index still; with more than as many as wait it is made
again."""

DEFAULT_ROLL_WINDOW_MS: Final = 2 * 24 * 3_600_000
"""RocketMQ's: two days."""


@dataclass(eq=False, repr=False, kw_only=True)
class TimerMessageService(DeliveryService):
    """Moves due messages of the timer topic to their real queues.

    *claims* are shared with the handler that recalls messages.
    """

    name = "timer"

    claims: TimerClaims
    roll_window_ms: int = DEFAULT_ROLL_WINDOW_MS
    load_units: int = LOAD_UNITS

    def __post_init__(self) -> None:
        super().__post_init__()
        self._wake = Wakeup()
        self._index = TimerIndex()
        self._loaded_to = 0
        self._roll_at_s = 0.0
        self._mine: list[int] = []
        """Claimed by the step in hand."""

    async def _serve(self, term: int) -> None:
        self.claims.give_back(self._mine)
        self._begin()
        while self._loop.leads(term):
            now_ms = self._clock.wall_ms()
            await self._load(now_ms)
            if not (await self._deliver(term, now_ms) or await self._roll(term)):
                await self._rest()

    def _begin(self) -> None:
        """Forget which messages are known to be due: it is read from the queue again."""
        lowest = self._group.state.timers.lowest
        self._index = TimerIndex()
        self._loaded_to = self._max_offset if lowest is None else lowest

    @property
    def _max_offset(self) -> int:
        return self._group.state.max_offset(TIMER_TOPIC, 0)

    def _on_applied(self, touched: Sequence[QueueTouched]) -> None:
        for topic, _, _ in touched:
            if topic == TIMER_TOPIC:
                self._wake.set()

    async def _rest(self) -> None:
        """Wait for the next message to be due, or for a new one."""
        next_ms = self._index.next_ms()
        wait_s = LONGEST_SLEEP_S
        if next_ms is not None:
            wait_s = min(wait_s, (next_ms - self._clock.wall_ms()) / 1000)
        if wait_s > 0:
            await self._wake.wait_or(self._clock, wait_s)
        else:
            await trio.lowlevel.checkpoint()

    # -- what is due ------------------------------------------------------------------------

    async def _load(self, now_ms: int) -> None:
        """Take what came to the queue since into the index."""
        while self._index.open_some(now_ms):
            await trio.lowlevel.checkpoint()
        timers = self._group.state.timers
        if len(self._index) > 2 * len(timers) + STALE_MAX:
            self._begin()
        while self._loaded_to < self._max_offset:
            first = self._loaded_to
            count = min(self._max_offset - first, self.load_units)
            waiting = np.flatnonzero(self._group.state.timers.mask(first, count))
            self._loaded_to = first + count
            if len(waiting):
                units = self._group.queues.queue(TIMER_TOPIC, 0).read(first, count)
                due_ms = units["tags_code"][waiting].astype(np.int64)
                self._index.add(waiting + first, due_ms)
            await trio.lowlevel.checkpoint()

    def _units(self, offsets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield offset, position and size of each message; neighbours are read together."""
        queue = self._group.queues.queue(TIMER_TOPIC, 0)
        breaks = [
            place for place, (one, other) in enumerate(pairwise(offsets), 1) if other != one + 1
        ]
        for start, end in pairwise([0, *breaks, len(offsets)] if offsets else ()):
            units = queue.read(offsets[start], end - start)
            places = units["phy_offset"].tolist(), units["size"].tolist()
            yield from zip(offsets[start:end], *places, strict=True)

    def _claim(
        self, offsets: Sequence[int], make: Callable[[int, int, StoredRecords], Delivery | None]
    ) -> DueEntry:
        """Return what `_entry_of` makes of those of *offsets* that no recall has; claim these."""
        self._mine = [each for each in offsets if self.claims.claim(each)]
        entry = self._entry_of(self._units(self._mine), make)
        self.claims.give_back(entry.left + entry.unready)
        self._mine = entry.chosen
        return entry

    # -- delivering ------------------------------------------------------------------------

    async def _deliver(self, term: int, now_ms: int) -> bool:
        """Propose one entry of what is due; tell whether something was."""
        taken = self._index.take(now_ms, MAX_DELIVERIES_PER_ENTRY)
        if not taken:
            return False
        timers = self._group.state.timers
        # A recall that is on its way may fail: then the message is due after all.
        held = [each for each in taken if each in timers and self.claims.is_claimed(each)]
        entry = self._claim(taken, partial(self._delivered, 0))
        self._index.put_back(entry.left + held, now_ms)
        if entry.unready:  # due a little later, behind what is whole
            again_ms = np.full(len(entry.unready), now_ms + int(RETRY_S * 1000), np.int64)
            self._index.add(np.array(sorted(entry.unready), np.int64), again_ms)
        if not entry.chosen:
            if entry.left or held:
                await self._clock.sleep(RETRY_S)
            else:
                await trio.lowlevel.checkpoint()
            return True
        if not await self._store(entry, term):
            self._index.put_back(entry.chosen, now_ms)
        return True

    async def _store(self, entry: DueEntry, term: int) -> bool:
        """Store an entry's messages in the place of the old; false when that is not done."""
        done = TimersChange(done=tuple(entry.chosen))
        fate = await self._loop.store_deliveries(entry.deliveries, done, term=term)
        if fate is Fate.LEADERSHIP_OVER:
            return True
        self.claims.give_back(entry.chosen)
        self._mine = []
        if fate is Fate.NOT_STORED:
            await self._loop.pause()
        return fate is Fate.APPLIED

    # -- rolling ---------------------------------------------------------------------------

    async def _roll(self, term: int) -> bool:
        """Store again what lies in one place for too long; return whether something did."""
        timers = self._group.state.timers
        first = timers.lowest
        if first is None or self._clock.monotonic() < self._roll_at_s:
            return False
        count = min(ROLLED_OFFSETS, self._max_offset - first)
        waiting = (np.flatnonzero(timers.mask(first, count)) + first).tolist()
        old_ms = self._clock.wall_ms() - self.roll_window_ms
        entry = self._claim(waiting, partial(self._rolled, old_ms))
        if not entry.chosen:
            self._roll_at_s = self._clock.monotonic() + LONGEST_SLEEP_S
            return False
        await self._store(entry, term)
        return True

    def _rolled(
        self, old_ms: int, position: int, offset: int, records: StoredRecords
    ) -> Delivery | None:
        data = records.bytes_at(position)
        check_place(data, position, 0, offset)
        record = decode_stored(data)
        if record.store_timestamp_ms >= old_ms:
            return None
        # From its new place it would count as sent to a topic that was made since.
        run = real_destination(record.properties, position, self.real_queue)
        return None if self.is_deleting(run.topic) else rolled_message(record)
