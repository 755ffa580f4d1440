"""Finding the exact end of a log after any kind of stop. It trusts nothing it can check.

Recovery walks the entries from a mark that is known to be good to the end of the log. An entry
counts only when magic, checksums, index, term, position and chain all fit. Where one does not:

* nothing valid follows: a torn tail, never acknowledged; it is cut;
* a valid entry follows, or the place is at or below the commit mark, or the log was longer when
  it was closed: damage to something this node may have acknowledged. `DamagedLogError`; the node
  must neither vote nor lead with it.

Spec: docs/reference/formats.md, section 10.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dledger.commitlog.entry import (
    ENTRY_HEADER_BYTES,
    ENTRY_MAGIC,
    EntryHeader,
    parse_header,
    verify_frame,
)
from dledger.commitlog.entry_index import RECENT_UNITS, UNIT_BYTES, EntryIndex, encode_unit
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptStoreError,
    ForeignStoreError,
    NewerEntryError,
)
from dledger.commitlog.mark import Anchor, Extent, Mark, SlotFile, Truncation
from dledger.commitlog.seams import Disk
from dledger.commitlog.segment import (
    BLANK_BYTES,
    LogFormat,
    Segment,
    encode_blank,
    place,
    segment_base,
)
from dledger.commitlog.store_paths import StorePaths, parse_file_name

_MAGIC_BYTES: Final = ENTRY_MAGIC.to_bytes(4, "big")
_STORE_TIME: Final = struct.Struct(">q")
_STORE_TIME_OFFSET: Final = 40

_MAX_UNITS_BYTES: Final = 1 << 18
"""Index units collected before they are written."""

_NEW_SEGMENT_PROBE_BYTES: Final = 4096
"""Looked at in any case, should the extent have lost its newest value."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A place in a segment where an entry should be and is not.

    `later_index` is the index of a valid entry behind it, None when there is none.
    """

    path: str
    offset: int
    index: int
    later_index: int | None

    def __str__(self) -> str:
        behind = "" if self.later_index is None else f"; entry {self.later_index} follows it"
        return f"{self.path} is damaged at byte {self.offset}: no entry {self.index}{behind}"


class DamagedLogError(CorruptStoreError):
    """Damage where this node may have acknowledged something; the files were left as they were."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(str(damage))
        self.damage = damage


@dataclass(slots=True)
class RecoveryReport:
    """What recovery did. The caller measures how long it took.

    Args:
        entries_scanned: What was checked, frame by frame.
        torn_tail: Something unusable stood behind the last entry and was removed.
        mark_valid: False when a mark was given and the log does not hold that entry.
        index_rebuilt: The whole entry index was made again.
        damage: What was cut although it may have been acknowledged; only with ``repair=True``.
    """

    first_scanned_index: int = 1
    entries_scanned: int = 0
    torn_tail: bool = False
    cut_bytes: int = 0
    mark_valid: bool = True
    index_rebuilt: bool = False
    damage: Damage | None = None


@dataclass(slots=True)
class Recovered:
    """A log as recovery leaves it: everything in it is durable, nothing stands behind its end."""

    segments: dict[int, Segment]
    spares: dict[int, Segment]
    last: Mark
    last_store_time_ms: int


def newest_store_time_ms(
    index: int,
    anchor: Anchor,
    entry_index: EntryIndex,
    segments: Mapping[int, Segment],
    segment_bytes: int,
) -> int:
    """Return the store time of the newest entry at or before *index* that has one."""
    while index >= anchor.first_index:
        position = entry_index.unit(index)[0]
        segment = segments[segment_base(position, segment_bytes)]
        at = position + _STORE_TIME_OFFSET
        (store_time_ms,) = _STORE_TIME.unpack(segment.read_at(at, _STORE_TIME.size))
        if store_time_ms > 0:
            return int(store_time_ms)
        index -= 1
    return anchor.prev_store_time_ms


def drop_segments(disk: Disk, paths: StorePaths, segments: Sequence[Segment]) -> None:
    """Remove segment files, durably. Views of them stay valid."""
    for segment in segments:
        segment.close()
        disk.unlink(segment.path)
    if segments:
        disk.flush_dir(paths.commitlog)


