"""Connections, hellos and the list of members, as they change.

The list in the log and the hellos of others decide which members count (`dledger.raft.peers`); here
the library and the replicator are kept in step with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from dledger.commitlog.errors import RemoteProtocolError
from dledger.raft.candidate import ElectionTimer, VoteEligibility
from dledger.raft.identity import Hello
from dledger.raft.peers import NAMES_MAX, PeerState, RaftState
from dledger.raft.replicator import Replicator
from dledger.remoting.addresses import join_address
from dledger.waiting import WakeAll, Wakeup


@dataclass(eq=False)
class Contacts:
    """The other members, as they connect, disconnect and send hellos.

    Attributes:
        timer_wake: Set when the election timer may end earlier.
        links_wake: Set when connections are wanted to others than before.
        found_wake: Set when a call of ours is answered.
    """

    state: RaftState
    replicator: Replicator
    timer: ElectionTimer
    eligibility: VoteEligibility
    timer_wake: Wakeup = field(default_factory=Wakeup, init=False)
    agree_wake: Wakeup = field(default_factory=Wakeup, init=False)
    leader_wake: Wakeup = field(default_factory=Wakeup, init=False)
    links_wake: Wakeup = field(default_factory=Wakeup, init=False)
    found_wake: WakeAll = field(default_factory=WakeAll, init=False)
    _started_ms: int = field(init=False)
    _members_version: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        is_async = not self.state.settings.sync_flush
        self._started_ms = max(1, self.state.clock.wall_ms()) if is_async else 0

    # -- connections -----------------------------------------------------------------------

    def hello(self, channel: str, *, to_member: bool = False) -> Hello:
        """Return this member's hello as of now."""
        state, roster = self.state, self.state.roster
        settings, journal = state.settings, state.journal
        return Hello(
            cluster=settings.cluster,
            group=settings.group,
            name=settings.self_id,
            incarnation=roster.identity.incarnation,
            voters=roster.identity.voters,
            doubtful=self.eligibility.doubtful,
            client_address=settings.client_address,
            channel=channel,
            peer=join_address(*settings.peers[settings.self_id]),
            last=(journal.last_term, journal.last_index),
            members=roster.vouches_for() if to_member else (),
            members_index=journal.members.index if to_member else 0,
            started_ms=self._started_ms,
        )

    def link_up(self, peer: str, channel: str, hello: Hello) -> None:
        """Record a connection to *peer*, which answered our call with *hello*."""
        core = self.state.core
        self.state.roster.found(hello)
        self.on_hello(hello)
        self.found_wake.set()
        peer_state = self.state.peers.of(peer)
        peer_state.up.add(channel)
        if hello.doubtful:
            core.forget_match(peer)
        if channel == "control":
            core.connected(peer, True)
        # What was forgotten is asked for again: else it counts only with the next entry.
        is_asked = channel == "data" or hello.doubtful
        if is_asked and core.is_leader and peer in self.replicator.peers:
            self.replicator.link_reset(peer)
            peer_state.send_data()

    def link_down(self, peer: str, channel: str) -> None:
        """Record that a connection of ours to *peer* broke."""
        peer_state = self.state.peers.of(peer)
        peer_state.up.discard(channel)
        if channel == "control":
            peer_state.control.clear()
            self.state.core.connected(peer, False)
            self.maybe_lost_leader(peer)
        else:
            peer_state.replies.clear()
            if not self.state.settings.sync_flush:
                # Perhaps its power failed, and what it acknowledged is on no disk. The first answer
                # on the next connection states again what it has.
                self.state.core.forget_match(peer)

    def maybe_lost_leader(self, peer: str) -> None:
        """Shorten the election timeout if *peer*, to which a connection ended, leads."""
        if peer == self.state.core.leader_id:
            self.timer.lost_leader(self.state.clock.monotonic())
            self.timer_wake.set()

    def count_guest(self, name: str, delta: int) -> None:
        """Count the connections that *name* opened to us: one more (+1) or one less (-1)."""
        guests = self.state.roster.guests
        guests[name] += delta
        self.state.peers.of(name)
        if not guests[name]:
            del guests[name]
            self._forget_absent()
        self.links_wake.set()

    def _forget_absent(self) -> None:
        """Drop what is known of names that are neither wanted nor connected any more."""
        peers, roster = self.state.peers, self.state.roster
        talked_to = roster.talked_to()
        for name in [name for name in peers if name not in talked_to]:
            if not peers[name].up:
                del peers[name]
                roster.forget(name)

    # -- hellos ----------------------------------------------------------------------------

    def on_hello(self, hello: Hello) -> None:
        """Record a member's hello.

        Raises RemoteProtocolError: this node has hellos of too many names: close the connection.
        """
        state, peers, roster = self.state, self.state.peers, self.state.roster
        is_new = hello.name not in peers and hello.name not in roster.expected()
        if is_new and len(peers) >= NAMES_MAX:
            raise RemoteProtocolError(f"{hello.name} is one name too many for this node")
        peer, now = peers.of(hello.name), state.clock.monotonic()
        if peer.hello is None or peer.hello.incarnation != hello.incarnation:
            peer.hello_since_s, peer.close_since_s = now, None
            if state.core.is_leader and hello.name in self.replicator.peers:
                self.replicator.reset(hello.name, now)
        peer.hello = roster.hellos[hello.name] = hello
        self.note_agreed()
        if not roster.identity.voters:
            self.agree_wake.set()

    def set_doubtful(self, peer: str, is_doubtful: bool) -> None:
        """Record whether *peer* is `doubtful` now."""
        # The hello of a long-lived connection may be out of date.
        known = self.state.peers.get(peer)
        if known is not None and known.hello is not None and known.hello.doubtful != is_doubtful:
            known.hello = replace(known.hello, doubtful=is_doubtful)
            self.state.roster.hellos[peer] = known.hello

    def is_newest(self, hello: Hello) -> bool:
        """Whether no other incarnation, or other start of it, has sent a hello of that name since.

        What a process acknowledged before its power failed must not count after that.
        """
        newest = self.state.roster.hellos.get(hello.name)
        return newest is not None and (newest.incarnation, newest.started_ms) == (
            hello.incarnation,
            hello.started_ms,
        )

    # -- members ---------------------------------------------------------------------------

    def note_agreed(self) -> None:
        """Adopt the voters agreed on at bootstrap, as soon as there are any."""
        self.state.roster.note_bootstrap()
        self.note_members()

    def note_members(self) -> None:
        """Count and serve the members of the list, when it has changed."""
        state, members = self.state, self.state.journal.members
        if members.version == self._members_version:
            return
        self._members_version = members.version
        state.core.set_voters(state.roster.other_voters)
        for name in state.roster.talked_to():
            state.peers.of(name)
        if state.core.is_leader:
            self.follow_members()
        self.links_wake.set()

    def follow_members(self) -> None:
        """Leader: send to the members, and to removed ones what they may have."""
        roster = self.state.roster
        roster.note_leaving()
        self.replicator.follow(roster.followers(), self.state.clock.monotonic())
        self.hold_back()

    def hold_back(self) -> None:
        """Leader: send no member the entry that removes it before that is committed, here as well.

        With that entry its log would be newer than those of members that lack it: it would vote for
        none of them, and may not campaign itself (thesis, 4.2.2).
        """
        for name, index in self.state.roster.leaving.items():
            is_committed = index <= self.state.core.commit_index
            self.replicator.hold_back(name, None if is_committed else index)

    def forget_leaving(self, name: str) -> None:
        """Leader: send *name*, a removed member, nothing more."""
        self.state.roster.leaving.pop(name, None)
        self._members_version = -1
        self.note_members()

    def invite(self, name: str, address: tuple[str, int]) -> None:
        """Connect to *name* at *address*, a member or not, until `uninvite`."""
        self.state.roster.invited[name] = address
        self._members_version = -1
        self.note_members()

    def uninvite(self, name: str) -> None:
        """Connect to *name* only if it is a member or has connected itself."""
        if self.state.roster.invited.pop(name, None) is not None:
            self._members_version = -1
            self.note_members()
            self._forget_absent()

    # -- status ----------------------------------------------------------------------------

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the part of ``dledger raft status`` about the other members."""
        now = self.state.clock.monotonic()
        peers = self.state.peers
        return {name: self._row(peers[name], now) for name in self.state.roster.talked_to()}

    def _row(self, peer: PeerState, now: float) -> dict[str, Any]:
        is_leader = self.state.core.is_leader
        progress = self.replicator.peers.get(peer.name) if is_leader else None
        acked_at_s = max(progress.acked_at_s, progress.echoed_at_s) if progress else None
        return {
            "connected": peer.is_connected,
            "voter": self.state.roster.is_voter(peer.name),
            "client_address": peer.hello.client_address if peer.hello else None,
            "match_index": progress.match_index if progress else None,
            "acked_ms_ago": None if acked_at_s is None else round(1000 * (now - acked_at_s)),
        }
