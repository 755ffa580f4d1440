"""The key index: RocketMQ's hash files from ``topic#key`` to positions in the commit log.

Everything above the newest position that is flushed is put again from the log. Putting is
idempotent for whole Raft entries: positions at or below the newest one indexed are skipped.

A file that the disk does not give back is given up, with those after it, and its owner puts the
keys of entries from there on again. Until that has come to its end a mark is missing on the disk,
so that a restart does not forget it.

Spec: docs/reference/formats.md, section 4.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger.commitlog.errors import CorruptStoreError, ForeignStoreError
from dledger.commitlog.java_hash import index_key_hash
from dledger.commitlog.key_index_file import (
    ENTRY_BYTES,
    ENTRY_DTYPE,
    HEADER_BYTES,
    MAX_TIME_DIFF_S,
    PLAIN_ENTRIES,
    SLOT_BYTES,
    FileFlush,
    Header,
    IndexFile,
)
from dledger.commitlog.seams import CANNOT_BE_READ, Disk, UtcOffset, utc

SLOTS_PER_FILE: Final = 5_000_000
ENTRIES_PER_FILE: Final = 20_000_000
"""Entry numbers of a file; number 0 means none, so a file takes one entry less."""

MAX_QUERY_RESULTS: Final = 64
"""RocketMQ's maxMsgsNumBatch."""

