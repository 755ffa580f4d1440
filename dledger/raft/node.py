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

What it does is done in rooms of their own (decisions/0003-rooms-of-a-member.md); here they are
wired, frames find their room, and events end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commitlog.entry_log import EntryLog
from commitlog.errors import LocalProtocolError
from dledger.raft.barrier import ReadBarrier
from dledger.raft.clocks import Clocks
from dledger.raft.contacts import Contacts
from dledger.raft.core import Message, RaftCore, Role
from dledger.raft.doubt import Doubt
from dledger.raft.election import ElectionTimer
from dledger.raft.failure import Failure
from dledger.raft.flusher import Flusher
from dledger.raft.follower import Follower
from dledger.raft.guards import ALL_ON, Guards
from dledger.raft.handover import Handover
from dledger.raft.identity import Hello, Identity
from dledger.raft.installation import Installation
from dledger.raft.journal import CommitLogJournal, Proposal, entry_size
from dledger.raft.membership import Members, MembersLog
from dledger.raft.owner import Owner
from dledger.raft.peers import Outgoing, Peers
from dledger.raft.promises import Promises
from dledger.raft.reception import Reception
from dledger.raft.reconfiguration import Reconfiguration
from dledger.raft.reign import Reign
from dledger.raft.replicator import Replicator
from dledger.raft.roster import Roster
from dledger.raft.sender import FrameWithBytes, Sender
from dledger.raft.settings import RaftSettings
from dledger.raft.term_vote import TermVote
from dledger.raft.transfer import Transfer
from dledger.raft.voting import Voting
from dledger.raft.wire import SIGNS_OF_LIFE, PeerFrame
from remoting.seams import Clock, Rng


