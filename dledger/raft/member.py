"""One member of a Raft group: the library's decisions, our timers, guards and sender, joined.

Everything here is synchronous. Links (`dledger.raft.links`) deliver received frames and send
frames; two small tasks flush the disk and two more keep the time. After every event `settle` runs
the library, releases what is durable by now and calls the owner, so there is no polling tick.

What leaves this node, and what it waits for:

=====================  =========================================================
VOTE, VOTE_REPLY       term and vote are on disk, and the term is still the same
APPEND_REPLY           the entries are on disk, same term, no truncation since
commit (leader)        the entry is on disk here and on a majority
everything else        nothing
=====================  =========================================================

The roles are in files of their own (internals/decisions/0003-raft-member.md): here they are created
over one `RaftState`, frames are dispatched by term and kind, and events end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import LocalProtocolError, RemoteProtocolError
from dledger.raft.acks import Flusher, PendingAcks
from dledger.raft.candidate import Candidate, ElectionTimer, VoteEligibility
from dledger.raft.contacts import Contacts
from dledger.raft.follower import Follower
from dledger.raft.identity import Hello, Identity
from dledger.raft.journal import CommitLogJournal, Proposal, TermVote, entry_size
from dledger.raft.leader import Leader, MemberChanges
from dledger.raft.library import Message, RaftCore, Role
from dledger.raft.membership import MembersLog
from dledger.raft.peers import NotAMemberError, Owner, Peers, RaftState, Roster
from dledger.raft.replicator import FrameWithBytes, Replicator, Sender
from dledger.raft.settings import ALL_ON, Guards, RaftSettings
from dledger.raft.snapshot import Installation
from dledger.raft.transfer import Transfers
from dledger.raft.wire import CERTAIN, HEARTBEATS, TERM_JUMP_MAX, Kind, PeerFrame
from dledger.remoting.seams import Clock, Rng

OF_MEMBERS: Final = frozenset(
    {
        Kind.APPEND,
        Kind.HEARTBEAT,
        Kind.VOTE,
        Kind.PRE_VOTE,
        Kind.SNAPSHOT,
        Kind.TIMEOUT_NOW,
        Kind.FETCH,
    }
)
"""Frames that only a member may send: it wants to lead, a vote, or entries."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a member has on disk when it starts."""

    entry_log: EntryLog
    term_vote: TermVote
    identity: Identity
    commit_index: int = 0
    """What is certainly committed; 0 when unknown."""
    members: MembersLog | None = None
    """The list of members at the end of the log; None: it is searched, entry by entry."""
    doubtful: bool = False
    """Votes or acknowledgements may be lost: an unclean stop with async flushes, or a torn log."""
    damaged: bool = False
    """Acknowledged entries are lost: the log was cut because of damage."""


