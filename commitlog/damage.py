"""Damaged entries: found, kept from being read, and overwritten with another replica's copy.

The entry index has position, size, term and chain of every entry, apart from the segments; so a
frame that does not fit its checksums or its unit is recognized wherever it stands. Units that are
damaged themselves are made from the frames, see `LogRepair.restore_unit`.

Spec: docs/reference/formats.md, section 10.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from typing_extensions import Buffer

from dledger.commitlog.entry import ENTRY_HEADER_BYTES, EntryHeader, parse_header, verify_frame
from dledger.commitlog.entry_index import Unit, encode_unit
from dledger.commitlog.errors import CorruptEntryError
from dledger.commitlog.log_reader import LogFiles, LogReader
from dledger.commitlog.segment import BLANK_BYTES, Segment, encode_blank, segment_base

# ---------------------------------------------------------------------------------- found


@dataclass(slots=True)
class Checked:
    """What a check has covered: entries before *next_index*, and which of them are suspect."""

    next_index: int
    size_bytes: int
    suspects: list[int]


def check_entries(entry_log: LogReader, first: int, last: int, max_bytes: int) -> Checked:
    """Compare entries *first* … *last* with their checksums, their units and each other.

    Blocking; may run in a worker thread beside the thread that owns the log. What it suspects is
    to be checked again by that one.

    *max_bytes*: stop after this number of bytes; at least one entry is checked.
    """
    checked = Checked(first, 0, [])
    chain = entry_log.stored_chain(first - 1)
    for index in range(first, last + 1):
        unit = entry_log.stored_unit(index)
        if unit is None or not _is_whole(entry_log.bytes_at(unit[0], unit[3]), index, unit, chain):
            checked.suspects.append(index)
        chain = None if unit is None else unit[2]
        checked.size_bytes += ENTRY_HEADER_BYTES if unit is None else unit[3]
        checked.next_index = index + 1
        if checked.size_bytes >= max_bytes:
            break
    return checked


def _is_whole(frame: bytes, index: int, unit: Unit, prev_chain: int | None) -> bool:
    try:
        header = parse_header(frame)
        found = (header.position, header.term, header.chain, header.size)
        if header.index != index or found != unit:
            return False
        if prev_chain is not None:
            verify_frame(frame, header, prev_chain)
    except CorruptEntryError:
        return False
    return (
        zlib.crc32(memoryview(frame)[ENTRY_HEADER_BYTES:]) == header.body_crc
        if prev_chain is None
        else True
    )


# -------------------------------------------------------------------------- overwritten with a copy


PAGE_BYTES: Final = 4096
"""What a disk takes without having to read the rest of it."""


class LogRepair:
    """Repairs one log. Of the thread that owns the log."""

    def __init__(self, files: LogFiles, log: LogReader) -> None:
        self._files = files
        self._log = log

    def restore_unit(self, index: int) -> bool:
        """Make the index unit of entry *index* from its frame; return whether it is there now.

        Units before it that are missing are restored, too, and all of a page that the disk does
        not give back.
        """
        # A page that the disk does not give back is written as a whole: some units of it are lost.
        units = self._files.index.renew(index)
        before = units.start - 1
        while before >= self._log.first_index and self._files.index.stored(before) is None:
            before = self._files.index.renew(before).start - 1
        for wanted in range(
            max(before + 1, self._log.first_index), min(units[-1], self._log.last_index) + 1
        ):
            if self._files.index.stored(wanted) is None and not self._restore_unit(wanted):
                break
        return self._files.index.stored(index) is not None

    def _places_of(self, index: int) -> tuple[int, ...]:
        """Where entry *index* may stand, by the one before it."""
        if index == self._log.anchor.first_index:
            end = self._log.anchor.position
        else:
            unit = self._files.index.stored(index - 1)
            if unit is None:
                return ()
            end = unit[0] + unit[3]
        base = segment_base(end, self._files.segment_bytes)
        return (end,) if end == base else (end, base + self._files.segment_bytes)

    def _restore_unit(self, index: int) -> bool:
        chain = self._log.stored_chain(index - 1)
        for position in self._places_of(index):
            try:
                header = parse_header(self._log.bytes_at(position, ENTRY_HEADER_BYTES))
                if chain is None or (header.index, header.position) != (index, position):
                    continue
                verify_frame(self._log.bytes_at(position, header.size), header, chain)
            except CorruptEntryError:
                continue
            self._put_unit(header)
            return True
        return False

    def _put_unit(self, header: EntryHeader) -> None:
        unit = encode_unit(header.index, header.position, header.term, header.chain, header.size)
        self._files.index.put_bulk(header.index, bytearray(unit))

    def mark_damaged(self, index: int) -> None:
        """Note that the bytes of entry *index* are not what was written: they are not read now."""
        unit = self._files.index.stored(index)
        if unit is not None:
            self._log.damaged.add(index, unit[0], unit[0] + unit[3])
            return
        start, end = self._log.first_position, self._log.end_position
        for before in range(index - 1, self._log.first_index - 1, -1):
            if (unit := self._files.index.stored(before)) is not None:
                start = unit[0] + unit[3]
                break
        for after in range(index + 1, self._log.last_index + 1):
            if (unit := self._files.index.stored(after)) is not None:
                end = unit[0]
                break
        self._log.damaged.add(index, start, end)

    def mark_whole(self, index: int) -> None:
        """Note that entry *index* was put right, durably."""
        self._log.damaged.remove(index)

    def accept(self, frame: Buffer) -> EntryHeader:
        """Compare another replica's copy of a damaged entry with what is known of it here.

        Entries are put right in ascending order: without its own unit, one is known by the chain of
        the entry before it. `write_copies` is to follow.

        Raises:
            CorruptEntryError: The copy is damaged, or is not the entry that stood here. Nothing
                changed.
            FlushFailedError: The log is poisoned. Nothing changed.
        """
        health = self._files.health
        if health.failure is not None or health.closed:
            raise health.refusal()
        header = parse_header(frame)
        index, view = header.index, memoryview(frame)
        unit, chain = self._files.index.stored(index), self._log.stored_chain(index - 1)
        found = (header.position, header.term, header.chain, header.size)
        if unit is None:
            fits = chain is not None and header.position in self._places_of(index)
            after = self._files.index.stored(index + 1) if index < self._log.last_index else None
            fits = fits and (after is None or header.end_position <= after[0])
        else:
            fits = found == unit
        if not (fits and self._log.first_index <= index <= self._log.last_index):
            raise CorruptEntryError(f"the copy of entry {index} is not the entry that stood here")
        if chain is not None:
            verify_frame(view, header, chain)
        elif zlib.crc32(view[ENTRY_HEADER_BYTES:]) != header.body_crc:
            raise CorruptEntryError(f"the copy of entry {index} is damaged itself")
        segment = self._files.segments[segment_base(header.position, self._files.segment_bytes)]
        if view.nbytes != header.size or header.end_position + BLANK_BYTES > segment.end:
            raise CorruptEntryError(f"the copy of entry {index} does not fit its place")
        if unit is None:
            self._put_unit(header)
        return header

    def write_copies(self, copies: Sequence[tuple[EntryHeader, Buffer]]) -> None:
        """Write accepted copies, in ascending order; durable after the next flush.

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
            segment = self._files.segments[segment_base(last.position, self._files.segment_bytes)]
            data = b"".join(frames)
            rest = self._rest_of_page(segment, last)
            segment.write(last.end_position - len(data), data + rest)
            self._files.dirty[segment.base] = segment

    def _continues(self, before: EntryHeader, header: EntryHeader) -> bool:
        return (
            before.end_position == header.position
            and header.position % self._files.segment_bytes != 0
        )

    def _rest_of_page(self, segment: Segment, last: EntryHeader) -> bytes:
        """Return what stands between the end of an entry and the end of the page.

        Nothing when that is another entry's, or not known.
        """
        end = last.end_position
        size = min(-end % PAGE_BYTES, segment.end - end)
        if end == self._log.end_position:
            return bytes(size)
        following = self._files.index.stored(last.index + 1)
        if following is None or following[0] < segment.end:
            return b""
        return encode_blank(segment.end - end).ljust(size, b"\0")[:size]
