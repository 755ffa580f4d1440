"""Whom this node knows, is connected with, and counts.

The list in the log and the hellos of others decide it (`dledger.raft.roster`); here the library
and the replicator are kept in step with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from commitlog.errors import RemoteProtocolError
from dledger.raft.core import RaftCore
from dledger.raft.doubt import Doubt
from dledger.raft.election import ElectionTimer
from dledger.raft.identity import Hello
from dledger.raft.journal import CommitLogJournal
from dledger.raft.peers import Peers, PeerState
from dledger.raft.replicator import Replicator
from dledger.raft.roster import NAMES_MAX, Roster
from dledger.raft.settings import RaftSettings
from dledger.raft.wakeup import WakeAll, Wakeup
from remoting.seams import Clock


@dataclass(eq=False)
class Contacts:
    """The others, as they come, go and introduce themselves.

    Attributes:
        timer_wake: Set when the election timer may end earlier.
        agree_wake: Set when somebody was heard before the voters were agreed on.
        reign_wake: Set when this member begins to lead.
        links_wake: Set when connections are wanted to others than before.
        found_wake: Set when somebody has answered a call of ours.
    """

    settings: RaftSettings
    clock: Clock
    core: RaftCore
    journal: CommitLogJournal
    roster: Roster
    replicator: Replicator
    timer: ElectionTimer
    peers: Peers
    doubt: Doubt
    timer_wake: Wakeup = field(default_factory=Wakeup, init=False)
    agree_wake: Wakeup = field(default_factory=Wakeup, init=False)
    reign_wake: Wakeup = field(default_factory=Wakeup, init=False)
    links_wake: Wakeup = field(default_factory=Wakeup, init=False)
    found_wake: WakeAll = field(default_factory=WakeAll, init=False)
    _members_version: int = field(default=-1, init=False)

    # -- connections -----------------------------------------------------------------------

    def hello(self, channel: str, *, to_member: bool = False) -> Hello:
        """Return how this member introduces itself now.

        Args:
            to_member: It answers a member, which may know who the others are.
        """
        return Hello(
            cluster=self.settings.cluster,
            group=self.settings.group,
            name=self.settings.self_id,
            incarnation=self.roster.identity.incarnation,
            voters=self.roster.identity.voters,
            doubtful=self.doubt.doubtful,
            client_address=self.settings.client_address,
            channel=channel,
            peer=":".join(map(str, self.settings.peers[self.settings.self_id])),
            last=(self.journal.last_term, self.journal.last_index),
            members=self.roster.vouches_for() if to_member else (),
            members_index=self.journal.members.index,
        )

    def link_up(self, peer: str, channel: str, hello: Hello) -> None:
        """A connection of ours to *peer* stands, and it has answered with *hello*."""
        self.roster.found(hello)
        self.heard(hello)
        self.found_wake.set()
        state = self.peers.of(peer)
        state.up.add(channel)
        if hello.doubtful:
            self.core.forget_match(peer)
        if channel == "control":
            self.core.connected(peer, True)
        elif self.core.is_leader and peer in self.replicator.peers:
            self.replicator.link_reset(peer)
            state.data_wake.set()

    def link_down(self, peer: str, channel: str) -> None:
        """A connection of ours to *peer* broke."""
        state = self.peers.of(peer)
        state.up.discard(channel)
        if channel == "control":
            state.control.clear()
            self.core.connected(peer, False)
            self.maybe_lost_leader(peer)
        else:
            state.replies.clear()

    def maybe_lost_leader(self, peer: str) -> None:
        """A connection with *peer* ended: if it leads, do not wait for the timeout."""
        if peer == self.core.leader_id:
            self.timer.lost_leader(self.clock.monotonic())
            self.timer_wake.set()

    def guest(self, name: str, delta: int) -> None:
        """A connection that *name* opened to us began (+1) or ended (-1)."""
        guests = self.roster.guests
        guests[name] += delta
        self.peers.of(name)
        if not guests[name]:
            del guests[name]
            self._forget_gone()
        self.links_wake.set()

    def _forget_gone(self) -> None:
        """Keep nothing of those that are neither talked to nor connected any more."""
        talked_to = self.roster.talked_to()
        for name in [name for name in self.peers if name not in talked_to]:
            if not self.peers[name].up:
                del self.peers[name]
                self.roster.forget(name)

    # -- hellos ----------------------------------------------------------------------------

    def heard(self, hello: Hello) -> None:
        """Take note of how a member introduced itself.

        Raises:
            RemoteProtocolError: Too many names have been heard: close the connection.
        """
        is_new = hello.name not in self.peers and hello.name not in self.roster.expected()
        if is_new and len(self.peers) >= NAMES_MAX:
            raise RemoteProtocolError(f"{hello.name} is one name too many for this node")
        state, now = self.peers.of(hello.name), self.clock.monotonic()
        if state.hello is None or state.hello.incarnation != hello.incarnation:
            state.hello_since_s, state.close_since_s = now, None
            if self.core.is_leader and hello.name in self.replicator.peers:
                self.replicator.begin_anew(hello.name, now)
        state.hello = self.roster.hellos[hello.name] = hello
        self.note_agreed()
        if not self.roster.identity.voters:
            self.agree_wake.set()

    def heard_doubt(self, peer: str, is_doubtful: bool) -> None:
        """Take note of what *peer* says of its own promises."""
        # What the hello of a long-lived connection said may be over since.
        state = self.peers.get(peer)
        if state is not None and state.hello is not None and state.hello.doubtful != is_doubtful:
            state.hello = replace(state.hello, doubtful=is_doubtful)
            self.roster.hellos[peer] = state.hello

    def speaks_for(self, hello: Hello) -> bool:
        """Whether it is still this incarnation that speaks under its name."""
        newest = self.roster.hellos.get(hello.name)
        return newest is not None and newest.incarnation == hello.incarnation

    # -- members ---------------------------------------------------------------------------

    def note_agreed(self) -> None:
        """Take note of the voters agreed on at bootstrap, as soon as there are any."""
        self.roster.note_bootstrap()
        self.note_members()

    def note_members(self) -> None:
        """Count and serve those who stand in the list, when it has changed."""
        members = self.journal.members
        if members.version == self._members_version:
            return
        self._members_version = members.version
        self.core.set_voters(self.roster.other_voters)
        for name in self.roster.talked_to():
            self.peers.of(name)
        if self.core.is_leader:
            self.follow_members()
        self.links_wake.set()

    def follow_members(self) -> None:
        """Leader: send to the members, and to those who leave what they may have."""
        self.roster.note_leaving()
        self.replicator.follow(self.roster.followers(), self.clock.monotonic())
        self.hold_back()

    def hold_back(self) -> None:
        """Leader: send no member the entry that removes it before that is committed.

        With that entry its log would be newer than those of members who have not got it: it would
        vote for none of them, and may not stand itself (thesis, 4.2.2). Committed means here as
        well: a single voter's library counts an entry before it is on the disk.
        """
        for name, index in self.roster.leaving.items():
            is_committed = index <= self.core.commit_index
            self.replicator.hold_back(name, None if is_committed else index)

    def forget_leaving(self, name: str) -> None:
        """Leader: *name* knows that it was removed, or does not answer: send it nothing more."""
        self.roster.leaving.pop(name, None)
        self._members_version = -1
        self.note_members()

    def invite(self, name: str, address: tuple[str, int]) -> None:
        """Connect to *name* at *address*, a member or not, until `uninvite`."""
        self.roster.invited[name] = address
        self._members_version = -1
        self.note_members()

    def uninvite(self, name: str) -> None:
        """Talk to *name* only if it is a member or connected."""
        if self.roster.invited.pop(name, None) is not None:
            self._members_version = -1
            self.note_members()
            self._forget_gone()

    # -- looking ---------------------------------------------------------------------------

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return what ``dledger raft status`` shows of the others."""
        now = self.clock.monotonic()
        return {name: self._row(self.peers[name], now) for name in self.roster.talked_to()}

    def _row(self, peer: PeerState, now: float) -> dict[str, Any]:
        progress = self.replicator.peers.get(peer.name) if self.core.is_leader else None
        return {
            "connected": peer.is_connected,
            "voter": self.roster.is_voter(peer.name),
            "incarnation": peer.hello.incarnation if peer.hello else None,
            "client_address": peer.hello.client_address if peer.hello else None,
            "match_index": progress.match_index if progress else None,
            "acked_ms_ago": round(1000 * (now - progress.acked_at_s)) if progress else None,
        }
