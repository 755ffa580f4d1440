"""What a member receives: every frame finds its room, if its term lets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from commitlog.errors import RemoteProtocolError
from dledger.raft.bounds import TERM_JUMP_MAX
from dledger.raft.core import RaftCore
from dledger.raft.follower import Follower
from dledger.raft.guards import Guards
from dledger.raft.owner import Owner
from dledger.raft.peers import Peers
from dledger.raft.refusals import NotAMemberError
from dledger.raft.reign import Reign
from dledger.raft.roster import Roster
from dledger.raft.sender import Sender
from dledger.raft.voting import Voting
from dledger.raft.wire import Kind, PeerFrame

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
"""What only a member may send: it asks to be followed, voted for or given entries."""


@dataclass(eq=False)
class Reception:
    """Sorts frames by term and kind."""

    owner: Owner
    guards: Guards
    core: RaftCore
    roster: Roster
    peers: Peers
    sender: Sender
    voting: Voting
    follower: Follower
    reign: Reign

    def take(self, peer: str, frame: PeerFrame) -> bool:
        """Handle one frame from *peer*.

        Returns:
            Whether this member stands for election now: the event must end before the next frame.
        Raises:
            RemoteProtocolError: The frame is not what a member sends, or contradicts what is
                known here: close its connection.
            InvariantBroken: What this member has on its own disk contradicts itself: stop the node.
        """
        if not self._hears(peer, frame):
            return False
        if frame.kind is Kind.PRE_VOTE:
            self.voting.on_pre_vote(peer, *frame.fields)
        elif frame.kind is Kind.PRE_VOTE_REPLY:
            return self.voting.on_pre_vote_reply(peer, frame.term, *frame.fields)
        elif frame.kind is Kind.FETCH:
            self.sender.on_fetch(peer, *frame.fields)
        elif frame.kind is Kind.FETCH_REPLY:
            self.owner.on_fetched(peer, frame.payload)
        elif frame.term < self.core.term and self.guards.envelope:
            # The library ignores lower terms in silence; then their sender would never learn.
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
            return self._dispatch(peer, frame)
        return False

    def _hears(self, peer: str, frame: PeerFrame) -> bool:
        hello = self.roster.hellos.get(peer)
        if frame.kind in OF_MEMBERS:
            if hello is None or not self.roster.is_member(hello.key):
                raise NotAMemberError(f"{peer} sends a {frame.kind.name} and is no member")
        elif hello is None or not self.roster.is_known(hello.key):
            return False  # the late answer of one that has left meanwhile
        if frame.term - self.core.term > TERM_JUMP_MAX:
            raise RemoteProtocolError(f"{peer} is in term {frame.term}, which no member comes to")
        return True

    def _dispatch(self, peer: str, frame: PeerFrame) -> bool:
        match frame.kind:
            case Kind.APPEND:
                self.follower.on_append(peer, frame)
            case Kind.APPEND_REPLY:
                self.reign.on_append_reply(peer, *frame.fields)
            case Kind.HEARTBEAT:
                self.follower.on_heartbeat(peer, frame.term, *frame.fields)
            case Kind.HEARTBEAT_REPLY:
                self.reign.on_heartbeat_reply(peer, *frame.fields)
            case Kind.VOTE:
                self.voting.on_vote(peer, frame.term, *frame.fields)
            case Kind.VOTE_REPLY:
                self.voting.on_vote_reply(peer, frame.term)
            case Kind.SNAPSHOT:
                self.follower.on_snapshot(peer, frame)
            case Kind.SNAPSHOT_REPLY:
                self.reign.on_snapshot_reply(peer, *frame.fields)
            case Kind.TIMEOUT_NOW:
                return self.voting.on_timeout_now(peer, frame.fields[0])
            case Kind.TERM_NOTICE:
                pass  # of our own term: nothing to learn
            case _:
                raise RemoteProtocolError(f"a {frame.kind.name} frame inside a connection")
        return False
