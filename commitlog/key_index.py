"""The key index: RocketMQ's hash files from ``topic#key`` to positions in the commit log.

A file is a header, a table of slots and entries; a slot holds the number of its newest entry and
each entry the number of the one before it in the same slot.

What a file counts as its own is what its header says, and the header becomes durable after the
entries it counts. Everything later is put again from the log. Putting is idempotent for whole
Raft entries: positions at or below the newest one indexed are skipped.

Spec: docs/formats.md, section 4.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commitlog.errors import CorruptStoreError, ForeignStoreError
from commitlog.java_hash import index_key_hash
from commitlog.seams import Disk, DiskFile, UtcOffset, utc

HEADER_BYTES: Final = 40
SLOT_BYTES: Final = 4
ENTRY_DTYPE: Final = np.dtype(
    [("key_hash", ">i4"), ("phy_offset", ">i8"), ("time_diff_s", ">i4"), ("previous", ">i4")]
)
ENTRY_BYTES: Final = ENTRY_DTYPE.itemsize

SLOTS_PER_FILE: Final = 5_000_000
ENTRIES_PER_FILE: Final = 20_000_000
"""Entry numbers of a file; number 0 means none, so a file takes one entry less."""

MAX_QUERY_RESULTS: Final = 64
"""RocketMQ's maxMsgsNumBatch."""

MAX_TIME_DIFF_S: Final = 0x7FFFFFFF

MS_PER_ENTRY_TIME: Final = 1000
"""An entry's time is the begin of its second, counted from its file's first: who wants all from a
time on asks for less than one of these before it."""

_SLOTS_PER_PAGE: Final = 1024
"""Slots in one page of 4 KiB: what is written again when one of them changes."""

_PAGES_PER_WRITE: Final = 64
"""Pages that a flush copies in one go: 256 KiB, a fraction of a millisecond."""

_REBUILD_ENTRIES: Final = 1 << 20
"""Entries looked at in one go when the slot table is rebuilt: 20 MB of the file at a time."""

_HEADER: Final = struct.Struct(">qqqqii")
_ENTRY: Final = struct.Struct(">iqii")

PLAIN_ENTRIES: Final = 8
"""Up to here one entry after the other is cheaper than starting numpy (measured)."""
_SLOT: Final = struct.Struct(">i")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_NAME_MS: Final = 253_402_300_799_999
_NAME_LENGTH: Final = 17

_Entries = npt.NDArray[Any]


def file_name(time_ms: int, utc_offset: UtcOffset = utc) -> str:
    """Return the name of an index file: yyyyMMddHHmmssSSS, in local time as in RocketMQ."""
    local_ms = time_ms + utc_offset(time_ms)
    moment = _EPOCH + timedelta(milliseconds=min(max(local_ms, 0), _MAX_NAME_MS))
    return f"{moment:%Y%m%d%H%M%S}{moment.microsecond // 1000:03d}"


class _Header(NamedTuple):
    begin_timestamp_ms: int = 0
    end_timestamp_ms: int = 0
    begin_phy_offset: int = 0
    end_phy_offset: int = 0
    used_slots: int = 0
    next_entry: int = 1