MS_PER_ENTRY_TIME: Final = 1000
"""An entry's time is the begin of its second, counted from its file's first: a search from a
time on asks for less than one of these before it."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_NAME_MS: Final = 253_402_300_799_999
_NAME_LENGTH: Final = 17

__all__ = [
    "ENTRIES_PER_FILE",
    "ENTRY_BYTES",
    "ENTRY_DTYPE",
    "HEADER_BYTES",
    "MAX_QUERY_RESULTS",
    "MAX_TIME_DIFF_S",
    "MS_PER_ENTRY_TIME",
    "PLAIN_ENTRIES",
    "SLOTS_PER_FILE",
    "SLOT_BYTES",
    "KeyIndex",
    "KeyIndexFlush",
    "file_name",
]


def file_name(time_ms: int, utc_offset: UtcOffset = utc) -> str:
    """Return the name of an index file: yyyyMMddHHmmssSSS, in local time as in RocketMQ."""
    local_ms = time_ms + utc_offset(time_ms)
    moment = _EPOCH + timedelta(milliseconds=min(max(local_ms, 0), _MAX_NAME_MS))
    return f"{moment:%Y%m%d%H%M%S}{moment.microsecond // 1000:03d}"


@dataclass(eq=False, repr=False)
class KeyIndexFlush:
    """Index files to flush. `run` blocks and may be called in a worker thread, one at a time.

    Attributes:
        done: Whether `run` has written all of it.
        unreadable: Files that could not be written, as the disk does not give back the rest of a
            page. They are to be given up.
        is_whole: Whether no file was to be given up before: it is left out, with those after it.
    """

    _disk: Disk
    _folder: str | None
    _files: Sequence[FileFlush]
    _mark: str | None
    _set_mark: bool
    is_whole: bool

    def __post_init__(self) -> None:
        self.done = False
        self.unreadable: list[str] = []

    def run(self) -> None:
        """Flush entries and slots, then the header that counts them.

        Raises:
            FlushFailedError: The node must stop.
            DiskFullError: Some slots are not in the file; the next job writes them again.
        """
        for flush in self._files:
            try:
                self._write(flush)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in CANNOT_BE_READ:
                    raise
                self.unreadable.append(flush.path)
                # Those after it must not count: after a crash nothing would tell what is missing.
                break
        if self._folder is not None and self._disk.exists(self._folder):
            self._disk.flush_dir(self._folder)
        if self._mark is not None and (self.unreadable or not self.is_whole):
            # Before a checkpoint claims these keys.
            _remove_mark(self._disk, self._mark)
        elif self._mark is not None and self._set_mark:
            self._disk.replace(self._mark, b"")
        self.done = not self.unreadable

    def _write(self, flush: FileFlush) -> None:
        # Descriptors of its own: a file may be removed meanwhile.
        file = self._disk.open(flush.path)
        try:
            for at, slots in flush.pages:
                file.write_at(at, slots.astype(">i4").tobytes())
            file.flush()
            file.write_at(0, flush.header)
            file.flush()
        finally:
            file.close()


def _remove_mark(disk: Disk, mark: str) -> None:
    if disk.exists(mark):
        disk.unlink(mark)
        disk.flush_dir(posixpath.dirname(mark))


class KeyIndex:
    """All index files below one folder; the newest takes entries.

    Not thread-safe; only the job that `begin_flush` returns may run elsewhere.

    Args:
        max_entries: Entry numbers in a file; it takes one entry less.
        utc_offset: Local time, for names of files.
        mark: Path of a file that is there while no key is missing; None: the owner takes the index
            for whole, whatever happens to it.
    Attributes:
        is_behind: Whether keys of the log above `end_phy_offset` may be missing: the owner puts
            them, then flushes with `begin_completion`.
        files_lost: Files given up since the start because the disk did not give them back.
        on_unreadable: Called with the path of a file that is to be given up, and why.
    Raises:
        ForeignStoreError: A file has another size than these settings give.
        CorruptStoreError: A file's header cannot be right, and there is no *mark*.
    """

    def __init__(
        self,
        disk: Disk,
        root: str,
        slots: int = SLOTS_PER_FILE,
        max_entries: int = ENTRIES_PER_FILE,
        utc_offset: UtcOffset = utc,
        mark: str | None = None,
    ) -> None:
        self._disk = disk
        self._root = root
        self._slots = slots
        self._max_entries = max_entries
        self._utc_offset = utc_offset
        self._names_changed = False
        self._last_flush: KeyIndexFlush | None = None
        self._files: list[IndexFile] = []
        self._mark = mark
        self._unreadable: set[str] = set()
        self._completing = False
        self.is_behind = mark is not None and not disk.exists(mark)
        self.files_lost = 0
        self.on_unreadable: Callable[[str, str], object] = lambda _path, _why: None
        for name in disk.list_dir(root):
            if len(name) == _NAME_LENGTH and name.isdecimal():
                self._load(f"{root}/{name}")
        self._last_name = self._files[-1].path.rpartition("/")[2] if self._files else ""
        if mark is not None and not self._files:
            # The folder may have been removed unnoticed. Written down: a start that finds the first
            # of the files that are made again would take them for all.
            self.is_behind = True
            _remove_mark(disk, mark)
        self.give_up_unreadable()
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
        index_file = IndexFile(path, file, self._slots, self._max_entries)
        try:
            has_entries = index_file.load_header()
        except OSError as error:
            self._note_unreadable(path, error)
            has_entries = True
        except CorruptStoreError as error:
            if self._mark is None:
                raise
            self._give_up_later(path, str(error))
            has_entries = True
        if has_entries:
            self._files.append(index_file)
        else:
            # Made shortly before a crash: nothing in it was ever flushed.
            file.close()
            self._disk.unlink(path)

    @property
    def _file_bytes(self) -> int:
        return HEADER_BYTES + self._slots * SLOT_BYTES + self._max_entries * ENTRY_BYTES

    @property
    def _newest_header(self) -> Header | None:
        """Header of the newest file with entries: where the disk was full, one may have none."""
        headers = (file.header for file in reversed(self._files))
        return next((header for header in headers if header.next_entry > 1), None)

    @property
    def end_phy_offset(self) -> int:
        """Newest position indexed, or -1."""
        newest = self._newest_header
        return -1 if newest is None else newest.end_phy_offset

    @property
    def last_timestamp_ms(self) -> int:
        """Store time of the newest entry, or 0."""
        newest = self._newest_header
        return 0 if newest is None else newest.end_timestamp_ms

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
        Raises:
            DiskFullError: What was added before a new file was needed stays.
        """
        self._note_last_flush()
        # Not where retention has removed the file meanwhile: nothing is given up then.
        if self._unreadable and (self.give_up_unreadable() or self._unreadable):
            return
        if self._files:
            done = int(np.searchsorted(phy_offsets, self.end_phy_offset, side="right"))
        else:
            done = 0
        while done < len(hashes):
            part = self._part(phy_offsets, done)
            if part.start == part.stop:
                self._roll(int(store_times[done]))
                part = self._part(phy_offsets, done)
            current = self._files[-1]
            try:
                current.append(hashes[part], phy_offsets[part], store_times[part])
            except OSError as error:
                self._note_unreadable(current.path, error)
                self.give_up_unreadable()
                return
            done = part.stop

    def _part(self, phy_offsets: npt.NDArray[np.int64], first: int) -> slice:
        """Return what of the keys from *first* on goes into the newest file."""
        if not self._files:
            return slice(first, first)
        end = min(first + self._files[-1].free_entries, len(phy_offsets))
        if first < end < len(phy_offsets) and phy_offsets[end - 1] == phy_offsets[end]:
            begin = int(np.searchsorted(phy_offsets, phy_offsets[end], side="left"))
            # A record with more keys than any file takes begins one, and is cut all the same.
            if begin > first or self._files[-1].header.next_entry > 1:
                end = max(begin, first)
        return slice(first, max(end, first))

    def query(self, topic: str, key: str, max_num: int, begin_ms: int, end_ms: int) -> list[int]:
        """Return positions of records that may have *key*, newest first.

        Other keys with the same hash are among them, and times are compared in whole seconds from
        the begin of the file: the caller reads the records.

        Args:
            max_num: At most 64 are returned.
            begin_ms, end_ms: Store time, both included.
        """
        found = self.candidates(topic, key, begin_ms, end_ms)
        limit = max(0, min(max_num, MAX_QUERY_RESULTS))
        return list(islice((position for position in found if position is not None), limit))

    def candidates(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int | None]:
        """Yield what `query` returns without end to it, one step a look at an entry.

        What is put while the caller pauses may be missing; a file removed meanwhile ends it.

        Yields:
            A position, or None for an entry of another key or time, or of the message before, which
            may have the key twice: the caller bounds the steps.
        """
        key_hash = index_key_hash(topic, key)
        before: int | None = None
        for file in reversed(list(self._files)):
            header = file.header
            if file.path in self._unreadable:
                continue
            if begin_ms <= header.end_timestamp_ms and header.begin_timestamp_ms <= end_ms:
                try:
                    for position in file.walk(key_hash, begin_ms, end_ms):
                        yield None if position == before else position
                        before = before if position is None else position
                        if file not in self._files:
                            return
                except OSError as error:
                    self._note_unreadable(file.path, error)
            if header.begin_timestamp_ms < begin_ms:
                break

    def truncate_beyond(self, phy_offset: int) -> None:
        """Forget every entry at or after byte *phy_offset* of the log: its end position."""
        while self._files and self._files[-1].header.begin_phy_offset >= phy_offset:
            self._remove(self._files.pop())
        if self._files and self._files[-1].header.end_phy_offset >= phy_offset:
            try:
                self._files[-1].truncate(phy_offset)
            except OSError as error:
                self._note_unreadable(self._files[-1].path, error)
                self.give_up_unreadable()

    def prepare(self) -> None:
        """Make the slot table of the file that takes entries, which reads all of them. Blocking."""
        if self._files and self._files[-1].free_entries > 0:
            try:
                self._files[-1].table()
            except OSError as error:
                self._note_unreadable(self._files[-1].path, error)
                self.give_up_unreadable()

    # -- what the disk does not give back ----------------------------------------------------

    def _note_unreadable(self, path: str, error: OSError) -> None:
        if error.errno not in CANNOT_BE_READ:
            raise error
        self._give_up_later(path, str(error))

    def _give_up_later(self, path: str, why: str) -> None:
        if path not in self._unreadable:
            self._unreadable.add(path)
            self.is_behind = self._mark is not None
            self.on_unreadable(path, why)

    def _note_last_flush(self) -> None:
        last = self._last_flush
        if last is not None and last.unreadable:
            for path in last.unreadable:
                self._give_up_later(path, "a page of it cannot be read")
            last.unreadable = []

    @property
    def has_unreadable(self) -> bool:
        """Whether files are to be given up: what is put is not taken meanwhile."""
        return bool(self._unreadable)

    def give_up_unreadable(self) -> bool:
        """Remove files that cannot be read, and those after them; tell whether there were any.

        `is_behind` holds then, durably, before the first file goes. Blocking. Does nothing while a
        job of `begin_completion` runs.

        Raises FlushFailedError: the node must stop.
        """
        if self._completing:
            return False
        bad = [at for at, file in enumerate(self._files) if file.path in self._unreadable]
        self._unreadable.clear()
        if not bad:
            return False
        self.is_behind = self._mark is not None
        if self._mark is not None:
            _remove_mark(self._disk, self._mark)
        self.files_lost += len(bad)
        while len(self._files) > bad[0]:
            self._remove(self._files.pop())
        # Before new ones come: of the old ones none may be back behind a gap after a power cut.
        self._disk.flush_dir(self._root)
        return True

    def delete_before(self, phy_offset: int) -> None:
        """Remove files that only point before byte *phy_offset*, the first one kept in the log."""
        while self._files and self._files[0].header.end_phy_offset < phy_offset:
            self._remove(self._files.pop(0))

    def begin_flush(self) -> KeyIndexFlush:
        """Return the job that makes everything put so far durable. Run one before the next."""
        return self._begin_flush(set_mark=False)

    def begin_completion(self) -> KeyIndexFlush:
        """Return such a job that also notes, durably, that no key is missing any more.

        `end_completion` follows when it was run.
        """
        self._note_last_flush()
        self._completing = True
        return self._begin_flush(set_mark=not self._unreadable)

    def end_completion(self, job: KeyIndexFlush) -> None:
        """Take note that *job* was run, or has failed."""
        self._completing = False
        self._note_last_flush()
        self.is_behind = bool(self._unreadable) or not job.done
        self.give_up_unreadable()

    def _begin_flush(self, *, set_mark: bool) -> KeyIndexFlush:
        self._note_last_flush()
        last = self._last_flush
        for file in self._files:
            if last is not None and not last.done:
                file.flush_again()
            elif not file.changed and file is not self._files[-1]:
                file.drop_table()
        folder = self._root if self._names_changed or (last and not last.done) else None
        self._names_changed = False
        # What comes behind a file that is to be given up goes with it.
        kept = takewhile(lambda file: file.path not in self._unreadable, self._files)
        files = [file.begin_flush() for file in kept if file.changed]
        is_whole = not self._unreadable
        job = KeyIndexFlush(self._disk, folder, files, self._mark, set_mark, is_whole)
        self._last_flush = job
        return job

    def flush(self) -> None:
        """Make everything put so far durable. Raises FlushFailedError: the node must stop."""
        self.begin_flush().run()

    def close(self) -> None:
        """Give the descriptors back; what was not flushed is put again from the log."""
        for file in self._files:
            file.file.close()
        self._files = []

    def _roll(self, store_time_ms: int) -> None:
        name = file_name(store_time_ms, self._utc_offset)
        if name <= self._last_name:
            # Names order the files: two in one millisecond, after a clock that went back, or at
            # the end of summer time, still come one after the other. None is used again: a flush
            # that was begun before its file was given up must not find another one.
            name = file_name(_name_ms(self._last_name) + 1)
        path = f"{self._root}/{name}"
        file = self._disk.create(path, self._file_bytes, reserve=False)
        self._last_name = name
        self._names_changed = True
        self._files.append(IndexFile(path, file, self._slots, self._max_entries))

    def _remove(self, file: IndexFile) -> None:
        file.file.close()
        self._disk.unlink(file.path)
        self._names_changed = True


def _name_ms(name: str) -> int:
    moment = datetime.strptime(name[:14] + "+0000", "%Y%m%d%H%M%S%z")
    return (moment - _EPOCH) // timedelta(milliseconds=1) + int(name[14:])
