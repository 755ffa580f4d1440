"""What a leader does: heartbeats, answers of its followers, and the list of members.

The library decides when a member begins and ceases to lead. Which change of the members is the next
is decided in `dledger.raft.membership`, from the list in the log and the connections of the leader;
here it is checked against what could commit, and appended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog

from dledger.broker_errors import ChangePendingError, ChangeRefusedError
from dledger.commitlog.errors import DiskFullError, LogBusyError, RemoteProtocolError
from dledger.raft.candidate import ElectionTimer, majority
from dledger.raft.contacts import Contacts
from dledger.raft.identity import Hello
from dledger.raft.journal import ConfigProposal
from dledger.raft.library import Message
from dledger.raft.membership import Members, Sight, check_change, next_list
from dledger.raft.peers import PeerState, RaftState
from dledger.raft.read_index import ReadIndex
from dledger.raft.replicator import Replicator
from dledger.raft.transfer import Transfers
from dledger.raft.wire import Kind

log = structlog.get_logger(__name__)

ALIVE: Final[Message] = {
    "type": "next_node_idx",
    "reset": False,
    "success": False,
    "next_node_idx": 0,
}
"""An answer that for the library proves only that its sender runs."""

CLOSE_BYTES: Final = 1 << 20
"""A learner that lacks no more than this, one append, is close.

It has caught up when it has been a learner, connected and close for an election timeout, and has
what was committed when that began: in a short log every learner is close, also one whose disk is
stuck (thesis, 4.2.1: rounds).
"""

LEAVER_TIMEOUTS: Final = 10.0
"""Election timeouts for which a removed member is sent the list without it, once that is committed.

