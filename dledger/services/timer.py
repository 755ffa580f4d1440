"""Delivery of messages with a time of their own, on the leader.

One entry holds the messages that became due *and* the note that they wait no longer; whoever
decides about a message claims it first. So each is delivered exactly once, or recalled, whatever
happens to the leader. Nobody is delivered before its time by the leader's wall clock.

A message that waits for longer than the roll window is stored anew at the end of the log, so that
what retention has to keep for it does not grow with how far its time is away.

Spec: semantics fact sheet, section 2; docs/state.md, section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import structlog
import trio

from commitlog.errors import CorruptEntryError, CorruptRecordError, DiskFullError
from commitlog.record import decode_record
from dledger.errors import NotLeaderError, PendingFullError, ShuttingDownError, UnknownOutcomeError
from dledger.group_api import BrokerGroup, QueueTouched
from dledger.services.delay_level import Delivery
from dledger.services.timer_claims import TimerClaims
from dledger.services.timer_index import TimerIndex
from dledger.services.timer_message import delivered_message, rolled_message, timer_batch
from dledger.services.waiting import wait_for
from dledger.state.names import TIMER_TOPIC
from dledger.state.state_record import TimersChange
from remoting.seams import Clock

log = structlog.get_logger(__name__)

MAX_DELIVERIES_PER_ENTRY: Final = 2048
"""Messages of one delivery entry: bounds the time between two heartbeats' worth of work."""

MAX_DELIVERY_BYTES: Final = 1 << 20
"""Bytes of one delivery entry, one message at least: an entry must stay far below a segment."""

LOAD_UNITS: Final = 16_384
"""Units of the timer queue looked at in one go when a reign begins."""

ROLLED_OFFSETS: Final = 4096
"""Offsets looked at in one go for messages that are to be rolled."""

RETRY_S: Final = 1.0
"""Pause after the log took nothing, or before messages that cannot go now; they are kept."""

LONGEST_SLEEP_S: Final = 60.0
"""The wall clock is looked at again after this long, in case it was set; so is what to roll."""

STALE_MAX: Final = 100_000
"""What was recalled and stands in the index still; with more than as many as wait it is made
anew."""

DEFAULT_ROLL_WINDOW_MS: Final = 2 * 24 * 3_600_000
"""RocketMQ's: two days."""


