"""What a leader does: begins, beats, hears its followers, and ends.

A reign is the time one leader leads in one term; the library says when it begins and ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import structlog

from commitlog.errors import RemoteProtocolError
from dledger.broker_errors import ReplicationError
from dledger.raft.barrier import ReadBarrier
from dledger.raft.clocks import Clocks
from dledger.raft.contacts import Contacts
from dledger.raft.core import Message, RaftCore
from dledger.raft.election import ElectionTimer, majority
from dledger.raft.handover import Handover
from dledger.raft.journal import CommitLogJournal
from dledger.raft.peers import Peers
from dledger.raft.reconfiguration import Reconfiguration
from dledger.raft.replicator import Replicator
from dledger.raft.roster import Roster
from dledger.raft.settings import RaftSettings
from dledger.raft.wire import Kind
from remoting.seams import Clock

log = structlog.get_logger(__name__)

YIELDS_EVERY_S: Final = 10.0
"""Pause between attempts of a leader to hand over: one stops sends for an election timeout."""

ALIVE: Final[Message] = {
    "type": "next_node_idx",
    "reset": False,
    "success": False,
    "next_node_idx": 0,
}
"""An answer the library takes as a sign of life only."""


@dataclass(eq=False)
class Reign:
    """The member as leader.

    Attributes:
        barrier: Reads that wait for proof that this member still leads.
        noop_index: Index of the first entry of this reign; 0 while there is none.
        elections: Reigns begun since the start.
        beats: Number of the newest heartbeat; never goes back while the process lives.
    """

    settings: RaftSettings
    clock: Clock
    clocks: Clocks
    core: RaftCore
    journal: CommitLogJournal
    roster: Roster
    replicator: Replicator
    timer: ElectionTimer
    peers: Peers
    contacts: Contacts
    reconfiguration: Reconfiguration
    handover: Handover
    barrier: ReadBarrier = field(default_factory=ReadBarrier, init=False)
    noop_index: int = field(default=0, init=False)
    elections: int = field(default=0, init=False)
    beats: int = field(default=0, init=False)
    _term: int = field(default=0, init=False)
    _yields_at_s: float = field(default=0.0, init=False)
    """When a leader whose date is off tries again to give its leadership up."""

    def note_role(self) -> None:
        """Begin or end a reign, if the library has changed its mind about who leads."""
        leads = self.core.is_leader
        if leads and self._term != self.core.term:
            self._begin()
        elif not leads and self._term:
            self._end()

    def _begin(self) -> None:
        self._term = self.core.term
        self.elections += 1
        # The library appended the no-op in the same call that made this member leader.
        self.noop_index = self.journal.last_index
        self.clocks.begin()
        self.roster.leaving.clear()
        self.roster.note_leaving()
        self.replicator.start(self.roster.followers(), self.clock.monotonic())
        self.contacts.follow_members()
        for peer in self.peers.values():
            peer.close_since_s = None
        log.info("became_leader", group=self.settings.group, term=self._term)
        self.reconfiguration.write_first()
        self.contacts.reign_wake.set()
        self.beat()

    def _end(self) -> None:
        term = self.core.term
        log.info("stepped_down", group=self.settings.group, term=term, reign=self._term)
        self._term = 0
        self.noop_index = 0
        self.timer.restart(self.clock.monotonic())
        self.contacts.timer_wake.set()

    def wake_links(self) -> None:
        """Wake the data links that have something to send."""
        self.contacts.hold_back()
        for name in self.replicator.peers:
            if self.replicator.has_work(name):
                self.peers[name].data_wake.set()

    # -- heartbeats ------------------------------------------------------------------------

    def beat(self) -> None:
        """Tell everybody that this leader lives, and probe those that do not answer."""
        if not self.core.is_leader:
            return
        now = self.clock.monotonic()
        self._count_beat()
        self.reconfiguration.tend(now, self.noop_index)
        self._yield_if_clock_is_off(now)
        for name in self.replicator.peers:
            self._send_beat(name)
            self.replicator.stalled(name, now)

    def _yield_if_clock_is_off(self, now: float) -> None:
        if now < self._yields_at_s or not self.clocks.are_off():
            return
        self._yields_at_s = now + YIELDS_EVERY_S
        try:
            self.handover.begin(self.clocks.nearest())
        except ReplicationError as error:
            log.warning("leads_on_with_a_wrong_clock", reason=str(error))

    def beat_for_reads(self) -> None:
        """Ask the voters now whether this member still leads; reads wait for their answers."""
        self._count_beat()
        for name in self.roster.other_voters:
            self._send_beat(name)

    def confirmed_beat(self) -> int:
        """Return the newest heartbeat of this reign that a majority of the voters has echoed."""
        voters = [name for name in self.roster.other_voters if self.roster.is_voter(name)]
        needed = majority(self.roster.voters) - self.roster.is_self_voter
        return self.barrier.confirmed(voters, needed)

    def _count_beat(self) -> None:
        self.beats += 1
        self.barrier.beat_left(self.beats)

    def _send_beat(self, name: str) -> None:
        self.peers.send(name, Kind.HEARTBEAT, self.beats, self.core.commit_index)

    # -- what followers answer -------------------------------------------------------------

    def on_heartbeat_reply(self, peer: str, beat: int, date_ms: int, is_doubtful: bool) -> None:
        """*peer* has heard heartbeat *beat*, on its own date *date_ms*."""
        self.contacts.heard_doubt(peer, bool(is_doubtful))
        self.clocks.note(peer, date_ms)
        if self.core.is_leader and self.roster.is_voter(peer):
            self.core.step(peer, ALIVE)
            self.barrier.echoed(peer, beat)

    def on_append_reply(self, peer: str, matched: bool, index: int) -> None:
        """*peer* has everything up to *index*, or asks for what begins there.

        Raises:
            RemoteProtocolError: It claims to have more than there is.
        """
        if not self._serves(peer):
            return
        now = self.clock.monotonic()
        if not matched:
            self.replicator.rejected(peer, index, now)
            self._step_if_counted(peer, ALIVE)
            return
        if index > self.journal.last_index:
            raise RemoteProtocolError(f"{peer} acknowledged index {index} beyond this log")
        self.replicator.matched(peer, index, now)
        self._step_if_counted(peer, {**ALIVE, "success": True, "next_node_idx": index + 1})

    def on_snapshot_reply(self, peer: str, index: int, offset: int, next_index: int) -> None:
        """*peer* has so much of the snapshot at *index*, or goes on with entries."""
        if not self._serves(peer):
            return
        now = self.clock.monotonic()
        if next_index:
            self.replicator.installed(peer, next_index, now)
        else:
            self.replicator.snapshot_taken(peer, index, offset, now)
        self._step_if_counted(peer, ALIVE)

    def _serves(self, peer: str) -> bool:
        return self.core.is_leader and peer in self.replicator.peers

    def _step_if_counted(self, peer: str, message: Message) -> None:
        if self.roster.is_voter(peer):
            self.core.step(peer, message)
