"""Files of a replica that are derived from its log: consume queues and key index.

They are written on apply only, and can be thrown away: the next start makes them from the log.
Units of consume queues have no checksum: what follows from an entry that the scrub reads is
compared with what the files of its queues have, and a file that differs is given up, as one that
the disk does not give back. It is made again meanwhile: reads of its units fail until then.

Where files of the key index are lost, their keys are put again from the log, a few entries at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from dledger.commitlog.consume_queue_store import ConsumeQueueStore, remove_all
from dledger.commitlog.derive import Derived, derive
from dledger.commitlog.entry import parse_header
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptStoreError,
    MQError,
    OffsetOutOfRangeError,
)
from dledger.commitlog.key_index import FLUSH_KEYS, KeyIndex, KeyIndexFlush
from dledger.commitlog.key_run import Keys
from dledger.commitlog.mark import Anchor
from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.commitlog.queue_unit import UNIT_BYTES
from dledger.commitlog.record import decode_record
from dledger.commitlog.seams import Disk
from dledger.commitlog.store_paths import StorePaths
from dledger.settings.tables import StoreTable
from dledger.state.tables import QueueBounds, QueueKey, StateTables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    from dledger.commitlog.consume_queue import ConsumeQueue
    from dledger.commitlog.entry_log import EntryLog
    from dledger.commitlog.queue_unit import Units


log = structlog.get_logger(__name__)

KEYS_ARE_MISSING: Final = "keys are being put into the key index again; ask again later"
"""Answer to a query that finds nothing meanwhile."""


def walk(
    entry_log: EntryLog,
    first: int,
    last: int,
    delays: Mapping[int, int],
    max_bytes: int,
    *,
    skip_damaged: bool,
) -> Iterator[tuple[int, Derived | None]]:
    """Yield the entries from *first* to *last* with what follows from them, some at a time.

    Raises CorruptEntryError: an entry waits for its repair.
    """
    left = max_bytes
    for index in range(max(first, entry_log.first_index), last + 1):
        if left <= 0:
            return
        try:
            frame = entry_log.frame(index)
        except CorruptEntryError:
            if not skip_damaged:
                raise
            yield index, None
        else:
            left -= len(frame)
            yield index, derive(frame, parse_header(frame), delay_ms=delays)


class KeyIndexing:
    """The key index, and what fills its gaps."""

    def __init__(self, index: KeyIndex, on_due: Callable[[], object]) -> None:
        self.index = index
        self._on_due = on_due
        self._found = Keys(0)
        """Keys of the first gap, as far as it was read."""
        index.on_unreadable = self._note_unreadable
        index.on_long = on_due

    def _note_unreadable(self, path: str, why: str) -> None:
        log.error("key_index_file_unreadable", path=path, error=why)
        self._on_due()

    @property
    def is_behind(self) -> bool:
        """Whether keys of applied entries may be missing."""
        return self.index.is_behind

    @property
    def is_due(self) -> bool:
        """Whether `step` has something to do."""
        return self.index.is_long or self.index.is_behind

    def status(self) -> dict[str, Any]:
        """Return what ``dledger raft status`` shows."""
        return {"behind": self.is_behind, "files_lost": self.index.files_lost}

    def step(
        self,
        entry_log: EntryLog,
        delays: Mapping[int, int],
        max_bytes: int,
        *,
        skip_damaged: bool,
    ) -> KeyIndexFlush | None:
        """Read a few more entries whose keys are missing; return a job once it is worth one.

        Run by the caller, one at a time with the flushes of checkpoints; `KeyIndex.end_flush`
        follows.

        Args:
            skip_damaged: Leave out entries that cannot be repaired.
        Raises CorruptEntryError: an entry waits for its repair; come again.
        """
        if self.index.is_long:
            return self.index.begin_flush()
        self.index.delete_before(entry_log.first_index)
        gap = self.index.gap
        if gap is None:
            return None
        first, last = gap
        if self._found.first != first:
            self._found = Keys(first)
            log.warning("key_index_is_made_again", first=first, last=last)
        found = self._found
        for index, derived in walk(
            entry_log, found.last + 1, last, delays, max_bytes, skip_damaged=skip_damaged
        ):
            if derived is None:
                found.last = index
            else:
                found.add(index, derived.key_hashes, derived.key_phy_offsets)
        if found.last < last and len(found) < FLUSH_KEYS:
            return None
        self._found = Keys(0)
        return self.index.begin_fill(found)


# ---------------------------------------------------------------------- units compared with the log


def give_up_differing(
    queues: ConsumeQueueStore, tables: StateTables, entry_log: EntryLog, derived: Derived
) -> int:
    """Compare the units of applied entries; return how many files were given up.

    Files that are being put again are left alone. Units of the schedule topic are compared without
    their times, which follow the levels that were set when they were written.

    Raises FlushFailedError, OSError: it could not be noted; the node must stop.
    """
    given_up = 0
    for topic, queue_id, where in derived.groups:
        bounds = tables.queues.get((topic, queue_id))
        offsets, units = derived.queue_offset[where], derived.units[where]
        if bounds is None or not len(offsets):
            continue
        queue = queues.queue(topic, queue_id)
        # A topic that was deleted and made again counts from 0 on.
        ends = [*(np.flatnonzero(np.diff(offsets) != 1) + 1).tolist(), len(offsets)]
        for begin, end in pairwise([0, *ends]):
            first = int(offsets[begin])
            given_up += _compare_run(queue, bounds, entry_log, first, units[begin:end])
    return given_up


def _compare_run(
    queue: ConsumeQueue, bounds: QueueBounds, entry_log: EntryLog, begin: int, wanted: Units
) -> int:
    """Compare units that follow each other from *begin* on; return how many files were given up."""
    first = max(begin, bounds.min_offset)
    last = min(begin + len(wanted), bounds.max_offset)
    if first >= last:
        return 0
    wanted = wanted[first - begin : last - begin]
    try:
        found = queue.read(first, last - first)
    except (OSError, OffsetOutOfRangeError):
        return 0  # the queue has noted that it cannot be read
    given_up = 0
    for at in np.flatnonzero(_differ(found, wanted, queue.topic)).tolist():
        if not _is_newer(entry_log, queue, first + at, found[at], wanted[at]):
            given_up += queue.give_up(first + at)
    return given_up


def _differ(found: Units, wanted: Units, topic: str) -> npt.NDArray[np.bool_]:
    differ: npt.NDArray[np.bool_] = found["phy_offset"] != wanted["phy_offset"]
    differ |= found["size"] != wanted["size"]
    if topic != SCHEDULE_TOPIC:
        differ |= found["tags_code"] != wanted["tags_code"]
    return differ


def _is_newer(
    entry_log: EntryLog, queue: ConsumeQueue, offset: int, found: Units, wanted: Units
) -> bool:
    """Whether a later message has that offset: its topic was deleted and made again."""
    if int(found["phy_offset"]) <= int(wanted["phy_offset"]):
        return False
    return points_to(entry_log, found, queue.topic, queue.queue_id, offset)


def points_to(entry_log: EntryLog, unit: Units, topic: str, queue_id: int, offset: int) -> bool:
    """Whether the log has, where *unit* points to, the message of that queue and offset."""
    position, size = int(unit["phy_offset"]), int(unit["size"])
    try:
        record = decode_record(entry_log.read(position, size))
    except (MQError, OSError):
        return False
    place = (record.topic, record.queue_id, record.queue_offset, record.phy_offset, record.size)
    return place == (topic, queue_id, offset, position, size)


# ----------------------------------------------------------------------------- queues and key index


ATTEMPTS_MAX: Final = 8
"""Repairs in a row where apply waits for them: each may find one more bad file."""


class QueueRepair:
    """Puts the units of lost files again, a few entries at a time; *queues*: of this replica."""

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


@dataclass(eq=False, repr=False)
class DerivedFiles:
    """The consume queues and the key index.

    Attributes:
        queues, key_index, keys: Replaced by `begin_empty`.
        begun_later: Queues that begin in a later file than the first one they may have.
        derives_again: Queues were lost, and a checkpoint does not have them yet: they were before
            this start, and the replay makes all of them, or files of theirs were made again.
    """

    _disk: Disk
    _paths: StorePaths
    _settings: StoreTable
    _on_behind: Callable[[], object]
    _max_open_files: int

    def __post_init__(self) -> None:
        self.begun_later: set[QueueKey] = set()
        self._saved_begins: dict[QueueKey, int] = {}
        """Begins of such queues as the newest checkpoint has them."""
        self._open()

    def _open(self) -> None:
        self._lost = False
        # All of it follows from the log: the replay begins with the first entry that is kept.
        self.derives_again = self._disk.exists(self._paths.derived_lost)
        if self.derives_again:
            self.remove()
        try:
            self.queues: ConsumeQueueStore = self._open_queues()
        except CorruptStoreError as error:
            log.error("consume_queues_damaged", error=str(error))
            self._note_lost()
            self.derives_again = True
            self.remove()
            self.queues = self._open_queues()
        self.key_index = KeyIndex(self._disk, self._paths.index)
        self.keys = KeyIndexing(self.key_index, self._on_behind)
        self.queue_repair = QueueRepair(self.queues)

    def _open_queues(self) -> ConsumeQueueStore:
        return ConsumeQueueStore(
            self._disk,
            self._paths.consumequeue,
            units_per_file=self._settings.mapped_file_size_consume_queue // UNIT_BYTES,
            max_open_files=self._max_open_files,
            on_unreadable=self._on_unreadable,
        )

    def _on_unreadable(self, path: str, error: OSError) -> None:
        if not self._lost:
            log.error(
                "consume_queue_unreadable",
                path=path,
                error=str(error),
                next_step="nothing: its units are put again from the log",
            )
            self._lost = True
            self._note_lost()
        self._on_behind()

    def _note_lost(self) -> None:
        """Write down that queues are lost, until a checkpoint has them again."""
        self._disk.replace(self._paths.derived_lost, b"queues\n")

    @property
    def is_behind(self) -> bool:
        """Whether units or keys of applied entries may be missing, or fill the memory."""
        return self.keys.is_due or self.queue_repair.is_behind

    def put_units_again(
        self,
        entry_log: EntryLog,
        last: int,
        delays: Mapping[int, int],
        max_bytes: int,
    ) -> bool:
        """Put units of lost files again; see `QueueRepair.step`."""
        repair = self.queue_repair
        if not repair.is_behind:
            return False
        if repair.step(entry_log, last, delays, max_bytes):
            return True
        self._lost = False
        self.derives_again = True
        return False

    @property
    def are_again(self) -> bool:
        """Whether those that were lost were derived, and none was lost since."""
        return self.derives_again and not self._lost

    def end_deriving(self) -> None:
        """Note durably that a checkpoint has what was lost."""
        self.derives_again = False
        self._disk.unlink(self._paths.derived_lost)
        self._disk.flush_dir(self._paths.raft)

    def find_begun_later(self) -> None:
        """Take every queue with files for one that begins later: a killed process left some."""
        self.begun_later = {
            (queue.topic, queue.queue_id) for queue in self.queues.queues() if queue.has_files
        }

    def put(self, last: int, derived: Derived, known: Container[tuple[str, int]] | None) -> None:
        """Write units and keys of the next entries, up to *last*.

        The units only of queues in *known*, if that is given.
        """
        for topic, queue_id, where in derived.groups:
            if (known is None or (topic, queue_id) in known) and len(derived.queue_offset[where]):
                first = int(derived.queue_offset[where][0])
                self.queues.queue(topic, queue_id).put(first, derived.units[where])
        self.key_index.put(last, derived.key_hashes, derived.key_phy_offsets)

    def begin_empty(self) -> None:
        """Remove all of them, and open them again: `queues`, `key_index` and `keys` are new."""
        self.close()
        self.remove()
        self._open()

    def remove(self) -> None:
        """Remove all files; those that are open can be used until they are closed."""
        remove_all(self._disk, self._paths.consumequeue)
        self._disk.remove_tree(self._paths.index)

    def note_begins(self, tables: StateTables) -> None:
        """Note where queues begin in a checkpoint: the next start needs what stands there."""
        known = (key for key in self.begun_later if key in tables.queues)
        self._saved_begins = {key: tables.queues[key].min_offset for key in known}

    def delete_before(self, floor: Anchor, tables: StateTables) -> None:
        """Remove what segments before *floor*, which are removed, had.

        To be called when a checkpoint was written. Queues may begin later by now: a start with that
        checkpoint comes to this once more, and then reads the units from its begins on.
        """
        for key, begin in self._saved_begins.items():
            bounds = tables.queues.get(key)
            if bounds:
                # Less than in the checkpoint: its topic was deleted and made again.
                self.queues.queue(*key).delete_before(min(begin, bounds.min_offset))
            if bounds is None or bounds.min_offset <= begin:
                self.begun_later.discard(key)
        self.key_index.delete_before(floor.first_index)

    def first_kept(
        self, topic: str, queue_id: int, bounds: QueueBounds, floor: int
    ) -> tuple[int, int]:
        """Return the first offset of a queue whose message stands at or after *floor*, and where.

        Without such a message: its end, and 0.
        """
        queue = self.queues.queue(topic, queue_id)
        low, high, position = bounds.min_offset, bounds.max_offset, 0
        while low < high:
            middle = (low + high) // 2
            found = int(queue.read(middle, 1)[0]["phy_offset"])
            if found < floor:
                low = middle + 1
            else:
                high, position = middle, found
        if queue.keeps_before(low, bounds.min_offset):
            self.begun_later.add((topic, queue_id))
        return low, position

    def close(self) -> None:
        """Give the descriptors back."""
        self.queues.close()
