"""ReadIndex: proof that this member still led when a read arrived (Raft thesis §6.4).

A read that must not be stale records the commit index, and is answered when a majority has echoed a
heartbeat that was sent *after* the read arrived, in the same term, and the log is applied up to the
recorded index. Nothing is written.

Reads share heartbeats: one is sent at once when none is out; reads that arrive while it is out wait
for the next, which is sent when it is answered, or with the regular heartbeat if it was lost.

Pure bookkeeping for one term as leader; `dledger.raft.leader` sends, `dledger.group` answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dledger.group_api import OnBarrier
from dledger.waiting import CALLS_PER_TURN


@dataclass(slots=True)
class _Read:
    index: int
    deadline_s: float
    on_done: OnBarrier
    heartbeat: int = 0
    """The heartbeat to be echoed; 0 while none was sent since the read arrived."""


@dataclass(slots=True)
class ReadIndex:
    """Waiting reads, oldest first, and which heartbeats the other voters have echoed.

    Invariant: reads are answered in the order in which they arrived.
    """

    _reads: deque[_Read] = field(default_factory=deque)
    _echoes: dict[str, int] = field(default_factory=dict)
    _newest_heartbeat: int = 0

    def __len__(self) -> int:
        return len(self._reads)

    @property
    def needs_heartbeat(self) -> bool:
        """Whether a read waits for a heartbeat and none that counts for a waiting read is out."""
        # Later reads never have an earlier heartbeat, so the oldest one decides.
        return bool(self._reads) and not self._reads[0].heartbeat

    def add(self, index: int, deadline_s: float, on_done: OnBarrier) -> None:
        """Add a read that waits until *index* is applied and the leadership is proven."""
        self._reads.append(_Read(index, deadline_s, on_done))

    def heartbeat_sent(self, heartbeat: int) -> None:
        """Record that *heartbeat* is sent to all now: all waiting reads may count on it."""
        self._newest_heartbeat = heartbeat
        for read in reversed(self._reads):
            if read.heartbeat:
                break
            read.heartbeat = heartbeat

    def heartbeat_echoed(self, voter: str, heartbeat: int) -> None:
        """Record that *voter* has answered *heartbeat* in this term."""
        if self._echoes.get(voter, 0) < heartbeat <= self._newest_heartbeat:
            self._echoes[voter] = heartbeat

    def confirmed(self, others: Iterable[str], needed: int) -> int:
        """Return the newest heartbeat that *needed* of *others* have echoed; 0: there is none."""
        if needed <= 0:
            return self._newest_heartbeat
        echoes = sorted((self._echoes.get(voter, 0) for voter in others), reverse=True)
        return echoes[needed - 1] if needed <= len(echoes) else 0

    def pop_ready(self, confirmed: int, applied_index: int) -> list[OnBarrier]:
        """Remove and return the reads that may be answered now, as many as a turn takes."""
        return self._pop(
            lambda read: 0 < read.heartbeat <= confirmed and read.index <= applied_index
        )

    def pop_expired(self, now_s: float) -> list[OnBarrier]:
        """Remove and return the reads whose deadline has passed, as many as a turn takes."""
        return self._pop(lambda read: read.deadline_s <= now_s)

    def _pop(self, is_over: Callable[[_Read], bool]) -> list[OnBarrier]:
        over: list[OnBarrier] = []
        while self._reads and len(over) < CALLS_PER_TURN and is_over(self._reads[0]):
            over.append(self._reads.popleft().on_done)
        return over

    def clear(self) -> list[OnBarrier]:
        """Remove and return all reads, and forget every echo: this member no longer leads."""
        left = [read.on_done for read in self._reads]
        self._reads.clear()
        self._echoes.clear()
        self._newest_heartbeat = 0
        return left
