"""Proposals of a broker group: queued, sealed into entries, applied in their order, answered.

Group commit: what arrives while an entry is being flushed waits and becomes the next entry. An idle
group seals a proposal at once. Sealing is one synchronous step: check the leadership, give out
queue offsets from applied state plus what is in flight, append. So what was checked cannot change
before it is in the log, and `apply` never has to refuse.

A step of a consumer is appended only where its group stands at the offset that the step begins at
(`PendingCommits`): what was appended before decides, whether or not it is applied or answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import structlog
import trio

from dledger.broker_errors import (
    CommitNotExpectedError,
    NotLeaderError,
    PendingFullError,
    ShuttingDownError,
    UnknownOutcomeError,
)
from dledger.commitlog.entry import ENTRY_HEADER_BYTES, SIZE_FIELD_BYTES, RecordBatch, Run
from dledger.commitlog.errors import (
    DiskFullError,
    LocalProtocolError,
    LogBusyError,
    MQError,
    Outcome,
)
from dledger.group_api import (
    STOPS_NODE,
    OffsetCommit,
    OnDone,
    Proposed,
    ServiceCounts,
)
from dledger.log_clock import LogClock
from dledger.raft.journal import Proposal
from dledger.raft.member import RaftNode
from dledger.remoting.protocol.own_fields import NO_OFFSET
from dledger.remoting.seams import Clock
from dledger.settings.tables import RaftTable
from dledger.state.state_record import with_hosts
from dledger.state.tables import QueueKey, StateTables
from dledger.store import ReplicaStore
from dledger.waiting import Future, Turns, Wakeup

_Slot: TypeAlias = tuple[str, str, int]


class PendingCommits:
    """Offset of each group and queue: applied state plus what this leader has appended since.

    It holds what is appended and not applied, which the bytes in flight bound.
    """

    def __init__(self, tables: StateTables) -> None:
        self._tables = tables
        self._newest: dict[_Slot, tuple[int, int]] = {}
        """Offset, and the index of the entry that has it."""
        self._entries: deque[tuple[int, list[_Slot]]] = deque()

    def refusal_of(self, commits: Sequence[OffsetCommit]) -> CommitNotExpectedError | None:
        """Return why these may not be appended next; None: they may."""
        for commit in commits:
            if commit.expected is None:
                continue
            found = self._offset((commit.group, commit.topic, commit.queue_id))
            if found != commit.expected:
                return CommitNotExpectedError(commit.topic, commit.queue_id, commit.expected, found)
        return None

    def _offset(self, slot: _Slot) -> int:
        newest = self._newest.get(slot)
        if newest is not None:
            return newest[0]
        applied = self._tables.consumer_offset(*slot)
        return NO_OFFSET if applied is None else applied

    def keep(self, index: int, commits: Sequence[OffsetCommit]) -> None:
        """Count these as appended in entry *index*."""
        slots = [(commit.group, commit.topic, commit.queue_id) for commit in commits]
        for slot, commit in zip(slots, commits, strict=True):
            self._newest[slot] = (commit.offset, index)
        self._entries.append((index, slots))

    def applied(self, index: int) -> None:
        """Forget what the applied state has now: all up to entry *index*."""
        while self._entries and self._entries[0][0] <= index:
            at, slots = self._entries.popleft()
            for slot in slots:
                if self._newest.get(slot, (0, 0))[1] == at:
                    del self._newest[slot]

    def clear(self) -> None:
        """Forget everything: leadership has begun or ended."""
        self._newest.clear()
        self._entries.clear()


log = structlog.get_logger(__name__)

EXPIRE_INTERVAL_S: Final = 0.2
"""How often overdue proposals are looked for."""

BATCHES_PER_TURN: Final = 1_024
"""Sealed or refused before other tasks have their turn, some 5 microseconds each."""

ENTRY_IN_BATCHES: Final = 8
"""What an entry, or a refusal, costs beside its batches, in batches."""


@dataclass(slots=True)
class Leadership:
    """The right to append in one term. Its scope is cancelled the moment it ends."""

    term: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


@dataclass(slots=True)
class _Pending:
    batch: RecordBatch
    on_done: OnDone
    size: int
    is_applied: bool
    """Whether it is answered when it is applied, and not before."""
    settled: Sequence[OnDone]
    commits: Sequence[OffsetCommit] = ()

    @property
    def is_conditional(self) -> bool:
        """Whether what was appended before decides if it is; a step expects each offset."""
        return bool(self.commits) and self.commits[0].expected is not None


@dataclass(slots=True)
class _InFlight:
    """An appended entry whose proposers wait."""

    index: int
    term: int
    store_time_ms: int
    deadline_s: float
    waiting: list[tuple[_Pending, tuple[int, ...], int]]
    is_applied: bool
    """Whether one of them is answered when it is applied, and not before."""
    settled: list[OnDone]
    late_bytes: int = 0
    """Answered as unknown, and still on their way."""


class PendingQueueOffsets:
    """Next offset of every queue: applied state plus what this leader has appended since."""

    def __init__(self, tables: StateTables) -> None:
        self._tables = tables
        self._next: dict[str, dict[int, int]] = {}
        """By topic and queue id."""

    def plan(self, runs: Iterable[Run]) -> tuple[list[int], dict[QueueKey, int]]:
        """Return the first offset of each run, and what to `keep` once they are appended."""
        following = dict[QueueKey, int]()
        first_offsets = []
        for run in runs:
            key = (run.topic, run.queue_id)
            first = following.get(key)
            if first is None:
                first = self._next.get(run.topic, {}).get(run.queue_id)
                if first is None:
                    first = self._tables.max_offset(*key)
            first_offsets.append(first)
            following[key] = first + run.count
        return first_offsets, following

    def keep(self, following: dict[QueueKey, int]) -> None:
        """Count the runs of a plan as appended."""
        for (topic, queue_id), offset in following.items():
            self._next.setdefault(topic, {})[queue_id] = offset

    def forget_topics(self, topics: tuple[str, ...]) -> None:
        """Drop what is known of deleted topics: a topic of that name begins at 0 again.

        Call it when the deletion is applied (`Applied.deleted_topics`). Nothing of these topics
        is in flight then: processors refuse sends between proposal and apply of a deletion.
        """
        for topic in topics:
            self._next.pop(topic, None)

    def clear(self) -> None:
        """Forget everything: leadership has begun or ended."""
        self._next.clear()


class Proposals:
    """The proposals of one replica, in the order in which they came.

    Attributes:
        settings: May change while the group runs.
        store_host: Packed address of this replica, which its records get.
        entry_bytes_max: Largest entry.
        sync_replication: Answer when a majority has the entry; else when this leader has it, where
            that need not be applied.
        leadership: Set while this replica leads and has applied an entry of its own term.
        service_counts: Also counts listeners that failed.
        dates: The clock of all that waits for a date or compares store times.
    """

    node: RaftNode

    def __init__(
        self,
        store: ReplicaStore,
        settings: RaftTable,
        clock: Clock,
        *,
        store_host: bytes,
        entry_bytes_max: int,
        sync_replication: bool,
    ) -> None:
        self.store = store
        self.settings = settings
        self.store_host = store_host
        self.entry_bytes_max = entry_bytes_max
        self.sync_replication = sync_replication
        self.leadership: Leadership | None = None
        self.service_counts = ServiceCounts()
        self.dates = LogClock(clock, lambda: store.log.last_store_time_ms)
        self._clock = clock
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._seal_left = BATCHES_PER_TURN
        self._late_bytes = 0
        self._in_flight: deque[_InFlight] = deque()
        # Entries at its begin that are committed and answered, and still to be applied.
        self._answered = 0
        self._offsets = PendingQueueOffsets(store.tables)
        self._commits = PendingCommits(store.tables)
        self.turns = Turns(self.kick)
        self._draining = False
        self._drained = Wakeup()
        self._expire_wake = Wakeup()

    @property
    def state(self) -> StateTables:
        """The applied state; read only."""
        return self.store.tables

    @property
    def leader_address(self) -> str | None:
        """Advertised address of the leader's broker, as far as known."""
        if self.node.is_leader:
            return self.node.settings.client_address
        return self.node.transfers.leader_client_address()

    def propose(
        self,
        batch: RecordBatch,
        on_done: OnDone,
        *,
        is_applied: bool = True,
        settled: Sequence[OnDone] = (),
        commits: Sequence[OffsetCommit] = (),
    ) -> None:
        """Queue *batch* for the next entry; all of it goes into one.

        *on_done* is called exactly once, later, never from inside this call.

        Args:
            settled: Called, once each and before *on_done* where both are due, when the applied
                state of this replica shows what became of it, however late and in whatever role.
            is_applied: A stored batch is applied by then; off: it is committed, or with
                ``ASYNC_MASTER`` on this leader's disk.
            commits: The consumer offsets in it; append it only where they are as these expect.

        Raises:
            NotLeaderError, ShuttingDownError, PendingFullError: Nothing was stored.
            LocalProtocolError: The batch is larger than an entry may be; nothing was stored.
        """
        if self.leadership is None:
            raise NotLeaderError(self.leader_address, self.node.term)
        if self._draining:
            raise ShuttingDownError("this broker is stopping; nothing was stored")
        batch = with_hosts(batch, self.store_host)
        size = len(memoryview(batch.records)) + SIZE_FIELD_BYTES * len(batch.sizes)
        if size + ENTRY_HEADER_BYTES > self.entry_bytes_max:
            raise LocalProtocolError(
                f"a batch of {size} bytes does not fit an entry of {self.entry_bytes_max}"
            )
        on_their_way = self._pending_bytes + self._late_bytes
        if on_their_way + size > self.settings.max_pending_bytes:
            raise PendingFullError(f"{on_their_way} bytes wait for a majority; nothing was stored")
        if self._late_bytes:
            # What comes now would stand behind it and end as unknown, too.
            raise PendingFullError(
                "no majority has taken what was sent before in time (a full or slow disk, or a"
                " member that is away); nothing was stored"
            )
        self._pending_bytes += size
        self._pending.append(_Pending(batch, on_done, size, is_applied, settled, commits))
        self._expire_wake.set()

    async def submit(self, batch: RecordBatch, settled: Sequence[OnDone] = ()) -> Proposed:
        """`propose`, awaited.

        Raises:
            UnknownOutcomeError: The entry may or may not be stored.
            NotLeaderError, DiskFullError: It is certainly not stored; also everything `propose`
                raises.
        Cancellation: The entry may still be stored.
        """
        done = Future[Proposed]()
        self.propose(batch, done, settled=settled)
        self.kick()
        proposed = await done.wait()
        if proposed.outcome == "unknown":
            raise UnknownOutcomeError("leadership or the wait ended first; it may be stored")
        if proposed.outcome == "not_stored":
            raise proposed.error or NotLeaderError(self.leader_address, self.node.term)
        return proposed

    def kick(self) -> None:
        """Seal what is waiting, unless a flush is on its way: then its end does, or a next turn."""
        if self._pending and not self.node.flusher.flushing:
            self.node.settle()

    def _seal_all(self) -> None:
        while self._pending and self.leadership and not self.node.transfers.is_under_way:
            if self._seal_left <= 0:
                self.turns.next_turn(self._seal_on)
                return
            if not self._seal():
                return

    def _seal_on(self) -> None:
        self._seal_left = BATCHES_PER_TURN
        self.kick()

    def _seal(self) -> bool:
        taken: list[_Pending] = []
        size = ENTRY_HEADER_BYTES
        self._seal_left -= ENTRY_IN_BATCHES
        while self._pending and len(taken) < BATCHES_PER_TURN:
            following = self._pending[0]
            if taken and size + following.size > self.entry_bytes_max:
                break
            if following.is_conditional:
                if taken:
                    break  # first in an entry of its own, all before it is counted
                error = self._commits.refusal_of(following.commits)
                if error is not None:
                    self._end_all([self._pending.popleft()], error)
                    return True
            taken.append(self._pending.popleft())
            size += taken[-1].size
        self._seal_left -= len(taken)
        runs = (run for pending in taken for run in pending.batch.runs)
        offsets, kept = self._offsets.plan(runs)
        proposal = Proposal(
            [pending.batch for pending in taken], offsets, self.dates.store_time_ms()
        )
        try:
            index = self.node.append(proposal)
        except LogBusyError:
            # Nothing was sealed: they wait until the space is there, see `Maintenance`.
            self._pending.extendleft(reversed(taken))
            return False
        except DiskFullError as error:
            log.error("append_without_space", error=str(error))
            self._end_all(taken, error)
            self.turns.next_turn(self._seal_on)
            return False
        self._offsets.keep(kept)
        commits = [commit for pending in taken for commit in pending.commits]
        if commits:
            self._commits.keep(index, commits)
        self._in_flight.append(self._entry_in_flight(index, taken, offsets))
        return True

    def _entry_in_flight(self, index: int, taken: list[_Pending], offsets: list[int]) -> _InFlight:
        entry_log = self.store.log
        count = sum([len(pending.batch.sizes) for pending in taken])
        position = entry_log.position_at(index) + ENTRY_HEADER_BYTES + SIZE_FIELD_BYTES * count
        waiting, settled, at = [], list[OnDone](), 0
        for pending in taken:
            settled += pending.settled
            batch, after = pending.batch, at + len(pending.batch.runs)
            first = position + int(batch.sizes[: batch.heads].sum())
            waiting.append((pending, tuple(offsets[at + batch.heads : after]), first))
            position += pending.size - SIZE_FIELD_BYTES * len(batch.sizes)
            at = after
        return _InFlight(
            index=index,
            term=self.node.term,
            store_time_ms=entry_log.last_store_time_ms,
            deadline_s=self._clock.monotonic() + self.settings.propose_timeout_ms / 1000,
            waiting=waiting,
            is_applied=any(pending.is_applied for pending in taken),
            settled=settled,
        )

    def _finish(self, pending: _Pending, proposed: Proposed) -> None:
        self._pending_bytes -= pending.size
        self.call(pending.on_done, proposed)
        if self._draining and not self._pending_bytes:
            self._drained.set()

    def _end_all(self, lost: Iterable[_Pending], error: MQError | None = None) -> None:
        """Answer, in their turn, that these are not stored."""
        ended, lost = Proposed("not_stored", error=error), list(lost)
        self._settle([settled for each in lost for settled in each.settled], ended)
        self.turns.call_each(lambda each: self._finish(each, ended), lost)

    def _end(self, entry: _InFlight, outcome: Outcome) -> None:
        """Settle *entry*, and answer what waits for it still."""
        self._settle(entry.settled, Proposed(outcome))
        self._answer(entry, outcome)

    def _settle(self, settled: Iterable[OnDone], proposed: Proposed) -> None:
        for listener in settled:
            self.call(listener, proposed)

    def _answer(
        self, entry: _InFlight, outcome: Outcome, *, may_be_unapplied: bool = False
    ) -> None:
        """Answer what waits for *entry*; of one that *may_be_unapplied*, what needs no more."""
        waiting, entry.waiting = entry.waiting, []
        if may_be_unapplied:
            entry.waiting = [item for item in waiting if item[0].is_applied]
            waiting = [item for item in waiting if not item[0].is_applied]

        def answer(item: tuple[_Pending, tuple[int, ...], int]) -> None:
            pending, offsets, position = item
            proposed = Proposed(outcome)
            if outcome == "stored":
                proposed = Proposed(
                    outcome, offsets, position, entry.store_time_ms, entry.index, entry.term
                )
            self._finish(pending, proposed)

        self.turns.call_each(answer, waiting)

    def resolve(self, index: int) -> None:
        """Answer what is in flight up to entry *index*, which is applied."""
        self._commits.applied(index)
        while self._in_flight and self._in_flight[0].index <= index:
            entry = self._next_in_flight()
            if entry.index < self.store.log.first_index:
                self._end(entry, "unknown")  # a snapshot took its place
                continue
            stored = self.store.log.term_at(entry.index) == entry.term
            self._end(entry, "stored" if stored else "not_stored")

    def _next_in_flight(self) -> _InFlight:
        entry = self._in_flight.popleft()
        self._answered = max(0, self._answered - 1)
        self._late_bytes -= entry.late_bytes
        return entry

    def _answer_committed(self) -> bool:
        """Answer what is committed and need not be applied for that.

        Returns:
            Whether all that is committed is answered.
        """
        commit_index, term = self.node.commit_index, self.node.term
        while self._answered < len(self._in_flight):
            entry = self._in_flight[self._answered]
            if entry.index > commit_index or entry.term != term:
                return True
            if entry.is_applied:
                return False
            self._answered += 1
            self._answer(entry, "stored")
        return True

    def _answer_stable(self) -> None:
        stable = self.node.journal.stable_index
        for entry in self._in_flight:
            if entry.index > stable or entry.term != self.node.term:
                return
            self._answer(entry, "stored", may_be_unapplied=True)

    def call(self, listener: Callable[[Any], None], value: Any) -> None:
        """Call *listener*; an unexpected error is counted and logged, and ends nothing."""
        try:
            listener(value)
        except STOPS_NODE:
            raise
        except Exception as error:
            self.service_counts.listener_failures += 1
            name = getattr(listener, "__qualname__", repr(listener))
            log.error("listener_failed", listener=name, exc_info=error)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new proposals and wait for those in flight; return whether all were answered."""
        self._draining = True
        if not self._pending_bytes:
            return True
        return await self._drained.wait_or(self._clock, timeout_s)

    async def _expire_loop(self) -> None:
        """End as unknown what no majority has taken in time; refuse what a hanging disk keeps."""
        head, since, waiting = None, 0.0, 0
        while True:
            if not (self._in_flight or self._pending):
                await self._expire_wake.wait()
            await self._clock.sleep(EXPIRE_INTERVAL_S)
            now = self._clock.monotonic()
            for entry in list(self._in_flight):
                if entry.deadline_s > now:
                    break
                late = sum(pending.size for pending, _, _ in entry.waiting)
                entry.late_bytes += late
                self._late_bytes += late
                self._answer(entry, "unknown")
            first = self._pending[0] if self._pending else None
            if first is None or first is not head:
                head, since, waiting = first, now, len(self._pending)
            elif now - since >= self.settings.propose_timeout_ms / 1000:
                # The disk hangs: nothing was sealed since.
                error = PendingFullError(f"nothing was written for {now - since:.1f} s")
                self._end_all([self._pending.popleft() for _ in range(waiting)], error)
                head = None

    def forget_topics(self, topics: tuple[str, ...]) -> None:
        """Forget the queue offsets of *topics*, whose deletion is applied."""
        self._offsets.forget_topics(topics)
