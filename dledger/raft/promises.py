"""Promises that wait for the disk: votes, and acknowledgements of entries.

=================  =========================================================
VOTE, VOTE_REPLY   term and vote are on disk, and the term is still the same
APPEND_REPLY       the entries are on disk, same term, no truncation since
=================  =========================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dledger.raft.core import RaftCore
from dledger.raft.doubt import Doubt
from dledger.raft.guards import Guards
from dledger.raft.journal import CommitLogJournal
from dledger.raft.peers import Outgoing, Peers
from dledger.raft.wire import Kind


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


@dataclass(eq=False)
class Promises:
    """What this member will say as soon as its disk holds it."""

    guards: Guards
    core: RaftCore
    journal: CommitLogJournal
    doubt: Doubt
    peers: Peers
    _held: list[_Held] = field(default_factory=list, init=False)
    _owed: _Owed | None = field(default=None, init=False)

    def hold(self, peer: str, kind: Kind, term: int, fields: tuple[Any, ...]) -> None:
        """Send a frame once term and vote are durable as they are now."""
        self._held.append(_Held(self.journal.term_vote.version, peer, Outgoing(kind, term, fields)))

    def owe(self, leader: str, verified: int) -> None:
        """Acknowledge everything up to *verified* to *leader* once it is stable."""
        owed, term, generation = self._owed, self.core.term, self.journal.log.generation
        if owed is None or (owed.leader, owed.term, owed.generation) != (leader, term, generation):
            self._owed = _Owed(leader, term, generation, verified)
            return
        if verified <= owed.acked:
            # The leader asks again for what was answered: the answer may be lost.
            owed.acked = -1
        owed.verified = max(owed.verified, verified)

    def verified(self, leader: str, term: int) -> int:
        """Return up to which index this log is known to be that of the *leader* of *term*.

        0 when nothing is known: another leader or term, or a log that was cut since.
        """
        owed = self._owed
        if owed is None or (owed.leader, owed.term) != (leader, term):
            return 0
        return owed.verified if owed.generation == self.journal.log.generation else 0

    def owe_nothing(self) -> None:
        """Another log took the place of the one that acknowledgements were about."""
        self._owed = None

    def release(self) -> None:
        """Send what the disk holds by now; forget what another term has made void."""
        self._release_held()
        self._release_acks()

    def _release_held(self) -> None:
        if not self._held:
            return
        durable = self.journal.term_vote.durable_version
        waiting = []
        for held in self._held:
            if held.frame.term != self.core.term:
                continue
            if self.guards.durable_before_promise and held.version > durable:
                waiting.append(held)
                continue
            self.peers.send_made(held.peer, held.frame)
        self._held = waiting

    def _release_acks(self) -> None:
        owed = self._owed
        if owed is None:
            return
        if owed.term != self.core.term or owed.generation != self.journal.log.generation:
            self._owed = None
            return
        if self.guards.durable_before_promise and not self.journal.term_vote.is_durable:
            return
        index = min(owed.verified, self.journal.stable_index)
        if index > owed.acked and not self.doubt.has_hole:
            owed.acked = index
            self.peers.reply(owed.leader, Kind.APPEND_REPLY, True, index)
