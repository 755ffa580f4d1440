"""One member of a Raft group: the library's decisions, our timers, guards and sender, joined.

Everything here is synchronous. Links (`dledger.raft.links`) bring frames in and carry frames
out; two small tasks flush the disk and watch the clock. After every event `settle` runs the
library, releases what has become durable and tells the owner, so there is no polling tick.

What leaves this node, and what it waits for:

=====================  =========================================================
VOTE, VOTE_REPLY       term and vote are on disk, and the term is still the same
APPEND_REPLY           the entries are on disk, same term, no truncation since
commit (leader)        the entry is on disk here and on a majority
everything else        nothing
=====================  =========================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import structlog

from commitlog.damage import check_entries
from commitlog.entry_log import EntryLog
from commitlog.errors import (
    CorruptEntryError,
    CorruptStoreError,
    DiskFullError,
    FlushFailedError,
    InvariantBroken,
    LocalProtocolError,
    RemoteProtocolError,
)
from dledger.errors import ChangePendingError, ChangeRefusedError, NotLeaderError
from dledger.raft.append import AppendRequest, Rejected, plan_append, split_frames
from dledger.raft.barrier import ReadBarrier
from dledger.raft.core import Message, RaftCore
from dledger.raft.election import Ballot, ElectionTimer, is_up_to_date, majority
from dledger.raft.guards import ALL_ON, Guards
from dledger.raft.identity import Hello, Identity
from dledger.raft.journal import CommitLogJournal, ConfigProposal, Proposal, entry_size
from dledger.raft.membership import Members, MembersLog, Sight, check_change, next_list
from dledger.raft.repair import FETCH_BYTES
from dledger.raft.replicator import Append, Replicator
from dledger.raft.roster import NAMES_MAX, Roster
from dledger.raft.snapshot import Receiving, Sending
from dledger.raft.term_vote import TermVote
from dledger.raft.transfer import Transfer, choose_target
from dledger.raft.wakeup import Wakeup
from dledger.raft.wire import Kind, PeerFrame
from remoting.seams import Clock, Executor, Rng

log = structlog.get_logger(__name__)

FLUSH: Final = "flush"
"""Name under which the executor measures flushes of the log."""

CONTROL_QUEUE_FRAMES: Final = 64
"""Heartbeats and votes waiting for a link, frames; older ones are dropped, Raft repeats them."""

CLOSE_BYTES: Final = 1 << 20
"""A learner that lacks no more than this, one append, for an election timeout has caught up."""

HEARTBEAT: Final[Message] = {"commit_index": 0, "entries": [], "prevLogIdx": None, "prevLogTerm": 0}
"""An append the library takes as a sign of life only: it returns before it looks at the log."""

ALIVE: Final[Message] = {
    "type": "next_node_idx",
    "reset": False,
    "success": False,
    "next_node_idx": 0,
}
"""An answer the library takes as a sign of life only."""


@dataclass(frozen=True, slots=True)
class RaftSettings:
    """What a member is told about its group and its pace."""

    cluster: str
    group: str
    self_id: str
    peers: Mapping[str, tuple[str, int]]
    """Host and port of every member's peer listener, this member included."""
    listen_port: int = 0
    """What this member binds, when it is not what the others are told; 0: the same."""
    client_address: str = ""
    election_timeout_s: float = 0.8
    heartbeat_interval_s: float = 0.1
    window_bytes: int = 8 << 20
    """Bytes on their way to one follower."""
    append_bytes: int = 1 << 20
    """Bytes in one append; at least one entry goes."""
    entry_bytes_max: int = 16 << 20
    """Largest entry; the frame that carries it must stay below `wire.FRAME_BYTES_MAX`."""
    sync_flush: bool = True
    flush_interval_s: float = 0.5
    """Pause between flushes when `sync_flush` is off."""

    @property
    def others(self) -> tuple[str, ...]:
        """The other members' names, sorted."""
        return tuple(sorted(set(self.peers) - {self.self_id}))


@dataclass(slots=True)
class Outgoing:
    """A frame without connection numbers; the link adds them."""

    kind: Kind
    term: int
    fields: tuple[Any, ...]


@dataclass(slots=True)
class PeerState:
    """What this node knows of one other member, and what waits to be sent to it."""

    name: str
    hello: Hello | None = None
    control: deque[Outgoing] = field(default_factory=lambda: deque(maxlen=CONTROL_QUEUE_FRAMES))
    replies: deque[Outgoing] = field(default_factory=lambda: deque(maxlen=CONTROL_QUEUE_FRAMES))
    control_wake: Wakeup = field(default_factory=Wakeup)
    data_wake: Wakeup = field(default_factory=Wakeup)
    up: set[str] = field(default_factory=set)
    idle_due: bool = False
    wanted: tuple[int, int] | None = None
    """Entries it asked for, because its own are damaged."""
    hello_since_s: float = 0.0
    """Since when it has been this incarnation that speaks."""
    close_since_s: float | None = None
    """Since when it has had almost everything."""


@dataclass(slots=True)
class _Held:
    """A frame that waits until term and vote are durable."""

    version: int
    peer: str
    frame: Outgoing


@dataclass(slots=True)
class _Owed:
    """Acknowledgements owed to the leader of one term, for one generation of the log."""

    leader: str
    term: int
    generation: int
    verified: int
    acked: int = -1


def _no_snapshot() -> tuple[int, bytes]:
    raise InvariantBroken("this node has no tables to send")


def _ignore_snapshot(leader: str, data: bytes) -> None:
    raise InvariantBroken(f"a snapshot of {len(data)} bytes from {leader}, and nobody to take it")


def _ignore_fetched(peer: str, entries: memoryview) -> None:
    """Nobody repairs anything here."""


