"""The log of one replica: entries in segments, found by index, flushed by ticket.

Synchronous, and owned by one thread. Two things may run in a worker: `FlushTicket.run` and
`EntryLog.reserve_next`. A log whose flush failed is poisoned: it can be read, nothing else.

Spec: docs/reference/formats.md, sections 5, 6 and 10.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from typing_extensions import Buffer

from commitlog.claim import Claim
from commitlog.damage import DamagedEntries
from commitlog.entry import ENTRY_HEADER_BYTES, ENTRY_MAGIC, EntryHeader, parse_header, verify_frame
from commitlog.entry_index import DEFAULT_UNITS_PER_FILE, EntryIndex, Unit, encode_unit
from commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    CorruptStoreError,
    DiskFullError,
    FlushFailedError,
    InvariantBroken,
    LogBusyError,
    MQError,
    OffsetOutOfRangeError,
)
from commitlog.extent import Extent, Truncation
from commitlog.log_format import LogFormat, check_format
from commitlog.mark import Anchor, Mark, load_anchor, store_anchor
from commitlog.record import MAGIC_V1, MAGIC_V2, MIN_RECORD_BYTES
from commitlog.recovery import (
    Recovered,
    Recovery,
    RecoveryReport,
    drop_segments,
    newest_store_time_ms,
)
from commitlog.seams import Disk, DiskFile
from commitlog.segment import (
    BLANK_BYTES,
    DEFAULT_SEGMENT_BYTES,
    Segment,
    encode_blank,
    place,
    segment_base,
)
from commitlog.slot_file import SlotFile
from commitlog.store_paths import StorePaths

__all__ = ["Anchor", "Drop", "EntryLog", "FlushTicket", "Mark", "RecoveryReport"]

EXTENT_WINDOW_BYTES: Final = 64 << 20
"""How far ahead the extent is noted: what recovery reads at most behind the last entry."""

RESIDENT_BYTES: Final = 256 << 20
"""Of what this process wrote itself, so much at the end of the log is taken to be in memory."""

PAGE_BYTES: Final = 4096
"""What a disk takes without having to read the rest of it."""

_FRAME_BEGIN: Final = struct.Struct(">IIq")
_RECORD_BEGIN: Final = struct.Struct(">II")


@dataclass(slots=True)
class _Health:
    """Shared with tickets in worker threads: set once, never cleared."""

    failure: str | None = None


class FlushTicket:
    """What one flush has to make durable; made by `EntryLog.begin_flush`.

    Only `run` may be called in a worker thread; it touches nothing but files.
    """

    __slots__ = ("_health", "done", "files", "folder", "generation", "last_index", "number")

    def __init__(
        self,
        number: int,
        last_index: int,
        generation: int,
        files: tuple[DiskFile, ...],
        folder: tuple[Disk, str] | None,
        health: _Health,
    ) -> None:
        self.number = number
        self.last_index = last_index
        self.generation = generation
        self.files = files
        self.done = False
        self.folder = folder
        self._health = health

    def run(self) -> None:
        """Flush the files. Blocking; thread-safe.

        Raises:
            FlushFailedError: The log is poisoned from now on.
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


class Drop:
    """Segments that retention removes; made by `EntryLog.plan_drop`.

    `note` and `remove` may be called in a worker thread.
    """

    __slots__ = ("_disk", "_paths", "anchor", "segments", "size_bytes")

    def __init__(self, disk: Disk, paths: StorePaths, anchor: Anchor) -> None:
        self._disk = disk
        self._paths = paths
        self.anchor = anchor
        self.segments: list[Segment] = []
        self.size_bytes = 0

    def note(self) -> None:
        """Note durably where the log begins. Blocking.

        Raises:
            DiskFullError: Nothing changed.
            FlushFailedError: Either begin may be there after a crash.
        """
        store_anchor(self._disk, self._paths.anchor, self.anchor)

    def remove(self) -> None:
        """Remove the files, durably. Blocking: a large file takes its time."""
        drop_segments(self._disk, self._paths, self.segments)


