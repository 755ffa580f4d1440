"""The way of a member's bytes to its disk: the log, and term and vote.

Two small tasks flush, each when woken, and end in an event of the node. A follower's flush that
takes no time at all is made at once, without the task.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from dledger.raft.journal import CommitLogJournal
from dledger.raft.settings import RaftSettings
from dledger.raft.wakeup import Wakeup
from remoting.seams import Clock, Executor

FLUSH: Final = "flush"
"""Name under which the executor measures flushes of the log."""


class Flusher:
    """Flushes what is not durable yet.

    Args:
        settle: Ends an event of the node; called after each flush.
    Attributes:
        flushing: Whether a flush of the log is under way in another thread.
    """

    def __init__(
        self,
        settings: RaftSettings,
        journal: CommitLogJournal,
        clock: Clock,
        settle: Callable[[], None],
    ) -> None:
        self.flushing = False
        self._settings = settings
        self._journal = journal
        self._term_vote = journal.term_vote
        self._clock = clock
        self._settle = settle
        self._flush_wake = Wakeup()
        self._vote_wake = Wakeup()
        self._executor: Executor | None = None

    async def flush_loop(self, executor: Executor) -> None:
        """Make what was promised durable, one flush at a time. Runs until cancelled.

        Raises:
            FlushFailedError: The disk said no: the node must stop.
        """
        self._executor = executor
        while True:
            await self._flush_wake.wait()
            if not self._settings.sync_flush:
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

        Raises:
            DiskFullError, FlushFailedError: The disk said no: the node must stop.
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
        """Flush the log here and now, if that takes no time; the caller is in an event."""
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
        """Let the tasks flush what is not durable."""
        if not self._term_vote.is_durable:
            self._vote_wake.set()
        if self._journal.has_unflushed:
            self._flush_wake.set()
