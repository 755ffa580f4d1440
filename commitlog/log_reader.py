"""Reading the entries of a log: by index, by position, from memory or from file; and their flush.

Spec: docs/reference/formats.md, sections 5 and 6.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from dledger.commitlog.entry import ENTRY_HEADER_BYTES, ENTRY_MAGIC, parse_header
from dledger.commitlog.entry_index import EntryIndex, Unit
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    CorruptStoreError,
    FlushFailedError,
    InvariantBroken,
    MQError,
    OffsetOutOfRangeError,
)
from dledger.commitlog.mark import Anchor, Mark
from dledger.commitlog.record import MAGIC_V1, MAGIC_V2, MIN_RECORD_BYTES
from dledger.commitlog.recovery import Recovered, RecoveryReport
from dledger.commitlog.seams import Disk, DiskFile
from dledger.commitlog.segment import BLANK_BYTES, Segment, segment_base
from dledger.commitlog.store_paths import StorePaths


@dataclass(slots=True)
class Health:
    """Whether a log may be written. Shared with worker threads: set once, never cleared."""

    failure: str | None = None
    closed: bool = False

    def refusal(self) -> MQError:
        """Return why nothing may be written."""
        if self.closed:
            return InvariantBroken("the log is closed")
        return FlushFailedError(f"an earlier flush failed: {self.failure}")


@dataclass(eq=False, repr=False)
class FlushTicket:
    """What one flush has to make durable; made by `EntryLog.begin_flush`.

    Only `run` may be called in a worker thread; it touches nothing but files.
    """

    number: int
    last_index: int
    generation: int
    files: tuple[DiskFile, ...]
    folder: tuple[Disk, str] | None
    _health: Health

    def __post_init__(self) -> None:
        self.done = False

    def run(self) -> None:
        """Flush the files. Blocking; thread-safe.

        Raises FlushFailedError: the log is poisoned from now on.
        """
        try:
            for file in self.files:
                file.flush()
            if self.folder is not None:
                disk, path = self.folder
                disk.flush_dir(path)
        except (MQError, OSError) as error:
            self._health.failure = str(error)
            raise FlushFailedError(
                f"flush up to entry {self.last_index} failed: {error}"
            ) from error
        self.done = True


RESIDENT_BYTES: Final = 256 << 20
"""Of what this process wrote itself, this much at the end of the log is taken to be in memory."""

_FRAME_BEGIN: Final = struct.Struct(">IIq")
_RECORD_BEGIN: Final = struct.Struct(">II")


@dataclass(slots=True)
class LogFiles:
    """The files of a log, shared by the objects that read, write, allocate and repair them.

    Attributes:
        segments: By the position of their first byte.
        new_names: Whether files were made since then: the folder is to be flushed, too.
    """

    disk: Disk
    paths: StorePaths
    segment_bytes: int
    units_per_file: int
    index: EntryIndex
    segments: dict[int, Segment]
    dirty: dict[int, Segment] = field(default_factory=dict)
    new_names: bool = False
    health: Health = field(default_factory=Health)


class DamagedEntries:
    """Which entries of a log are known to be damaged, by index and by place.

    Invariant: `indexes` ascends; the spans of its entries do, too, and do not overlap.
    """

    def __init__(self) -> None:
        self.indexes: list[int] = []
        self._spans: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self.indexes)

    def __contains__(self, index: int) -> bool:
        return index in self._spans

    @property
    def first(self) -> int | None:
        """The first damaged entry, None when all are whole."""
        return self.indexes[0] if self.indexes else None

    def add(self, index: int, start: int, end: int) -> None:
        """Note that entry *index*, which stands between *start* and *end*, is damaged."""
        if index not in self._spans:
            insort(self.indexes, index)
        self._spans[index] = (start, end)

    def remove(self, index: int) -> None:
        """Entry *index* is whole again."""
        if self._spans.pop(index, None) is not None:
            del self.indexes[bisect_left(self.indexes, index)]

    def drop_outside(self, first: int, last: int) -> None:
        """Forget entries that the log does not hold any more."""
        for index in [i for i in self.indexes if not first <= i <= last]:
            self.remove(index)

    def whole_until(self, first: int, last: int) -> int:
        """Return up to where entries from *first* on are whole, at most *last*."""
        at = bisect_left(self.indexes, first)
        return min(last, self.indexes[at] - 1) if at < len(self.indexes) else last

    def span(self, index: int) -> tuple[int, int]:
        """Return where damaged entry *index* begins and ends."""
        return self._spans[index]

    def overlaps(self, start: int, end: int) -> int | None:
        """Return a damaged entry within bytes *start* … *end*, None when there is none."""
        at = bisect_left(self.indexes, True, key=lambda index: self._spans[index][1] > start)
        if at < len(self.indexes) and self._spans[self.indexes[at]][0] < end:
            return self.indexes[at]
        return None

    def ranges(self) -> list[tuple[int, int]]:
        """Return runs of damaged entries as (first, last)."""
        runs: list[tuple[int, int]] = []
        for index in self.indexes:
            if runs and runs[-1][1] == index - 1:
                runs[-1] = (runs[-1][0], index)
            else:
                runs.append((index, index))
        return runs


class LogReader:
    """The entries of one Raft log, to be read.

    Attributes (read-only for callers):
        first_index, last_index: ``last_index == first_index - 1`` when the log is empty.
        last_term, last_chain, last_store_time_ms: Of the newest entry, or of the anchor.
        first_position, end_position: Absolute bytes; the end is that of the newest entry.
        durable_index: Newest entry that is certainly on the disk.
        mark_valid: False when `EntryLog.open` got a mark whose entry this log does not hold.
        damaged: Entries known to be damaged; they are not read until `LogRepair.mark_whole`.
        on_unreadable: Called with position and size of bytes that the disk does not give back.
        on_lost_unit: Called with an index whose unit is damaged; restores it or returns False.

    Invariant: ``first_index - 1 <= durable_index <= last_index``.
    """

    def __init__(
        self, files: LogFiles, anchor: Anchor, recovered: Recovered, report: RecoveryReport
    ) -> None:
        last = recovered.last
        self.anchor = anchor
        self.first_index = anchor.first_index
        self.first_position = anchor.position
        self.last_index = last.index
        self.last_term = last.term
        self.last_chain = last.chain
        self.last_store_time_ms = recovered.last_store_time_ms
        self.end_position = last.end_position
        self.durable_index = last.index
        self.report = report
        self.mark_valid = report.mark_valid
        self.damaged = DamagedEntries()
        self.on_unreadable: Callable[[int, int], object] = lambda _position, _size: None
        self.on_lost_unit: Callable[[int], bool] = lambda _index: False
        self._segment_bytes = files.segment_bytes
        self._index = files.index
        self._segments = files.segments
        self._written_from = last.end_position

    @property
    def max_entry_bytes(self) -> int:
        """The largest frame a segment can hold."""
        return self._segment_bytes - BLANK_BYTES

    def _unit(self, index: int) -> tuple[int, int, int, int]:
        if index > self.last_index or index < self.first_index:
            raise OffsetOutOfRangeError(
                f"entry {index} is not within {self.first_index} and {self.last_index}"
            )
        return self._located(index)

    def _located(self, index: int) -> Unit:
        try:
            return self._index.unit(index)
        except CorruptStoreError:
            if not self.on_lost_unit(index):
                raise
            return self._index.unit(index)

    def term_at(self, index: int) -> int:
        """Return the term of entry *index*; the one before the first kept entry is known too.

        Raises:
            OffsetOutOfRangeError: The log does not hold it.
            CorruptStoreError: The entry index is damaged there.
        """
        if index == self.anchor.first_index - 1:
            return self.anchor.prev_term
        return self._unit(index)[1]

    def chain_at(self, index: int) -> int:
        """Return the running chain up to and with entry *index*; raises like `term_at`."""
        if index == self.anchor.first_index - 1:
            return self.anchor.prev_chain
        return self._unit(index)[2]

    def position_at(self, index: int) -> int:
        """Return the absolute byte where entry *index* starts; raises like `term_at`."""
        return self._unit(index)[0]

    def size_at(self, index: int) -> int:
        """Return the size of entry *index* in bytes; raises like `term_at`."""
        return self._unit(index)[3]

    def mark_at(self, index: int) -> Mark:
        """Return the mark of entry *index*, or of the anchor; raises like `term_at`."""
        if index == self.anchor.first_index - 1:
            return self.anchor.mark
        position, term, chain, size = self._unit(index)
        return Mark(index, term, position, chain, position + size)

    def frame(self, index: int) -> memoryview:
        """Return the bytes of entry *index*: a read-only view that pins its segment.

        It stays as it is while the entry is in the log; after a truncation within its segment it
        shows what stands there instead.

        Raises:
            OffsetOutOfRangeError: The log does not hold it.
            CorruptEntryError: Something else stands there.
        """
        position, _, _, size = self._unit(index)
        if self.damaged:
            self._refuse_damaged(position, size)
        segment = self._segments[position - position % self._segment_bytes]
        frame = self._bytes_of(segment, position, size)
        if _FRAME_BEGIN.unpack_from(frame) != (ENTRY_MAGIC, size, index):
            at = position - segment.base
            raise CorruptEntryError(f"{segment.path}: entry {index} does not stand at byte {at}")
        return frame

    def frames(self, first: int, max_bytes: int, last: int | None = None) -> list[memoryview]:
        """Return entries from *first* on, whole, at least one, up to *last* or the newest.

        They are views like those of `frame`, one for each segment touched, and end before their sum
        exceeds *max_bytes*; the first is returned anyway.

        Raises OffsetOutOfRangeError: the log does not hold *first*.
        """
        stop = self.last_index if last is None else min(last, self.last_index)
        views: list[memoryview] = []
        position = self._unit(first)[0]
        index = first
        budget = max_bytes
        while index <= stop:
            segment = self._segments[position - position % self._segment_bytes]
            upto = self._last_ending_by(index, stop, min(position + budget, segment.end))
            if upto < index:
                if views:
                    break
                upto = index
            tail_position, _, _, tail_size = self._located(upto)
            size = tail_position + tail_size - position
            if self.damaged:
                self._refuse_damaged(position, size)
            views.append(self._bytes_of(segment, position, size))
            budget -= size
            index = upto + 1
            if index <= stop:
                position = self._located(index)[0]
        return views

    def _last_ending_by(self, low: int, high: int, end: int) -> int:
        """Newest entry of [*low*, *high*] that ends at or before *end*; low - 1 when none does."""
        unit = self._located
        # An entry has at least a header, which bounds how many fit.
        high = min(high, low + (end - unit(low)[0]) // ENTRY_HEADER_BYTES)
        found = low - 1
        while found < high:
            middle = (found + high + 1) // 2
            position, _, _, size = unit(middle)
            if position + size <= end:
                found = middle
            else:
                high = middle - 1
        return found

    def read(self, phy_offset: int, size: int) -> memoryview:
        """Return *size* bytes at an absolute position, within one segment; a view like `frame`'s.

        Raises:
            OffsetOutOfRangeError: Not all of them are in the log, or they span two segments.
            CorruptEntryError: They are known to be damaged.
        """
        if phy_offset < self.first_position or size < 0 or phy_offset + size > self.end_position:
            raise OffsetOutOfRangeError(
                f"{size} bytes at {phy_offset} are not within "
                f"{self.first_position} and {self.end_position}"
            )
        base = phy_offset - phy_offset % self._segment_bytes
        if phy_offset + size > base + self._segment_bytes:
            raise OffsetOutOfRangeError(f"{size} bytes at {phy_offset} span two segments")
        if self.damaged:
            self._refuse_damaged(phy_offset, size)
        segment = self._segments.get(base)
        return memoryview(b"") if segment is None else self._bytes_of(segment, phy_offset, size)

    def _bytes_of(self, segment: Segment, position: int, size: int) -> memoryview:
        """Return bytes by the mapping where they are in memory, by a read where they may not be.

        A page that cannot be brought in ends the process that touches it; a read only fails.

        Raises CorruptEntryError: the disk does not give them back.
        """
        if position >= self._written_from and position >= self.end_position - RESIDENT_BYTES:
            return segment.bytes_at(position, size)
        try:
            return memoryview(segment.file.read(position - segment.base, size))
        except OSError as error:
            self.on_unreadable(position, size)
            at = position - segment.base
            raise CorruptEntryError(
                f"{segment.path}: {size} bytes at {at} cannot be read: {error}"
            ) from error

    def record_at(self, phy_offset: int) -> memoryview:
        """Return the record that starts at *phy_offset*; a view like `frame`'s.

        Its checksum is not compared.

        Raises:
            OffsetOutOfRangeError: Before the first kept byte, or at or past the end.
            CorruptRecordError: No record starts there.
        """
        size, magic = _RECORD_BEGIN.unpack(self.read(phy_offset, _RECORD_BEGIN.size))
        free_bytes = self._segment_bytes - phy_offset % self._segment_bytes
        free_bytes = min(free_bytes, self.end_position - phy_offset)
        if magic not in (MAGIC_V1, MAGIC_V2) or not MIN_RECORD_BYTES <= size <= free_bytes:
            raise CorruptRecordError(f"no record starts at {phy_offset}")
        return self.read(phy_offset, size)

    def index_of(self, position: int) -> int:
        """Return the entry that holds the byte at *position*, or the one before it in a gap.

        Raises OffsetOutOfRangeError: outside the log.
        """
        if not self.first_position <= position < self.end_position:
            raise OffsetOutOfRangeError(f"no entry holds byte {position}")
        low, high = self.first_index, self.last_index
        while low < high:
            middle = (low + high + 1) // 2
            if self._located(middle)[0] <= position:
                low = middle
            else:
                high = middle - 1
        return low

    def anchor_at(self, index: int) -> Anchor:
        """Return the anchor of a log that would begin with entry *index*, which is kept here."""
        before = index - 1
        if before < self.first_index:
            return self.anchor
        unit_position = self.position_at(index)
        return Anchor(
            first_index=index,
            position=unit_position,
            prev_term=self.term_at(before),
            prev_chain=self.chain_at(before),
            prev_store_time_ms=parse_header(self.frame(before)).store_time_ms,
        )

    # -- from file, damaged or not -----------------------------------------------------------

    @property
    def index_pages_lost(self) -> int:
        """Pages of the entry index that the disk did not give back since the start."""
        return self._index.pages_lost

    def stored_unit(self, index: int) -> Unit | None:
        """Return (position, term, chain, size) from file, None when the unit is damaged.

        May be called in a worker thread.
        """
        return self._index.stored(index)

    def stored_chain(self, index: int) -> int | None:
        """Return the chain up to *index* from file, None when it is damaged. As `stored_unit`."""
        if index == self.anchor.first_index - 1:
            return self.anchor.prev_chain
        unit = self._index.stored(index)
        return None if unit is None else unit[2]

    def bytes_at(self, position: int, size: int) -> bytes:
        """Return a copy of bytes of one segment, damaged or not, fewer at its end.

        Those on a bad sector come as bytes that fit no checksum. As `stored_unit`.
        """
        segment = self._segments.get(segment_base(position, self._segment_bytes))
        return b"" if segment is None else segment.read_at(position, size)

    def _refuse_damaged(self, position: int, size: int) -> None:
        index = self.damaged.overlaps(position, position + size)
        if index is not None:
            raise CorruptEntryError(f"entry {index} is damaged and waits for its repair")
