"""A broker group: proposals in, committed and applied entries out. The only door to the log.

Group commit: what arrives while an entry is being flushed waits and becomes the next entry, so
the price of an entry (a flush, a round trip, a tick of the consensus code) is shared by however
many messages there are. An idle group seals a proposal at once.

Sealing is one synchronous step: check the leadership, give out queue offsets from applied state
plus what is in flight, append. So what was checked cannot change before it is in the log, and
`apply` never has to refuse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import structlog
import trio

from commitlog.entry import ENTRY_HEADER_BYTES, SIZE_FIELD_BYTES, RecordBatch
from commitlog.entry_log import EntryLog
from commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    CorruptStoreError,
    DiskFullError,
    ForeignStoreError,
    LocalProtocolError,
    LogBusyError,
)
from commitlog.mark import Anchor
from dledger.broker_errors import (
    NotLeaderError,
    PendingFullError,
    ShuttingDownError,
    UnknownOutcomeError,
)
from dledger.group_api import AppliedListener, OnBarrier, OnDone, Proposed
from dledger.metrics.loop_stall import LoopStall
from dledger.raft.guards import ALL_ON, Guards
from dledger.raft.identity import Identity
from dledger.raft.journal import Proposal, members_in
from dledger.raft.links import Links
from dledger.raft.membership import Members, MembersLog
from dledger.raft.node import RaftNode, RaftSettings
from dledger.raft.term_vote import TermVote
from dledger.raft.transfer import Phase
from dledger.raft.wakeup import Wakeup
from dledger.raft.wire import FRAME_BYTES_MAX
from dledger.services.fence import STOPS_NODE, fenced
from dledger.services.key_index_repair import KeyIndexRepair
from dledger.services.scrub import ScrubService
from dledger.services.service_counts import ServiceCounts
from dledger.state.apply import QueueUnits
from dledger.state.snapshot import snapshot
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore, goes_on_after
from remoting.frame_room import FrameRoom
from remoting.seams import Clock, Executor, Network, Rng

log = structlog.get_logger(__name__)

APPLY_AT_ONCE_ENTRIES: Final = 64
"""Entries applied in one go before other tasks get their turn."""

SPACE_RETRY_S: Final = 1.0
"""How often an entry is tried again that a full disk let nobody apply."""

FLUSH_POLL_S: Final = 0.001
"""How often the end of a flush is looked for before a snapshot replaces the log; rare."""

INSTALL: Final = "install"
DROP: Final = "drop"
"""Names under which the executor measures taking in a snapshot, and removing segments."""

APPLY_AFTER_TURNS: Final = 2
"""Turns of the scheduler a follower's apply gives away: its answer is built and sent in them."""

FRAME_HEAD_ROOM_BYTES: Final = 4096
"""What a frame between peers needs beside the entry in it, with much to spare."""

CHECKPOINT_BYTES_PER_S: Final = 4 << 20
"""Tables are written whole: large ones less often, so that they never fill a disk's time."""

EXPIRE_INTERVAL_S: Final = 0.2
"""How often overdue proposals are looked for."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Limits of a group, each with its unit."""

    pending_bytes_max: int = 64 << 20
    """Bytes proposed and not yet answered; above it proposals are refused."""
    entry_bytes_max: int = 16 << 20
    """Largest entry; the library would start to chunk far above it."""
    quorum_timeout_s: float = 3.0
    """A proposal without an answer for so long ends as unknown."""
    drain_timeout_s: float = 5.0
    """How long a clean stop waits for proposals in flight."""
    checkpoint_interval_s: float = 3.0
    """How far a restart after a kill may have to replay."""
    scrub_bytes_per_s: int = 0
    """How fast the log is checked for damage; 0: all of it about once a day."""
    sync_replication: bool = True
    """Answer when a majority has the entry; else when this leader has it."""


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


