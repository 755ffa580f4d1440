"""Consume queues: for each queue a file of 20-byte units that point into the commit log.

Units are derived from committed entries only and can be written again at any time. How many units
count is not recorded here: the state tables own each queue's min and max offset, so bytes at or
past the max offset may be left-overs and mean nothing.

Spec: docs/formats.md, section 3.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from commitlog.errors import (
    ForeignStoreError,
    InvariantBroken,
    OffsetOutOfRangeError,
)
from commitlog.seams import Disk, DiskFile

UNIT_DTYPE: Final = np.dtype([("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
UNIT_BYTES: Final = UNIT_DTYPE.itemsize
T = TypeVar("T")
Units = npt.NDArray[Any]
"""Array of `UNIT_DTYPE`."""

UNITS_PER_FILE: Final = 300_000
"""RocketMQ's file of 6,000,000 bytes."""

FILLER_SIZE: Final = 0x7FFFFFFF
"""Size in a unit that stands before a queue's first one in its file."""

MAX_OPEN_FILES: Final = 200
"""Open consume queue files; a mapped one has two descriptors, and 1,024 is the usual limit."""

NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""The process, or the machine, has no descriptor left: that says nothing about the disk."""

EAGER_QUEUES: Final = 1_000
"""Queues that are looked for when the store is opened; with more of them each is looked for when
it is asked for, so that a start does not read a hundred thousand folders."""

FLUSH_TOGETHER: Final = 256
"""Above so many files that were not open a flush asks for all of them at once: one after the other
would take a minute for 20,000 of them, and the next checkpoint waits for it."""

WAITING_BYTES_MAX: Final = 8 << 20
"""Units that wait in memory for the next flush, of queues whose file is not open. Beyond it they
are written at once."""

_NAME_DIGITS: Final = 20


class ConsumeQueueStore:
    """All consume queues below one folder: ``<root>/<topic>/<queue id>/<20-digit byte offset>``.

    Not thread-safe; only the job that `begin_flush` returns may run elsewhere.
    """

    __slots__ = (
        "_dirty",
        "_dirty_folders",
        "_disk",
        "_files",
        "_last_flush",
        "_max_open_files",
        "_queues",
        "_root",
        "_waiting",
        "_waiting_bytes",
        "units_per_file",
    )

    def __init__(
        self,
        disk: Disk,
        root: str,
        units_per_file: int = UNITS_PER_FILE,
        *,
        max_open_files: int = MAX_OPEN_FILES,
    ) -> None:
        """Find the queues below *root*.

        Args:
            max_open_files: Files kept open; fewer where the process has no descriptor left.
        Raises:
            ForeignStoreError: Their files have another size.
        """
        self._disk = disk
        self._root = root
        self._max_open_files = max_open_files
        self.units_per_file = units_per_file
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._files: OrderedDict[str, DiskFile] = OrderedDict()
        self._dirty: set[str] = set()
        self._dirty_folders: set[str] = set()
        self._last_flush: ConsumeQueueFlush | None = None
        self._waiting: dict[ConsumeQueue, None] = {}
        self._waiting_bytes = 0
        self._find()

    def _find(self) -> None:
        for topic in self._disk.list_dir(self._root):
            for name in self._disk.list_dir(f"{self._root}/{topic}"):
                if name.isdecimal():
                    self.queue(topic, int(name))._check()
                if len(self._queues) >= EAGER_QUEUES:
                    return

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue; files are made when its first unit is put."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            if not topic or topic in (".", "..") or "/" in topic or "\0" in topic:
                raise InvariantBroken(f"topic {topic!r} cannot name a folder")
            if queue_id < 0:
                raise InvariantBroken(f"queue id {queue_id} of {topic} is negative")
            queue = ConsumeQueue(self, self._disk, self._root, topic, queue_id)
            self._queues[topic, queue_id] = queue
        return queue

    def queues(self) -> Sequence[ConsumeQueue]:
        """Return the queues that were asked for, or found at the start, in no special order.

        Those with files are all among them while there are less than `EAGER_QUEUES`.
        """
        return list(self._queues.values())

    def delete_topic(self, topic: str) -> None:
        """Remove all queues of *topic* and their files; arrays read before stay valid."""
        folder = f"{self._root}/{topic}"
        for key in [key for key in self._queues if key[0] == topic]:
            self._queues.pop(key)._forget()
        self._dirty_folders = {
            path for path in self._dirty_folders if not f"{path}/".startswith(f"{folder}/")
        }
        if self._disk.exists(folder):
            self._disk.remove_tree(folder)
            self._disk.flush_dir(self._root)

    def begin_flush(self) -> ConsumeQueueFlush:
        """Return the job that makes all units put so far durable.

        What an earlier job did not come to is in it again.
        """
        self._end_flush()
        last = self._last_flush
        if last is not None and not last.done:
            self._dirty.update(last.paths)
            self._dirty_folders.update(last.folders)
        late = [part for queue in self._waiting for part in queue._begin_flush()]
        job = ConsumeQueueFlush(
            self._disk, sorted(self._dirty), sorted(self._dirty_folders), late, self.file_bytes
        )
        self._last_flush = job
        self._dirty = set()
        self._dirty_folders = set()
        return job

    @property
    def file_bytes(self) -> int:
        """Size of a file."""
        return self.units_per_file * UNIT_BYTES

    def _end_flush(self) -> None:
        """Forget the units in memory that the last job has written."""
        if self._last_flush is None or not self._last_flush.done:
            return
        for queue in [queue for queue in self._waiting if queue._end_flush()]:
            del self._waiting[queue]
        self._waiting_bytes = sum(queue._waiting_bytes for queue in self._waiting)

    def _may_wait(self, size: int) -> bool:
        """Whether units of a file that is not open may wait in memory."""
        return (
            len(self._files) >= self._max_open_files
            and self._waiting_bytes + size <= WAITING_BYTES_MAX
        )

    def flush(self) -> None:
        """Make all units put so far durable.

        Raises:
            FlushFailedError: The node must stop.
        """
        self.begin_flush().run()

    def close(self) -> None:
        """Give all descriptors back; what was not flushed stays in the page cache."""
        while self._files:
            self._files.popitem()[1].close()

    def _open(self, path: str) -> DiskFile:
        file = self._files.get(path)
        if file is None:
            file = self._with_descriptor(lambda: self._disk.open(path))
            expected = self.file_bytes
            if file.size != expected:
                file.close()
                if file.size == 0:
                    # A crash came between making the file and giving it its size.
                    self._disk.unlink(path)
                    return self._create(path.rpartition("/")[0], path)
                raise ForeignStoreError(f"{path} has {file.size} bytes in place of {expected}")
            self._keep(path, file)
        else:
            self._files.move_to_end(path)
        return file

    def _create(self, folder: str, path: str) -> DiskFile:
        # A flush may make it, too; one without a size was left by a crash.
        file, _ = self._with_descriptor(lambda: _opened(self._disk, path, self.file_bytes))
        if not file.size:
            file.close()
            self._disk.unlink(path)
            file, _ = self._with_descriptor(lambda: _opened(self._disk, path, self.file_bytes))
        self._dirty_folders.add(folder)
        self._keep(path, file)
        return file

    def _keep(self, path: str, file: DiskFile) -> None:
        self._files[path] = file
        if len(self._files) > self._max_open_files:
            self._files.popitem(last=False)[1].close()

    def _with_descriptor(self, get: Callable[[], T]) -> T:
        """Get a file; where no descriptor is left, give up half of those that are kept here."""
        while True:
            try:
                return get()
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR or not self._files:
                    raise
            for _ in range((len(self._files) + 1) // 2):
                self._files.popitem(last=False)[1].close()

    def _drop(self, path: str) -> None:
        self._dirty.discard(path)
        file = self._files.pop(path, None)
        if file is not None:
            file.close()


class Late(NamedTuple):
    """Units that waited in memory, for one file."""

    path: str
    within: int
    """Unit of the file that they begin at."""
    units: bytes


class ConsumeQueueFlush:
    """Files to flush. `run` blocks and may be called in a worker thread, one job at a time."""

    __slots__ = ("_disk", "_file_bytes", "_late", "done", "folders", "forgotten", "paths")

    def __init__(
        self,
        disk: Disk,
        paths: Sequence[str],
        folders: Sequence[str],
        late: Sequence[Late] = (),
        file_bytes: int = 0,
    ) -> None:
        self._disk = disk
        self._late = late
        self._file_bytes = file_bytes
        self.paths = paths
        self.folders = folders
        self.forgotten: set[str] = set()
        """Paths that were removed since: nothing is written there any more."""
        self.done = False

    def _write_late(self) -> bool:
        """Write what waited; tell whether all of it was."""
        all_written, many = True, len(self._late) > FLUSH_TOGETHER
        paths: list[str] = []
        folders: set[str] = set()
        for path, within, units in self._late:
            if path in self.forgotten:
                continue
            folder = path.rpartition("/")[0]
            if many:
                self._disk.make_dir(folder, durably=False)
            file, is_new = _opened(self._disk, path, self._file_bytes)
            try:
                if not file.size:
                    all_written = False  # being made by the owner of the store, or left by a crash
                    continue
                if is_new and within:
                    file.write_at(0, _fillers(within))
                file.write_at(within * UNIT_BYTES, units)
                if not many:
                    file.flush()
            finally:
                file.close()
            if many:
                paths.append(path)
                topic = folder.rpartition("/")[0]
                folders.update((folder, topic, topic.rpartition("/")[0]) if is_new else ())
            elif is_new:
                self._disk.flush_dir(folder)
        if many:
            self._disk.flush_all(paths, sorted(folders))
        return all_written

    def run(self) -> None:
        """Flush them.

        Raises:
            OSError: No descriptor is left; what was not flushed is in the next job.
            DiskFullError: No space for a new file; what was not flushed is in the next job.
            FlushFailedError: The node must stop.
        """
        all_written = self._write_late()
        for path in self.paths:
            # Descriptors of its own: the store may close or remove a file meanwhile.
            try:
                file = self._disk.open(path)
            except FileNotFoundError:
                continue
            try:
                file.flush()
            finally:
                file.close()
        for folder in self.folders:
            try:
                self._disk.flush_dir(folder)
            except FileNotFoundError:
                continue  # removed with its topic
        self.done = all_written


class ConsumeQueue:
    """One queue. Offsets are logical: unit *n* stands at byte 20·n."""

    __slots__ = (
        "_begins",
        "_disk",
        "_folder",
        "_leaving",
        "_store",
        "_tail",
        "queue_id",
        "topic",
    )

    def __init__(
        self, store: ConsumeQueueStore, disk: Disk, root: str, topic: str, queue_id: int
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self._store = store
        self._disk = disk
        self._folder = f"{root}/{topic}/{queue_id}"
        self._begins = {
            int(name) // UNIT_BYTES
            for name in disk.list_dir(self._folder)
            if len(name) == _NAME_DIGITS and name.isdecimal()
        }
        if self._begins:
            # A process that was killed may have left names that no flush has reached.
            store._dirty_folders.add(self._folder)
        # Newest units that stand in memory only, and those before them that a flush has now.
        self._tail = _Waiting()
        self._leaving = _Waiting()

    @property
    def _waiting_bytes(self) -> int:
        return len(self._tail.units) + len(self._leaving.units)

    def _begin_flush(self) -> list[Late]:
        """Return all units in memory, by file; they stay until `_end_flush`."""
        first = self._leaving.first if self._leaving.units else self._tail.first
        units = self._leaving.units + self._tail.units
        self._leaving, self._tail = _Waiting(first, units), _Waiting()
        parts, done = [], 0
        while done < len(units):
            begin, within = self._locate(first + done // UNIT_BYTES)
            size = min(self._store.file_bytes - within * UNIT_BYTES, len(units) - done)
            parts.append(Late(self._path(begin), within, bytes(units[done : done + size])))
            done += size
        return parts

    def _end_flush(self) -> bool:
        """Forget what a flush has written; tell whether nothing waits any more."""
        self._leaving = _Waiting()
        return not self._tail.units

    def _wait(self, first: int, units: Units) -> bool:
        """Let units wait in memory, if that is how they are to be stored."""
        waits = self._waiting_bytes > 0
        size = len(units) * UNIT_BYTES
        if not waits and (
            not self._store._may_wait(size)
            or self._path(self._locate(first)[0]) in self._store._files
        ):
            return False
        known = self._tail if self._tail.units else self._leaving
        if waits and (first != known.end or not self._store._may_wait(size)):
            self._write_waiting()
            return False
        if not self._tail.units:
            self._tail = _Waiting(first, bytearray())
        self._tail.units += np.ascontiguousarray(units, UNIT_DTYPE).tobytes()
        end = first + len(units)
        self._begins.update(range(self._locate(first)[0], end, self._store.units_per_file))
        self._store._waiting[self] = None
        self._store._waiting_bytes += size
        return True

    def _write_waiting(self) -> None:
        """Write what waits in memory, here and now; a flush that has it writes the same."""
        for path, within, units in self._begin_flush():
            begin = int(path.rpartition("/")[2]) // UNIT_BYTES
            if not self._disk.exists(path):
                self._begins.discard(begin)
            self._put_file(begin, within, np.frombuffer(units, UNIT_DTYPE))
        self._store._waiting_bytes -= self._waiting_bytes
        self._store._waiting.pop(self, None)
        self._end_flush()

    def _check(self) -> None:
        # One file tells: files of two sizes never lie side by side.
        for begin in sorted(self._begins)[:1]:
            self._store._open(self._path(begin))

    def put(self, first_queue_offset: int, units: Units) -> None:
        """Write *units* at *first_queue_offset* and on, over whatever is there.

        Holes are allowed: that offsets are dense is for the caller to see to.

        Raises:
            DiskFullError: Some of them may have been written; putting them again is harmless.
        """
        if first_queue_offset < 0:
            raise InvariantBroken(f"queue offset {first_queue_offset} is negative")
        if len(units) and self._wait(first_queue_offset, units):
            return
        per_file = self._store.units_per_file
        done = 0
        while done < len(units):
            begin, within = self._locate(first_queue_offset + done)
            count = min(per_file - within, len(units) - done)
            self._put_file(begin, within, units[done : done + count])
            done += count

    def _put_file(self, begin: int, within: int, units: Units) -> None:
        path = self._path(begin)
        if begin in self._begins:
            file = self._store._open(path)
        else:
            file = self._store._create(self._folder, path)
            self._begins.add(begin)
            if within:
                file.write_at(0, _fillers(within))
        file.write_at(within * UNIT_BYTES, np.ascontiguousarray(units, UNIT_DTYPE).tobytes())
        self._store._dirty.add(path)

    def read(self, first: int, count: int) -> Units:
        """Return *count* units from *first* on.

        Read-only, and inside one file a view that pins it. The caller stays between the queue's
        min and max offset; bytes outside mean nothing.

        Raises:
            OffsetOutOfRangeError: There is no file for one of them.
        """
        if first < 0 or count < 0:
            raise OffsetOutOfRangeError(f"{count} units at queue offset {first}")
        per_file = self._store.units_per_file
        parts: list[Units] = []
        end = first + count
        if self._waiting_bytes:
            waiting = [item for item in (self._leaving, self._tail) if item.units]
            late = [part for item in waiting for part in item.within(first, end)]
            if sum(map(len, late)) == count:
                return _joined(late)
            # What is in files comes first; no hole can be before what waits.
            end -= sum(map(len, late))
        else:
            late = []
        while first < end:
            begin, within = self._locate(first)
            if begin not in self._begins:
                raise OffsetOutOfRangeError(
                    f"{self.topic} queue {self.queue_id} has no file for queue offset {first}"
                )
            part = min(per_file - within, end - first)
            file = self._store._open(self._path(begin))
            view = file.view(within * UNIT_BYTES, part * UNIT_BYTES)
            parts.append(np.frombuffer(view, UNIT_DTYPE))
            first += part
        return _joined([*parts, *late])

    def truncate_to(self, max_offset: int) -> None:
        """Forget units at and after *max_offset*: files that hold no others are removed.

        In the file that stays nothing is overwritten; the state tables own the max offset.
        """
        self._write_waiting()
        for begin in [begin for begin in self._begins if begin >= max_offset]:
            self._remove(begin)

    def delete_before(self, min_offset: int) -> None:
        """Remove the files that hold only units before *min_offset*."""
        last = min_offset - self._store.units_per_file
        if self._waiting_bytes and any(begin <= last for begin in self._begins):
            self._write_waiting()
        for begin in [begin for begin in self._begins if begin <= last]:
            self._remove(begin)

    def _locate(self, queue_offset: int) -> tuple[int, int]:
        within = queue_offset % self._store.units_per_file
        return queue_offset - within, within

    def _path(self, begin: int) -> str:
        return f"{self._folder}/{begin * UNIT_BYTES:020d}"

    def _remove(self, begin: int) -> None:
        path = self._path(begin)
        self._store._drop(path)
        self._disk.unlink(path)
        self._store._dirty_folders.add(self._folder)
        self._begins.discard(begin)

    def _forget(self) -> None:
        self._store._waiting.pop(self, None)
        self._store._waiting_bytes -= self._waiting_bytes
        self._tail, self._leaving = _Waiting(), _Waiting()
        if self._store._last_flush is not None:
            self._store._last_flush.forgotten.update(map(self._path, self._begins))
        for begin in self._begins:
            self._store._drop(self._path(begin))
        self._begins = set()


def _opened(disk: Disk, path: str, size: int) -> tuple[DiskFile, bool]:
    """Return a file, and whether it was made now."""
    try:
        return disk.create(path, size, reserve=False), True
    except FileExistsError:
        pass
    return disk.open(path), False


class _Waiting:
    """Units in memory, from offset *first* on."""

    __slots__ = ("first", "units")

    def __init__(self, first: int = 0, units: bytes | bytearray = b"") -> None:
        self.first = first
        self.units = units

    @property
    def end(self) -> int:
        return self.first + len(self.units) // UNIT_BYTES

    def within(self, first: int, end: int) -> list[Units]:
        """Return a copy of the units of ``first … end - 1`` that are here."""
        low, high = max(first, self.first), min(end, self.end)
        if low >= high:
            return []
        at = (low - self.first) * UNIT_BYTES
        taken = bytes(self.units[at : at + (high - low) * UNIT_BYTES])
        return [np.frombuffer(taken, UNIT_DTYPE)]


def _joined(parts: list[Units]) -> Units:
    if len(parts) == 1:
        return parts[0]
    units: Units = np.concatenate(parts) if parts else np.empty(0, UNIT_DTYPE)
    units.flags.writeable = False
    return units


def _fillers(count: int) -> bytes:
    units = np.zeros(count, UNIT_DTYPE)
    units["size"] = FILLER_SIZE
    return units.tobytes()
