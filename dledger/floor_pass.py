"""Where queues begin after a floor has moved, whatever has become of their files.

What is being applied cannot wait, and all replicas need the same answer: a file that cannot be read
is made again here and now, and one that went with its topic stands for a queue that keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import OffsetOutOfRangeError
from dledger.commitlog.record import decode_record
from dledger.commitlog.seams import CANNOT_BE_READ
from dledger.derived_files import ATTEMPTS_MAX, DerivedFiles, walk
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.state.state_record import TopicsChange, decode_change
from dledger.state.tables import QueueBounds
from dledger.state.topics import TOPICS_QUEUE

REPAIR_STEP_BYTES: Final = 16 << 20
"""Entries read in one go for units that cannot wait."""


@dataclass(eq=False, repr=False)
class FloorPass:
    """One floor, moved by one entry."""

    _log: EntryLog
    _derived: DerivedFiles
    _delays: Mapping[int, int]
    _index: int
    _floor: int

    def first_kept(self, topic: str, queue_id: int, bounds: QueueBounds) -> tuple[int, int]:
        """Return what `DerivedFiles.first_kept` does.

        Raises:
            DiskFullError: No space to make a file again; ask again when there is.
            OffsetOutOfRangeError: Units are missing for no known reason.
        """
        for _ in range(ATTEMPTS_MAX):
            try:
                return self._derived.first_kept(topic, queue_id, bounds, self._floor)
            except OffsetOutOfRangeError:
                # Files of a deleted topic go at once: before this start that may have been, by an
                # entry that no checkpoint covers. It is applied again, and nothing is kept.
                if topic not in self._deleted_later:
                    raise
                return bounds.max_offset, 0
            except OSError as error:
                if error.errno not in CANNOT_BE_READ:
                    raise
            while self._derived.put_units_again(
                self._log, self._index, self._delays, REPAIR_STEP_BYTES
            ):
                pass
        return self._derived.first_kept(topic, queue_id, bounds, self._floor)

    @cached_property
    def _deleted_later(self) -> set[str]:
        """The topics that entries behind this one delete, committed or not."""
        deleted: set[str] = set()
        log = self._log
        entries = walk(
            log,
            self._index + 1,
            log.last_index,
            self._delays,
            log.end_position,
            skip_damaged=True,
        )
        for _, derived in entries:
            if derived is None:
                continue
            for topic, queue_id, where in derived.groups:
                if (topic, queue_id) != (STATE_TOPIC, TOPICS_QUEUE):
                    continue
                for position in derived.phy_offset[where].tolist():
                    body = decode_record(log.record_at(position)).body
                    change = decode_change(queue_id, body)
                    if isinstance(change, TopicsChange):
                        deleted.update(change.delete)
        return deleted
