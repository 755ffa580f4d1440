"""Queue files that the disk does not give back are made again from the log, meanwhile.

Reads of the units in such a file fail until that has come to its end; everything else goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from commitlog.derive import Derived
from commitlog.errors import OffsetOutOfRangeError
from dledger.key_indexing import walk
from dledger.queue_check import points_to

if TYPE_CHECKING:
    from collections.abc import Mapping

    from commitlog.consume_queue_store import ConsumeQueueStore
    from commitlog.entry_log import EntryLog
    from commitlog.queue_files import QueueKey

log = structlog.get_logger(__name__)

ATTEMPTS_MAX: Final = 8
"""Repairs in a row where apply waits for them: each may find one more bad file."""


class QueueRepair:
    """Puts the units of lost files again, a few entries at a time.

    Args:
        queues: Of this replica.
    """

    def __init__(self, queues: ConsumeQueueStore) -> None:
        self._queues = queues
        self._begins: dict[QueueKey, list[int]] = {}
        self._next = self._last = 0

    @property
    def is_behind(self) -> bool:
        """Whether units are missing."""
        return bool(self._queues.lost)

    def step(
        self,
        entry_log: EntryLog,
        last: int,
        delays: Mapping[int, int],
        max_bytes: int,
    ) -> bool:
        """Put the units of a few more entries; tell whether there are more to be put.

        Args:
            last: Newest entry whose units were put.
            max_bytes: Stop after this number of bytes of entries; at least one is read.
        Raises:
            CorruptEntryError: An entry waits for its repair; come again. A queue has no gap: it
                stays unreadable, in this file, if the entry cannot be repaired.
            DiskFullError: Come again when there is space.
        """
        if self._queues.lost.unreadable:
            self._begin(entry_log, last)
        for index, derived in walk(
            entry_log, self._next, self._last, delays, max_bytes, skip_damaged=False
        ):
            if derived is not None:
                self._put(derived)
            self._next = index + 1
        if self._next <= self._last or self._queues.lost.unreadable:
            return True
        self._queues.lost.end()
        log.info("consume_queues_are_whole", queues=len(self._begins), last=self._last)
        self._begins = {}
        return False

    def _begin(self, entry_log: EntryLog, last: int) -> None:
        """Make new files, and begin where the first of them may have its first unit."""
        first = last + 1
        self._queues.renew_lost()
        self._begins = self._queues.lost.filling
        for key, begins in self._begins.items():
            first = min(first, *(self._first_index(entry_log, key, begin) for begin in begins))
        self._next, self._last = first, last
        log.warning("consume_queues_are_made_again", first=first, last=last)

    def _first_index(self, entry_log: EntryLog, key: QueueKey, begin: int) -> int:
        """Return an entry before which the units of a file do not begin."""
        if begin:
            try:
                unit = self._queues.queue(*key).read(begin - 1, 1)[0]
                if points_to(entry_log, unit, *key, begin - 1):
                    return entry_log.index_of(int(unit["phy_offset"]))
            except (OSError, OffsetOutOfRangeError):
                pass
        return entry_log.first_index

    def _put(self, derived: Derived) -> None:
        per_file = self._queues.units_per_file
        for topic, queue_id, where in derived.groups:
            begins = self._begins.get((topic, queue_id))
            if begins is None or not len(derived.queue_offset[where]):
                continue
            queue, units = self._queues.queue(topic, queue_id), derived.units[where]
            first = int(derived.queue_offset[where][0])
            for begin in begins:
                low, high = max(first, begin), min(first + len(units), begin + per_file)
                if low < high and queue.has_file(begin):
                    queue.put_again(low, units[low - first : high - first])
