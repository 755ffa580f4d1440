"""Consumer offsets on their way into the log: many one-way commits, one entry a second.

RocketMQ's clients commit one-way and often. The leader keeps the newest offset of each queue and
proposes them together; a commit that wants an answer is proposed at once. What is answered, and
what a read answers, is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import structlog
import trio

from dledger.broker_errors import NotLeaderError, PendingFullError
from dledger.commitlog.entry import RecordBatch
from dledger.commitlog.errors import DiskFullError, MQError
from dledger.group_api import BrokerGroup, OffsetCommit, OnDone, Proposed
from dledger.remoting.seams import Clock
from dledger.services.limits import AccountShares, Made, check_limit
from dledger.settings.tables import BrokerTable
from dledger.state.state_record import ConsumerOffset, ConsumerOffsetsChange, state_batch
from dledger.waiting import Future

OffsetSlot = tuple[str, str, int]
"""Consumer group, topic, queue id."""

MAX_OFFSETS_PER_RECORD = 20_000
"""Keeps an offsets record well below the largest body (about 60 bytes an offset)."""

OFFSETS_PER_TURN = 2_000
"""Offsets of one proposal of the regular flush, and the next waits for its answer: each replica
applies them in one go, a few milliseconds."""

MAX_DIRTY_OFFSETS = 100_000
"""Queues with an offset not yet proposed, which some requests look through, 10 ms; beyond it a
flush is made at once."""

logger = structlog.get_logger(__name__)


class OffsetCommits:
    """Offsets this leader has accepted and not yet seen applied.

    What is not yet proposed when leadership ends is dropped, as a one-way commit may be: the
    clients still hold their offsets and commit them again within seconds.
    """

    def __init__(
        self,
        group: BrokerGroup,
        clock: Clock,
        *,
        settings: BrokerTable | None = None,
        shares: AccountShares | None = None,
    ) -> None:
        self._group = group
        self._settings = settings or BrokerTable()
        self._shares = shares if shares is not None else AccountShares(group, self._settings)
        self._clock = clock
        self.check_slot: Callable[[OffsetSlot], None] = lambda _slot: None
        """Raises what refuses an offset of that queue for now."""
        self.exists: Callable[[str], bool] = lambda topic: (
            group.state.topic_config(topic) is not None
        )
        """Whether a topic is there, and its removal is not in flight."""
        self._dirty: dict[OffsetSlot, int] = {}
        self._in_flight: dict[OffsetSlot, ConsumerOffset] = {}
        self._term = 0

    def offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return the newest offset: not yet proposed, in flight, or applied; None without any."""
        if self._leads():
            slot = (group, topic, queue_id)
            dirty = self._dirty.get(slot)
            if dirty is not None:
                return dirty
            in_flight = self._in_flight.get(slot)
            if in_flight is not None:
                return in_flight[-1]
        return self._group.state.consumer_offset(group, topic, queue_id)

    def store_first(self, slots: Iterable[OffsetSlot], then: Callable[[], None]) -> None:
        """Call *then* when what was taken of these queues is stored, or cannot be stored now."""
        items = [
            (slot, offset)
            for slot in slots
            if (slot in self._dirty or self.is_on_its_way(slot))
            and (offset := self.offset(*slot)) is not None
        ]
        if not items:
            then()
            return
        chunks = [
            items[start : start + MAX_OFFSETS_PER_RECORD]
            for start in range(0, len(items), MAX_OFFSETS_PER_RECORD)
        ]
        try:
            for chunk in chunks:
                is_last = chunk is chunks[-1]
                self._propose(chunk, (lambda _: then()) if is_last else None)
                for slot, _ in chunk:
                    self._dirty.pop(slot, None)
        except (NotLeaderError, PendingFullError, DiskFullError) as exc:
            logger.warning("offset_commits_delayed", waiting=len(self._dirty), reason=str(exc))
            then()

    def slots(self, group: str, *topics: str) -> list[OffsetSlot]:
        """Return the queues in which *group* has an offset that is not applied yet.

        *topics*: without any, the queues of all topics.
        """
        pending = (*self._dirty, *self._in_flight) if self._leads() else ()
        return [slot for slot in pending if slot[0] == group and (not topics or slot[1] in topics)]

    def is_on_its_way(self, slot: OffsetSlot) -> bool:
        """Return whether an offset of that queue is proposed and not applied."""
        return self._leads() and slot in self._in_flight

    def waits(self, slot: OffsetSlot) -> bool:
        """Return whether an offset of that queue is taken and not proposed yet."""
        return self._leads() and slot in self._dirty

    def drop(self, slot: OffsetSlot) -> None:
        """Forget an offset that is not proposed yet."""
        self._dirty.pop(slot, None)

    def check_room(self, group: str, topic: str, account: str = "") -> None:
        """Let a consumer group have offsets in a topic.

        Raises TableFullError: it has none there, and there are as many as may be, or as the account
        may make; nothing was stored.
        """
        state = self._group.state
        if (group, topic) not in state.consumer_offsets:
            of_group = len(state.consumer_offsets.keys_with(0, group))
            check_limit(self._settings, "max_group_topics", len(state.consumer_offsets))
            check_limit(self._settings, "max_topics_per_group", of_group)
            self._shares.make(Made.GROUP_TOPIC, account, group, topic)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Take an offset for the next flush."""
        if self.offset(group, topic, queue_id) == offset:
            return
        self.check_slot((group, topic, queue_id))
        self._dirty[(group, topic, queue_id)] = offset
        if len(self._dirty) >= MAX_DIRTY_OFFSETS:
            self.flush()

    def commit_now(
        self,
        items: Sequence[tuple[OffsetSlot, int]],
        on_done: Callable[[Proposed], None],
        *,
        by_admin: bool = False,
    ) -> None:
        """Propose at most `MAX_OFFSETS_PER_RECORD` offsets at once; *on_done* is called for them.

        Raises NotLeaderError, PendingFullError, DiskFullError: nothing was stored.
        """
        for slot, _ in () if by_admin else items:
            self.check_slot(slot)
        self._leads()
        self._propose(items, on_done)
        # A later entry wins over an earlier one, so an older offset must not follow these.
        for slot, _ in items:
            self._dirty.pop(slot, None)

    def commit_step(
        self,
        batch: RecordBatch,
        commits: Sequence[OffsetCommit],
        on_done: OnDone,
        settled: Sequence[OnDone],
    ) -> None:
        """Propose *batch*, in which *commits* are, where the group stands as they expect.

        What was taken of these queues for the next flush is proposed before.

        Raises NotLeaderError, PendingFullError, DiskFullError: nothing was stored.
        """
        self._leads()
        slots = [(commit.group, commit.topic, commit.queue_id) for commit in commits]
        for slot in slots:
            self.check_slot(slot)
        waiting = [(slot, self._dirty[slot]) for slot in slots if slot in self._dirty]
        if waiting:
            self._propose(waiting, None)
            for slot, _ in waiting:
                del self._dirty[slot]
        self._group.propose(batch, on_done, settled=settled, commits=commits)

    def topics_of(self, group: str) -> list[str]:
        """Return the topics that a consumer group has offsets in, sorted."""
        topics = {topic for _, topic in self._group.state.consumer_offsets.keys_with(0, group)}
        if self._leads():
            topics |= {
                topic for name, topic, _ in (*self._dirty, *self._in_flight) if name == group
            }
        return sorted(topics)

    def drop_all(self, *, group: str | None = None, topic: str | None = None) -> None:
        """Forget what waits of a group, or in a topic: it is being removed."""
        for slot in [slot for slot in self._dirty if group == slot[0] or topic == slot[1]]:
            del self._dirty[slot]

    def flush(self) -> None:
        """Propose what waits, as much as a turn takes; the rest stays for the next time."""
        self._flush_first(None)
        self._group.kick()

    def _flush_first(self, on_done: Callable[[Proposed], None] | None) -> int | None:
        """Propose some of what waits; return how many, None: there is no more for now."""
        if not self._leads() or not self._dirty:
            return None
        taken = list(islice(self._dirty.items(), OFFSETS_PER_TURN))
        items = [item for item in taken if self._passes(item[0])]
        try:
            if items:
                self._propose(items, on_done)
        except (NotLeaderError, PendingFullError, DiskFullError) as exc:
            logger.warning("offset_commits_delayed", waiting=len(self._dirty), reason=str(exc))
            return None
        for slot, _ in taken:
            del self._dirty[slot]
        return len(items)

    async def run(self) -> None:
        """Flush every interval, in the leadership's scope.

        Cancellation: What was not proposed is dropped.
        """
        while True:
            await self._clock.sleep(self._settings.flush_consumer_offset_interval_ms / 1000)
            while len(self._dirty) > OFFSETS_PER_TURN and await self._flush_some():
                pass
            self.flush()

    async def _flush_some(self) -> bool:
        """Propose some of what waits and see it answered; tell whether it was stored."""
        done = Future[Proposed]()
        proposed = self._flush_first(done)
        if not proposed:
            await trio.lowlevel.checkpoint()
            return proposed == 0
        self._group.kick()
        return (await done.wait()).outcome == "stored"

    def _passes(self, slot: OffsetSlot) -> bool:
        """Return whether an offset that was taken still counts: its queue is there, and free."""
        try:
            self.check_slot(slot)
        except MQError:
            return False
        return self.exists(slot[1])

    def _leads(self) -> bool:
        """Tell whether this node leads, and forget what an earlier leadership of it left."""
        leadership = self._group.leadership
        if leadership is None:
            return False
        if leadership.term != self._term:
            self._term = leadership.term
            self._dirty.clear()
            self._in_flight.clear()
        return True

    def _propose(
        self, items: Iterable[tuple[OffsetSlot, int]], on_done: Callable[[Proposed], None] | None
    ) -> None:
        mine: dict[OffsetSlot, ConsumerOffset] = {slot: (*slot, offset) for slot, offset in items}

        def done(proposed: Proposed) -> None:
            for slot, item in mine.items():
                if self._in_flight.get(slot) is item:
                    del self._in_flight[slot]
            if on_done is not None:
                on_done(proposed)

        self._group.propose(
            state_batch(ConsumerOffsetsChange.of(mine.values())),
            done,
            commits=[OffsetCommit(*offset) for offset in mine.values()],
        )
        self._in_flight.update(mine)
