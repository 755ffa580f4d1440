"""The consumer offsets that stand in a leader's log, those that are not applied yet included.

A step of a consumer is appended only where its group stands at the offset that the step begins at.
What was appended before the step decides that, whether or not it is applied or answered: an entry
whose proposer was answered "unknown" still counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from dledger.broker_errors import CommitNotExpectedError
from dledger.group_api import OffsetCommit
from dledger.remoting.protocol.own_fields import NO_OFFSET
from dledger.state.tables import StateTables

_Slot: TypeAlias = tuple[str, str, int]


class PendingCommits:
    """Offset of each group and queue: applied state plus what this leader has appended since.

    It holds what is appended and not applied, which the bytes in flight bound.
    """

    def __init__(self, tables: StateTables) -> None:
        self._tables = tables
        self._newest: dict[_Slot, tuple[int, int]] = {}
        """Offset, and the index of the entry that has it."""
        self._entries: deque[tuple[int, list[_Slot]]] = deque()

    def refusal_of(self, commits: Sequence[OffsetCommit]) -> CommitNotExpectedError | None:
        """Return why these may not be appended next; None: they may."""
        for commit in commits:
            if commit.expected is None:
                continue
            found = self._offset((commit.group, commit.topic, commit.queue_id))
            if found != commit.expected:
                return CommitNotExpectedError(commit.topic, commit.queue_id, commit.expected, found)
        return None

    def _offset(self, slot: _Slot) -> int:
        newest = self._newest.get(slot)
        if newest is not None:
            return newest[0]
        applied = self._tables.consumer_offset(*slot)
        return NO_OFFSET if applied is None else applied

    def keep(self, index: int, commits: Sequence[OffsetCommit]) -> None:
        """Count these as appended in entry *index*."""
        slots = [(commit.group, commit.topic, commit.queue_id) for commit in commits]
        for slot, commit in zip(slots, commits, strict=True):
            self._newest[slot] = (commit.offset, index)
        self._entries.append((index, slots))

    def applied(self, index: int) -> None:
        """Forget what the applied state has now: all up to entry *index*."""
        while self._entries and self._entries[0][0] <= index:
            at, slots = self._entries.popleft()
            for slot in slots:
                if self._newest.get(slot, (0, 0))[1] == at:
                    del self._newest[slot]

    def clear(self) -> None:
        """Forget everything: leadership has begun or ended."""
        self._newest.clear()
        self._entries.clear()