class EntryLog:
    """Entries of one Raft log, identical bytes at identical positions on every replica.

    Attributes (read-only for callers):
        first_index, last_index: ``last_index == first_index - 1`` when the log is empty.
        last_term, last_chain, last_store_time_ms: Of the newest entry, or of the anchor.
        first_position, end_position: Absolute bytes; the end is that of the newest entry.
        durable_index: Newest entry that is certainly on the disk.
        generation: Raised by every truncation; whatever was taken before one is void.
        mark_valid: False when `open` got a mark whose entry this log does not hold.
        report: What recovery did.
        damaged: Entries known to be damaged; they are not read any more until `mark_whole`.

    Invariant: ``first_index - 1 <= durable_index <= last_index``.
    """

    def __init__(
        self,
        disk: Disk,
        paths: StorePaths,
        log_format: LogFormat,
        anchor: Anchor,
        entry_index: EntryIndex,
        extent_slots: SlotFile,
        truncation_slots: SlotFile,
        recovered: Recovered,
        report: RecoveryReport,
    ) -> None:
        last = recovered.last
        self.first_index = anchor.first_index
        self.first_position = anchor.position
        self.last_index = last.index
        self.last_term = last.term
        self.last_chain = last.chain
        self.last_store_time_ms = recovered.last_store_time_ms
        self.end_position = last.end_position
        self.durable_index = last.index
        self.generation = 0
        self.report = report
        self.mark_valid = report.mark_valid
        self.damaged = DamagedEntries()
        self.on_unreadable: Callable[[int, int], object] = lambda _position, _size: None
        """Called with position and size of bytes that the disk does not give back."""
        self._disk = disk
        self._paths = paths
        self._segment_bytes = log_format.segment_bytes
        self._units_per_file = log_format.index_units_per_file
        self._anchor = anchor
        self._index = entry_index
        self._extent_slots = extent_slots
        self._truncation_slots = truncation_slots
        self._segments = recovered.segments
        self._spares = recovered.spares
        # Written behind an exact end only after the extent was moved, so a shortened log shows.
        self._limit = last.end_position
        self._limit_is_exact = True
        self._written_from = last.end_position
        self._indexed_end = last.end_position
        self._index_stale = False
        self._dirty: dict[int, Segment] = {}
        self._new_names = False
        self._tickets: list[FlushTicket] = []
        self._ticket_number = 0
        self._claim = Claim()
        self._health = _Health()
        self._closed = False

    @classmethod
    def open(
        cls,
        disk: Disk,
        root: str,
        *,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        trusted: Mark | None = None,
        index_units_per_file: int = DEFAULT_UNITS_PER_FILE,
        repair: bool = False,
    ) -> EntryLog:
        """Open the log below the data folder *root* and recover it to its last good entry.

        Args:
            trusted: The commit mark this node persisted: a durable, committed entry. Entries up
                to it are not scanned again. Without one the whole log is.
            index_units_per_file: For a new folder; an old one keeps what it was made with.
            repair: Cut at damage instead of refusing it. What is cut may have been promised, so
                the node must not vote before a leader has caught it up; `report.damage` tells.
        Returns:
            The log; all of it is durable. Look at `mark_valid` before trusting *trusted*.
        Raises:
            DamagedLogError: (a CorruptStoreError) Damage that is no torn tail; segments untouched.
            CorruptStoreError: A file beside the segments is damaged.
            ForeignStoreError: The folder has another layout.
            ConfigError: A size no log can have.
            DiskFullError, FlushFailedError: The disk said no; opening again is safe.
        """
        paths = StorePaths(root)
        wanted = LogFormat(segment_bytes, index_units_per_file)
        log_format = check_format(disk, paths, wanted)
        anchor = load_anchor(disk, paths.anchor)
        entry_index = EntryIndex(disk, paths, log_format.index_units_per_file)
        extent_slots = SlotFile(disk, paths.extent)
        truncation_slots = SlotFile(disk, paths.truncation)
        recovery = Recovery(
            disk,
            paths,
            log_format,
            anchor,
            entry_index,
            extent_slots,
            truncation_slots,
            trusted=trusted,
            repair=repair,
        )
        try:
            recovered = recovery.run()
        except BaseException:
            recovery.close()
            raise
        return cls(
            disk,
            paths,
            log_format,
            anchor,
            entry_index,
            extent_slots,
            truncation_slots,
            recovered,
            recovery.report,
        )

    # -- looking ---------------------------------------------------------------------------

    @property
    def max_entry_bytes(self) -> int:
        """The largest frame a segment can hold."""
        return self._segment_bytes - BLANK_BYTES

    @property
    def poisoned(self) -> bool:
        """Whether a flush failed: nothing may be written or promised any more."""
        return self._health.failure is not None

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
            if not self.restore_unit(index):
                raise
            return self._index.unit(index)

    def term_at(self, index: int) -> int:
        """Return the term of entry *index*; the one before the first kept entry is known too.

        Raises:
            OffsetOutOfRangeError: The log does not hold it.
            CorruptStoreError: The entry index is damaged there.
        """
        if index == self._anchor.first_index - 1:
            return self._anchor.prev_term
        return self._unit(index)[1]

    def chain_at(self, index: int) -> int:
        """Return the running chain up to and with entry *index*; raises like `term_at`."""
        if index == self._anchor.first_index - 1:
            return self._anchor.prev_chain
        return self._unit(index)[2]

    def position_at(self, index: int) -> int:
        """Return the absolute byte where entry *index* starts; raises like `term_at`."""
        return self._unit(index)[0]

    def size_at(self, index: int) -> int:
        """Return the size of entry *index* in bytes; raises like `term_at`."""
        return self._unit(index)[3]

    def mark_at(self, index: int) -> Mark:
        """Return the mark of entry *index*, or of the anchor; raises like `term_at`."""
        if index == self._anchor.first_index - 1:
            return self._anchor.mark
        position, term, chain, size = self._unit(index)
        return Mark(index, term, position, chain, position + size)

    def frame(self, index: int) -> memoryview:
        """Return the bytes of entry *index*.

        Returns:
            A read-only view that pins its segment. It stays as it is while the entry is in the
            log; after a truncation within its segment it shows what stands there instead.
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

        Args:
            max_bytes: Stop before the sum of entries exceeds it; the first is returned anyway.
        Returns:
            Views like those of `frame`, one for each segment touched: entries of one segment
            that follow each other are one view.
        Raises:
            OffsetOutOfRangeError: The log does not hold *first*.
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

        A page that cannot be brought in ends the process that looks at it; a read only fails.

        Raises:
            CorruptEntryError: The disk does not give them back.
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

        Its checksum is not looked at.

        Raises:
            OffsetOutOfRangeError: Before the first kept byte, or at or past the end.
            CorruptRecordError: No record starts there.
        """
        size, magic = _RECORD_BEGIN.unpack(self.read(phy_offset, _RECORD_BEGIN.size))
        room = self._segment_bytes - phy_offset % self._segment_bytes
        room = min(room, self.end_position - phy_offset)
        if magic not in (MAGIC_V1, MAGIC_V2) or not MIN_RECORD_BYTES <= size <= room:
            raise CorruptRecordError(f"no record starts at {phy_offset}")
        return self.read(phy_offset, size)

    def index_of(self, position: int) -> int:
        """Return the entry that holds the byte at *position*, or the one before it in a gap.

        Raises:
            OffsetOutOfRangeError: Outside the log.
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

    # -- damage ----------------------------------------------------------------------------

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
        if index == self._anchor.first_index - 1:
            return self._anchor.prev_chain
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

    def restore_unit(self, index: int) -> bool:
        """Make the index unit of entry *index* anew from its frame; tell whether it is there now.

        Units before it that are missing are restored, too, and all of a page that the disk does
        not give back.
        """
        # A page that the disk does not give back is written as a whole: some units of it are gone.
        units = self._index.renew(index)
        before = units.start - 1
        while before >= self.first_index and self._index.stored(before) is None:
            before = self._index.renew(before).start - 1
        for wanted in range(max(before + 1, self.first_index), min(units[-1], self.last_index) + 1):
            if self._index.stored(wanted) is None and not self._restore_unit(wanted):
                break
        return self._index.stored(index) is not None

    def _places_of(self, index: int) -> tuple[int, ...]:
        """Where entry *index* may stand, by the one before it."""
        if index == self._anchor.first_index:
            end = self._anchor.position
        else:
            unit = self._index.stored(index - 1)
            if unit is None:
                return ()
            end = unit[0] + unit[3]
        base = segment_base(end, self._segment_bytes)
        return (end,) if end == base else (end, base + self._segment_bytes)

    def _restore_unit(self, index: int) -> bool:
        chain = self.stored_chain(index - 1)
        for position in self._places_of(index):
            try:
                header = parse_header(self.bytes_at(position, ENTRY_HEADER_BYTES))
                if chain is None or (header.index, header.position) != (index, position):
                    continue
                verify_frame(self.bytes_at(position, header.size), header, chain)
            except CorruptEntryError:
                continue
            self._put_unit(header)
            return True
        return False

    def _put_unit(self, header: EntryHeader) -> None:
        unit = encode_unit(header.index, header.position, header.term, header.chain, header.size)
        self._index.put_bulk(header.index, bytearray(unit))

    def mark_damaged(self, index: int) -> None:
        """Note that the bytes of entry *index* are not what was written: nobody reads them now."""
        unit = self._index.stored(index)
        if unit is not None:
            self.damaged.add(index, unit[0], unit[0] + unit[3])
            return
        start, end = self.first_position, self.end_position
        for before in range(index - 1, self.first_index - 1, -1):
            if (unit := self._index.stored(before)) is not None:
                start = unit[0] + unit[3]
                break
        for after in range(index + 1, self.last_index + 1):
            if (unit := self._index.stored(after)) is not None:
                end = unit[0]
                break
        self.damaged.add(index, start, end)

    def mark_whole(self, index: int) -> None:
        """Note that entry *index* was put right, durably."""
        self.damaged.remove(index)

    def rewrite(self, frame: Buffer) -> EntryHeader:
        """Write another replica's copy of a damaged entry over it; durable after the next flush.

        Raises: As `accept` and `write_copies`.
        """
        header = self.accept(frame)
        self.write_copies([(header, frame)])
        return header

    def accept(self, frame: Buffer) -> EntryHeader:
        """Compare another replica's copy of a damaged entry with what is known of it here.

        Entries are put right in ascending order: without its own unit, one is known by the chain
        of the entry before it. Its unit is there afterwards; `write_copies` is to follow.

        Raises:
            CorruptEntryError: The copy is damaged, or is not the entry that stood here. Nothing
                changed.
            FlushFailedError: The log is poisoned. Nothing changed.
        """
        if self._health.failure is not None or self._closed:
            raise self._refusal()
        header = parse_header(frame)
        index, view = header.index, memoryview(frame)
        unit, chain = self._index.stored(index), self.stored_chain(index - 1)
        found = (header.position, header.term, header.chain, header.size)
        if unit is None:
            fits = chain is not None and header.position in self._places_of(index)
            after = self._index.stored(index + 1) if index < self.last_index else None
            fits = fits and (after is None or header.end_position <= after[0])
        else:
            fits = found == unit
        if not (fits and self.first_index <= index <= self.last_index):
            raise CorruptEntryError(f"the copy of entry {index} is not the entry that stood here")
        if chain is not None:
            verify_frame(view, header, chain)
        elif zlib.crc32(view[ENTRY_HEADER_BYTES:]) != header.body_crc:
            raise CorruptEntryError(f"the copy of entry {index} is damaged itself")
        segment = self._segments[segment_base(header.position, self._segment_bytes)]
        if view.nbytes != header.size or header.end_position + BLANK_BYTES > segment.end:
            raise CorruptEntryError(f"the copy of entry {index} does not fit its place")
        if unit is None:
            self._put_unit(header)
        return header

    def write_copies(self, copies: Sequence[tuple[EntryHeader, Buffer]]) -> None:
        """Write accepted copies, in ascending order; durable after the next flush.

        Those that follow each other are one write: a page that the disk does not give back can
        only be written as a whole.

        Raises:
            DiskFullError: A copy-on-write file system had no space.
            OSError: The rest of a page cannot be read: entries beside these are damaged, too.
        """
        runs: list[tuple[EntryHeader, list[Buffer]]] = []
        for header, frame in copies:
            if runs and self._continues(runs[-1][0], header):
                runs[-1] = (header, [*runs[-1][1], frame])
            else:
                runs.append((header, [frame]))
        for last, frames in runs:
            segment = self._segments[segment_base(last.position, self._segment_bytes)]
            data = b"".join(frames)
            rest = self._rest_of_page(segment, last)
            segment.write(last.end_position - len(data), data + rest)
            self._dirty[segment.base] = segment

    def _continues(self, before: EntryHeader, header: EntryHeader) -> bool:
        return before.end_position == header.position and header.position % self._segment_bytes != 0

    def _rest_of_page(self, segment: Segment, last: EntryHeader) -> bytes:
        """Return what stands between the end of an entry and the end of the page.

        Nothing when that is another entry's, or not known.
        """
        end = last.end_position
        size = min(-end % PAGE_BYTES, segment.end - end)
        if end == self.end_position:
            return bytes(size)
        following = self._index.stored(last.index + 1)
        if following is None or following[0] < segment.end:
            return b""
        return encode_blank(segment.end - end).ljust(size, b"\0")[:size]

    # -- appending -------------------------------------------------------------------------

    def place(self, size: int) -> int:
        """Return the position at which a frame of *size* bytes would start.

        Raises:
            InvariantBroken: No segment can hold it; callers cap their entries below that.
        """
        if size > self._segment_bytes - BLANK_BYTES:
            raise InvariantBroken(
                f"an entry of {size} bytes does not fit a segment of {self._segment_bytes}"
            )
        return place(self.end_position, size, self._segment_bytes)

    def append(self, frame: Buffer, *, sealed_here: bool = False) -> EntryHeader:
        """Write one sealed frame behind the newest entry; volatile until flushed.

        Args:
            frame: Copied; the caller may reuse it.
            sealed_here: This process sealed the frame just now for this very place: body and
                chain are not computed a second time.
        Returns:
            The frame's header.
        Raises:
            CorruptEntryError: The frame is damaged, or belongs elsewhere. Nothing changed.
            DiskFullError: No space. Nothing changed.
            LogBusyError: `reserve_next` is making space in another thread. Nothing changed.
            FlushFailedError: The log is poisoned. Nothing changed.
        """
        if self._health.failure is not None or self._closed:
            raise self._refusal()
        header = parse_header(frame)
        size = header.size
        end = self.end_position
        index = self.last_index + 1
        room = self._segment_bytes - end % self._segment_bytes
        position = end if size + BLANK_BYTES <= room else end + room
        view = memoryview(frame)
        if (
            header.index != index
            or header.position != position
            or header.term < self.last_term
            or view.nbytes != size
            or size + BLANK_BYTES > self._segment_bytes
        ):
            raise CorruptEntryError(
                f"entry {header.index} of term {header.term}, {size} bytes at {header.position}, "
                f"cannot follow entry {self.last_index} of term {self.last_term}: "
                f"index {index} at {position} is next"
            )
        if not sealed_here:
            verify_frame(view, header, self.last_chain)
        segment = self._segments.get(position - position % self._segment_bytes)
        if (
            segment is None
            or position + size > self._limit
            or not self._index.has_room(index)
            or position != end
        ):
            segment = self._make_room(index, end, position, size)
        try:
            segment.write(position, view)
            self._index.put(index, position, header.term, header.chain, size)
        except DiskFullError:
            self._wipe(segment, position, size)
            raise
        self._dirty[segment.base] = segment
        self.last_index = index
        self.last_term = header.term
        self.last_chain = header.chain
        self.end_position = position + size
        if header.store_time_ms > self.last_store_time_ms:
            self.last_store_time_ms = header.store_time_ms
        return header

    def _refusal(self) -> MQError:
        if self._closed:
            return InvariantBroken("the log is closed")
        return FlushFailedError(f"an earlier flush failed: {self._health.failure}")

    def _make_room(self, index: int, end: int, position: int, size: int) -> Segment:
        """Have segment, extent and index ready for a frame; write the blank of a roll."""
        rolls = position != end
        wanted = [segment_base(end, self._segment_bytes)] if rolls else []
        wanted.append(segment_base(position, self._segment_bytes))
        missing = [base for base in wanted if base not in self._segments]
        to_make = [base for base in missing if base not in self._spares]
        if to_make or position + size > self._limit or not self._index.has_room(index):
            if not self._claim.take():
                raise LogBusyError("space is being allocated right now; nothing was written")
            try:
                for base in to_make:
                    self._spares[base] = self._create(base)
                    self._new_names = True
                self._index.make_room(index)
                if position + size > self._limit:
                    self._extend(position + size + EXTENT_WINDOW_BYTES)
            finally:
                self._claim.give_back()
        for base in missing:
            # In this order: `reserve_next` is never to find it in neither.
            self._segments[base] = self._spares[base]
            del self._spares[base]
        if rolls:
            old = self._segments[wanted[0]]
            old.write(end, encode_blank(old.end - end))
            self._dirty[old.base] = old
        return self._segments[wanted[-1]]

    def _create(self, base: int) -> Segment:
        path = self._paths.segment(base)
        return Segment(base, self._disk.create(path, self._segment_bytes, reserve=True))

    def _extend(self, limit: int) -> None:
        """Note durably that the log may be written up to *limit*."""
        durable = self.durable_index
        indexed = self._anchor.mark
        if durable >= self.first_index:
            # From the file, not from memory: this may run beside the thread that appends.
            unit = self._index.stored(durable)
            if unit is not None:
                position, term, chain, size = unit
                indexed = Mark(durable, term, position, chain, position + size)
        limit = max(limit, self._limit)
        try:
            self._index_stale = False
            self._index.flush()
            self._extent_slots.store(Extent(limit, indexed, exact=False).encode())
        except FlushFailedError as error:
            self._health.failure = str(error)
            raise
        self._limit = limit
        self._limit_is_exact = False
        self._indexed_end = indexed.end_position

    def _wipe(self, segment: Segment, position: int, size: int) -> None:
        # Half a frame must not stay behind the end. Where even zeros find no space, nobody
        # knows what is on the disk.
        try:
            segment.zero(position, position + size)
        except DiskFullError as error:
            self._health.failure = str(error)

    # -- allocating ahead ------------------------------------------------------------------

    def _next_base(self) -> int:
        base = segment_base(self.end_position, self._segment_bytes)
        return base + self._segment_bytes if base in self._segments else base

    @property
    def has_reserve(self) -> bool:
        """Whether the next segment is allocated: a roll cannot find the disk full."""
        return self._next_base() in self._spares

    @property
    def needs_reserve(self) -> bool:
        """Whether `reserve_next` has something to do. Cheap."""
        end = self.end_position
        return self._health.failure is None and (
            not self.has_reserve
            or self._limit - end < EXTENT_WINDOW_BYTES // 2
            or self._index_stale
            or not self._index.has_room(self.last_index + self._units_per_file // 2 + 1)
        )

    def reserve_next(self) -> None:
        """Allocate ahead: next segment, extent, index file. Blocking; may run in a worker thread.

        Does nothing when another call is under way.

        Raises:
            DiskFullError: The log goes on until the segment at hand is full.
            FlushFailedError: The log is poisoned from now on.
        """
        if self._health.failure is not None or self._closed:
            raise self._refusal()
        if not self._claim.take():
            return
        try:
            self._index.make_room(self.last_index + self._units_per_file // 2 + 1)
            self._extend(self.end_position + EXTENT_WINDOW_BYTES)
            base = self._next_base()
            if base not in self._spares and base not in self._segments:
                segment = self._create(base)
                try:
                    segment.file.flush()
                    self._disk.flush_dir(self._paths.commitlog)
                except FlushFailedError as error:
                    self._health.failure = str(error)
                    raise
                self._spares[base] = segment
        finally:
            self._claim.give_back()

    # -- flushing --------------------------------------------------------------------------

    def begin_flush(self) -> FlushTicket | None:
        """Return a ticket for all that was appended or rewritten, None when all of it is durable.

        Tickets may overlap: a later one covers what an earlier one has not finished.
        """
        if self.durable_index >= self.last_index and not self._dirty and not self._tickets:
            return None
        files = {segment.file: None for segment in self._dirty.values()}
        folder = self._new_names
        for ticket in self._tickets:
            files.update(dict.fromkeys(ticket.files))
            folder = folder or ticket.folder is not None
        self._dirty.clear()
        self._new_names = False
        self._ticket_number += 1
        ticket = FlushTicket(
            self._ticket_number,
            self.last_index,
            self.generation,
            tuple(files),
            (self._disk, self._paths.commitlog) if folder else None,
            self._health,
        )
        self._tickets.append(ticket)
        return ticket

    def complete_flush(self, ticket: FlushTicket) -> bool:
        """Take note of a finished ticket.

        Returns:
            Whether `durable_index` now covers the ticket; False when a truncation came between.
        Raises:
            FlushFailedError: The flush failed; nothing of it may be promised.
        """
        if self._health.failure is not None:
            raise self._refusal()
        if not ticket.done:
            raise InvariantBroken("a flush ticket was completed before it was run")
        self._tickets = [other for other in self._tickets if other.number > ticket.number]
        if ticket.generation != self.generation:
            return False
        self.durable_index = max(self.durable_index, ticket.last_index)
        return True

    def flush(self) -> None:
        """Make everything durable now. Blocking.

        Raises:
            FlushFailedError: The log is poisoned from now on.
        """
        if self._health.failure is not None:
            raise self._refusal()
        ticket = self.begin_flush()
        if ticket is not None:
            ticket.run()
            self.complete_flush(ticket)

    # -- cutting ---------------------------------------------------------------------------

    def truncate_from(self, index: int) -> None:
        """Drop entry *index* and all after it; durable when it returns. Blocking, and rare.

        Nothing happens when the log has no entry *index*.

        Raises:
            InvariantBroken: *index* is below the first kept entry. Nothing changed.
            FlushFailedError: The log is poisoned; at the next open the cut is finished.
        """
        if self._health.failure is not None or self._closed:
            raise self._refusal()
        if index < self.first_index:
            raise InvariantBroken(f"truncation at entry {index} below {self.first_index}")
        if index > self.last_index:
            return
        # A segment that is allocated ahead may be one that is removed here.
        self._claim.wait()
        try:
            self._truncate(self.mark_at(index - 1), index)
        finally:
            self._claim.give_back()

    def _truncate(self, last: Mark, index: int) -> None:
        written_to = self._limit if self._limit_is_exact else self.end_position
        cut = Truncation(last.end_position, written_to)
        try:
            self._truncation_slots.store(cut.encode())
            self._cut(last)
            self._remove_behind(last.end_position, written_to)
            self._truncation_slots.store(replace(cut, done=True).encode())
        except (MQError, OSError) as error:
            self._health.failure = str(error)
            raise FlushFailedError(f"truncation at entry {index} failed: {error}") from error

    def _cut(self, last: Mark) -> None:
        self.generation += 1
        self.durable_index = min(self.durable_index, last.index)
        self.last_index = last.index
        self.last_term = last.term
        self.last_chain = last.chain
        self.end_position = last.end_position
        self._written_from = min(self._written_from, last.end_position)
        self.damaged.drop_outside(self.first_index, last.index)
        self._index.cut_to(last.index)
        self.last_store_time_ms = newest_store_time_ms(
            last.index, self._anchor, self._index, self._segments, self._segment_bytes
        )
        if last.end_position < self._indexed_end:
            self._index_stale = True

    def _remove_behind(self, end: int, written_to: int) -> None:
        base = segment_base(end, self._segment_bytes)
        dropped = [self._segments.pop(key) for key in sorted(self._segments) if key > base]
        for segment in dropped:
            self._dirty.pop(segment.base, None)
        drop_segments(self._disk, self._paths, dropped)
        active = self._segments.get(base)
        if active is not None:
            active.zero(end, written_to)
            active.file.flush()
        # What an unfinished ticket had taken stays dirty: a ticket of an old generation counts
        # for nothing.
        for ticket in self._tickets:
            self._new_names = self._new_names or ticket.folder is not None
            for file in ticket.files:
                for segment in self._segments.values():
                    if segment.file is file:
                        self._dirty[segment.base] = segment
        self._tickets.clear()

    def anchor_at(self, index: int) -> Anchor:
        """Return the anchor of a log that would begin with entry *index*, which is kept here."""
        before = index - 1
        if before < self.first_index:
            return self._anchor
        unit_position = self.position_at(index)
        return Anchor(
            first_index=index,
            position=unit_position,
            prev_term=self.term_at(before),
            prev_chain=self.chain_at(before),
            prev_store_time_ms=parse_header(self.frame(before)).store_time_ms,
        )

    def drop_before(self, anchor: Anchor) -> int:
        """Forget everything before *anchor*, whole segments only; return the bytes given back.

        Blocking; `plan_drop` tells how to do it in steps. Does nothing while `reserve_next` runs.

        Raises: As `plan_drop` and `Drop.note`.
        """
        if not self._claim.take():
            return 0  # space is being allocated right now; the caller comes again
        try:
            drop = self.plan_drop(anchor)
            if drop is None:
                return 0
            drop.note()
            self.detach(drop)
            drop.remove()
        finally:
            self._claim.give_back()
        return drop.size_bytes

    def plan_drop(self, anchor: Anchor) -> Drop | None:
        """Return how to forget everything before *anchor*; None when there is nothing to do.

        `Drop.note`, `detach` and `Drop.remove` follow, in this order, beside no `reserve_next`. A
        crash between any two of them is finished at the next open. Views handed out stay valid.

        Args:
            anchor: From `anchor_at`.
        Raises:
            InvariantBroken: The anchor is not of this log, or not durable here. Nothing changed.
            FlushFailedError: The log is poisoned. Nothing changed.
        """
        if self._health.failure is not None or self._closed:
            raise self._refusal()
        if anchor.first_index <= self.first_index:
            return None
        if anchor.first_index > self.durable_index or anchor != self.anchor_at(anchor.first_index):
            raise InvariantBroken(
                f"retention up to entry {anchor.first_index} of a log that is durable up to "
                f"{self.durable_index}"
            )
        return Drop(self._disk, self._paths, anchor)

    def detach(self, drop: Drop) -> None:
        """Begin with the anchor that *drop* has noted; what stands before it is not read again."""
        anchor = drop.anchor
        self._anchor = anchor
        self.first_index = anchor.first_index
        self.first_position = anchor.position
        self.damaged.drop_outside(self.first_index, self.last_index)
        base = segment_base(anchor.position, self._segment_bytes)
        dropped = [self._segments.pop(key) for key in sorted(self._segments) if key < base]
        for segment in dropped:
            self._dirty.pop(segment.base, None)
        drop.segments = dropped
        drop.size_bytes = len(dropped) * self._segment_bytes
        self._index.drop_before(anchor.first_index)

    @staticmethod
    def begin_anew(disk: Disk, root: str, anchor: Anchor) -> None:
        """Empty the folder of a closed log, so that the next open begins at *anchor*.

        For a replica that is given a snapshot: what it had lies before the anchor. Doing it
        again after a crash is safe.

        Raises:
            DiskFullError, FlushFailedError: Doing it again is safe.
        """
        paths = StorePaths(root)
        # First what gives space back.
        for folder in (paths.commitlog, paths.entry_index):
            for name in disk.list_dir(folder):
                disk.unlink(f"{folder}/{name}")
            disk.flush_dir(folder)
        for path, payload in (
            (paths.truncation, b""),
            (paths.extent, Extent(anchor.position, anchor.mark, exact=False).encode()),
        ):
            slots = SlotFile(disk, path)
            slots.load()
            slots.store(payload)
            slots.close()
        store_anchor(disk, paths.anchor, anchor)

    def close(self, *, clean: bool = True) -> None:
        """Give all files back. Idempotent; views handed out stay valid.

        Args:
            clean: Flush everything and note the exact end, so that the next open need not look
                for it. Must not run beside `FlushTicket.run` or `reserve_next`.
        Raises:
            FlushFailedError: The clean close did not come about; the files are closed anyway.
        """
        if self._closed:
            return
        try:
            if clean and self._health.failure is None and self._claim.take():
                self.flush()
                self._index.flush()
                last = self.mark_at(self.last_index)
                extent = Extent(self.end_position, last, exact=True)
                self._extent_slots.store(extent.encode())
        except FlushFailedError as error:
            self._health.failure = str(error)
            raise
        finally:
            self._closed = True
            for segment in (*self._segments.values(), *self._spares.values()):
                segment.close()
            self._index.close()
            self._extent_slots.close()
            self._truncation_slots.close()
