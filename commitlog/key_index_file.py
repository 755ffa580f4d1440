"""One file of the key index: a header, a table of slots and entries.

A slot holds the number of its newest entry and each entry the number of the one before it in the
same slot. The header becomes durable after the entries it counts. The file is read, not mapped: an
`OSError` passes through, and `dledger.commitlog.key_index` gives the file up.

Spec: docs/reference/formats.md, section 4.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dledger.commitlog.errors import CorruptStoreError
from dledger.commitlog.seams import DiskFile

HEADER_BYTES: Final = 40
SLOT_BYTES: Final = 4
ENTRY_DTYPE: Final = np.dtype(
    [("key_hash", ">i4"), ("phy_offset", ">i8"), ("time_diff_s", ">i4"), ("previous", ">i4")]
)
ENTRY_BYTES: Final = ENTRY_DTYPE.itemsize

MAX_TIME_DIFF_S: Final = 0x7FFFFFFF

PLAIN_ENTRIES: Final = 8
"""Up to here one entry after the other is cheaper than starting numpy (measured)."""

WALK_ENTRIES: Final = 200
"""Entries read at once on the way down a chain, 4,000 bytes: neighbours in a chain of one key are
often neighbours in the file."""

_SLOTS_PER_PAGE: Final = 1024
"""Slots in one page of 4 KiB: what is written again when one of them changes."""

_PAGES_PER_WRITE: Final = 64
"""Pages that a flush copies in one go: 256 KiB, a fraction of a millisecond."""

_REBUILD_ENTRIES: Final = 1 << 20
"""Entries looked at in one go when the slot table is rebuilt: 20 MB of the file at a time."""

_HEADER: Final = struct.Struct(">qqqqii")
_ENTRY: Final = struct.Struct(">iqii")
_SLOT: Final = struct.Struct(">i")

_Entries = npt.NDArray[Any]


class Header(NamedTuple):
    """The header of a file."""

    begin_timestamp_ms: int = 0
    end_timestamp_ms: int = 0
    begin_phy_offset: int = 0
    end_phy_offset: int = 0
    used_slots: int = 0
    next_entry: int = 1


class IndexFile:
    """A file, and in memory its header and, while it takes entries, its slots."""

    def __init__(self, path: str, file: DiskFile, slots: int, capacity: int) -> None:
        self.path = path
        self.file = file
        self.header = Header()
        self._slots = slots
        self._capacity = capacity
        self._entries_at = HEADER_BYTES + slots * SLOT_BYTES
        # Kept while the file takes entries and until its slots are in the file.
        self._table: npt.NDArray[np.int32] | None = None
        self._dirty_pages = np.zeros(-(-slots // _SLOTS_PER_PAGE), np.bool_)
        self.changed = False
        # Whether the file's own slots may be believed: not while its newest entries are on their
        # way, and not after a crash, which may leave slots ahead of the header.
        self.slots_in_file = False

    @property
    def free_entries(self) -> int:
        """How many entries it still takes."""
        return self._capacity - self.header.next_entry

    def load_header(self) -> bool:
        """Read the header; False when nothing was ever flushed to this file."""
        header = Header(*_HEADER.unpack(self.file.read(0, HEADER_BYTES)))
        if header.next_entry == 0:
            return False
        if not 1 <= header.next_entry <= self._capacity:
            raise CorruptStoreError(
                f"{self.path} claims {header.next_entry} entries of {self._capacity}: remove the "
                "folder, it is derived from the log"
            )
        self.header = header
        return True

    def table(self) -> npt.NDArray[np.int32]:
        """Return the slots; the first call makes them from the entries, all of which it reads."""
        if self._table is None:
            self._table = self._rebuild()
        return self._table

    def _rebuild(self) -> npt.NDArray[np.int32]:
        table = _zeros(self._slots)
        for first in range(1, self.header.next_entry, _REBUILD_ENTRIES):
            last = min(first + _REBUILD_ENTRIES, self.header.next_entry)
            hashes = self.entries(first, last)["key_hash"].astype(np.int32)
            # Numbers grow along the file, so the greatest of a slot is its newest.
            np.maximum.at(table, hashes % self._slots, np.arange(first, last, dtype=np.int32))
        return table

    def entries(self, first: int, last: int) -> _Entries:
        """Return entries *first* … *last* - 1."""
        at, size = self._entries_at + first * ENTRY_BYTES, (last - first) * ENTRY_BYTES
        return np.frombuffer(self.file.read(at, size), ENTRY_DTYPE)

    def append(
        self,
        hashes: npt.NDArray[np.int32],
        phy_offsets: npt.NDArray[np.int64],
        store_times: npt.NDArray[np.int64],
    ) -> None:
        """Add entries for which the file has space.

        Raises:
            DiskFullError: Nothing was added.
            OSError: What the file holds is void.
        """
        count = len(hashes)
        if count <= PLAIN_ENTRIES:
            self._append_plain(hashes.tolist(), phy_offsets.tolist(), store_times.tolist())
            return
        header = self.header
        first = header.next_entry
        table = self.table()
        begin_ms = int(store_times[0]) if first == 1 else header.begin_timestamp_ms
        begin_phy = int(phy_offsets[0]) if first == 1 else header.begin_phy_offset

        slots = hashes % np.int32(self._slots)
        order = np.argsort(slots, kind="stable")
        sorted_slots = slots[order]
        numbers = order.astype(np.int32) + np.int32(first)
        opens = np.ones(count, np.bool_)
        np.not_equal(sorted_slots[1:], sorted_slots[:-1], out=opens[1:])
        before = table[sorted_slots]
        newly_used = int(np.count_nonzero(opens & (before == 0)))
        # Within the bulk an entry follows its neighbour of the same slot, else the table's.
        before[1:] = np.where(opens[1:], before[1:], numbers[:-1])
        previous = np.empty(count, np.int32)
        previous[order] = before

        entries = np.empty(count, ENTRY_DTYPE)
        entries["key_hash"] = hashes
        entries["phy_offset"] = phy_offsets
        entries["time_diff_s"] = np.clip((store_times - begin_ms) // 1000, 0, MAX_TIME_DIFF_S)
        entries["previous"] = previous
        self.file.write_at(self._entries_at + first * ENTRY_BYTES, entries.tobytes())

        closes = np.ones(count, np.bool_)
        closes[:-1] = opens[1:]
        table[sorted_slots[closes]] = numbers[closes]
        self._dirty_pages[slots // _SLOTS_PER_PAGE] = True
        self.header = Header(
            begin_ms,
            int(store_times[-1]),
            begin_phy,
            int(phy_offsets[-1]),
            header.used_slots + newly_used,
            first + count,
        )
        self.changed = True
        self.slots_in_file = False

    def _append_plain(
        self, hashes: list[int], phy_offsets: list[int], store_times: list[int]
    ) -> None:
        header = self.header
        number = first = header.next_entry
        table = self.table()
        begin_ms = store_times[0] if first == 1 else header.begin_timestamp_ms
        begin_phy = phy_offsets[0] if first == 1 else header.begin_phy_offset
        used_slots, parts = header.used_slots, []
        newest: dict[int, int] = {}
        for key_hash, phy_offset, store_time in zip(hashes, phy_offsets, store_times, strict=True):
            slot = key_hash % self._slots
            previous = newest.get(slot) or int(table[slot])
            used_slots += previous == 0
            seconds = min(max((store_time - begin_ms) // 1000, 0), MAX_TIME_DIFF_S)
            parts.append(_ENTRY.pack(key_hash, phy_offset, seconds, previous))
            newest[slot] = number
            number += 1
        self.file.write_at(self._entries_at + first * ENTRY_BYTES, b"".join(parts))
        # Not before: on a full disk the same entries are put again.
        for slot, newest_number in newest.items():
            table[slot] = newest_number
            self._dirty_pages[slot // _SLOTS_PER_PAGE] = True
        self.header = Header(
            begin_ms, store_times[-1], begin_phy, phy_offsets[-1], used_slots, number
        )
        self.changed = True
        self.slots_in_file = False

    def truncate(self, phy_offset: int) -> None:
        """Forget entries at or after *phy_offset*; the first one is known to be before it."""
        offsets = self.entries(1, self.header.next_entry)["phy_offset"]
        kept = int(np.searchsorted(offsets, phy_offset))
        if not kept:
            raise CorruptStoreError(f"entries of {self.path} are not in log order")
        last = self.entries(kept, kept + 1)[0]
        begin_ms = self.header.begin_timestamp_ms
        self.header = self.header._replace(
            end_timestamp_ms=begin_ms + int(last["time_diff_s"]) * 1000,
            end_phy_offset=int(last["phy_offset"]),
            next_entry=kept + 1,
        )
        self._table = self._rebuild()
        self._dirty_pages[:] = True
        self.header = self.header._replace(used_slots=int(np.count_nonzero(self._table)))
        self.changed = True
        self.slots_in_file = False

    def walk(self, key_hash: int, begin_ms: int, end_ms: int) -> Iterator[int | None]:
        """Yield positions of *key_hash*, newest entry first, and None for every other entry."""
        header = self.header
        slot = key_hash % self._slots
        if not self.slots_in_file:
            number = int(self.table()[slot])
        else:
            at = HEADER_BYTES + slot * SLOT_BYTES
            (number,) = _SLOT.unpack(self.file.read(at, SLOT_BYTES))
        above, block, first = header.next_entry, b"", header.next_entry
        # Chains only go down; a link that does not is damage and ends the walk.
        while 0 < number < above:
            if number < first:
                first = max(1, number + 1 - WALK_ENTRIES)
                at, size = first * ENTRY_BYTES, (number + 1 - first) * ENTRY_BYTES
                block = self.file.read(self._entries_at + at, size)
            entry_hash, phy_offset, time_diff_s, previous = _ENTRY.unpack_from(
                block, (number - first) * ENTRY_BYTES
            )
            time_ms = header.begin_timestamp_ms + time_diff_s * 1000
            matches = entry_hash == key_hash and begin_ms <= time_ms <= end_ms
            yield phy_offset if matches else None
            if time_diff_s < 0 or time_ms < begin_ms:
                break
            above, number = number, previous

    def begin_flush(self) -> FileFlush:
        """Return what is to be written so that the header may count all entries there are."""
        self.changed = False
        pages: list[tuple[int, npt.NDArray[np.int32]]] = []
        if self._table is not None:
            for first, last in _stretches(np.flatnonzero(self._dirty_pages)):
                for page in range(first, last, _PAGES_PER_WRITE):
                    end = min(page + _PAGES_PER_WRITE, last)
                    # Views: the job copies them. A slot that changes meanwhile is ahead of the
                    # header, as one may be after a crash, and its page is in the next job.
                    slots = self._table[page * _SLOTS_PER_PAGE : end * _SLOTS_PER_PAGE]
                    pages.append((HEADER_BYTES + page * _SLOTS_PER_PAGE * SLOT_BYTES, slots))
            self._dirty_pages[:] = False
        return FileFlush(self.path, pages, _HEADER.pack(*self.header))

    def flush_again(self) -> None:
        """Write everything once more: the last job did not come to its end."""
        self.changed = True
        self._dirty_pages[:] = self._table is not None

    def drop_table(self) -> None:
        """Answer from the file from now on: it is full and its slots were flushed."""
        self._table = None
        self.slots_in_file = True


class FileFlush(NamedTuple):
    """What one flush writes into a file: slots by their place, then the header."""

    path: str
    pages: list[tuple[int, npt.NDArray[np.int32]]]
    header: bytes


def _zeros(count: int) -> npt.NDArray[np.int32]:
    """Return zeros that take memory page by page."""
    return np.frombuffer(mmap.mmap(-1, count * 4), np.int32)


def _stretches(pages: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    if not len(pages):
        return []
    breaks = np.flatnonzero(np.diff(pages) > 1)
    firsts = [int(pages[0]), *pages[breaks + 1].tolist()]
    lasts = [*(pages[breaks] + 1).tolist(), int(pages[-1]) + 1]
    return list(zip(firsts, lasts, strict=True))
