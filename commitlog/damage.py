"""Entries whose bytes went bad after they were written: how they are found, and which they are.

The entry index knows position, size, term and chain of every entry, apart from the segments; so a
frame that does not fit its checksums or its unit is distinguished from a good one wherever it
stands. Units that are damaged themselves are made again from the frames, see
`EntryLog.restore_unit`.

Spec: docs/reference/formats.md, section 10.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Protocol

from commitlog.entry import ENTRY_HEADER_BYTES, parse_header, verify_frame
from commitlog.entry_index import Unit
from commitlog.errors import CorruptEntryError


class CheckedLog(Protocol):
    """What a check reads; all of it may be called in a worker thread."""

    def stored_unit(self, index: int) -> Unit | None:
        """Return the unit on file, None when it is damaged."""

    def stored_chain(self, index: int) -> int | None:
        """Return the chain up to *index*, the entry before the first one included."""

    def bytes_at(self, position: int, size: int) -> bytes:
        """Return bytes of one segment; fewer when they are not there."""


@dataclass(slots=True)
class Checked:
    """What a check looked at: entries before *next_index*, and which of them are suspect."""

    next_index: int
    size_bytes: int
    suspects: list[int]


def check_entries(entry_log: CheckedLog, first: int, last: int, max_bytes: int) -> Checked:
    """Compare entries *first* … *last* with their checksums, their units and each other.

    Blocking; may run in a worker thread beside the thread that owns the log. What it suspects is
    to be checked again by that one.

    Args:
        max_bytes: Stop after this number of bytes; at least one entry is checked.
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


class DamagedEntries:
    """Which entries of a log are known to be damaged, by index and by place.

    Invariant: `indexes` ascends; the spans of its entries do, too, and do not overlap.
    """

    __slots__ = ("_spans", "indexes")

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