class RaftNode:
    """A member. The owner calls `append`, reads `commit_index` and is told after every event.

    Args:
        on_settled: Called at the end of every event, synchronously; it may call `append`.
        doubtful: Promises may be lost: an unclean stop with async flushes, or a torn log. It
            votes when a leader has caught it up, or when most members are in doubt and all heard.
        damaged: The log was cut because of damage: promises are lost. It follows until a leader
            has refilled it, whatever the others say.
        members: The list of members at the end of the log; None: it is looked up, entry by entry.
    """

    def __init__(
        self,
        settings: RaftSettings,
        entry_log: EntryLog,
        term_vote: TermVote,
        identity: Identity,
        *,
        restored_commit_index: int,
        store_host: bytes,
        doubtful: bool,
        damaged: bool = False,
        clock: Clock,
        rng: Rng,
        on_settled: Callable[[], None],
        guards: Guards = ALL_ON,
        members: MembersLog | None = None,
    ) -> None:
        self.settings = settings
        self.identity = identity
        self.doubtful = doubtful or damaged
        self.damaged = damaged
        self.guards = guards
        self._clock = clock
        self._on_settled = on_settled
        self._term_vote = term_vote
        self.journal = CommitLogJournal(
            entry_log,
            term_vote,
            restored_commit_index=restored_commit_index,
            store_host=store_host,
            sync_flush=settings.sync_flush,
            guards=guards,
            members=members,
        )
        self.roster = Roster(self.journal.members, identity, settings.self_id, settings.peers)
        self.core = RaftCore(
            settings.self_id,
            settings.others,
            self.journal,
            send=self._from_library,
            clock=clock,
            rng=rng,
            leader_fallback_s=settings.election_timeout_s,
            guards=guards,
        )
        self.replicator = Replicator(
            self.journal,
            settings.window_bytes,
            settings.append_bytes,
            stall_s=settings.election_timeout_s / 2,
            guards=guards,
        )
        self.timer = ElectionTimer(settings.election_timeout_s, rng)
        self.timer.restart(clock.monotonic())
        if not settings.others:
            # Alone there is no leader to wait for.
            self.timer.lost_leader(clock.monotonic())
        self.peers = {name: PeerState(name) for name in settings.others}
        self.flush_wake = Wakeup()
        self.vote_wake = Wakeup()
        self.timer_wake = Wakeup()
        self.agree_wake = Wakeup()
        self.links_wake = Wakeup()
        self.transfer: Transfer | None = None
        self.noop_index = 0
        self.elections = 0
        self._failure: Exception | None = None
        self._refilled_at = (0, 0)
        self._reign = 0
        self._beat = 0
        self.barrier = ReadBarrier()
        self._pre_ballot = Ballot(0)
        self._ballot = Ballot(0)
        self._held: list[_Held] = []
        self._owed: _Owed | None = None
        self._receiving = Receiving()
        self.installing = False
        self.installs = 0
        self.take_snapshot: Callable[[], tuple[int, bytes]] = _no_snapshot
        self.on_snapshot: Callable[[str, bytes], None] = _ignore_snapshot
        self.may_lead: Callable[[], bool] = lambda: True
        self.on_suspect: Callable[[int], bool] = lambda index: False
        self.on_fetched: Callable[[str, memoryview], None] = _ignore_fetched
        self._leader_heard = (0, "")
        self._settling = False
        self._members_version = -1
        self._transfer_term = 0
        self._executor: Executor | None = None
        self.flushing = False
        self.roster.note_bootstrap()
        self._note_members()

    # -- what the owner asks ---------------------------------------------------------------

    @property
    def term(self) -> int:
        """Newest term seen."""
        return self.core.term

    @property
    def is_leader(self) -> bool:
        """Whether this member believes it leads; it may act only once its no-op is applied."""
        return self.core.is_leader

    @property
    def leader_id(self) -> str | None:
        """The leader of the current term, as far as known."""
        return self.core.leader_id

    @property
    def commit_index(self) -> int:
        """Newest index that may be applied: committed, and stable on this node."""
        return self.core.commit_index

    @property
    def has_hole(self) -> bool:
        """Whether entries are damaged here that another voter may have: no promises until then."""
        return len(self.journal.log.damaged) > 0 and bool(self.roster.other_voters)

    def give_up_lead(self) -> None:
        """Lead no longer, at once, if there is another voter who could; `settle` must follow."""
        if self.is_leader and self.has_hole:
            self.core.observe_term(self.term + 1)

    def leader_client_address(self) -> str | None:
        """Return where clients find the leader, if it is known and is not this node."""
        leader, transfer = self.leader_id, self.transfer
        if leader is None and transfer is not None and self.term == transfer.term + 1:
            leader = transfer.target
        return None if leader is None else self.roster.client_address(leader)

    def status(self) -> dict[str, Any]:
        """Return what ``dledger raft status`` shows of this member."""
        now = self._clock.monotonic()
        return {
            "self": self.settings.self_id,
            "group": self.settings.group,
            "role": self.core.role.value,
            "term": self.term,
            "leader": self.leader_id,
            "last_index": self.journal.last_index,
            "stable_index": self.journal.stable_index,
            "commit_index": self.commit_index,
            "voter": self.roster.is_self_voter,
            "members": [] if self.roster.members is None else self.roster.members.rows(),
            "members_index": self.journal.members.index,
            "doubtful": self.doubtful,
            "damaged": self.damaged,
            "truncations": self.journal.truncations,
            "first_index": self.journal.anchor_index + 1,
            "installs": self.installs,
            "elections": self.elections,
            "peers": {
                name: self._peer_status(self.peers[name], now) for name in self.roster.talked_to()
            },
        }

    def _peer_status(self, peer: PeerState, now: float) -> dict[str, Any]:
        progress = self.replicator.peers.get(peer.name) if self.is_leader else None
        return {
            "connected": "control" in peer.up,
            "voter": self._is_voter(peer.name),
            "incarnation": peer.hello.incarnation if peer.hello else None,
            "client_address": peer.hello.client_address if peer.hello else None,
            "match_index": progress.match_index if progress else None,
            "acked_ms_ago": round(1000 * (now - progress.acked_at_s)) if progress else None,
        }

    # -- what the owner does ---------------------------------------------------------------

    def append(self, proposal: Proposal) -> int:
        """Append one entry as leader and return its index; `settle` must follow.

        Raises:
            LocalProtocolError: Larger than `RaftSettings.entry_bytes_max`; nothing was appended.
            DiskFullError: Nothing was appended; this member stays leader.
            InvariantBroken: This member does not lead.
        """
        size = entry_size(proposal.batches)
        if self.guards.entry_size_capped and size > self.settings.entry_bytes_max:
            raise LocalProtocolError(
                f"an entry of {size} bytes is above the cap of {self.settings.entry_bytes_max}"
            )
        return self.core.append(proposal)

    def settle(self) -> None:
        """Finish an event: elect, count, release, wake, tell the owner.

        Raises:
            StoreError, InvariantBroken: This node must stop. Every later call raises the same, so
                whoever took the first one for an error of its own stops nothing from stopping.
        """
        if self._failure is not None:
            raise self._failure
        if self._settling:
            return
        self._settling = True
        try:
            self._note_members()
            self._tick()
            self._flush_at_once()
            self._drive_transfer()
            self._on_settled()
            if self.is_leader and not self.roster.other_voters and self._lags():
                # One voter that needs no flush: nothing else will happen that could commit.
                self._tick()
                self._on_settled()
        except OSError as error:
            raise self._disk_failed(error) from error
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._settling = False
        if self.doubtful:
            self._end_doubt()
        self._release_held()
        self._release_acks()
        if not self._term_vote.is_durable:
            self.vote_wake.set()
        if self.journal.has_unflushed:
            self.flush_wake.set()
        if self.is_leader:
            for name in self.replicator.peers:
                if self.replicator.has_work(name):
                    self.peers[name].data_wake.set()

    def _lags(self) -> bool:
        return self.core.known_commit_index < self.journal.stable_index

    def _flush_at_once(self) -> None:
        # A follower has nothing to do before its flush, and the leader waits for the answer. A
        # leader's own flush comes after its sends: it runs beside those of the followers.
        if (
            self._executor is None
            or self.is_leader
            or self.flushing
            or not self.settings.sync_flush
            or not self._term_vote.is_durable
            or not self.journal.has_unflushed
            or not self._executor.runs_inline(FLUSH)
        ):
            return
        ticket = self.journal.log.begin_flush()
        if ticket is not None:
            self._executor.run_inline(ticket.run, kind=FLUSH)
            self.journal.log.complete_flush(ticket)

    def _disk_failed(self, error: OSError) -> FlushFailedError:
        # By its type it would pass for the error of a connection, which is just made anew.
        failure = self._failure = FlushFailedError(f"the disk failed: {error}")
        return failure

    def _elect(self, act: Callable[[], None]) -> None:
        """Do what may make this member leader; one whose first entry does not fit is none."""
        try:
            act()
        except DiskFullError as error:
            log.error("election_won_without_space", term=self.term, error=str(error))
            self.core.observe_term(self.term + 1)

    def _tick(self) -> None:
        self._elect(self.core.tick)
        if self.is_leader and self._reign != self.term:
            self._begin_reign()
        elif not self.is_leader and self._reign:
            self._end_reign()

    def _begin_reign(self) -> None:
        self._reign = self.term
        self.elections += 1
        # The library appended the no-op in the same call that made this member leader.
        self.noop_index = self.journal.last_index
        self.replicator.start(self.roster.followers(), self._clock.monotonic())
        for peer in self.peers.values():
            peer.close_since_s = None
        log.info("became_leader", group=self.settings.group, term=self.term)
        self._write_first_list()
        self.beat()

    def _end_reign(self) -> None:
        log.info("stepped_down", group=self.settings.group, term=self.term, reign=self._reign)
        self._reign = 0
        self.noop_index = 0
        self.timer.restart(self._clock.monotonic())
        self.timer_wake.set()

    # -- sending ---------------------------------------------------------------------------

    def _send(self, peer: str, kind: Kind, *fields: Any) -> None:
        state = self._peer(peer)
        state.control.append(Outgoing(kind, self.term, fields))
        state.control_wake.set()

    def _from_library(self, peer: str, message: Message) -> None:
        match message["type"]:
            case "request_vote":
                transfer = message["term"] == self._transfer_term
                last = (message["last_log_index"], message["last_log_term"], transfer)
                self._hold(peer, Kind.VOTE, message["term"], last)
            case "response_vote":
                self.timer.restart(self._clock.monotonic())
                self._hold(peer, Kind.VOTE_REPLY, message["term"], ())
            case _:
                pass  # append replies are ours: they wait for the disk

    def _hold(self, peer: str, kind: Kind, term: int, fields: tuple[Any, ...]) -> None:
        self._held.append(_Held(self._term_vote.version, peer, Outgoing(kind, term, fields)))

    def _release_held(self) -> None:
        if not self._held:
            return
        durable = self._term_vote.durable_version
        waiting = []
        for held in self._held:
            if held.frame.term != self.term:
                continue
            if self.guards.durable_before_promise and held.version > durable:
                waiting.append(held)
                continue
            state = self._peer(held.peer)
            state.control.append(held.frame)
            state.control_wake.set()
        self._held = waiting

    def _release_acks(self) -> None:
        owed = self._owed
        if owed is None:
            return
        if owed.term != self.term or owed.generation != self.journal.log.generation:
            self._owed = None
            return
        if self.guards.durable_before_promise and not self._term_vote.is_durable:
            return
        index = min(owed.verified, self.journal.stable_index)
        if index > owed.acked and not self.has_hole:
            owed.acked = index
            self._reply(owed.leader, True, index)

    def _reply(self, peer: str, matched: bool, index: int) -> None:
        state = self.peers[peer]
        state.replies.append(Outgoing(Kind.APPEND_REPLY, self.term, (matched, index)))
        state.data_wake.set()

    def next_append(self, peer: str) -> tuple[Outgoing, list[memoryview]] | None:
        """Decide what the data link to *peer* sends next; None when there is nothing now.

        Returns:
            The frame and the log bytes that follow its head: views that pin their segment.
        """
        state = self._peer(peer)
        if state.wanted is not None:
            return self._next_copy(state)
        if not self.is_leader or peer not in self.replicator.peers:
            return None
        if self.replicator.needs_snapshot(peer):
            return self._next_chunk(peer)
        # A single voter's library commits before the flush; nobody else may hear of that.
        commit = self.commit_index
        is_probe = self.replicator.peers[peer].probing
        append = self.replicator.next_append(peer, commit, idle=state.idle_due)
        state.idle_due = False
        if append is None:
            return None
        views = self._entries(append)
        # A follower that is sent bad bytes drops the connection; what follows is a probe.
        if not views and not append.is_empty:
            return None
        if is_probe and views and not self._are_sound(append.first, views):
            return None
        size = sum(map(len, views))
        self.replicator.sent(peer, self._last_in(append, size), size)
        fields = (append.prev_index, append.prev_term, append.commit_index)
        return Outgoing(Kind.APPEND, self.term, fields), views

    def _are_sound(self, first: int, views: list[memoryview]) -> bool:
        entry_log = self.journal.log
        checked = check_entries(entry_log, first, entry_log.last_index, sum(map(len, views)))
        damaged = [index for index in checked.suspects if self.on_suspect(index)]
        return not damaged

    def fetch(self, peer: str, first: int, last: int) -> None:
        """Ask *peer* for entries that are damaged here; `on_fetched` gets what it has of them."""
        state = self._peer(peer)
        state.replies.append(Outgoing(Kind.FETCH, self.term, (first, last)))
        state.data_wake.set()

    def _on_fetch(self, peer: str, first: int, last: int) -> None:
        state = self._peer(peer)
        state.wanted = (first, last)
        state.data_wake.set()

    def _next_copy(self, state: PeerState) -> tuple[Outgoing, list[memoryview]]:
        first, last = state.wanted or (0, 0)
        state.wanted = None
        views: list[memoryview] = []
        last = self.journal.log.damaged.whole_until(first, min(last, self.commit_index))
        if self.journal.log.first_index <= first <= last:
            try:
                views = self.journal.log.frames(first, FETCH_BYTES, last)
            except (CorruptEntryError, CorruptStoreError) as error:
                log.warning("cannot_help_with_repair", peer=state.name, error=str(error))
            if views and not self._are_sound(first, views):
                views = []
        return Outgoing(Kind.FETCH_REPLY, self.term, (first,)), views

    def _next_chunk(self, peer: str) -> tuple[Outgoing, list[memoryview]] | None:
        progress = self.replicator.peers[peer]
        if progress.probe_out:
            return None
        if progress.snapshot is None:
            progress.snapshot = Sending(*self.take_snapshot())
            log.info("snapshot_offered", peer=peer, index=progress.snapshot.index)
        sending = progress.snapshot
        progress.probe_out = True
        fields = (sending.index, sending.offset, len(sending.data))
        return Outgoing(Kind.SNAPSHOT, self.term, fields), [sending.chunk()]

    def _entries(self, append: Append) -> list[memoryview]:
        if append.is_empty:
            return []
        try:
            return self.journal.log.frames(append.first, append.max_bytes)
        except CorruptEntryError as error:
            log.error("append_of_damaged_entry", error=str(error))
            return []

    def _last_in(self, append: Append, size: int) -> int:
        last = append.first - 1
        while size > 0:
            last += 1
            size -= self.journal.log.size_at(last)
        return last

    # -- links -----------------------------------------------------------------------------

    async def flush_loop(self, executor: Executor) -> None:
        """Make what was promised durable, one flush at a time. Runs until cancelled.

        Raises:
            FlushFailedError: The disk said no: the node must stop.
        """
        self._executor = executor
        while True:
            await self.flush_wake.wait()
            if not self.settings.sync_flush:
                await self._clock.sleep(self.settings.flush_interval_s)
            entry_log = self.journal.log
            ticket = entry_log.begin_flush()
            if ticket is not None:
                self.flushing = True
                try:
                    await executor.run(ticket.run, kind=FLUSH)
                finally:
                    self.flushing = False
                entry_log.complete_flush(ticket)
            self.settle()

    async def vote_loop(self, executor: Executor) -> None:
        """Make term and vote durable as soon as they change. Runs until cancelled.

        Raises:
            DiskFullError, FlushFailedError: The disk said no: the node must stop.
        """
        term_vote = self._term_vote
        while True:
            await self.vote_wake.wait()
            if not term_vote.is_durable:
                version, record = term_vote.snapshot()
                await executor.run(partial(term_vote.write, record), kind="flush_vote")
                term_vote.mark_durable(version)
            self.settle()

    def link_up(self, peer: str, channel: str, hello: Hello) -> None:
        """A connection of ours to *peer* stands, and it has answered with *hello*."""
        self.heard(hello)
        state = self.peers[peer]
        state.up.add(channel)
        if hello.doubtful:
            self.core.forget_match(peer)
        if channel == "control":
            self.core.connected(peer, True)
        elif self.is_leader and peer in self.replicator.peers:
            self.replicator.link_reset(peer)
            state.data_wake.set()
        self.settle()

    def link_down(self, peer: str, channel: str) -> None:
        """A connection of ours to *peer* broke."""
        state = self.peers[peer]
        state.up.discard(channel)
        if channel == "control":
            state.control.clear()
            self.core.connected(peer, False)
            self._maybe_lost_leader(peer)
        else:
            state.replies.clear()
        self.settle()

    def inbound_down(self, peer: str) -> None:
        """A connection that *peer* had opened to us ended."""
        self._maybe_lost_leader(peer)

    def _maybe_lost_leader(self, peer: str) -> None:
        if peer == self.leader_id:
            self.timer.lost_leader(self._clock.monotonic())
            self.timer_wake.set()

    def heard(self, hello: Hello) -> None:
        """Take note of how a member introduced itself.

        Raises:
            RemoteProtocolError: Too many names have been heard: close the connection.
        """
        if hello.name not in self.peers and len(self.peers) >= NAMES_MAX:
            raise RemoteProtocolError(f"{hello.name} is one name too many for this node")
        state, now = self._peer(hello.name), self._clock.monotonic()
        if state.hello is None or state.hello.incarnation != hello.incarnation:
            state.hello_since_s, state.close_since_s = now, None
            if self.is_leader and hello.name in self.replicator.peers:
                self.replicator.begin_anew(hello.name, now)
        state.hello = self.roster.hellos[hello.name] = hello
        self.note_agreed()
        if not self.identity.voters:
            self.agree_wake.set()

    def note_agreed(self) -> None:
        """Take note of the voters agreed on at bootstrap, as soon as there are any."""
        self.roster.note_bootstrap()
        self._note_members()

    def speaks_for(self, hello: Hello) -> bool:
        """Whether it is still this incarnation that speaks under its name."""
        newest = self.roster.hellos.get(hello.name)
        return newest is not None and newest.incarnation == hello.incarnation

    def guest(self, name: str, delta: int) -> None:
        """A connection that *name* opened to us began (+1) or ended (-1)."""
        guests = self.roster.guests
        guests[name] += delta
        if not guests[name]:
            del guests[name]
        self._peer(name)
        self.links_wake.set()

    def _peer(self, name: str) -> PeerState:
        state = self.peers.get(name)
        if state is None:
            state = self.peers[name] = PeerState(name)
        return state

    # -- members ---------------------------------------------------------------------------

    def _note_members(self) -> None:
        """Count and serve those who stand in the list, when it has changed."""
        members = self.journal.members
        if members.version == self._members_version:
            return
        self._members_version = members.version
        self.core.set_voters(self.roster.other_voters)
        for name in self.roster.talked_to():
            self._peer(name)
        if self.is_leader:
            self.replicator.follow(self.roster.followers(), self._clock.monotonic())
        self.links_wake.set()

    def invite(self, name: str, address: tuple[str, int]) -> None:
        """Connect to *name* at *address*, a member or not, until `uninvite`."""
        self.roster.invited[name] = address
        self._members_version = -1
        self._note_members()

    def uninvite(self, name: str) -> None:
        """Talk to *name* only if it is a member or a guest."""
        if self.roster.invited.pop(name, None) is not None:
            self._members_version = -1
            self._note_members()

    def _write_first_list(self) -> None:
        """The first leader of all puts the voters agreed at bootstrap into the log."""
        members = self.journal.members
        if members.index or members.members is None:
            return
        clients = {name: hello.client_address for name, hello in self.roster.hellos.items()}
        clients[self.settings.self_id] = self.settings.client_address
        first = Members.bootstrap(self.identity.voters, self.settings.peers, clients)
        self._append_members(first)

    def _append_members(self, members: Members) -> int:
        try:
            index = self.core.append(ConfigProposal(members))
        except OSError as error:
            raise self._disk_failed(error) from error
        log.info("members_changed", index=index, members=members.rows())
        self._note_members()
        return index

    def change_members(self, after: Members) -> int:
        """Append the list *after* as leader and return its index; `settle` must follow.

        Raises:
            NotLeaderError: This member does not lead.
            ChangePendingError: Another change, the no-op of this reign or a transfer comes first,
                or too few of the voters after it are connected and free of doubt.
            ChangeRefusedError: The change is not one safe step.
            DiskFullError: No space. In all cases nothing was appended.
        """
        if not self.is_leader:
            raise NotLeaderError(self.leader_client_address(), self.term)
        before = self.journal.members
        if self.transferring:
            raise ChangePendingError("leadership is being handed over; nothing was changed")
        if before.members is None or not 0 < self.noop_index <= self.commit_index:
            raise ChangePendingError("this leader has not committed anything yet")
        if before.index > self.commit_index:
            raise ChangePendingError("the change before this one is not committed yet")
        check_change(before.members, after, (self.settings.self_id, self.identity.incarnation))
        if not self._has_majority(after):
            raise ChangePendingError(
                "no majority of the voters after it is connected and free of doubt now"
            )
        return self._append_members(after)

    def _has_majority(self, members: Members) -> bool:
        # A list whose majority is gone, or has no vote, could never commit, and would hold.
        here = 1 + sum(
            1
            for name, hello in self.roster.hellos.items()
            if members.is_voter(name, hello.incarnation)
            and "control" in self.peers[name].up
            and not hello.doubtful
        )
        return here >= majority(len(members.voter_names))

    def _tend(self, now: float) -> None:
        """Leader: take the next step towards "everybody who is there and able votes"."""
        members = self.journal.members
        if self.transferring or members.members is None:
            return
        try:
            if not members.index:
                self._write_first_list()
                return
            if not 0 < max(self.noop_index, members.index) <= self.commit_index:
                return
            after = next_list(members.members, self._sights(members.members, now))
            if after is not None:
                self.change_members(after)
        except DiskFullError as error:
            log.error("members_without_space", error=str(error))
        except (ChangePendingError, ChangeRefusedError) as error:
            log.info("members_wait", reason=str(error))

    def _sights(self, members: Members, now: float) -> dict[str, Sight]:
        timeout_s = self.settings.election_timeout_s
        seen = {}
        for name in members.names:
            state = self.peers.get(name)
            if state is None or state.hello is None or "control" not in state.up:
                continue
            hello = state.hello
            self._note_lag(state, now)
            close = state.close_since_s
            host, port = hello.peer_address or ("", 0)
            seen[name] = Sight(
                incarnation=hello.incarnation,
                settled=now - state.hello_since_s >= timeout_s,
                caught_up=close is not None and now - close >= timeout_s and not hello.doubtful,
                host=host,
                port=port,
                client_address=hello.client_address,
            )
        return seen

    def _note_lag(self, state: PeerState, now: float) -> None:
        known = state.name in self.replicator.peers
        lag = self.replicator.lag_bytes(state.name) if known else None
        if lag is None or lag > CLOSE_BYTES:
            state.close_since_s = None
        elif state.close_since_s is None:
            state.close_since_s = now

    # -- transfer --------------------------------------------------------------------------

    @property
    def transferring(self) -> bool:
        """Whether leadership is being handed over: nothing is to be appended."""
        return self.transfer is not None and not self.transfer.is_over

    def begin_transfer(self, target: str | None) -> Transfer:
        """Start to hand leadership to *target*, or to the voter that has most.

        Raises:
            NotLeaderError: This member does not lead.
            ChangePendingError: A transfer is under way.
            ChangeRefusedError: There is no such voter that is connected.
        """
        if not self.is_leader:
            raise NotLeaderError(self.leader_client_address(), self.term)
        if self.transferring:
            raise ChangePendingError("leadership is being handed over already")
        able = {
            name: self.replicator.peers[name].match_index
            for name in self.roster.other_voters
            if self._is_voter(name) and "control" in self.peers[name].up
        }
        if target is None:
            target = choose_target(self._likely(able))
        if target is None or target not in able:
            raise ChangeRefusedError(f"{target or 'no other member'} is not a connected voter")
        timeout_s = self.settings.election_timeout_s
        now = self._clock.monotonic()
        self.transfer = Transfer(target, self.term, now + timeout_s, timeout_s)
        log.info("transfer_begins", target=target, term=self.term)
        return self.transfer

    def _likely(self, able: dict[str, int]) -> dict[str, int]:
        """Leave out those who would hardly win: in doubt, or asked in vain before."""
        last = self.transfer
        unlikely = {name for name in able if self.roster.hellos[name].doubtful}
        if last is not None and last.term == self.term:
            unlikely.add(last.target)
        return {name: match for name, match in able.items() if name not in unlikely} or able

    def _drive_transfer(self) -> None:
        transfer = self.transfer
        if transfer is None or transfer.is_over:
            return
        progress = self.replicator.peers.get(transfer.target)
        last = self.journal.last_index
        ask = transfer.advance(
            self._clock.monotonic(),
            leads=self.is_leader,
            term=self.term,
            target_has_all=progress is not None
            and progress.match_index == last == self.commit_index,
        )
        if ask:
            self._send(transfer.target, Kind.TIMEOUT_NOW, last)
        if transfer.is_over:
            log.info("transfer_ends", target=transfer.target, phase=transfer.phase.value)

    def _on_timeout_now(self, peer: str, last_index: int) -> None:
        """The leader asks this member to stand at once; nobody is asked first."""
        if peer == self.leader_id and last_index <= self.journal.last_index and self._may_stand():
            self._transfer_term = self.term + 1
            self._campaign()

    def hello(self, channel: str) -> Hello:
        """Return how this member introduces itself now."""
        return Hello(
            cluster=self.settings.cluster,
            group=self.settings.group,
            name=self.settings.self_id,
            incarnation=self.identity.incarnation,
            voters=self.identity.voters,
            doubtful=self.doubtful,
            client_address=self.settings.client_address,
            channel=channel,
            peer=":".join(map(str, self.settings.peers[self.settings.self_id])),
            last=(self.journal.last_term, self.journal.last_index),
        )

    def _is_voter(self, peer: str) -> bool:
        return self.roster.is_voter(peer)

    # -- clock -----------------------------------------------------------------------------

    def beat(self) -> None:
        """Leader: tell everybody that it lives, and probe those that do not answer."""
        if not self.is_leader:
            return
        now = self._clock.monotonic()
        self._beat += 1
        self.barrier.beat_left(self._beat)
        self._tend(now)
        for name in self.replicator.peers:
            peer = self.peers[name]
            self._send(name, Kind.HEARTBEAT, self._beat, self.commit_index)
            self.replicator.stalled(name, now)
            peer.idle_due = True
            peer.data_wake.set()

    def beat_for_reads(self) -> None:
        """Leader: ask the voters now whether it still leads; reads wait for their answers."""
        self._beat += 1
        self.barrier.beat_left(self._beat)
        for name in self.roster.other_voters:
            self._send(name, Kind.HEARTBEAT, self._beat, self.commit_index)

    def confirmed_beat(self) -> int:
        """Return the newest heartbeat of this reign that a majority of the voters has echoed."""
        voters = [name for name in self.roster.other_voters if self._is_voter(name)]
        needed = majority(self.roster.voters) - self.roster.is_self_voter
        return self.barrier.confirmed(voters, needed)

    def election_due_in(self) -> float:
        """Return seconds until this member should stand for election."""
        if self.is_leader:
            return self.settings.election_timeout_s
        return self.timer.deadline_s - self._clock.monotonic()

    def stand(self) -> None:
        """The election timeout passed: ask whether this member would win, then stand."""
        now = self._clock.monotonic()
        self.timer.restart(now)
        if not self._may_stand():
            return
        voters = self.roster.other_voters
        if not self.guards.one_vote_per_voter or not voters:
            self._campaign()
            return
        self._pre_ballot = Ballot(self.term + 1, {self.settings.self_id})
        for name in voters:
            self._send(
                name,
                Kind.PRE_VOTE,
                self.term + 1,
                self.journal.last_index,
                self.journal.last_term,
            )

    def _campaign(self) -> None:
        log.info("campaign", group=self.settings.group, term=self.term + 1)
        self._ballot = Ballot(self.term + 1)
        self._elect(self.core.campaign)
        self.settle()

    def _may_stand(self) -> bool:
        return (
            not self.is_leader
            and not self.installing
            and self.roster.is_self_voter
            and self._may_vote(self.journal.last_term, self.journal.last_index)
            and self.may_lead()
            and self.journal.log.has_reserve
        )

    def _may_vote(self, last_term: int, last_index: int) -> bool:
        """Whether this member may vote for a candidate whose log ends there."""
        # Whether this member or the candidate stands in the list here does not matter: the
        # candidate counts only voters of its own list, which may be newer (thesis §4.1).
        if self.roster.members is None or self.damaged or self.has_hole:
            return False
        if not self.doubtful:
            return True
        # When most members lost promises together, the best log among *all* of them is what is
        # left: somebody whose doubt has no ground may hold what another one really lost.
        hellos = [
            self.roster.hellos[name] for name in self.roster.other_voters if self._is_voter(name)
        ]
        doubtful = self.roster.is_self_voter + sum(1 for hello in hellos if hello.doubtful)
        return (
            doubtful >= majority(self.roster.voters)
            and len(hellos) == len(self.roster.other_voters)
            and all(
                hello.last is not None and is_up_to_date(last_term, last_index, *hello.last)
                for hello in hellos
            )
        )

    # -- receiving -------------------------------------------------------------------------

    def receive(self, peer: str, frame: PeerFrame) -> None:
        """Handle one frame from *peer*; the caller calls `settle` after a row of them.

        Raises:
            RemoteProtocolError: The frame is not what a member sends: close its connection.
            InvariantBroken: Logs contradict each other: stop the node.
        """
        if frame.kind is Kind.PRE_VOTE:
            self._on_pre_vote(peer, *frame.fields)
        elif frame.kind is Kind.PRE_VOTE_REPLY:
            self._on_pre_vote_reply(peer, frame.term, *frame.fields)
        elif frame.kind is Kind.FETCH:
            self._on_fetch(peer, *frame.fields)
        elif frame.kind is Kind.FETCH_REPLY:
            self.on_fetched(peer, frame.payload)
        elif frame.term < self.term and self.guards.envelope:
            # The library ignores lower terms in silence; then their sender would never learn.
            if frame.kind in (Kind.APPEND, Kind.HEARTBEAT, Kind.VOTE):
                self._send(peer, Kind.TERM_NOTICE)
        elif frame.term > self.term and frame.kind not in (Kind.APPEND, Kind.HEARTBEAT, Kind.VOTE):
            if self.roster.member(peer) is not None:
                self.core.observe_term(frame.term)
        else:
            self._dispatch(peer, frame)

    def _dispatch(self, peer: str, frame: PeerFrame) -> None:
        match frame.kind:
            case Kind.APPEND:
                self._on_append(peer, frame)
            case Kind.APPEND_REPLY:
                self._on_append_reply(peer, *frame.fields)
            case Kind.HEARTBEAT:
                self._on_heartbeat(peer, frame.term, frame.fields[0])
            case Kind.HEARTBEAT_REPLY:
                self._note_doubt(peer, bool(frame.fields[2]))
                if self.is_leader and self._is_voter(peer):
                    self.core.step(peer, ALIVE)
                    self.barrier.echoed(peer, frame.fields[0])
            case Kind.VOTE:
                self._on_vote(peer, frame.term, *frame.fields)
            case Kind.VOTE_REPLY:
                self._on_vote_reply(peer, frame.term)
            case Kind.SNAPSHOT:
                self._on_snapshot(peer, frame)
            case Kind.SNAPSHOT_REPLY:
                self._on_snapshot_reply(peer, *frame.fields)
            case Kind.TIMEOUT_NOW:
                self._on_timeout_now(peer, frame.fields[0])
            case Kind.TERM_NOTICE:
                pass  # of our own term: nothing to learn
            case _:
                raise RemoteProtocolError(f"a {frame.kind.name} frame inside a connection")

    def _on_append(self, peer: str, frame: PeerFrame) -> None:
        prev_index, prev_term, commit_index = frame.fields
        if self.installing:
            self._heard_leader(peer, frame.term)
            return
        request = AppendRequest(
            frame.term, prev_index, prev_term, commit_index, split_frames(frame.payload)
        )
        self._heard_leader(peer, frame.term)
        plan = plan_append(self.journal, request, self.guards)
        if isinstance(plan, Rejected):
            self._step_heartbeat(peer, frame.term)
            self._reply(peer, False, plan.next_index)
            return
        try:
            self.core.step(peer, plan.message)
        except DiskFullError as error:
            # What did not fit is not acknowledged; the leader sends it again.
            log.error("append_without_space", peer=peer, error=str(error))
            return
        except OSError as error:
            raise self._disk_failed(error) from error
        self._note_members()
        self._owe(peer, plan.verified)
        if self.doubtful and plan.verified >= commit_index > self.journal.anchor_index:
            self._refilled_at = (frame.term, commit_index)

    def _end_doubt(self) -> None:
        """Be a full voter again once a leader's own entry is committed and all up to it is here."""
        if self.is_leader:
            term, index = self.term, min(self.commit_index, self.journal.log.durable_index)
            ended = index >= self.noop_index > 0
        else:
            term, index = self._refilled_at
            ended = (
                term == self.term
                and self.journal.log.durable_index >= index > 0
                and self.journal.term_at(index) == term
            )
        if ended:
            log.info("doubt_ended", group=self.settings.group, term=term, index=index)
            self.doubtful = self.damaged = False

    def _on_snapshot(self, peer: str, frame: PeerFrame) -> None:
        index, offset, total = frame.fields
        self._heard_leader(peer, frame.term)
        self._step_heartbeat(peer, frame.term)
        if self.installing:
            return
        if index <= self.journal.last_index:
            # This log goes further already: appends will do.
            self._reply_snapshot(peer, index, total, self.journal.last_index + 1)
        elif self._receiving.take(index, offset, total, frame.payload):
            self.installing = True
            self.on_snapshot(peer, self._receiving.data())
        else:
            self._reply_snapshot(peer, index, self._receiving.offset, 0)

    def _reply_snapshot(self, peer: str, index: int, offset: int, next_index: int) -> None:
        state = self.peers[peer]
        fields = (index, offset, next_index)
        state.replies.append(Outgoing(Kind.SNAPSHOT_REPLY, self.term, fields))
        state.data_wake.set()

    def installed(self, leader: str, entry_log: EntryLog, index: int) -> None:
        """The snapshot of *index* is on disk; *entry_log* begins anew, everything old is void.

        The caller owns the log, as before.
        """
        self.journal.begin_anew(entry_log)
        self.core.begin_at(self.journal.anchor_index)
        self._owed = None
        self.installing = False
        self.installs += 1
        log.info("snapshot_installed", index=index, first_index=entry_log.first_index)
        if leader in self.peers:
            self._reply_snapshot(leader, index, 0, self.journal.last_index + 1)
        self.settle()

    def _on_snapshot_reply(self, peer: str, index: int, offset: int, next_index: int) -> None:
        if not self.is_leader or peer not in self.replicator.peers:
            return
        now = self._clock.monotonic()
        if next_index:
            self.replicator.installed(peer, next_index, now)
        else:
            self.replicator.snapshot_taken(peer, index, offset, now)
        if self._is_voter(peer):
            self.core.step(peer, ALIVE)

    def _owe(self, leader: str, verified: int) -> None:
        owed, generation = self._owed, self.journal.log.generation
        if owed is None or (owed.leader, owed.term, owed.generation) != (
            leader,
            self.term,
            generation,
        ):
            self._owed = _Owed(leader, self.term, generation, verified)
            return
        if verified <= owed.acked:
            # The leader asks again for what was answered: the answer may be lost.
            owed.acked = -1
        owed.verified = max(owed.verified, verified)

    def _on_append_reply(self, peer: str, matched: bool, index: int) -> None:
        if not self.is_leader or peer not in self.replicator.peers:
            return
        now = self._clock.monotonic()
        if not matched:
            self.replicator.rejected(peer, index, now)
            if self._is_voter(peer):
                self.core.step(peer, ALIVE)
            return
        if index > self.journal.last_index:
            raise RemoteProtocolError(f"{peer} acknowledged index {index} beyond this log")
        self.replicator.matched(peer, index, now)
        if self._is_voter(peer):
            self.core.step(
                peer,
                {
                    "type": "next_node_idx",
                    "reset": False,
                    "success": True,
                    "next_node_idx": index + 1,
                },
            )

    def _on_heartbeat(self, peer: str, term: int, beat: int) -> None:
        self._heard_leader(peer, term)
        self._step_heartbeat(peer, term)
        self._send(peer, Kind.HEARTBEAT_REPLY, beat, self.journal.stable_index, self.doubtful)

    def _note_doubt(self, peer: str, is_doubtful: bool) -> None:
        # What the hello of a long-lived connection said may be over since.
        state = self.peers.get(peer)
        if state is not None and state.hello is not None and state.hello.doubtful != is_doubtful:
            state.hello = replace(state.hello, doubtful=is_doubtful)
            self.roster.hellos[peer] = state.hello

    def _step_heartbeat(self, peer: str, term: int) -> None:
        self.core.step(peer, {"type": "append_entries", "term": term, **HEARTBEAT})

    def _heard_leader(self, peer: str, term: int) -> None:
        # The library would follow whoever speaks last.
        known_term, known_leader = self._leader_heard
        if (known_term == term and known_leader != peer) or (self.is_leader and term == self.term):
            other = self.settings.self_id if self.is_leader else known_leader
            raise InvariantBroken(f"{peer} and {other} both lead term {term}")
        self._leader_heard = (term, peer)
        self.timer.heard_leader(self._clock.monotonic())

    def _on_vote(
        self, peer: str, term: int, last_index: int, last_term: int, transfer: bool
    ) -> None:
        sticky = self.timer.hears_leader(self._clock.monotonic()) or self.is_leader
        if not self._may_vote(last_term, last_index) or (
            sticky and not transfer and self.guards.one_vote_per_voter
        ):
            return
        self.core.step(
            peer,
            {
                "type": "request_vote",
                "term": term,
                "last_log_index": last_index,
                "last_log_term": last_term,
            },
        )

    def _on_vote_reply(self, peer: str, term: int) -> None:
        if self.guards.one_vote_per_voter and not (
            self._is_voter(peer) and self._ballot.grant(term, peer)
        ):
            return
        self._elect(lambda: self.core.step(peer, {"type": "response_vote", "term": term}))

    def _on_pre_vote(self, peer: str, term: int, last_index: int, last_term: int) -> None:
        granted = (
            term > self.term
            and self._may_vote(last_term, last_index)
            and not self.is_leader
            and not self.timer.hears_leader(self._clock.monotonic())
            and is_up_to_date(
                last_term, last_index, self.journal.last_term, self.journal.last_index
            )
        )
        self._send(peer, Kind.PRE_VOTE_REPLY, term, granted)

    def _on_pre_vote_reply(self, peer: str, sender_term: int, term: int, granted: bool) -> None:
        if not granted:
            if self.roster.member(peer) is not None:
                self.core.observe_term(sender_term)
            return
        if (
            not self._is_voter(peer)
            or self.is_leader
            or term != self.term + 1
            or not self._pre_ballot.grant(term, peer)
        ):
            return
        if len(self._pre_ballot.votes) == majority(self.roster.voters):
            self._campaign()