def finish_truncation(
    disk: Disk, paths: StorePaths, slots: SlotFile, segment_bytes: int
) -> Truncation | None:
    """Finish a cut that a crash interrupted; return the newest cut, None when there is none.

    Raises CorruptStoreError: what was noted about it is damaged.
    """
    cut = Truncation.decode(slots.load() or b"")
    if cut is None or cut.done:
        return cut
    base = segment_base(cut.end_position, segment_bytes)
    later: list[Segment] = []
    for name in disk.list_dir(paths.commitlog):
        found = parse_file_name(name)
        if found is None or found < base:
            continue
        segment = Segment(found, disk.open(paths.segment(found)))
        if found > base:
            later.append(segment)
            continue
        segment.zero(cut.end_position, cut.written_to)
        segment.file.flush()
        segment.close()
    drop_segments(disk, paths, later)
    return cut


@dataclass(eq=False, repr=False)
class Recovery:
    """One pass over the segments of a folder; `run` may be called once."""

    _disk: Disk
    _paths: StorePaths
    _format: LogFormat
    _anchor: Anchor
    _entry_index: EntryIndex
    _extent_slots: SlotFile
    _truncation_slots: SlotFile
    _trusted: Mark | None
    _repair: bool

    def __post_init__(self) -> None:
        self._segment_bytes = self._format.segment_bytes
        self._extent: Extent | None = None
        self._cut: Truncation | None = None
        self._segments: dict[int, Segment] = {}
        self._loose: list[Segment] = []
        self._units = bytearray()
        self._units_first = self._anchor.first_index
        self.report = RecoveryReport()

    def run(self) -> Recovered:
        """Return the log, cut to its last good entry.

        Raises:
            DamagedLogError: See the module's docstring; the segments are as they were.
            CorruptStoreError: A file beside the segments is damaged.
            ForeignStoreError: A segment of another layout.
            DiskFullError: No space to rebuild the index; nothing is lost.
        """
        payload = self._extent_slots.load()
        self._extent = None if payload is None else Extent.decode(payload)
        self._cut = finish_truncation(
            self._disk, self._paths, self._truncation_slots, self._segment_bytes
        )
        self._open_segments()
        self._entry_index.open()
        start = self._choose_start()
        self.report.first_scanned_index = start.index + 1
        last, store_time_ms = self._scan(start)
        self._write_units()
        at_limit = self._extent is not None and self._extent.limit == last.end_position
        spares = self._settle_end(last, search=not at_limit)
        unchanged = at_limit and not self.report.entries_scanned
        wanted = Extent(last.end_position, last, exact=True)
        if not unchanged or self._extent != wanted:
            self._make_durable(start, last, wanted)
        if self._cut is not None:
            # Twice: from here on entries follow that a cut which is made once more would take.
            self._truncation_slots.store_twice(b"")
        self._entry_index.load_recent(self._anchor.first_index, last.index)
        if not store_time_ms:
            store_time_ms = newest_store_time_ms(
                last.index, self._anchor, self._entry_index, self._segments, self._segment_bytes
            )
        return Recovered(
            segments=self._segments,
            spares=spares,
            last=last,
            last_store_time_ms=store_time_ms,
        )

    def _open_segments(self) -> None:
        size = self._segment_bytes
        expected = segment_base(self._anchor.position, size)
        stale: list[Segment] = []
        for name in self._disk.list_dir(self._paths.commitlog):
            base = parse_file_name(name)
            if base is None or base % size:
                raise ForeignStoreError(
                    f"{self._paths.commitlog}/{name} is not a segment of {size} bytes"
                )
            segment = Segment(base, self._disk.open(self._paths.segment(base)))
            if base < expected and not self._segments:
                stale.append(segment)
            elif base == expected and segment.size == size:
                self._segments[base] = segment
                expected += size
            else:
                self._loose.append(segment)
        # Below the anchor: retention was interrupted after it had moved the anchor.
        drop_segments(self._disk, self._paths, stale)

    # -- where to begin --------------------------------------------------------------------

    def _choose_start(self) -> Mark:
        begin = self._anchor.mark
        trusted = self._trusted
        if trusted is not None and trusted.index > begin.index:
            self.report.mark_valid = self._holds(trusted)
        elif trusted is not None and trusted.index == begin.index:
            self.report.mark_valid = trusted.chain == begin.chain
        usable = trusted is not None and self.report.mark_valid and trusted.index > begin.index
        if usable and trusted is not None and self._extent is not None:
            indexed = self._extent.indexed
            if indexed.index > begin.index and self._holds(indexed):
                start = min(trusted, indexed, key=lambda mark: mark.index)
                if self._index_fits(start):
                    damage = self._damaged_body(start)
                    if damage is None:
                        return start
                    if not self._repair:
                        raise DamagedLogError(damage)
                    # The walk from the beginning meets it again, and cuts there.
        self.report.index_rebuilt = bool(self._segments)
        self._entry_index.renew_unreadable()
        return begin

    def _holds(self, mark: Mark) -> bool:
        segment = self._segments.get(segment_base(mark.position, self._segment_bytes))
        if segment is None:
            return False
        try:
            header = parse_header(segment.read_at(mark.position, ENTRY_HEADER_BYTES))
        except NewerEntryError as error:
            raise ForeignStoreError(f"{segment.path}: {error}") from error
        except CorruptEntryError:
            return False
        found = (header.index, header.term, header.position, header.chain, header.end_position)
        return found == (mark.index, mark.term, mark.position, mark.chain, mark.end_position) and (
            mark.end_position + BLANK_BYTES <= segment.end
        )

    def _damaged_body(self, mark: Mark) -> Damage | None:
        segment = self._segments[segment_base(mark.position, self._segment_bytes)]
        header = parse_header(segment.read_at(mark.position, ENTRY_HEADER_BYTES))
        body = segment.read_at(mark.position + ENTRY_HEADER_BYTES, header.size - ENTRY_HEADER_BYTES)
        if zlib.crc32(body) == header.body_crc:
            return None
        return Damage(segment.path, mark.position - segment.base, mark.index, None)

    def _index_fits(self, mark: Mark) -> bool:
        # One unit at either end of each file: a file that is missing or is another log's.
        per_file = self._format.index_units_per_file
        first = self._anchor.first_index
        while first <= mark.index:
            last = min(first - first % per_file + per_file - 1, mark.index)
            if self._entry_index.stored(first) is None or self._entry_index.stored(last) is None:
                return False
            first = last + 1
        recent = max(self._anchor.first_index, mark.index - RECENT_UNITS)
        if any(self._entry_index.stored(i) is None for i in range(recent, mark.index)):
            return False
        size = mark.end_position - mark.position
        return self._entry_index.stored(mark.index) == (mark.position, mark.term, mark.chain, size)

    # -- the walk --------------------------------------------------------------------------

    def _scan(self, start: Mark) -> tuple[Mark, int]:
        """Return the last good entry and the newest store time met, 0 when none was."""
        last = start
        newest = 0
        self._units_first = start.index + 1
        size = self._segment_bytes
        segment = self._segments.get(segment_base(last.end_position, size))
        while segment is not None:
            last, newest = self._scan_segment(segment, last, newest)
            following = self._segments.get(segment.end)
            if following is None:
                break
            header = self._fitting_entry(following, following.base, last)
            if header is None or place(last.end_position, header.size, size) != following.base:
                break
            self._restore_blank(segment, last.end_position)
            segment = following
        return last, newest

    def _scan_segment(self, segment: Segment, last: Mark, newest: int) -> tuple[Mark, int]:
        position = max(last.end_position, segment.base)
        entries = 0
        while (header := self._fitting_entry(segment, position, last)) is not None:
            last = Mark(header.index, header.term, position, header.chain, position + header.size)
            position += header.size
            newest = header.store_time_ms or newest
            entries += 1
            self._units += encode_unit(
                header.index, header.position, header.term, header.chain, header.size
            )
            if len(self._units) >= _MAX_UNITS_BYTES:
                self._write_units()
        self.report.entries_scanned += entries
        return last, newest

    def _fitting_entry(self, segment: Segment, position: int, last: Mark) -> EntryHeader | None:
        """The header at *position* if a whole entry that continues *last* stands there."""
        try:
            header = parse_header(segment.read_at(position, ENTRY_HEADER_BYTES))
            if (
                header.index != last.index + 1
                or header.term < last.term
                or header.position != position
                or header.end_position + BLANK_BYTES > segment.end
            ):
                return None
            verify_frame(segment.read_at(position, header.size), header, last.chain)
        except NewerEntryError as error:
            raise ForeignStoreError(f"{segment.path}: {error}") from error
        except CorruptEntryError:
            return None
        return header

    def _restore_blank(self, segment: Segment, position: int) -> None:
        if segment.has_blank_at(position):
            return
        self.report.torn_tail = True
        self.report.cut_bytes += segment.zero(position, segment.end)
        segment.write(position, encode_blank(segment.end - position))

    def _write_units(self) -> None:
        if self._units:
            self._entry_index.put_bulk(self._units_first, self._units)
            self._units_first += len(self._units) // UNIT_BYTES
            self._units = bytearray()

    # -- the end ---------------------------------------------------------------------------

    def _settle_end(self, last: Mark, *, search: bool) -> dict[int, Segment]:
        """Remove what stands behind *last*; return segments that were never written."""
        end = last.end_position
        base = segment_base(end, self._segment_bytes)
        behind = [segment for key, segment in self._segments.items() if key > base]
        active = self._segments.get(base)
        limit = self._extent.limit if self._extent is not None else None
        if search:
            places = [*([active] if active is not None else []), *behind, *self._loose]
            self._search(places, last, limit)
        for segment in behind:
            del self._segments[segment.base]
        spares: dict[int, Segment] = {}
        dropped: list[Segment] = []
        for segment in behind:
            if limit is not None and self._is_new(segment, limit):
                spares[segment.base] = segment
            else:
                dropped.append(segment)
        drop_segments(self._disk, self._paths, [*dropped, *self._loose])
        self._loose = []
        if search and active is not None:
            stop = active.end if limit is None or self.report.damage is not None else limit
            cut = active.zero(end, max(stop, end))
            self.report.cut_bytes += cut
            self.report.torn_tail = self.report.torn_tail or cut > 0
            active.file.flush()
        return spares

    @staticmethod
    def _is_new(segment: Segment, limit: int) -> bool:
        stop = max(limit, segment.base + _NEW_SEGMENT_PROBE_BYTES)
        return next(segment.written_chunks(segment.base, stop), None) is None

    def _search(self, places: Sequence[Segment], last: Mark, limit: int | None) -> None:
        """Decide whether what stands behind *last* may be cut."""
        end = last.end_position
        expected = last.index + 1
        written = False
        later: int | None = None
        for segment in places:
            start = max(segment.base, end)
            stop = segment.end if limit is None else min(limit, segment.end)
            for position, content in segment.written_chunks(start, stop):
                written = True
                later = _entry_in(segment, position, content, expected)
                if later is not None:
                    break
            if later is not None:
                break
        below_mark = written and self._trusted is not None and self._trusted.index >= expected
        if later is None and not below_mark and not self._ends_early(end):
            return
        base = segment_base(end, self._segment_bytes)
        damage = Damage(self._paths.segment(base), end - base, expected, later)
        if not self._repair:
            raise DamagedLogError(damage)
        self.report.damage = damage
        self._cut = Truncation(end, base + self._segment_bytes)
        self._truncation_slots.store(self._cut.encode())

    def _ends_early(self, end: int) -> bool:
        """Whether the log was closed, or recovered, with more in it than is there now."""
        if self._extent is None or not self._extent.exact or end >= self._extent.limit:
            return False
        cut = self._cut
        return cut is None or cut.written_to < self._extent.limit or end < cut.end_position

    def close(self) -> None:
        """Give all files back after `run` has failed."""
        for segment in (*self._segments.values(), *self._loose):
            segment.close()
        self._entry_index.close()
        self._extent_slots.close()
        self._truncation_slots.close()

    def _make_durable(self, start: Mark, last: Mark, extent: Extent) -> None:
        from_base = segment_base(start.end_position, self._segment_bytes)
        for base, segment in self._segments.items():
            if base >= from_base:
                segment.file.flush()
        self._disk.make_dir(self._paths.commitlog)
        self._disk.flush_dir(self._paths.commitlog)
        self._entry_index.flush()
        self._extent_slots.store(extent.encode())


def _entry_in(segment: Segment, position: int, content: bytes, expected: int) -> int | None:
    """Index of the first valid entry after *expected* that starts in this piece, or None."""
    # The magic itself may lie across the end of the piece.
    follow = segment.read_at(position + len(content), len(_MAGIC_BYTES) - 1)
    searched = content + follow
    at = searched.find(_MAGIC_BYTES)
    while at >= 0:
        try:
            header = parse_header(segment.read_at(position + at, ENTRY_HEADER_BYTES))
        except NewerEntryError as error:
            raise ForeignStoreError(f"{segment.path}: {error}") from error
        except CorruptEntryError:
            pass
        else:
            if header.position == position + at and header.index > expected:
                return header.index
        at = searched.find(_MAGIC_BYTES, at + 1)
    return None