One that is down never gets it; it may campaign then, and the others, which hear from a leader,
refuse.
"""


def could_commit(members: Members, connected: Iterable[Hello]) -> bool:
    """Whether the leader and those that are *connected* and may vote are a majority of a list.

    A list whose majority is away, or may not vote, could never commit, and would be in force.
    """
    able = sum(
        1
        for hello in connected
        if members.is_voter(hello.name, hello.incarnation) and not hello.doubtful
    )
    return 1 + able >= majority(len(members.voter_names))


@dataclass(eq=False)
class MemberChanges:
    """Leader: changes of the list of members, one safe step at a time."""

    state: RaftState
    replicator: Replicator
    contacts: Contacts
    transfers: Transfers
    _leaves_at_s: dict[tuple[str, int], float] = field(default_factory=dict, init=False)
    """Until when a removed member is sent entries, by its name and the entry that removes it."""
    _reason: str = field(default="", init=False)
    """Why the next step waits, as it was logged; empty while none waits."""

    def write_first(self) -> None:
        """Append the voters agreed at bootstrap, if the log has no list yet."""
        state, members = self.state, self.state.journal.members
        if members.index or members.members is None:
            return
        settings, roster = state.settings, state.roster
        clients = {name: hello.client_address for name, hello in roster.hellos.items()}
        clients[settings.self_id] = settings.client_address
        self._append(Members.bootstrap(roster.identity.voters, settings.peers, clients))

    def change(self, after: Members) -> int:
        """Append the list *after* as leader and return its index; `RaftNode.settle` must follow.

        Raises:
            NotLeaderError: This member does not lead.
            ChangePendingError: Another change, the no-op of this term or a transfer comes first,
                or too few of the voters after it are connected and may vote.
            ChangeRefusedError: The change is not one safe step.
            DiskFullError: No space. In all cases nothing was appended.
        """
        self.transfers.check_leads()
        state = self.state
        before, commit_index = state.journal.members, state.core.commit_index
        if self.transfers.is_under_way:
            raise ChangePendingError("leadership is being handed over; nothing was changed")
        if before.members is None or not 0 < state.noop_index <= commit_index:
            raise ChangePendingError("this leader has not committed anything yet")
        if before.index > commit_index:
            raise ChangePendingError("the change before this one is not committed yet")
        own = (state.settings.self_id, state.roster.identity.incarnation)
        check_change(before.members, after, own)
        if not could_commit(after, self._connected()):
            raise ChangePendingError(
                "no majority of the voters after it is connected and not `doubtful` now"
            )
        return self._append(after)

    def advance(self, now: float) -> None:
        """Take the next step towards "every member that is connected and able votes"."""
        self._advance_leaving(now)
        state, members = self.state, self.state.journal.members
        if self.transfers.is_under_way or members.members is None:
            return
        reason = ""
        try:
            if not members.index:
                self.write_first()
                return
            if not 0 < max(state.noop_index, members.index) <= state.core.commit_index:
                return
            after = next_list(members.members, self._sights(members.members, now))
            if after is not None:
                self.change(after)
        except DiskFullError as error:
            log.error("members_without_space", error=str(error))
        except (ChangePendingError, ChangeRefusedError) as error:
            reason = str(error)
            if reason != self._reason:
                log.info("members_wait", reason=reason)
        self._reason = reason

    def _advance_leaving(self, now: float) -> None:
        state = self.state
        wait_s, leaving = LEAVER_TIMEOUTS * state.settings.election_timeout_s, state.roster.leaving
        known = self._leaves_at_s
        self._leaves_at_s = {item: known[item] for item in leaving.items() if item in known}
        for name, index in list(leaving.items()):
            if index > state.core.commit_index:
                self._leaves_at_s[name, index] = now + wait_s
                continue
            has_list = self.replicator.peers[name].match_index >= index
            if has_list or now >= self._leaves_at_s.setdefault((name, index), now + wait_s):
                self.contacts.forget_leaving(name)

    def _append(self, members: Members) -> int:
        try:
            index = self.state.core.append(ConfigProposal(members))
        except LogBusyError as error:
            raise ChangePendingError(f"{error}; try again") from error
        except OSError as error:
            raise self.state.failure.of_disk(error) from error
        log.info("members_changed", index=index, members=members.rows())
        for peer in self.state.peers.values():
            if members.learner(peer.name) is None:
                peer.close_since_s = None
        self.contacts.note_members()
        return index

    def _connected(self) -> Iterable[Hello]:
        peers = self.state.peers
        return (
            hello for name, hello in self.state.roster.hellos.items() if peers[name].is_connected
        )

    def _sights(self, members: Members, now: float) -> dict[str, Sight]:
        timeout_s = self.state.settings.election_timeout_s
        seen = {}
        for name in members.names:
            peer = self.state.peers.get(name)
            if peer is None or peer.hello is None:
                continue
            hello, learner = peer.hello, members.learner(name)
            is_learner = learner is not None and learner.incarnation == hello.incarnation
            self._update_lag(peer, now, is_followed=is_learner and peer.is_connected)
            if not peer.is_connected:
                continue
            host, port = hello.peer_address or ("", 0)
            seen[name] = Sight(
                incarnation=hello.incarnation,
                settled=now - peer.hello_since_s >= timeout_s,
                caught_up=self._has_caught_up(peer, now) and not hello.doubtful,
                host=host,
                port=port,
                client_address=hello.client_address,
            )
        return seen

    def _update_lag(self, peer: PeerState, now: float, *, is_followed: bool) -> None:
        is_followed = is_followed and peer.name in self.replicator.peers
        lag = self.replicator.lag_bytes(peer.name) if is_followed else None
        if lag is None or lag > CLOSE_BYTES:
            peer.close_since_s = None
        elif peer.close_since_s is None:
            peer.close_since_s, peer.close_commit_index = now, self.state.core.commit_index

    def _has_caught_up(self, peer: PeerState, now: float) -> bool:
        since_s = peer.close_since_s
        if since_s is None or now - since_s < self.state.settings.election_timeout_s:
            return False
        return self.replicator.peers[peer.name].match_index >= peer.close_commit_index


@dataclass(eq=False)
class Leader:
    """The member as leader.

    Attributes:
        reads: Reads that wait for proof that this member still leads.
        elections: How often this member began to lead since the start.
        heartbeats: Number of the newest heartbeat; never decreases while the process runs.
    """

    state: RaftState
    replicator: Replicator
    timer: ElectionTimer
    contacts: Contacts
    changes: MemberChanges
    transfers: Transfers
    reads: ReadIndex = field(default_factory=ReadIndex, init=False)
    elections: int = field(default=0, init=False)
    heartbeats: int = field(default=0, init=False)
    _term: int = field(default=0, init=False)

    def update_role(self) -> None:
        """Begin or cease to lead, if the library has changed this member's role."""
        core = self.state.core
        leads = core.is_leader
        if leads and self._term != core.term:
            self._begin()
        elif not leads and self._term:
            self._end()

    def _begin(self) -> None:
        state = self.state
        self._term = state.core.term
        self.elections += 1
        # The library appended the no-op in the same call that made this member leader.
        state.noop_index = state.journal.last_index
        state.roster.leaving.clear()
        state.roster.note_leaving()
        self.replicator.start(state.roster.followers(), state.clock.monotonic())
        self.contacts.follow_members()
        for peer in state.peers.values():
            peer.close_since_s = None
        log.info("became_leader", group=state.settings.group, term=self._term)
        self.changes.write_first()
        self.contacts.leader_wake.set()
        self.send_heartbeats()

    def _end(self) -> None:
        state = self.state
        log.info(
            "stepped_down", group=state.settings.group, term=state.core.term, led_term=self._term
        )
        self._term = 0
        state.noop_index = 0
        for name in list(state.roster.leaving):
            self.contacts.forget_leaving(name)
        self.timer.restart(state.clock.monotonic())
        self.contacts.timer_wake.set()

    def wake_links(self) -> None:
        """Wake the data links that have something to send."""
        self.contacts.hold_back()
        for name in self.replicator.peers:
            self.wake_link(name)

    def wake_link(self, name: str) -> None:
        """Wake the data link to *name* if it has something to send."""
        if name in self.replicator.peers and self.replicator.has_work(name):
            self.state.peers[name].send_data()

    # -- heartbeats ------------------------------------------------------------------------

    def send_heartbeats(self) -> None:
        """Send a heartbeat to every follower, and probe those that do not answer."""
        if not self.state.core.is_leader:
            return
        now = self.state.clock.monotonic()
        self._count_heartbeat()
        self.changes.advance(now)
        for name in self.replicator.peers:
            self._send_heartbeat(name)
            self.replicator.stalled(name, now)

    def send_read_heartbeats(self) -> None:
        """Send a heartbeat to the other voters now; waiting reads are answered by its echoes."""
        self._count_heartbeat()
        for name in self.state.roster.other_voters:
            self._send_heartbeat(name)

    def confirmed_heartbeat(self) -> int:
        """Return the newest heartbeat of this term that a majority of the voters has echoed."""
        roster = self.state.roster
        voters = [name for name in roster.other_voters if roster.is_voter(name)]
        needed = majority(roster.voters) - roster.is_self_voter
        return self.reads.confirmed(voters, needed)

    def _count_heartbeat(self) -> None:
        self.heartbeats += 1
        self.reads.heartbeat_sent(self.heartbeats)

    def _send_heartbeat(self, name: str) -> None:
        state = self.state
        state.peers.send(name, Kind.HEARTBEAT, self.heartbeats, state.core.commit_index)

    # -- answers of followers --------------------------------------------------------------

    def on_heartbeat_reply(self, peer: str, heartbeat: int, is_doubtful: bool) -> None:
        """Count the echo of *heartbeat* by *peer*."""
        self.contacts.set_doubtful(peer, bool(is_doubtful))
        if self.state.core.is_leader and self.state.roster.is_voter(peer):
            self.state.core.step(peer, ALIVE)
            self.reads.heartbeat_echoed(peer, heartbeat)

    def on_append_reply(self, peer: str, matched: bool, index: int) -> None:
        """Record that *peer* has everything up to *index*, or lacks what begins there.

        Raises:
            RemoteProtocolError: It claims to have more than there is.
        """
        if not self._serves(peer):
            return
        now = self.state.clock.monotonic()
        if not matched:
            self.replicator.rejected(peer, index, now)
            self._step_if_counted(peer, ALIVE)
            return
        if index > self.state.journal.last_index:
            raise RemoteProtocolError(f"{peer} acknowledged index {index} beyond this log")
        self.replicator.matched(peer, index, now)
        self._step_if_counted(peer, {**ALIVE, "success": True, "next_node_idx": index + 1})

    def on_snapshot_reply(self, peer: str, index: int, offset: int, next_index: int) -> None:
        """Record *offset*, up to which *peer* has the snapshot of *index*.

        Args:
            next_index: The entry that *peer* continues with, without the snapshot; 0: it takes it.
        """
        if not self._serves(peer):
            return
        now = self.state.clock.monotonic()
        if next_index:
            self.replicator.installed(peer, next_index, now)
        else:
            self.replicator.snapshot_acked(peer, index, offset, now)
        self._step_if_counted(peer, ALIVE)

    def _serves(self, peer: str) -> bool:
        return self.state.core.is_leader and peer in self.replicator.peers

    def _step_if_counted(self, peer: str, message: Message) -> None:
        if self.state.roster.is_voter(peer):
            self.state.core.step(peer, message)