class RaftNode:
    """A member. Its owner calls `append` and reads `commit_index` after every event.

    Attributes:
        owner: The callbacks of this node's owner.
        contradictions: How often a peer's frame contradicted this member's own log or term.
    """

    def __init__(
        self,
        settings: RaftSettings,
        stored: Stored,
        *,
        store_host: bytes,
        clock: Clock,
        rng: Rng,
        on_settled: Callable[[], None],
        guards: Guards = ALL_ON,
    ) -> None:
        self.settings = settings
        self.identity = stored.identity
        self.guards = guards
        self.owner = Owner(on_settled)
        self.contradictions = 0
        self._settling = False
        self.journal = CommitLogJournal(
            stored.entry_log,
            stored.term_vote,
            restored_commit_index=stored.commit_index,
            store_host=store_host,
            sync_flush=settings.sync_flush,
            guards=guards,
            members=stored.members,
        )
        self.roster = Roster(
            self.journal.members, stored.identity, settings.self_id, settings.peers
        )
        self.core = RaftCore(
            settings.self_id,
            settings.others,
            self.journal,
            send=self._on_library_message,
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
            # A single member has no leader to wait for.
            self.timer.lost_leader(clock.monotonic())
        self.peers = Peers(settings.others, self.core)
        self.state = RaftState(
            settings,
            guards,
            clock,
            self.owner,
            self.core,
            self.journal,
            self.roster,
            self.peers,
        )
        self._create_roles(doubtful=stored.doubtful or stored.damaged, damaged=stored.damaged)
        self.contacts.note_agreed()

    def _create_roles(self, *, doubtful: bool, damaged: bool) -> None:
        state, replicator, timer = self.state, self.replicator, self.timer
        self.flusher = Flusher(self.settings, self.journal, state.clock, self.settle)
        self.eligibility = VoteEligibility(state, doubtful, damaged)
        self.acks = PendingAcks(state)
        self.installation = Installation(state, self.acks)
        self.sender = Sender(state, replicator)
        self.transfers = Transfers(state, replicator)
        self.contacts = Contacts(state, replicator, timer, self.eligibility)
        self.candidate = Candidate(state, timer, self.eligibility, self.acks, self.installation)
        self.follower = Follower(
            state, timer, self.eligibility, self.acks, self.installation, self.contacts
        )
        self.changes = MemberChanges(state, replicator, self.contacts, self.transfers)
        self.leader = Leader(state, replicator, timer, self.contacts, self.changes, self.transfers)

    # -- what the owner reads --------------------------------------------------------------

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

    def status(self) -> dict[str, Any]:
        """Return what ``dledger raft status`` shows of this member."""
        members = self.roster.members
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
            "members": [] if members is None else members.rows(),
            "members_index": self.journal.members.index,
            "doubtful": self.eligibility.doubtful,
            "damaged": self.eligibility.damaged,
            "truncations": self.journal.truncations,
            "contradictions": self.contradictions,
            "first_index": self.journal.anchor_index + 1,
            "installs": self.installation.count,
            "elections": self.leader.elections,
            "peers": self.contacts.rows(),
        }

    def holds_log(self, now_s: float) -> bool:
        """Whether this leader refills a follower with log that may be below the floor by now."""
        return self.is_leader and self.replicator.holds_log(now_s)

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

    def step_down_if_damaged(self) -> None:
        """Cease to lead or to campaign, at once, if another voter may have what is damaged here.

        `settle` must follow.
        """
        if self.core.role is not Role.FOLLOWER and self.state.has_hole:
            self.core.observe_term(self.term + 1)

    def installed(self, leader: str, entry_log: EntryLog, index: int) -> None:
        """Continue on *entry_log*: the snapshot of *index* is on disk, the old log is void.

        The caller owns the log, as before.
        """
        self.installation.finish(leader, entry_log, index)
        self.settle()

    def declined(self, leader: str, index: int, next_index: int) -> None:
        """Ask for entries from *next_index* on: this log needs no snapshot of *index*."""
        self.installation.decline(leader, index, next_index)
        self.settle()

    def refused(self) -> None:
        """Drop the snapshot that arrived: it cannot be installed, and nothing was changed."""
        self.installation.refuse()
        self.settle()

    # -- events ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Finish an event: elect, count, release, wake, call the owner.

        Raises:
            StoreError, InvariantBroken: This node must stop. Every later call raises the same, so
                a caller that takes the first one for an error of its own cannot keep it running.
        """
        self.state.failure.raise_again()
        if self._settling:
            return
        self._settling = True
        try:
            self._advance()
        except OSError as error:
            raise self.state.failure.of_disk(error) from error
        except Exception as error:
            self.state.failure.error = error
            raise
        finally:
            self._settling = False
        if self.eligibility.doubtful:
            self.eligibility.end_if_refilled()
        self.acks.release()
        self.flusher.wake()
        if self.is_leader:
            self.leader.wake_links()

    def _advance(self) -> None:
        self.contacts.note_members()
        self._tick()
        if not self.is_leader:
            self.flusher.flush_at_once()
        self.transfers.drive()
        self.owner.on_settled()
        if self.is_leader and not self.roster.other_voters and self._lags():
            # One voter that needs no flush: no later event would commit.
            self._tick()
            self.owner.on_settled()

    def _tick(self) -> None:
        if self.core.role is not Role.FOLLOWER:  # a follower changes by messages alone
            self.candidate.elect(self.core.tick)
        self.leader.update_role()

    def _on_library_message(self, peer: str, message: Message) -> None:
        self.candidate.on_library_message(peer, message)  # the core is created before its roles

    def _lags(self) -> bool:
        return self.core.known_commit_index < self.journal.stable_index

    def begin_election(self) -> None:
        """The election timeout passed: ask whether this member would win, then campaign."""
        if self.candidate.begin_election():
            self.settle()

    def link_up(self, peer: str, channel: str, hello: Hello) -> None:
        """Record a connection to *peer*, which answered our call with *hello*."""
        self.contacts.link_up(peer, channel, hello)
        self.settle()

    def link_down(self, peer: str, channel: str) -> None:
        """Record that a connection of ours to *peer* broke."""
        self.contacts.link_down(peer, channel)
        self.settle()

    def next_frame(self, peer: str) -> FrameWithBytes | None:
        """Decide what the data link to *peer* sends next; None when there is nothing now.

        Returns:
            The frame and the log bytes that follow its head: views that pin their segment.
        Raises:
            FlushFailedError: The disk failed: stop the node.
        """
        try:
            return self.sender.next_frame(peer)
        except OSError as error:
            raise self.state.failure.of_disk(error) from error

    # -- frames ----------------------------------------------------------------------------

    def receive(self, peer: str, frame: PeerFrame) -> bool:
        """Handle one frame from *peer*.

        Returns:
            Whether something may follow from it: then the caller calls `settle` after a series of
            frames. A heartbeat changes nothing, most of the time.
        Raises:
            RemoteProtocolError: No member sends such a frame, or it contradicts what is known here:
                close its connection.
            StoreError, InvariantBroken: The disk failed, what is on it contradicts itself, or what
                `settle` raised: stop the node.
        """
        self.state.failure.raise_again()
        try:
            return self._receive(peer, frame)
        except OSError as error:
            raise self.state.failure.of_disk(error) from error

    def _receive(self, peer: str, frame: PeerFrame) -> bool:
        if frame.kind is Kind.APPEND_REPLY and self._is_late(frame):
            self._step(peer, frame)
            self.leader.wake_link(peer)
            return False
        if frame.kind not in HEARTBEATS:
            if self._step(peer, frame):
                self.settle()
            return True
        before = self._role()
        self._step(peer, frame)
        return bool(self.leader.reads) or self.eligibility.doubtful or self._role() != before

    def _is_late(self, frame: PeerFrame) -> bool:
        """Whether a reply acknowledges what is committed: as a rule that of the slower follower."""
        return (
            self.is_leader
            and frame.term == self.term
            and bool(frame.fields[0])
            and frame.fields[1] <= self.commit_index
            and not self.transfers.is_under_way
        )

    def _role(self) -> tuple[object, ...]:
        core = self.core
        return core.term, core.role, core.leader_id, core.known_commit_index

    def _step(self, peer: str, frame: PeerFrame) -> bool:
        """Dispatch one frame by term and kind.

        Returns:
            Whether this member campaigns now: the event must end before the next frame.
        """
        if not self._accepts(peer, frame):
            return False
        if frame.kind is Kind.PRE_VOTE:
            self.candidate.on_pre_vote(peer, *frame.fields)
        elif frame.kind is Kind.PRE_VOTE_REPLY:
            if frame.fields[1] == CERTAIN:
                self.contacts.set_doubtful(peer, is_doubtful=False)
            return self.candidate.on_pre_vote_reply(peer, frame.term, *frame.fields)
        elif frame.kind is Kind.FETCH:
            self.sender.on_fetch(peer, *frame.fields)
        elif frame.kind is Kind.FETCH_REPLY:
            self.owner.on_fetched(peer, frame.payload)
        elif frame.term < self.core.term and self.guards.envelope:
            # The library drops lower terms silently; then their sender would never learn.
            if frame.kind in (Kind.APPEND, Kind.HEARTBEAT, Kind.VOTE):
                self.peers.send(peer, Kind.TERM_NOTICE)
        elif frame.term > self.core.term and frame.kind not in (
            Kind.APPEND,
            Kind.HEARTBEAT,
            Kind.VOTE,
        ):
            if self.roster.member(peer) is not None:
                self.core.observe_term(frame.term)
        else:
            return self._step_role(peer, frame)
        return False

    def _accepts(self, peer: str, frame: PeerFrame) -> bool:
        hello = self.roster.hellos.get(peer)
        if frame.kind in OF_MEMBERS:
            if hello is None or not self.roster.is_member(hello.key):
                raise NotAMemberError(f"{peer} sends a {frame.kind.name} and is no member")
        elif hello is None or not self.roster.is_known(hello.key):
            return False  # the late answer of a member that has left meanwhile
        if frame.term - self.core.term > TERM_JUMP_MAX:
            raise RemoteProtocolError(f"{peer} is in term {frame.term}, which no member comes to")
        return True

    def _step_role(self, peer: str, frame: PeerFrame) -> bool:
        match frame.kind:
            case Kind.APPEND:
                self.follower.on_append(peer, frame)
            case Kind.APPEND_REPLY:
                self.leader.on_append_reply(peer, *frame.fields)
            case Kind.HEARTBEAT:
                self.follower.on_heartbeat(peer, frame.term, *frame.fields)
            case Kind.HEARTBEAT_REPLY:
                self.leader.on_heartbeat_reply(peer, *frame.fields)
            case Kind.VOTE:
                self.candidate.on_vote(peer, frame.term, *frame.fields)
            case Kind.VOTE_REPLY:
                self.candidate.on_vote_reply(peer, frame.term)
            case Kind.SNAPSHOT:
                self.follower.on_snapshot(peer, frame)
            case Kind.SNAPSHOT_REPLY:
                self.leader.on_snapshot_reply(peer, *frame.fields)
            case Kind.TIMEOUT_NOW:
                return self.candidate.on_timeout_now(peer, frame.fields[0])
            case Kind.TERM_NOTICE:
                pass  # of our own term: nothing to learn
            case _:
                raise RemoteProtocolError(f"a {frame.kind.name} frame inside a connection")
        return False
