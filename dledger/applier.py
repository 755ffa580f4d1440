"""Applies committed entries to one replica: at once where a read waits, else many together.

A leader that answers has applied what it answers; a follower applies after its acknowledgement.
Where the disk is full nothing is applied until there is space: what is applied can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
import trio

from dledger.commitlog.errors import CorruptEntryError, CorruptRecordError, DiskFullError
from dledger.group_api import AppliedListener
from dledger.proposals import Proposals
from dledger.raft.member import RaftNode
from dledger.remoting.seams import Clock
from dledger.state.apply import APPLIED_TOGETHER_BYTES, Applied, QueueUnits
from dledger.store import ReplicaStore
from dledger.waiting import Wakeup

log = structlog.get_logger(__name__)

APPLY_AT_ONCE_ENTRIES: Final = 64
"""Entries, of `APPLIED_TOGETHER_BYTES`, that may wait to be applied until a read wants them."""

APPLY_TURN_US: Final = 10_000
"""What is applied before other tasks get their turn, by the costs below, in microseconds. The entry
that meets the limit is applied as a whole."""

ENTRY_US: Final = 50
QUEUE_US: Final = 30
RECORD_US: Final = 6
TOPICS_US: Final = 500
STATE_BYTES_PER_US: Final = 4


def cost_us(applied: Applied) -> float:
    """Return what it cost, about, to apply entries of one call."""
    records = sum(len(each.units) for each in applied.units)
    units_us = QUEUE_US * len(applied.units) + RECORD_US * records
    state_us = applied.state_bytes / STATE_BYTES_PER_US + TOPICS_US * applied.topics_changed
    return ENTRY_US + units_us + state_us


SPACE_RETRY_S: Final = 1.0
"""How often an entry is tried again that a full disk kept from being applied."""

APPLY_AFTER_TURNS: Final = 2
"""Turns of the scheduler a follower's apply gives away: its answer is built and sent in them."""

APPLY_INTERVAL_S: Final = 0.1
"""Pause after an apply that nothing waited for: many entries together cost little more than one."""


@dataclass(eq=False, repr=False)
class Applier:
    """Applies the entries of one replica.

    Attributes:
        on_applied: Called after each applied entry with the queues that it touched.
        on_units: Called with the units themselves; for listeners that need sizes.
        waiting_reads: Each returns how many reads wait for an entry; see `apply_soon`.
        wake: Set it when there may be something to apply; see `apply_soon`.
    """

    _store: ReplicaStore
    _node: RaftNode
    _proposals: Proposals
    _suspect: Callable[[int], bool]
    _clock: Clock

    def __post_init__(self) -> None:
        self.on_applied: list[AppliedListener] = []
        self.on_units: list[Callable[[Sequence[QueueUnits]], None]] = []
        self.waiting_reads: list[Callable[[], int]] = []
        self.wake = Wakeup()
        self._hurry = Wakeup()
        self._lacks_space = False

    def apply(self, turn_us: float = APPLY_TURN_US) -> None:
        """Apply entries that are committed; answer their proposals, call listeners.

        *turn_us*: stop behind the entry that reaches this cost, see `cost_us`.

        Raises CorruptEntryError, CorruptRecordError: an entry is damaged that cannot be repaired.
        """
        store = self._store
        if store.installing:
            return
        commit = store.applicable(self._node.commit_index)
        stop = min(commit, store.derived_index + APPLY_AT_ONCE_ENTRIES)
        while store.derived_index < stop and turn_us > 0:
            # Read each time: a listener called below may have made this node apply more.
            try:
                applied = store.apply_next(stop)
            except (CorruptEntryError, CorruptRecordError):
                if not self._suspect(store.derived_index + 1):
                    raise
                return
            except DiskFullError as error:
                self._wait_for_space(store.derived_index + 1, error)
                return
            index = applied.index
            if self._lacks_space:
                self._lacks_space = False
                log.info("apply_goes_on", index=index)
            if applied.deleted_topics:
                self._proposals.forget_topics(applied.deleted_topics)
            self._proposals.resolve(index)
            turn_us -= cost_us(applied)
            touched = applied.touched
            for listener in self.on_applied:
                self._proposals.call(listener, touched)
            for units_listener in self.on_units:
                self._proposals.call(units_listener, applied.units)
        if store.derived_index < commit:
            self.wake.set()
            self._hurry.set()

    def apply_soon(self) -> None:
        """Let `run` apply what is committed; at once if a read waits or there is much of it."""
        self.wake.set()
        if not self.may_lag or any(count() for count in self.waiting_reads):
            self._hurry.set()

    @property
    def may_lag(self) -> bool:
        """Whether what is committed may be applied later: little waits, and nothing hinders."""
        entry_log = self._store.log
        first = max(self._store.derived_index + 1, entry_log.first_index)
        last = min(self._node.commit_index, entry_log.last_index)
        if self._lacks_space or last - first >= APPLY_AT_ONCE_ENTRIES - 1:
            return False
        positions = entry_log.position_at
        return last <= first or positions(last) - positions(first) < APPLIED_TOGETHER_BYTES

    def _wait_for_space(self, index: int, error: DiskFullError) -> None:
        """Apply nothing for now: what is applied can be read, and sends wait or are refused."""
        if not self._lacks_space:
            log.error("apply_without_space", index=index, error=str(error))
        self._lacks_space = True
        self.wake.set()

    async def run(self) -> None:
        """Apply what is committed, a few entries at a time, until cancelled."""
        while True:
            await self.wake.wait()
            # A follower's flush and acknowledgement go first: the leader waits for them.
            for _ in range(APPLY_AFTER_TURNS):
                await trio.lowlevel.checkpoint()
            self.apply()
            self._node.settle()
            if self._lacks_space:
                await self._clock.sleep(SPACE_RETRY_S)
            else:
                await self._hurry.wait_or(self._clock, APPLY_INTERVAL_S)
