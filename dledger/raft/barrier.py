"""The read barrier: proof that this member still led when a read was asked (ReadIndex, §6.4).

A leader's applied state may be old: another one may have been elected behind a cut link. So a read
that must not be stale notes the commit index, and is answered when a majority has echoed a
heartbeat that left *after* the read was asked, in the same term, and the log is applied up to the
noted index. Nothing is written.

Reads share heartbeats: one leaves at once when none is out; reads that come while it is out wait
for the next, which leaves when it is answered, or with the regular heartbeat if it was lost. So a
lone read takes one round trip, and a thousand at once take two heartbeats.

Pure bookkeeping, for one reign; `dledger.raft.reign` sends, `dledger.group` answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dledger.group_api import OnBarrier


@dataclass(slots=True)
class _Read:
    index: int
    deadline_s: float
    on_done: OnBarrier
    beat: int = 0
    """The heartbeat that has to come back; 0 while none has left since the read was asked."""


@dataclass(slots=True)
class ReadBarrier:
    """Reads that wait, oldest first, and which heartbeats the others have echoed.

    Invariant: reads are answered in the order in which they were asked.
    """

    _reads: deque[_Read] = field(default_factory=deque)
    _echoes: dict[str, int] = field(default_factory=dict)
    _newest_beat: int = 0

    def __len__(self) -> int:
        return len(self._reads)

    @property
    def wants_beat(self) -> bool:
        """Whether somebody waits for a heartbeat and none of theirs is out."""
        # Later reads never carry an earlier heartbeat, so the ends of the row tell.
        return bool(self._reads) and not self._reads[0].beat

    def ask(self, index: int, deadline_s: float, on_done: OnBarrier) -> None:
        """Let a read wait until *index* is applied and the leadership proven."""
        self._reads.append(_Read(index, deadline_s, on_done))

    def beat_left(self, beat: int) -> None:
        """Heartbeat *beat* leaves now, to everybody: all that wait may count on it."""
        self._newest_beat = beat
        for read in reversed(self._reads):
            if read.beat:
                break
            read.beat = beat

    def echoed(self, voter: str, beat: int) -> None:
        """*voter* has answered *beat* in this term."""
        if self._echoes.get(voter, 0) < beat <= self._newest_beat:
            self._echoes[voter] = beat

    def confirmed(self, others: Iterable[str], needed: int) -> int:
        """Return the newest heartbeat that *needed* of *others* have echoed; 0 when there is none.

        Args:
            others: The other voters, by name.
            needed: How many of them make a majority together with this member.
        """
        if needed <= 0:
            return self._newest_beat
        beats = sorted((self._echoes.get(voter, 0) for voter in others), reverse=True)
        return beats[needed - 1] if needed <= len(beats) else 0

    def take_ready(self, confirmed: int, applied_index: int) -> list[OnBarrier]:
        """Remove and return the reads that may be answered now."""
        ready: list[OnBarrier] = []
        reads = self._reads
        while reads and 0 < reads[0].beat <= confirmed and reads[0].index <= applied_index:
            ready.append(reads.popleft().on_done)
        return ready

    def take_expired(self, now_s: float) -> list[OnBarrier]:
        """Remove and return the reads whose time is over."""
        expired: list[OnBarrier] = []
        while self._reads and self._reads[0].deadline_s <= now_s:
            expired.append(self._reads.popleft().on_done)
        return expired

    def end(self) -> list[OnBarrier]:
        """The reign is over: remove and return everybody, forget every echo."""
        left = [read.on_done for read in self._reads]
        self._reads.clear()
        self._echoes.clear()
        self._newest_beat = 0
        return left
