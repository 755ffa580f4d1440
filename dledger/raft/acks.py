"""Votes and acknowledgements that wait for the disk, and the tasks that flush for them.

=================  =========================================================
VOTE, VOTE_REPLY   term and vote are on disk, and the term is still the same
APPEND_REPLY       the entries are on disk, same term, no truncation since
=================  =========================================================

Two small tasks flush, one the log, one term and vote, each when woken; each flush ends in an event
of the node. A follower's flush that takes no time is made at once, without the task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from dledger.raft.journal import CommitLogJournal
from dledger.raft.peers import Outgoing, RaftState
from dledger.raft.settings import RaftSettings
from dledger.raft.wire import Kind
from dledger.remoting.seams import Clock, Executor
from dledger.waiting import Wakeup

FLUSH: Final = "flush"
"""Name under which the executor measures flushes of the log."""


@dataclass(slots=True)
class _PendingVote:
    """A frame that waits until term and vote are durable."""

    version: int
    peer: str
    frame: Outgoing


@dataclass(slots=True)
class _PendingAck:
    """What to acknowledge to the leader of one term, for one generation of the log."""

    leader: str
    term: int
    generation: int
    verified: int
    acked: int = -1


@dataclass(eq=False)
class PendingAcks:
    """Frames that this member sends as soon as its disk holds what they state."""

    state: RaftState
    _votes: list[_PendingVote] = field(default_factory=list, init=False)
    _ack: _PendingAck | None = field(default=None, init=False)

    def defer_vote(self, peer: str, kind: Kind, term: int, fields: tuple[Any, ...]) -> None:
        """Send a frame once term and vote are durable as they are now."""
        version = self.state.journal.term_vote.version
        self._votes.append(_PendingVote(version, peer, Outgoing(kind, term, fields)))

    def defer_ack(self, leader: str, verified: int) -> None:
        """Acknowledge everything up to *verified* to *leader* once it is stable."""
        ack, state = self._ack, self.state
        term, generation = state.core.term, state.journal.log.generation
        if ack is None or (ack.leader, ack.term, ack.generation) != (leader, term, generation):
            self._ack = _PendingAck(leader, term, generation, verified)
            return
        if verified <= ack.acked:
            # The leader repeats what was acknowledged: the answer may be lost.
            ack.acked = -1
        ack.verified = max(ack.verified, verified)

    def verified_index(self, leader: str, term: int) -> int:
        """Return up to which index this log is known to be that of the *leader* of *term*.

        0 when nothing is known: another leader or term, or a log that was cut since.
        """
        ack = self._ack
        if ack is None or (ack.leader, ack.term) != (leader, term):
            return 0
        return ack.verified if ack.generation == self.state.journal.log.generation else 0

    def clear_acks(self) -> None:
        """Drop the pending acknowledgement: another log replaced the one it is about."""
        self._ack = None

    def release(self) -> None:
        """Send what the disk holds by now; drop what another term has made void."""
        self._release_votes()
        self._release_acks()

    def _release_votes(self) -> None:
        if not self._votes:
            return
        state = self.state
        durable = state.journal.term_vote.durable_version
        waiting = []
        for vote in self._votes:
            if vote.frame.term != state.core.term:
                continue
            if state.guards.durable_before_promise and vote.version > durable:
                waiting.append(vote)
                continue
            state.peers.send_made(vote.peer, vote.frame)
        self._votes = waiting

    def _release_acks(self) -> None:
        ack, state = self._ack, self.state
        if ack is None:
            return
        if ack.term != state.core.term or ack.generation != state.journal.log.generation:
            self._ack = None
            return
        if state.guards.durable_before_promise and not state.journal.term_vote.is_durable:
            return
        index = min(ack.verified, state.journal.stable_index)
        if index > ack.acked and not state.has_hole:
            ack.acked = index
            state.peers.reply(ack.leader, Kind.APPEND_REPLY, True, index)


@dataclass(eq=False, repr=False)
class Flusher:
    """Flushes what is not durable yet.

    *flushing*: whether a flush of the log is under way in another thread.
    """

    _settings: RaftSettings
    _journal: CommitLogJournal
    _clock: Clock
    _settle: Callable[[], None]

    def __post_init__(self) -> None:
        self.flushing = False
        self._term_vote = self._journal.term_vote
        self._flush_wake = Wakeup()
        self._vote_wake = Wakeup()
        self._executor: Executor | None = None

    async def flush_loop(self, executor: Executor) -> None:
        """Make appended entries durable, one flush at a time. Runs until cancelled.

        Raises FlushFailedError: the flush failed; the node must stop.
        """
        self._executor = executor
        while True:
            await self._flush_wake.wait()
            if not (self._settings.sync_flush or self._journal.waits_for_list):
                await self._clock.sleep(self._settings.flush_interval_s)
            entry_log = self._journal.log
            ticket = entry_log.begin_flush()
            if ticket is not None:
                self.flushing = True
                try:
                    await executor.run(ticket.run, kind=FLUSH)
                finally:
                    self.flushing = False
                entry_log.complete_flush(ticket)
            self._settle()

    async def vote_loop(self, executor: Executor) -> None:
        """Make term and vote durable as soon as they change. Runs until cancelled.

        Raises DiskFullError, FlushFailedError: the flush failed; the node must stop.
        """
        term_vote = self._term_vote
        while True:
            await self._vote_wake.wait()
            if not term_vote.is_durable:
                version, record = term_vote.snapshot()
                await executor.run(partial(term_vote.write, record), kind="flush_vote")
                term_vote.mark_durable(version)
            self._settle()

    def flush_at_once(self) -> None:
        """Flush the log now, if that takes no time; to be called within an event of the node."""
        # A follower has nothing to do before its flush, and the leader waits for the answer. A
        # leader's own flush comes after its sends: it runs beside those of the followers.
        if (
            self._executor is None
            or self.flushing
            or not self._settings.sync_flush
            or not self._term_vote.is_durable
            or not self._journal.has_unflushed
            or not self._executor.runs_inline(FLUSH)
        ):
            return
        ticket = self._journal.log.begin_flush()
        if ticket is not None:
            self._executor.run_inline(ticket.run, kind=FLUSH)
            self._journal.log.complete_flush(ticket)

    def wake(self) -> None:
        """Wake the tasks that have something to flush."""
        if not self._term_vote.is_durable:
            self._vote_wake.set()
        if self._journal.has_unflushed:
            self._flush_wake.set()