class TimerMessageService:
    """Moves due messages of the timer topic to their real queues.

    Args:
        claims: Shared with whoever recalls messages.
        is_deleting: Whether the removal of a topic is in flight: its messages wait until it is
            applied, since no queue offset can be assigned in that topic before.
        entry_bytes_max: Largest entry of the group. What is delivered together takes half of it
            at most; one message always fits, as the settings are checked.
        roll_window_ms: How long a message lies in one place.
    """

    def __init__(
        self,
        group: BrokerGroup,
        clock: Clock,
        claims: TimerClaims,
        *,
        is_deleting: Callable[[str], bool] = lambda _topic: False,
        entry_bytes_max: int = 2 * MAX_DELIVERY_BYTES,
        roll_window_ms: int = DEFAULT_ROLL_WINDOW_MS,
    ) -> None:
        self._group = group
        self._clock = clock
        self._claims = claims
        self._is_deleting = is_deleting
        self._bytes_max = min(MAX_DELIVERY_BYTES, entry_bytes_max // 2)
        self._roll_window_ms = roll_window_ms
        self._wake = trio.Event()
        self._index = TimerIndex()
        self._loaded_to = 0
        self._roll_at_s = 0.0

    async def run(self) -> None:
        """Deliver until cancelled. Run it inside the leadership's nursery, once per leadership.

        Cancellation: An entry in flight may still be stored; the next leader sees what it did.
        """
        self._begin()
        self._group.on_applied.append(self._on_applied)
        try:
            while True:
                self._wake = trio.Event()
                await self._load()
                if not (await self._deliver() or await self._roll()):
                    await self._rest()
        finally:
            self._group.on_applied.remove(self._on_applied)

    def _begin(self) -> None:
        """Forget what is known of who is due: it is read from the queue again."""
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
            await wait_for(self._wake, self._clock, wait_s)
        else:
            await trio.lowlevel.checkpoint()

    # -- who is due ------------------------------------------------------------------------

    async def _load(self) -> None:
        """Take what came to the queue since into the index."""
        timers = self._group.state.timers
        if len(self._index) > 2 * len(timers) + STALE_MAX:
            self._begin()
        while self._loaded_to < self._max_offset:
            first = self._loaded_to
            count = min(self._max_offset - first, LOAD_UNITS)
            waiting = np.flatnonzero(self._group.state.timers.mask(first, count))
            self._loaded_to = first + count
            if len(waiting):
                units = self._group.queues.queue(TIMER_TOPIC, 0).read(first, count)
                due_ms = units["tags_code"][waiting].astype(np.int64)
                self._index.add(waiting + first, due_ms)
            await trio.lowlevel.checkpoint()

    def _positions(self, offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield position and size of each message; neighbours are read together."""
        if not offsets:
            return
        queue = self._group.queues.queue(TIMER_TOPIC, 0)
        breaks = [
            place for place, (one, other) in enumerate(pairwise(offsets), 1) if other != one + 1
        ]
        for start, end in pairwise([0, *breaks, len(offsets)]):
            units = queue.read(offsets[start], end - start)
            yield from zip(units["phy_offset"].tolist(), units["size"].tolist(), strict=True)

    # -- delivering ------------------------------------------------------------------------

    async def _deliver(self) -> bool:
        """Propose one entry of what is due; tell whether something was."""
        now_ms = self._clock.wall_ms()
        taken = self._index.take(now_ms, MAX_DELIVERIES_PER_ENTRY)
        if not taken:
            return False
        timers = self._group.state.timers
        # A recall that is on its way may fail: then the message is due after all.
        held = [each for each in taken if each in timers and self._claims.is_claimed(each)]
        free = [each for each in taken if self._claims.claim(each)]
        deliveries, chosen, left = self._deliverable(free)
        self._claims.give_back(left)
        self._index.put_back(left + held, now_ms)
        if not chosen:
            if left or held:
                await self._clock.sleep(RETRY_S)
            else:
                await trio.lowlevel.checkpoint()
            return True
        if not await self._propose(deliveries, chosen):
            self._index.put_back(chosen, now_ms)
        return True

    def _deliverable(self, offsets: list[int]) -> tuple[list[Delivery], list[int], list[int]]:
        """Return messages for one entry, whose they are, and what does not go with them."""
        deliveries: list[Delivery] = []
        chosen: list[int] = []
        left: list[int] = []
        size = 0
        for offset, (position, record_bytes) in zip(offsets, self._positions(offsets), strict=True):
            if chosen and size + record_bytes > self._bytes_max:
                left.append(offset)
                continue
            delivery = self._delivery_at(position, record_bytes)
            if delivery is None or self._is_deleting(delivery.topic):
                left.append(offset)
                continue
            deliveries.append(delivery)
            chosen.append(offset)
            size += record_bytes
        return deliveries, chosen, left

    def _delivery_at(self, position: int, record_bytes: int) -> Delivery | None:
        try:
            return delivered_message(self._group.log.read(position, record_bytes))
        except (CorruptEntryError, CorruptRecordError) as error:
            # It is repaired with a peer's copy, and goes then.
            log.warning("timer_message_damaged", phy_offset=position, error=str(error))
            self._group.report_damage(position, record_bytes)
            return None

    async def _propose(self, deliveries: Sequence[Delivery], offsets: list[int]) -> bool:
        """Store *deliveries* in the place of *offsets*; false when that certainly is not done."""
        try:
            await self._group.submit(timer_batch(deliveries, TimersChange(done=tuple(offsets))))
        except UnknownOutcomeError as exc:
            # It is in the log of this term: either it is applied yet, or this leadership ends and
            # the next one finds in its applied state who waits. Their claims keep them from here.
            log.info("timer_delivery_unknown", messages=len(offsets), reason=str(exc))
        except (PendingFullError, DiskFullError, NotLeaderError, ShuttingDownError) as exc:
            self._claims.give_back(offsets)
            log.warning("timer_delivery_waits", messages=len(offsets), reason=str(exc))
            await self._clock.sleep(RETRY_S)
            return False
        return True

    # -- rolling ---------------------------------------------------------------------------

    async def _roll(self) -> bool:
        """Store anew what lies in one place for too long; tell whether something did."""
        timers = self._group.state.timers
        first = timers.lowest
        if first is None or self._clock.monotonic() < self._roll_at_s:
            return False
        old_ms = self._clock.wall_ms() - self._roll_window_ms
        count = min(ROLLED_OFFSETS, self._max_offset - first)
        rolled: list[Delivery] = []
        chosen: list[int] = []
        size = 0
        offsets = (np.flatnonzero(timers.mask(first, count)) + first).tolist()
        for offset, (position, record_bytes) in zip(offsets, self._positions(offsets), strict=True):
            if size + record_bytes > self._bytes_max and chosen:
                break
            try:
                record = decode_record(self._group.log.record_at(position), check_crc=False)
                if record.store_timestamp_ms >= old_ms:
                    break
                if self._claims.claim(offset):
                    rolled.append(rolled_message(self._group.log.record_at(position)))
                    chosen.append(offset)
                    size += record_bytes
            except (CorruptEntryError, CorruptRecordError):
                self._claims.give_back([offset])
                self._group.report_damage(position, record_bytes)
                break
        if not chosen:
            self._roll_at_s = self._clock.monotonic() + LONGEST_SLEEP_S
            return False
        await self._propose(rolled, chosen)
        return True
