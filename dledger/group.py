"""A broker group: proposals in, committed and applied entries out. The only way to the log.

Here its parts meet: what is proposed (`dledger.proposals`), what is applied (`dledger.proposals`),
the files of the replica (`dledger.maintenance`), and the leadership that begins and ends with the
events of the Raft node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from math import inf
from typing import Any, Final

import structlog
import trio

from dledger.applier import Applier
from dledger.broker_errors import NotLeaderError
from dledger.commitlog.consume_queue_store import ConsumeQueueStore
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.key_index import KeyIndex
from dledger.group_api import OnBarrier, fenced
from dledger.loop_stall import LoopStall
from dledger.maintenance import Maintenance, members_of
from dledger.proposals import Leadership, Proposals
from dledger.raft.identity import Identity
from dledger.raft.journal import load_term_vote
from dledger.raft.links import Links
from dledger.raft.member import RaftNode, Stored
from dledger.raft.settings import ALL_ON, Guards, RaftSettings
from dledger.raft.transfer import Phase
from dledger.raft.wire import FRAME_BYTES_MAX
from dledger.remoting.memory_budget import FrameSpace
from dledger.remoting.seams import Clock, Executor, Network, Rng
from dledger.replica_records import CHECKPOINT
from dledger.scrub import DerivedRepair, ScrubService
from dledger.settings.tables import RaftTable
from dledger.store import ReplicaStore
from dledger.waiting import CALLS_PER_TURN, Wakeup

log = structlog.get_logger(__name__)

FRAME_HEAD_RESERVED_BYTES: Final = 4096
"""What a frame between peers needs beside the entry in it, with much to spare."""


class Group(Proposals):
    """One replica of a broker group; implements `dledger.group_api.BrokerGroup`.

    *store*: opened and replayed; closed by the caller.
    """

    def __init__(
        self,
        store: ReplicaStore,
        identity: Identity,
        raft: RaftSettings,
        settings: RaftTable,
        *,
        store_host: bytes,
        clock: Clock,
        rng: Rng,
        network: Network,
        executor: Executor,
        sync_replication: bool = True,
        guards: Guards = ALL_ON,
    ) -> None:
        # An entry stands in one segment and travels in one frame.
        cap = min(store.log.max_entry_bytes, FRAME_BYTES_MAX - FRAME_HEAD_RESERVED_BYTES)
        super().__init__(
            store,
            settings,
            clock,
            store_host=store_host,
            entry_bytes_max=min(settings.max_entry_bytes, cap),
            sync_replication=sync_replication,
        )
        self.on_role_change: list[Callable[[], None]] = []
        # What others add to `status`.
        self.status_parts: list[Callable[[], Mapping[str, Any]]] = []
        self.services: list[Callable[[Leadership], Awaitable[None]]] = []
        self.loop_stall = LoopStall()
        self._executor = executor
        self._leadership_wake = Wakeup()
        self._transfer_over: trio.Event | None = None
        self._role: tuple[int, str | None] = (0, None)
        stored = Stored(
            store.log,
            load_term_vote(
                store.vote_slots, has_taken_part=bool(identity.voters) or store.log.end_position > 0
            ),
            identity,
            commit_index=store.restored_commit_index,
            members=members_of(store),
            doubtful=store.torn or (store.unclean and not raft.sync_flush),
            damaged=store.damaged,
        )
        self.node = RaftNode(
            raft,
            stored,
            store_host=store_host,
            clock=clock,
            rng=rng,
            on_settled=self._on_settled,
            guards=guards,
        )
        self.node.owner.may_lead = lambda: not store.refilling
        # One at a time: a checkpoint and the installation of a snapshot write the same files.
        store_lock = trio.Lock()
        self.scrub = ScrubService(store, self.node, clock, executor, store_lock)
        self.maintenance = Maintenance(
            store, self.node, self.scrub, settings, self.kick, store_lock, clock, executor
        )
        self._applier = Applier(store, self.node, self, self.scrub.suspect, clock)
        self.on_applied = self._applier.on_applied
        self.on_units = self._applier.on_units
        self.waiting_reads = self._applier.waiting_reads
        self._derived_repair = DerivedRepair(
            store, clock, executor, store_lock, lambda: bool(self.node.roster.other_voters)
        )
        self._links = Links(self.node, network=network, clock=clock, rng=rng, executor=executor)

    # -- read by processors and services ------------------------------------------------------

    @property
    def log(self) -> EntryLog:
        """The log; read applied records only."""
        return self.store.log

    @property
    def queues(self) -> ConsumeQueueStore:
        """The consume queues."""
        return self.store.queues

    @property
    def key_index(self) -> KeyIndex:
        """The key index."""
        return self.store.key_index

    @property
    def readable(self) -> bool:
        """Whether queues and log hold what the tables say; not while a snapshot is refilled."""
        return not self.store.refilling

    @property
    def peer_frames(self) -> FrameSpace:
        """Memory for unfinished frames of the other members."""
        return self._links.frames

    @property
    def group_identity(self) -> str:
        """Identity of the whole group; empty before bootstrap."""
        return self.node.identity.group_identity

    @property
    def membership_proof(self) -> str:
        """What members alone can send to NameServers; empty without a secret."""
        secret = self.node.settings.secret
        return "" if secret is None else secret.membership_proof(self.group_identity)

    @property
    def has_other_members(self) -> bool:
        """Whether another member may have a copy of what is damaged here."""
        return len(self.node.peers) > 0

    @property
    def term(self) -> int:
        """Newest term seen."""
        return self.node.term

    @property
    def store_time_ms(self) -> int:
        """The store time that an entry gets which is sealed now."""
        return self.dates.store_time_ms()

    @property
    def store_time_ahead_ms(self) -> int:
        """How far the newest entry's store time is ahead of this replica's date."""
        return self.store.log.last_store_time_ms - self._clock.wall_ms()

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
            "clock_off_ms": self.dates.off_ms(),
            "scrub": self.scrub.status(),
            "key_index": self.store.keys.status(),
            **{key: value for part in self.status_parts for key, value in part().items()},
            "event_loop": self.loop_stall.status(),
        }

    def report_damage(self, position: int, size: int) -> None:
        """Report bytes read from the log that were bad: what is damaged is repaired from now on."""
        self.scrub.suspect_bytes(position, size)
        self.node.settle()

    # -- reads that must not be stale ---------------------------------------------------------

    def read_barrier(self, on_done: OnBarrier) -> None:
        """Call *on_done* when a read from `state` reflects all that was stored before this call.

        With no other voter that is at once, from inside this call. *on_done* is called exactly
        once: with None, or with the error when leadership ended or no majority confirmed it within
        an election timeout.

        Raises NotLeaderError: this replica does not lead; *on_done* is not called.
        """
        if self.leadership is None:
            raise NotLeaderError(self.leader_address, self.node.term)
        self.catch_up()
        node = self.node
        index = node.commit_index
        if not self.sync_replication:
            index = node.journal.stable_index  # what was answered already
        deadline_s = self._clock.monotonic() + node.settings.election_timeout_s
        node.leader.reads.add(index, deadline_s, on_done)
        if node.leader.reads.needs_heartbeat:
            node.leader.send_read_heartbeats()
            if not node.roster.other_voters:
                self._answer_reads()

    def _answer_reads(self) -> None:
        leader, reads = self.node.leader, self.node.leader.reads
        if not len(reads):
            return
        ready = reads.pop_ready(leader.confirmed_heartbeat(), self.state.applied_index)
        expired = reads.pop_expired(self._clock.monotonic())
        for on_done in ready:
            on_done(None)
        for on_done in expired:
            # Perhaps cut off from the others: the leader may be another one, unknown here.
            on_done(NotLeaderError(None, self.node.term))
        if CALLS_PER_TURN in (len(ready), len(expired)):
            self.turns.next_turn(self._answer_reads)
        if reads.needs_heartbeat:
            leader.send_read_heartbeats()

    # -- after every event of the node --------------------------------------------------------

    def _on_settled(self) -> None:
        if self.store.torn and not self.node.eligibility.doubtful:
            self.store.end_doubt()
        self._note_leadership()
        if self.node.is_leader:
            self._apply_as_leader()
            self._note_leadership()
            self._answer_reads()
        elif self.store.derived_index < self.store.applicable(self.node.commit_index):
            self._applier.apply_soon()
        if not self.sync_replication:
            self._answer_stable()
        if self._transfer_over is not None and not self.node.transfers.is_under_way:
            self._transfer_over.set()
            self._transfer_over = None
        if self._pending and not self.node.flusher.flushing:
            self._seal_all()
        if self.store.log.allocator.needs_reserve:
            self.maintenance.reserve_wake.set()

    def _apply_as_leader(self) -> None:
        """Answer what needs no more than to be committed; apply now what others wait for."""
        if (
            self.leadership is None
            or len(self.node.leader.reads)
            or not self._applier.may_lag
            or not self._answer_committed()
        ):
            self._applier.apply()
        elif self.store.derived_index < self.store.applicable(self.node.commit_index):
            self._applier.apply_soon()

    def catch_up(self) -> None:
        """Apply all that is committed here: a read sees every message that was answered."""
        if self.store.derived_index < self.node.commit_index:
            self._applier.apply(inf)

    def _note_leadership(self) -> None:
        node = self.node
        if self.leadership is not None and not (
            node.is_leader and node.term == self.leadership.term
        ):
            self._lose_leadership()
        if (
            self.leadership is None
            and node.is_leader
            and 0 < node.state.noop_index <= self.state.applied_index
        ):
            # Everything that can ever commit from before is applied now: count from there.
            self._offsets.clear()
            self._commits.clear()
            # What of an earlier leadership is not applied by now was cut and never will be.
            while self._in_flight:
                self._end(self._next_in_flight(), "not_stored")
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
        self._offsets.clear()
        self._commits.clear()
        error = NotLeaderError(self.leader_address, self.node.term)
        self.turns.call_each(lambda on_read: on_read(error), self.node.leader.reads.clear())
        # What was never appended is certainly not stored; what was, the next leader decides.
        pending, self._pending = self._pending, deque()
        self._end_all(pending)

    # -- tasks --------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part in the group until cancelled; started when the peer port is bound.

        Raises:
            OSError: The peer port cannot be bound.
            FlushFailedError, DiskFullError, InvariantBroken: This replica must stop.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._applier.run)
            nursery.start_soon(self.turns.run)
            nursery.start_soon(self._expire_loop)
            nursery.start_soon(self.maintenance.allocate_ahead)
            nursery.start_soon(self.maintenance.write_checkpoints)
            nursery.start_soon(self.maintenance.install_snapshots)
            nursery.start_soon(self._leadership_loop)
            nursery.start_soon(self.scrub.run)
            nursery.start_soon(self._derived_repair.run)
            await nursery.start(self._links.run)
            task_status.started()

    async def transfer_leadership(self, target: str | None = None) -> bool:
        """
        Hand leadership to the voter *target*, or to the one that has most; return whether it went.

        Proposals wait meanwhile: they are sealed afterwards if this replica still leads, and
        otherwise end as not stored, with a hint at the new leader.

        Raises:
            NotLeaderError, ChangePendingError, ChangeRefusedError: Nothing was begun.
        Cancellation: The transfer goes on.
        """
        transfer = self.node.transfers.begin(target)
        over = self._transfer_over = trio.Event()
        self.node.settle()
        await over.wait()
        return transfer.phase is Phase.DONE

    async def close(self) -> None:
        """Flush and checkpoint everything, then close the store cleanly. `run` has ended.

        Raises FlushFailedError: the store was closed as after a crash.
        """
        ticket = self.store.log.begin_flush()
        if ticket is not None:
            await self._executor.run(ticket.run, kind="flush")
            self.store.log.complete_flush(ticket)
        before = -1
        while before < self.store.derived_index:
            before = self.store.derived_index
            self._applier.apply(inf)
        checkpoint = self.store.begin_checkpoint(self.node.commit_index)
        if checkpoint is not None:
            await self._executor.run(checkpoint.write, kind=CHECKPOINT)
        self.store.close(clean=True)

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