class RaftNode:
    """A member. The owner calls `append`, reads `commit_index` and is told after every event.

    Args:
        doubtful: Promises may be lost: an unclean stop with async flushes, or a torn log. It
            votes when a leader has caught it up, or when most members are in doubt and all heard.
        damaged: The log was cut because of damage: promises are lost. It follows until a leader
            has refilled it, whatever the others say.
        members: The list of members at the end of the log; None: it is looked up, entry by entry.
    Attributes:
        owner: What this node asks and tells its owner.
        contradictions: How often a peer said what contradicts this member's own log or term.
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
        self.guards = guards
        self.owner = Owner(on_settled)
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
            send=self._library_says,
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
        self.peers = Peers(settings.others, self.core)
        self.doubt = Doubt(
            settings.group,
            self.core,
            self.journal,
            self.roster,
            doubtful=doubtful or damaged,
            damaged=damaged,
        )
        self._settling = False
        self.contradictions = 0
        self._failure = Failure()
        self._furnish(clock)
        self.contacts.note_agreed()

    def _furnish(self, clock: Clock) -> None:
        """Make the rooms from the inside out, each with what it reads and calls."""
        settings, guards, owner = self.settings, self.guards, self.owner
        core, journal, timer, peers = self.core, self.journal, self.timer, self.peers
        roster, replicator = self.roster, self.replicator
        doubt, failure = self.doubt, self._failure
        self.flusher = Flusher(settings, journal, clock, self.settle)
        self.promises = promises = Promises(guards, core, journal, doubt, peers)
        self.installation = installation = Installation(owner, core, journal, promises, peers)
        self.sender = sender = Sender(owner, core, journal, replicator, peers)
        self.handover = handover = Handover(
            settings, clock, core, journal, roster, replicator, peers
        )
        self.contacts = contacts = Contacts(
            settings, clock, core, journal, roster, replicator, timer, peers, doubt
        )
        self.clocks = clocks = Clocks(clock, roster, lambda: self.journal.log.last_store_time_ms)
        self.voting = voting = Voting(
            settings,
            owner,
            guards,
            clock,
            clocks,
            core,
            journal,
            roster,
            timer,
            peers,
            doubt,
            promises,
            installation,
        )
        self.follower = follower = Follower(
            settings,
            guards,
            clock,
            core,
            journal,
            timer,
            peers,
            doubt,
            promises,
            installation,
            contacts,
            failure,
        )
        self.reconfiguration = changes = Reconfiguration(
            settings, core, journal, roster, replicator, peers, contacts, handover, failure
        )
        self.reign = reign = Reign(
            settings,
            clock,
            clocks,
            core,
            journal,
            roster,
            replicator,
            timer,
            peers,
            contacts,
            changes,
            handover,
        )
        self._reception = Reception(
            owner, guards, core, roster, peers, sender, voting, follower, reign
        )

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
    def noop_index(self) -> int:
        """Index of the first entry of this member's reign; 0 while it does not lead."""
        return self.reign.noop_index

    @property
    def barrier(self) -> ReadBarrier:
        """Reads that wait for proof that this member still leads."""
        return self.reign.barrier

    @property
    def doubtful(self) -> bool:
        """Whether its promises may be lost."""
        return self.doubt.doubtful

    @property
    def damaged(self) -> bool:
        """Whether its promises are lost."""
        return self.doubt.damaged

    @property
    def has_hole(self) -> bool:
        """Whether entries are damaged here that another voter may have: no promises until then."""
        return self.doubt.has_hole

    @property
    def flushing(self) -> bool:
        """Whether a flush of the log is under way."""
        return self.flusher.flushing

    @property
    def transferring(self) -> bool:
        """Whether leadership is being handed over: nothing is to be appended."""
        return self.handover.is_under_way

    def leader_client_address(self) -> str | None:
        """Return where clients find the leader, if it is known and is not this node."""
        return self.handover.leader_client_address()

    def confirmed_beat(self) -> int:
        """Return the newest heartbeat of this reign that a majority of the voters has echoed."""
        return self.reign.confirmed_beat()

    def status(self) -> dict[str, Any]:
        """Return what ``dledger raft status`` shows of this member."""
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
            "contradictions": self.contradictions,
            "first_index": self.journal.anchor_index + 1,
            "installs": self.installation.count,
            "elections": self.reign.elections,
            "clock_behind_voters_ms": self.clocks.ahead_ms(),
            "peers": self.contacts.rows(),
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

    def holds_log(self, now_s: float) -> bool:
        """Whether this leader refills a follower with log that may be below the floor by now."""
        return self.is_leader and self.replicator.holds_log(now_s)

    def beat_for_reads(self) -> None:
        """Leader: ask the voters now whether it still leads; reads wait for their answers."""
        self.reign.beat_for_reads()

    def give_up_lead(self) -> None:
        """Lead no longer, at once, if there is another voter who could; `settle` must follow."""
        if self.is_leader and self.has_hole:
            self.core.observe_term(self.term + 1)

    def begin_transfer(self, target: str | None) -> Transfer:
        """Start to hand leadership to *target*, or to the voter that has most; `settle` follows.

        Raises:
            NotLeaderError: This member does not lead.
            ChangePendingError: A transfer is under way.
            ChangeRefusedError: There is no such voter that is connected.
        """
        return self.handover.begin(target)

    def change_members(self, after: Members) -> int:
        """Append the list *after* as leader and return its index; `settle` must follow.

        Raises:
            NotLeaderError: This member does not lead.
            ChangePendingError: Another change, the no-op of this reign or a transfer comes first,
                or too few of the voters after it are connected and free of doubt.
            ChangeRefusedError: The change is not one safe step.
            DiskFullError: No space. In all cases nothing was appended.
        """
        return self.reconfiguration.change(after, self.noop_index)

    def invite(self, name: str, address: tuple[str, int]) -> None:
        """Connect to *name* at *address*, a member or not, until `uninvite`."""
        self.contacts.invite(name, address)

    def uninvite(self, name: str) -> None:
        """Talk to *name* only if it is a member or a guest."""
        self.contacts.uninvite(name)

    def fetch(self, peer: str, first: int, last: int) -> None:
        """Ask *peer* for entries that are damaged here; `owner.on_fetched` gets its answer."""
        self.sender.fetch(peer, first, last)

    def installed(self, leader: str, entry_log: EntryLog, index: int) -> None:
        """The snapshot of *index* is on disk; *entry_log* begins anew, everything old is void.

        The caller owns the log, as before.
        """
        self.installation.finish(leader, entry_log, index)
        self.settle()

    def declined(self, leader: str, index: int, next_index: int) -> None:
        """The snapshot of *index* is not needed: entries from *next_index* on continue this log."""
        self.installation.decline(leader, index, next_index)
        self.settle()

    def refused(self) -> None:
        """The snapshot that came cannot be installed; everything is as it was."""
        self.installation.refuse()
        self.settle()

    # -- events ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Finish an event: elect, count, release, wake, tell the owner.

        Raises:
            StoreError, InvariantBroken: This node must stop. Every later call raises the same, so
                whoever took the first one for an error of its own stops nothing from stopping.
        """
        self._failure.raise_again()
        if self._settling:
            return
        self._settling = True
        try:
            self._advance()
        except OSError as error:
            raise self._failure.of_disk(error) from error
        except Exception as error:
            self._failure.error = error
            raise
        finally:
            self._settling = False
        if self.doubt.doubtful:
            self.doubt.end_if_refilled(self.noop_index)
        self.promises.release()
        self.flusher.wake()
        if self.is_leader:
            self.reign.wake_links()

    def _advance(self) -> None:
        self.contacts.note_members()
        self._tick()
        if not self.is_leader:
            self.flusher.flush_at_once()
        self.handover.drive()
        self.owner.on_settled()
        if self.is_leader and not self.roster.other_voters and self._lags():
            # One voter that needs no flush: nothing else will happen that could commit.
            self._tick()
            self.owner.on_settled()

    def _tick(self) -> None:
        if self.core.role is not Role.FOLLOWER:  # to a follower things happen by messages alone
            self.voting.elect(self.core.tick)
        self.reign.note_role()

    def _library_says(self, peer: str, message: Message) -> None:
        self.voting.library_says(peer, message)

    def _lags(self) -> bool:
        return self.core.known_commit_index < self.journal.stable_index

    def stand(self) -> None:
        """The election timeout passed: ask whether this member would win, then stand."""
        if self.voting.stand():
            self.settle()

    def beat(self) -> None:
        """Leader: tell everybody that it lives, and probe those that do not answer."""
        self.reign.beat()

    def election_due_in(self) -> float:
        """Return seconds until this member should stand for election."""
        return self.voting.due_in()

    # -- links -----------------------------------------------------------------------------

    def hello(self, channel: str, *, to_member: bool = False) -> Hello:
        """Return how this member introduces itself now; *to_member*: with all the others."""
        return self.contacts.hello(channel, to_member=to_member)

    def heard(self, hello: Hello) -> None:
        """Take note of how a member introduced itself.

        Raises:
            RemoteProtocolError: Too many names have been heard: close the connection.
        """
        self.contacts.heard(hello)

    def note_agreed(self) -> None:
        """Take note of the voters agreed on at bootstrap, as soon as there are any."""
        self.contacts.note_agreed()

    def link_up(self, peer: str, channel: str, hello: Hello) -> None:
        """A connection of ours to *peer* stands, and it has answered with *hello*."""
        self.contacts.link_up(peer, channel, hello)
        self.settle()

    def link_down(self, peer: str, channel: str) -> None:
        """A connection of ours to *peer* broke."""
        self.contacts.link_down(peer, channel)
        self.settle()

    def next_append(self, peer: str) -> FrameWithBytes | None:
        """Decide what the data link to *peer* sends next; None when there is nothing now.

        Returns:
            The frame and the log bytes that follow its head: views that pin their segment.
        Raises:
            FlushFailedError: The disk failed: stop the node.
        """
        try:
            return self.sender.next_frame(peer)
        except OSError as error:
            raise self._failure.of_disk(error) from error

    def receive(self, peer: str, frame: PeerFrame) -> bool:
        """Handle one frame from *peer*.

        Returns:
            Whether something may follow from it: then the caller calls `settle` after a row of
            frames. A sign of life changes nothing, most of the time.
        Raises:
            RemoteProtocolError: The frame is not what a member sends, or contradicts what is
                known here: close its connection.
            StoreError, InvariantBroken: The disk failed, what is on it contradicts itself, or what
                `settle` raised: stop the node.
        """
        self._failure.raise_again()
        try:
            return self._receive(peer, frame)
        except OSError as error:
            raise self._failure.of_disk(error) from error

    def _receive(self, peer: str, frame: PeerFrame) -> bool:
        if frame.kind not in SIGNS_OF_LIFE:
            if self._reception.take(peer, frame):
                self.settle()
            return True
        before = self._standing()
        self._reception.take(peer, frame)
        return bool(self.barrier) or self.doubt.doubtful or self._standing() != before

    def _standing(self) -> tuple[object, ...]:
        core = self.core
        knows = self.clocks.are_known
        return core.term, core.role, core.leader_id, core.known_commit_index, knows


__all__ = ["Outgoing", "RaftNode", "RaftSettings"]