@dataclass(slots=True)
class _InFlight:
    """An appended entry whose proposers wait."""

    index: int
    term: int
    store_time_ms: int
    deadline_s: float
    waiting: list[tuple[_Pending, tuple[int, ...], int]]
    late_bytes: int = 0
    """Answered as unknown: nobody waits any more, but it is still on its way."""


class Group:
    """One replica of a broker group; implements `dledger.group_api.BrokerGroup`.

    Args:
        store: Opened and replayed; closed by the caller.
    """

    def __init__(
        self,
        store: ReplicaStore,
        identity: Identity,
        raft: RaftSettings,
        settings: GroupSettings,
        *,
        store_host: bytes,
        clock: Clock,
        rng: Rng,
        network: Network,
        executor: Executor,
        guards: Guards = ALL_ON,
    ) -> None:
        self.store = store
        # An entry stands in one segment and travels in one frame.
        cap = min(store.log.max_entry_bytes, FRAME_BYTES_MAX - FRAME_HEAD_ROOM_BYTES)
        self.settings = replace(settings, entry_bytes_max=min(settings.entry_bytes_max, cap))
        self.on_applied: list[AppliedListener] = []
        # Told the same with the units themselves; for those who want sizes.
        self.on_units: list[Callable[[Sequence[QueueUnits]], None]] = []
        self.on_role_change: list[Callable[[], None]] = []
        # What others add to `status`.
        self.status_parts: list[Callable[[], Mapping[str, Any]]] = []
        self.services: list[Callable[[Leadership], Awaitable[None]]] = []
        self.service_counts = ServiceCounts()
        self.leadership: Leadership | None = None
        self._clock = clock
        self._executor = executor
        self.loop_stall = LoopStall()
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._late_bytes = 0
        self._lacks_space = False
        self._in_flight: deque[_InFlight] = deque()
        self._counters: dict[tuple[str, int], int] = {}
        self._draining = False
        self._drained = Wakeup()
        self._apply_wake = Wakeup()
        self._reserve_wake = Wakeup()
        self._expire_wake = Wakeup()
        self._install_wake = Wakeup()
        self._snapshot: tuple[str, bytes] | None = None
        # One at a time: a checkpoint and the installation of a snapshot write the same files.
        self._store_lock = trio.Lock()
        self._leadership_wake = Wakeup()
        self._transfer_over: trio.Event | None = None
        self._role: tuple[int, str | None] = (0, None)
        self.node = RaftNode(
            raft,
            store.log,
            TermVote(store.vote_slots),
            identity,
            restored_commit_index=store.restored_commit_index,
            store_host=store_host,
            doubtful=store.torn or (store.unclean and not raft.sync_flush),
            damaged=store.damaged,
            clock=clock,
            rng=rng,
            on_settled=self._on_settled,
            guards=guards,
            members=self._members_of_log(),
        )
        self.node.owner.take_snapshot = self._take_snapshot
        self.node.owner.on_snapshot = self._on_snapshot
        self.node.owner.may_lead = lambda: not store.refilling
        self.scrub = ScrubService(
            store,
            self.node,
            clock=clock,
            executor=executor,
            lock=self._store_lock,
            bytes_per_s=settings.scrub_bytes_per_s,
        )
        self.scrub.on_config_repaired = self._on_repaired
        store.log.on_unreadable = self._on_unreadable
        self._key_index_repair = KeyIndexRepair(
            store,
            clock=clock,
            executor=executor,
            lock=self._store_lock,
            can_be_repaired=lambda: bool(self.node.roster.other_voters),
        )
        self._links = Links(self.node, network=network, clock=clock, rng=rng, executor=executor)

    # -- what others ask -------------------------------------------------------------------

    @property
    def peer_frames(self) -> FrameRoom:
        """Memory for unfinished frames of the other members."""
        return self._links.frames

    @property
    def state(self) -> StateTables:
        """The applied state; read only."""
        return self.store.tables

    @property
    def log(self) -> Any:
        """The log; read applied records only."""
        return self.store.log

    @property
    def queues(self) -> Any:
        """The consume queues."""
        return self.store.queues

    @property
    def key_index(self) -> Any:
        """The key index."""
        return self.store.key_index

    @property
    def readable(self) -> bool:
        """Whether queues and log hold what the tables say; not while a snapshot is refilled."""
        return not self.store.refilling

    @property
    def group_identity(self) -> str:
        """Identity of the whole group; empty before bootstrap."""
        return self.node.identity.group_identity

    @property
    def membership_proof(self) -> str:
        """What members alone can say to NameServers; empty without a secret."""
        secret = self.node.settings.secret
        return "" if secret is None else secret.membership_proof(self.group_identity)

    @property
    def member_addresses(self) -> tuple[str, ...]:
        """Advertised addresses of the members, as far as known."""
        members = self.node.roster.members
        found = (m.client_address for m in (() if members is None else members.members))
        return tuple(sorted({address for address in found if address}))

    @property
    def has_other_members(self) -> bool:
        """Whether another member may have a copy of what is damaged here."""
        return len(self.node.peers) > 0

    @property
    def term(self) -> int:
        """Newest term seen."""
        return self.node.term

    @property
    def store_time_ahead_ms(self) -> int:
        """How far the newest entry's store time is ahead of this replica's date.

        A little below 0 while messages come, more in a quiet group. Far above 0: the group was once
        led by a wrong date, see docs/operate/operations.md.
        """
        return self.store.log.last_store_time_ms - self._clock.wall_ms()

    @property
    def leader_address(self) -> str | None:
        """Advertised address of the leader's broker, as far as known."""
        if self.node.is_leader:
            return self.node.settings.client_address
        return self.node.leader_client_address()

    def status(self) -> Mapping[str, Any]:
        """Return what ``dledger raft status`` shows of this replica."""
        applied = self.state.applied_index
        return {
            **self.node.status(),
            "group_identity": self.group_identity,
            "serving": self.leadership is not None,
            "leader_address": self.leader_address,
            "applied_index": applied,
            "refilling": self.store.refilling,
            "applied_chain": f"{self.state.applied_chain:016x}",
            "end_position": self.store.log.end_position,
            "pending_bytes": self._pending_bytes,
            "store_time_ahead_ms": self.store_time_ahead_ms,
            "scrub": self.scrub.status(),
            "key_index": self.store.keys.status(),
            **{key: value for part in self.status_parts for key, value in part().items()},
            "event_loop": self.loop_stall.status(),
        }

    # -- proposals -------------------------------------------------------------------------

    def propose(self, batch: RecordBatch, on_done: OnDone) -> None:
        """Queue *batch* for the next entry; all of it goes into one.

        *on_done* is called exactly once, later, never from inside this call.

        Raises:
            NotLeaderError, ShuttingDownError, PendingFullError: Nothing was stored.
            LocalProtocolError: The batch is larger than an entry may be; nothing was stored.
        """
        if self.leadership is None:
            raise NotLeaderError(self.leader_address, self.node.term)
        if self._draining:
            raise ShuttingDownError("this broker is stopping; nothing was stored")
        size = len(memoryview(batch.records)) + SIZE_FIELD_BYTES * len(batch.sizes)
        if size + ENTRY_HEADER_BYTES > self.settings.entry_bytes_max:
            raise LocalProtocolError(
                f"a batch of {size} bytes does not fit an entry of {self.settings.entry_bytes_max}"
            )
        on_their_way = self._pending_bytes + self._late_bytes
        if on_their_way + size > self.settings.pending_bytes_max:
            raise PendingFullError(f"{on_their_way} bytes wait for a majority; nothing was stored")
        if self._late_bytes:
            # What comes now would stand behind it and end as unknown, too.
            raise PendingFullError(
                "no majority has taken what was sent before in time (a full or slow disk, or a"
                " member that is away); nothing was stored"
            )
        self._pending_bytes += size
        self._pending.append(_Pending(batch, on_done, size))
        self._expire_wake.set()

    async def submit(self, batch: RecordBatch) -> Proposed:
        """`propose`, awaited.

        Raises:
            UnknownOutcomeError: The entry may or may not be stored.
            NotLeaderError, DiskFullError: It is certainly not stored; also everything `propose`
                raises.
        Cancellation: The entry may still be stored.
        """
        done = trio.Event()
        results: list[Proposed] = []

        def on_done(proposed: Proposed) -> None:
            results.append(proposed)
            done.set()

        self.propose(batch, on_done)
        self.kick()
        await done.wait()
        proposed = results[0]
        if proposed.outcome == "unknown":
            raise UnknownOutcomeError("leadership or the wait ended first; it may be stored")
        if proposed.outcome == "not_stored":
            raise proposed.error or NotLeaderError(self.leader_address, self.node.term)
        return proposed

    def kick(self) -> None:
        """Seal what is waiting, unless a flush is on its way: then its end does."""
        if self._pending and not self.node.flushing:
            self.node.settle()

    def _seal_all(self) -> None:
        while self._pending and self.leadership is not None and not self.node.transferring:
            if not self._seal():
                return

    def _seal(self) -> bool:
        taken: list[_Pending] = []
        size = ENTRY_HEADER_BYTES
        while self._pending and (
            not taken or size + self._pending[0].size <= self.settings.entry_bytes_max
        ):
            taken.append(self._pending.popleft())
            size += taken[-1].size
        counters, tables = self._counters, self.state
        offsets: list[int] = []
        moved: dict[tuple[str, int], int] = {}
        for pending in taken:
            for run in pending.batch.runs:
                key = (run.topic, run.queue_id)
                first = moved.get(key)
                if first is None:
                    first = counters.get(key)
                    if first is None:
                        first = tables.max_offset(*key)
                offsets.append(first)
                moved[key] = first + run.count
        proposal = Proposal(
            [pending.batch for pending in taken], offsets, self.node.clocks.store_time_ms()
        )
        try:
            index = self.node.append(proposal)
        except LogBusyError:
            # Nothing was sealed: they wait until the space is there, see `_reserve_loop`.
            self._pending.extendleft(reversed(taken))
            return False
        except DiskFullError as error:
            log.error("append_without_space", error=str(error))
            for pending in taken:
                self._finish(pending, Proposed("not_stored", error=error))
            return False
        counters.update(moved)
        self._in_flight.append(self._entry_in_flight(index, taken, offsets))
        return True

    def _entry_in_flight(self, index: int, taken: list[_Pending], offsets: list[int]) -> _InFlight:
        entry_log = self.store.log
        count = sum(len(pending.batch.sizes) for pending in taken)
        position = entry_log.position_at(index) + ENTRY_HEADER_BYTES + SIZE_FIELD_BYTES * count
        waiting, at = [], 0
        for pending in taken:
            runs = len(pending.batch.runs)
            waiting.append((pending, tuple(offsets[at : at + runs]), position))
            position += int(np.sum(pending.batch.sizes, dtype=np.int64))
            at += runs
        return _InFlight(
            index=index,
            term=self.node.term,
            store_time_ms=entry_log.last_store_time_ms,
            deadline_s=self._clock.monotonic() + self.settings.quorum_timeout_s,
            waiting=waiting,
        )

    def _finish(self, pending: _Pending, proposed: Proposed) -> None:
        self._pending_bytes -= pending.size
        self._call(pending.on_done, proposed)
        if self._draining and not self._pending_bytes:
            self._drained.set()

    def _answer(self, entry: _InFlight, outcome: str) -> None:
        waiting, entry.waiting = entry.waiting, []
        for pending, offsets, position in waiting:
            if outcome == "stored":
                proposed = Proposed(
                    "stored", offsets, position, entry.store_time_ms, entry.index, entry.term
                )
            else:
                proposed = Proposed("unknown" if outcome == "unknown" else "not_stored")
            self._finish(pending, proposed)

    def report_damage(self, position: int, size: int) -> None:
        """Say that bytes read from the log were bad: what is damaged is repaired from now on."""
        self.scrub.suspect_bytes(position, size)
        self.node.settle()

    # -- reads that must not be stale ------------------------------------------------------

    def read_barrier(self, on_done: OnBarrier) -> None:
        """Call *on_done* when a read from `state` reflects all that was stored before this call.

        With no other voter that is at once, from inside this call. The reads of many callers
        share heartbeats.

        Args:
            on_done: Called exactly once: with None, or with the error when leadership ended or
                nobody confirmed it within an election timeout.
        Raises:
            NotLeaderError: This replica does not lead; *on_done* is not called.
        """
        if self.leadership is None:
            raise NotLeaderError(self.leader_address, self.node.term)
        node = self.node
        index = node.commit_index
        if not self.settings.sync_replication:
            index = node.journal.stable_index  # what was answered already
        deadline_s = self._clock.monotonic() + node.settings.election_timeout_s
        node.barrier.ask(index, deadline_s, on_done)
        if node.barrier.wants_beat:
            node.beat_for_reads()
            if not node.roster.other_voters:
                self._answer_reads()

    async def wait_read_barrier(self) -> None:
        """`read_barrier`, awaited.

        Raises:
            NotLeaderError: Nobody knows whether `state` is current.
        Cancellation: Nothing happens.
        """
        done = trio.Event()
        failures: list[NotLeaderError] = []

        def on_done(error: NotLeaderError | None) -> None:
            if error is not None:
                failures.append(error)
            done.set()

        self.read_barrier(on_done)
        await done.wait()
        if failures:
            raise failures[0]

    def _answer_reads(self) -> None:
        barrier = self.node.barrier
        if not len(barrier):
            return
        for on_done in barrier.take_ready(self.node.confirmed_beat(), self.state.applied_index):
            on_done(None)
        for on_done in barrier.take_expired(self._clock.monotonic()):
            # Perhaps cut off from the others: whoever leads now is not known here.
            on_done(NotLeaderError(None, self.node.term))
        if barrier.wants_beat:
            self.node.beat_for_reads()

    # -- after every event of the node -----------------------------------------------------

    def _on_settled(self) -> None:
        if self.store.torn and not self.node.doubtful:
            self.store.end_doubt()
        self._note_leadership()
        if self.node.is_leader:
            # Those who wait for an answer wait for this.
            self._apply(APPLY_AT_ONCE_ENTRIES)
            self._note_leadership()
            self._answer_reads()
        elif self.store.derived_index < self.store.applicable(self.node.commit_index):
            self._apply_wake.set()
        if not self.settings.sync_replication:
            self._answer_stable()
        if self._transfer_over is not None and not self.node.transferring:
            self._transfer_over.set()
            self._transfer_over = None
        if self._pending and not self.node.flushing:
            self._seal_all()
        if self.store.log.needs_reserve:
            self._reserve_wake.set()

    def _note_leadership(self) -> None:
        node = self.node
        if self.leadership is not None and not (
            node.is_leader and node.term == self.leadership.term
        ):
            self._lose_leadership()
        if (
            self.leadership is None
            and node.is_leader
            and 0 < node.noop_index <= self.state.applied_index
            and node.clocks.are_known
        ):
            # Everything that can ever commit from before is applied now: counters start anew.
            self._counters.clear()
            # What of an earlier reign is not applied by now was cut and never will be.
            while self._in_flight:
                self._answer(self._next_in_flight(), "not_stored")
            self.leadership = Leadership(node.term)
            self._leadership_wake.set()
            log.info("leadership_begins", term=node.term)
        role = (node.term, node.leader_id if self.leadership is None else "self")
        if role != self._role:
            self._role = role
            for listener in self.on_role_change:
                listener()

    def _lose_leadership(self) -> None:
        assert self.leadership is not None
        log.info("leadership_ends", term=self.leadership.term)
        self.leadership.scope.cancel()
        self.leadership = None
        self._counters.clear()
        for on_read in self.node.barrier.end():
            on_read(NotLeaderError(self.leader_address, self.node.term))
        # What was never appended is certainly not stored; what was, the next leader decides.
        while self._pending:
            self._finish(self._pending.popleft(), Proposed("not_stored"))

    def _apply(self, limit: int) -> None:
        store = self.store
        if store.installing:
            return
        commit = store.applicable(self.node.commit_index)
        stop = min(commit, store.derived_index + limit)
        while store.derived_index < stop:
            # Asked anew each time: somebody told below may have made this node apply more.
            index = store.derived_index + 1
            try:
                applied = store.apply(index)
            except (CorruptEntryError, CorruptRecordError):
                if not self.scrub.suspect(index):
                    raise
                return
            except DiskFullError as error:
                self._wait_for_space(index, error)
                return
            if self._lacks_space:
                self._lacks_space = False
                log.info("apply_goes_on", index=index)
            if applied.deleted_topics:
                self._forget_counters(applied.deleted_topics)
            self._resolve(index)
            touched = applied.touched
            for listener in self.on_applied:
                self._call(listener, touched)
            for units_listener in self.on_units:
                self._call(units_listener, applied.units)
        if store.derived_index < commit:
            self._apply_wake.set()

    def _wait_for_space(self, index: int, error: DiskFullError) -> None:
        """Apply nothing for now: what is applied can be read, and sends wait or are refused."""
        if not self._lacks_space:
            log.error("apply_without_space", index=index, error=str(error))
        self._lacks_space = True
        self._apply_wake.set()

    def _call(self, listener: Callable[[Any], None], heard: Any) -> None:
        """Call *listener*; an unexpected error is its own, not the end of this node."""
        try:
            listener(heard)
        except STOPS_NODE:
            raise
        except Exception as error:
            self.service_counts.listener_failures += 1
            name = getattr(listener, "__qualname__", repr(listener))
            log.error("listener_failed", listener=name, exc_info=error)

    def _forget_counters(self, topics: tuple[str, ...]) -> None:
        for key in [key for key in self._counters if key[0] in topics]:
            del self._counters[key]

    def _resolve(self, index: int) -> None:
        while self._in_flight and self._in_flight[0].index <= index:
            entry = self._next_in_flight()
            if entry.index < self.store.log.first_index:
                self._answer(entry, "unknown")  # a snapshot took its place
                continue
            stored = self.store.log.term_at(entry.index) == entry.term
            self._answer(entry, "stored" if stored else "not_stored")

    def _next_in_flight(self) -> _InFlight:
        entry = self._in_flight.popleft()
        self._late_bytes -= entry.late_bytes
        return entry

    def _answer_stable(self) -> None:
        stable = self.node.journal.stable_index
        for entry in self._in_flight:
            if entry.index > stable or entry.term != self.node.term:
                return
            self._answer(entry, "stored")

    # -- tasks -----------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part in the group until cancelled; started when the peer port is bound.

        Raises:
            OSError: The peer port cannot be bound.
            FlushFailedError, DiskFullError, InvariantBroken: This replica must stop.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._apply_loop)
            nursery.start_soon(self._expire_loop)
            nursery.start_soon(self._reserve_loop)
            nursery.start_soon(self._checkpoint_loop)
            nursery.start_soon(self._install_loop)
            nursery.start_soon(self._leadership_loop)
            nursery.start_soon(self.scrub.run)
            nursery.start_soon(self._key_index_repair.run)
            await nursery.start(self._links.run)
            task_status.started()

    async def transfer_leadership(self, target: str | None = None) -> bool:
        """Hand leadership to the voter *target*, or to the one that has most.

        Proposals wait meanwhile: they are sealed afterwards if this replica still leads, and
        otherwise end as not stored, with a hint at the new leader.

        Returns:
            Whether this replica no longer leads because of it.
        Raises:
            NotLeaderError, ChangePendingError, ChangeRefusedError: Nothing was begun.
        Cancellation: The transfer goes on.
        """
        transfer = self.node.begin_transfer(target)
        over = self._transfer_over = trio.Event()
        self.node.settle()
        await over.wait()
        return transfer.phase is Phase.DONE

    async def drain(self) -> bool:
        """Refuse new proposals and wait for those in flight; tell whether all were answered."""
        self._draining = True
        if not self._pending_bytes:
            return True
        return await self._drained.wait_or(self._clock, self.settings.drain_timeout_s)

    async def close(self) -> None:
        """Flush and checkpoint everything, then close the store cleanly. `run` has ended.

        Raises:
            FlushFailedError: The store was closed as after a crash.
        """
        ticket = self.store.log.begin_flush()
        if ticket is not None:
            await self._executor.run(ticket.run, kind="flush")
            self.store.log.complete_flush(ticket)
        self._apply(self.node.commit_index)
        checkpoint = self.store.begin_checkpoint(self.node.commit_index)
        if checkpoint is not None:
            await self._executor.run(checkpoint.write, kind=checkpoint.kind)
        self.store.close(clean=True)

    async def _apply_loop(self) -> None:
        while True:
            await self._apply_wake.wait()
            # A follower's flush and acknowledgement go first: the leader waits for them.
            for _ in range(APPLY_AFTER_TURNS):
                await trio.lowlevel.checkpoint()
            self._apply(APPLY_AT_ONCE_ENTRIES)
            self.node.settle()
            if self._lacks_space:
                await self._clock.sleep(SPACE_RETRY_S)

    async def _expire_loop(self) -> None:
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
            elif now - since >= self.settings.quorum_timeout_s:
                # The disk hangs: nothing was sealed since.
                error = PendingFullError(f"nothing was written for {now - since:.1f} s")
                for _ in range(waiting):
                    self._finish(self._pending.popleft(), Proposed("not_stored", error=error))
                head = None

    async def _reserve_loop(self) -> None:
        while True:
            await self._reserve_wake.wait()
            if self.store.log.needs_reserve:
                try:
                    async with self._store_lock:
                        await self._executor.run(self.store.log.reserve_next, kind="reserve")
                except DiskFullError as error:
                    log.error("no_space_for_next_segment", error=str(error))
                    await self._clock.sleep(self.settings.checkpoint_interval_s)
                    self._reserve_wake.set()
            self.kick()  # what met a log that was being enlarged is sealed now

    async def _checkpoint_loop(self) -> None:
        while True:
            await self._clock.sleep(self._checkpoint_pause_s())
            async with self._store_lock:
                checkpoint = self.store.begin_checkpoint(self.node.commit_index)
                if checkpoint is None:
                    continue
                try:
                    await self._executor.run(checkpoint.write, kind=checkpoint.kind)
                except DiskFullError as error:
                    log.error("no_space_for_checkpoint", error=str(error))
                    continue
                if not self.node.holds_log(self._clock.monotonic()):
                    try:
                        await self._drop_before(checkpoint.floor)
                    except DiskFullError as error:
                        log.error("no_space_for_retention", error=str(error))

    def _checkpoint_pause_s(self) -> float:
        saved = self.store.saved_tables
        size = 0 if saved is None else len(saved[1])
        return max(self.settings.checkpoint_interval_s, size / CHECKPOINT_BYTES_PER_S)

    async def _drop_before(self, floor: Anchor) -> None:
        drop = self.store.plan_drop(floor)
        if drop is None:
            return
        await self._executor.run(drop.note, kind=DROP)
        self.store.detach(drop)
        self.node.journal.anchor_moved()
        # Giving back gigabytes takes a file system its time.
        await self._executor.run(drop.remove, kind=DROP)
        log.info("segments_removed", bytes=drop.size_bytes, first_index=floor.first_index)

    def _members_of_log(self) -> MembersLog:
        tables = self.store.tables
        return members_in(
            self.store.log,
            after=tables.applied_index,
            index=tables.members_index,
            members=self._applied_members(),
        )

    def _on_unreadable(self, position: int, size: int) -> None:
        if self.store.installing:
            return
        try:
            trio.lowlevel.current_trio_token()
        except RuntimeError:
            # A cold read in a worker thread. What follows is this node's own state.
            trio.from_thread.run_sync(self.scrub.suspect_bytes, position, size)
        else:
            self.scrub.suspect_bytes(position, size)

    def _on_repaired(self) -> None:
        # An entry that was skipped when the log was read may have brought a list of members.
        self.node.journal.members.become(self._members_of_log())

    def _applied_members(self) -> Members | None:
        tables = self.store.tables
        return Members.decode(tables.members_body) if tables.members_index else None

    def _take_snapshot(self) -> tuple[int, bytes]:
        # What a checkpoint has written will do: the log goes on from its floor.
        return self.store.saved_tables or (self.state.applied_index, snapshot(self.state))

    def _on_snapshot(self, leader: str, data: bytes) -> None:
        self._snapshot = (leader, data)
        self._install_wake.set()

    async def _install_loop(self) -> None:
        while True:
            await self._install_wake.wait()
            if self._snapshot is None:
                continue
            leader, data = self._snapshot
            self._snapshot = None
            async with self._store_lock:
                await self._install(leader, data)

    async def _install(self, leader: str, data: bytes) -> None:
        store = self.store
        try:
            loaded = await self._executor.run(partial(store.decode, data), kind=INSTALL)
            commit = self.node.journal.commit_index
            if not store.needs(loaded, commit):
                index, following = goes_on_after(loaded, commit)
                log.info("snapshot_not_needed", index=index, next_index=following)
                self.node.declined(leader, index, following)
                return
            await self._executor.run(partial(store.offer, data), kind=INSTALL)
        except (CorruptStoreError, ForeignStoreError, DiskFullError) as error:
            # Nothing was changed. What a peer sends, or a full disk, is no reason to stop.
            log.error("snapshot_refused", leader=leader, error=str(error))
            self.node.refused()
            return
        entry_log = await self._empty_for(loaded)
        while self.node.flushing:
            await self._clock.sleep(FLUSH_POLL_S)
        before = store.take_over(loaded, entry_log)
        store.log.on_unreadable = self._on_unreadable
        store.write_damage()
        self.node.journal.members.reset(self.state.members_index, self._applied_members())
        self.node.installed(leader, store.log, self.state.applied_index)
        await self._executor.run(partial(before.close, clean=False), kind=DROP)

    async def _empty_for(self, loaded: StateTables) -> EntryLog:
        """Empty the folder; on a full disk this node follows and waits, as long as it takes."""
        self.store.installing = True
        is_waiting = False
        while True:
            try:
                return await self._executor.run(partial(self.store.empty_for, loaded), kind=INSTALL)
            except DiskFullError as error:
                if not is_waiting:
                    log.error("installation_without_space", error=str(error))
                    # Files that are removed give their space back when nobody has them open.
                    close = partial(self.store.log.close, clean=False)
                    await self._executor.run(close, kind=DROP)
                is_waiting = True
                await self._clock.sleep(SPACE_RETRY_S)

    async def _leadership_loop(self) -> None:
        while True:
            await self._leadership_wake.wait()
            leadership = self.leadership
            if leadership is None:
                continue
            with leadership.scope:
                async with trio.open_nursery() as nursery:
                    for service in self.services:
                        name = getattr(service, "name", getattr(service, "__qualname__", "?"))
                        run = partial(service, leadership)
                        nursery.start_soon(fenced, name, run, self._clock, self.service_counts)
            if leadership is self.leadership and not leadership.scope.cancelled_caught:
                await trio.lowlevel.checkpoint()