class _IndexFile:
    __slots__ = (
        "_capacity",
        "_dirty_pages",
        "_entries_at",
        "_slots",
        "_table",
        "changed",
        "file",
        "header",
        "path",
        "slots_in_file",
    )

    def __init__(self, path: str, file: DiskFile, slots: int, capacity: int) -> None:
        self.path = path
        self.file = file
        self.header = _Header()
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
    def room(self) -> int:
        return self._capacity - self.header.next_entry

    def load_header(self) -> bool:
        """Read the header; False when nothing was ever flushed to this file."""
        header = _Header(*_HEADER.unpack(self.file.view(0, HEADER_BYTES)))
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
        if self._table is None:
            self._table = self._rebuild()
        return self._table

    def _rebuild(self) -> npt.NDArray[np.int32]:
        table = np.zeros(self._slots, np.int32)
        for first in range(1, self.header.next_entry, _REBUILD_ENTRIES):
            last = min(first + _REBUILD_ENTRIES, self.header.next_entry)
            hashes = self.entries(first, last)["key_hash"].astype(np.int32)
            # Numbers grow along the file, so the greatest of a slot is its newest.
            np.maximum.at(table, hashes % self._slots, np.arange(first, last, dtype=np.int32))
        return table

    def entries(self, first: int, last: int) -> _Entries:
        view = self.file.view(self._entries_at + first * ENTRY_BYTES, (last - first) * ENTRY_BYTES)
        return np.frombuffer(view, ENTRY_DTYPE)

    def append(
        self,
        hashes: npt.NDArray[np.int32],
        phy_offsets: npt.NDArray[np.int64],
        store_times: npt.NDArray[np.int64],
    ) -> None:
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
        self.header = _Header(
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
        for key_hash, phy_offset, store_time in zip(hashes, phy_offsets, store_times, strict=True):
            slot = key_hash % self._slots
            previous = int(table[slot])
            used_slots += previous == 0
            seconds = min(max((store_time - begin_ms) // 1000, 0), MAX_TIME_DIFF_S)
            parts.append(_ENTRY.pack(key_hash, phy_offset, seconds, previous))
            table[slot] = number
            self._dirty_pages[slot // _SLOTS_PER_PAGE] = True
            number += 1
        self.file.write_at(self._entries_at + first * ENTRY_BYTES, b"".join(parts))
        self.header = _Header(
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
            (number,) = _SLOT.unpack(self.file.view(at, SLOT_BYTES))
        above = header.next_entry
        # Chains only go down; a link that does not is damage and ends the walk.
        while 0 < number < above:
            view = self.file.view(self._entries_at + number * ENTRY_BYTES, ENTRY_BYTES)
            entry_hash, phy_offset, time_diff_s, previous = _ENTRY.unpack(view)
            time_ms = header.begin_timestamp_ms + time_diff_s * 1000
            matches = entry_hash == key_hash and begin_ms <= time_ms <= end_ms
            yield phy_offset if matches else None
            if time_diff_s < 0 or time_ms < begin_ms:
                break
            above, number = number, previous

    def begin_flush(self) -> _FileFlush:
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
        return _FileFlush(self.path, pages, _HEADER.pack(*self.header))

    def flush_again(self) -> None:
        """Write everything once more: the last job did not come to its end."""
        self.changed = True
        self._dirty_pages[:] = self._table is not None

    def drop_table(self) -> None:
        """Answer from the file from now on: it is full and its slots were flushed."""
        self._table = None
        self.slots_in_file = True


class _FileFlush(NamedTuple):
    path: str
    pages: list[tuple[int, npt.NDArray[np.int32]]]
    header: bytes


class KeyIndexFlush:
    """Index files to flush. `run` blocks and may be called in a worker thread, one at a time."""

    __slots__ = ("_disk", "_files", "_folder", "done")

    def __init__(self, disk: Disk, folder: str | None, files: Sequence[_FileFlush]) -> None:
        self._disk = disk
        self._folder = folder
        self._files = files
        self.done = False

    def run(self) -> None:
        """Flush entries and slots, then the header that counts them.

        Raises:
            FlushFailedError: The node must stop.
            DiskFullError: Some slots are not in the file; the next job writes them again.
        """
        for path, pages, header in self._files:
            # Descriptors of its own: a file may be removed meanwhile.
            try:
                file = self._disk.open(path)
            except FileNotFoundError:
                continue
            try:
                for at, slots in pages:
                    file.write_at(at, slots.astype(">i4").tobytes())
                file.flush()
                file.write_at(0, header)
                file.flush()
            finally:
                file.close()
        if self._folder is not None:
            self._disk.flush_dir(self._folder)
        self.done = True


class KeyIndex:
    """All index files below one folder; the newest takes entries.

    Not thread-safe; only the job that `begin_flush` returns may run elsewhere.

    Args:
        slots: Slots in a file.
        max_entries: Entry numbers in a file; it takes one entry less.
        utc_offset: Local time, for names of files.
    Raises:
        ForeignStoreError: A file has another size than these settings give.
        CorruptStoreError: A file's header cannot be right.
    """

    __slots__ = (
        "_disk",
        "_files",
        "_last_flush",
        "_max_entries",
        "_names_changed",
        "_root",
        "_slots",
        "_utc_offset",
    )

    def __init__(
        self,
        disk: Disk,
        root: str,
        slots: int = SLOTS_PER_FILE,
        max_entries: int = ENTRIES_PER_FILE,
        utc_offset: UtcOffset = utc,
    ) -> None:
        self._disk = disk
        self._root = root
        self._slots = slots
        self._max_entries = max_entries
        self._utc_offset = utc_offset
        self._names_changed = False
        self._last_flush: KeyIndexFlush | None = None
        self._files: list[_IndexFile] = []
        for name in disk.list_dir(root):
            if len(name) == _NAME_LENGTH and name.isdecimal():
                self._load(f"{root}/{name}")
        for index_file in self._files[:-1]:
            index_file.slots_in_file = True
        # A process that was killed may have left names that no flush has reached.
        self._names_changed = bool(self._files)

    def _load(self, path: str) -> None:
        file = self._disk.open(path)
        if file.size == 0:
            # A crash came between making the file and giving it its size.
            file.close()
            self._disk.unlink(path)
            return
        if file.size != self._file_bytes:
            file.close()
            raise ForeignStoreError(
                f"{path} has {file.size} bytes in place of {self._file_bytes}: made with other "
                "numbers of slots or entries"
            )
        index_file = _IndexFile(path, file, self._slots, self._max_entries)
        if index_file.load_header():
            self._files.append(index_file)
        else:
            # Made shortly before a crash: nothing in it was ever flushed.
            file.close()
            self._disk.unlink(path)

    @property
    def _file_bytes(self) -> int:
        return HEADER_BYTES + self._slots * SLOT_BYTES + self._max_entries * ENTRY_BYTES

    @property
    def end_phy_offset(self) -> int:
        """Newest position indexed, or -1."""
        return self._files[-1].header.end_phy_offset if self._files else -1

    @property
    def last_timestamp_ms(self) -> int:
        """Store time of the newest entry, or 0."""
        return self._files[-1].header.end_timestamp_ms if self._files else 0

    def put_bulk(
        self,
        hashes: npt.NDArray[np.int32],
        phy_offsets: npt.NDArray[np.int64],
        store_times: npt.NDArray[np.int64],
    ) -> None:
        """Add the keys of one or more whole Raft entries, in log order.

        Args:
            hashes: From `index_key_hash`, none negative.
            phy_offsets: Record each key belongs to; never decreasing. What is at or below the
                newest position already indexed is skipped.
            store_times: Of these records, ms.
        Raises:
            DiskFullError: What was added before a new file was needed stays.
        """
        if self._files:
            done = int(np.searchsorted(phy_offsets, self.end_phy_offset, side="right"))
        else:
            done = 0
        while done < len(hashes):
            if not self._files or self._files[-1].room <= 0:
                self._roll(int(store_times[done]))
            current = self._files[-1]
            part = slice(done, done + current.room)
            current.append(hashes[part], phy_offsets[part], store_times[part])
            done = part.stop

    def query(self, topic: str, key: str, max_num: int, begin_ms: int, end_ms: int) -> list[int]:
        """Return positions of records that may have *key*, newest first.

        Other keys with the same hash are among them, and times are compared in whole seconds from
        the begin of the file: the caller looks at the records.

        Args:
            max_num: At most 64 are returned.
            begin_ms, end_ms: Store time, both included.
        """
        limit = min(max_num, MAX_QUERY_RESULTS)
        found: list[int] = []
        for position in self.candidates(topic, key, begin_ms, end_ms):
            if len(found) >= limit:
                break
            if position is not None:
                found.append(position)
        return found

    def candidates(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int | None]:
        """Yield what `query` returns without end to it, one step a look at an entry.

        What is put while the caller pauses may be missing; a file removed meanwhile ends it.

        Yields:
            A position, or None for an entry of another key or time: the caller bounds the steps.
        """
        key_hash = index_key_hash(topic, key)
        for file in reversed(list(self._files)):
            header = file.header
            if begin_ms <= header.end_timestamp_ms and header.begin_timestamp_ms <= end_ms:
                for position in file.walk(key_hash, begin_ms, end_ms):
                    yield position
                    if file not in self._files:
                        return
            if header.begin_timestamp_ms < begin_ms:
                break

    def truncate_beyond(self, phy_offset: int) -> None:
        """Forget every entry at or after byte *phy_offset* of the log: its end position."""
        while self._files and self._files[-1].header.begin_phy_offset >= phy_offset:
            self._remove(self._files.pop())
        if self._files and self._files[-1].header.end_phy_offset >= phy_offset:
            self._files[-1].truncate(phy_offset)

    def delete_before(self, phy_offset: int) -> None:
        """Remove files that only point before byte *phy_offset*, the first one kept in the log."""
        while self._files and self._files[0].header.end_phy_offset < phy_offset:
            self._remove(self._files.pop(0))

    def begin_flush(self) -> KeyIndexFlush:
        """Return the job that makes everything put so far durable. Run one before the next."""
        last = self._last_flush
        for file in self._files:
            if last is not None and not last.done:
                file.flush_again()
            elif not file.changed and file is not self._files[-1]:
                file.drop_table()
        folder = self._root if self._names_changed or (last and not last.done) else None
        self._names_changed = False
        files = [file.begin_flush() for file in self._files if file.changed]
        self._last_flush = KeyIndexFlush(self._disk, folder, files)
        return self._last_flush

    def flush(self) -> None:
        """Make everything put so far durable.

        Raises:
            FlushFailedError: The node must stop.
        """
        self.begin_flush().run()

    def close(self) -> None:
        """Give the descriptors back; what was not flushed is put again from the log."""
        for file in self._files:
            file.file.close()
        self._files = []

    def _roll(self, store_time_ms: int) -> None:
        name = file_name(store_time_ms, self._utc_offset)
        if self._files:
            # Names order the files: two in one millisecond, after a clock that went back, or at
            # the end of summer time, still come one after the other.
            newest = self._files[-1].path.rpartition("/")[2]
            while name <= newest:
                name = file_name(_name_ms(newest) + 1)
        path = f"{self._root}/{name}"
        file = self._disk.create(path, self._file_bytes, reserve=False)
        self._names_changed = True
        self._files.append(_IndexFile(path, file, self._slots, self._max_entries))

    def _remove(self, file: _IndexFile) -> None:
        file.file.close()
        self._disk.unlink(file.path)
        self._names_changed = True


def _name_ms(name: str) -> int:
    moment = datetime.strptime(name[:14] + "+0000", "%Y%m%d%H%M%S%z")
    return (moment - _EPOCH) // timedelta(milliseconds=1) + int(name[14:])


def _stretches(pages: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    if not len(pages):
        return []
    breaks = np.flatnonzero(np.diff(pages) > 1)
    firsts = [int(pages[0]), *pages[breaks + 1].tolist()]
    lasts = [*(pages[breaks] + 1).tolist(), int(pages[-1]) + 1]
    return list(zip(firsts, lasts, strict=True))
