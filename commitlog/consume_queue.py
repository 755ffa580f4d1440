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
from typing import Any, Final

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
        for topic in disk.list_dir(root):
            for name in disk.list_dir(f"{root}/{topic}"):
                if name.isdecimal():
                    self.queue(topic, int(name))._check()
                    # A process that was killed may have left names that no flush has reached.
                    self._dirty_folders.add(f"{root}/{topic}/{name}")

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
        """Return all queues that have files or were asked for, in no special order."""
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
        last = self._last_flush
        if last is not None and not last.done:
            self._dirty.update(last.paths)
            self._dirty_folders.update(last.folders)
        job = ConsumeQueueFlush(self._disk, sorted(self._dirty), sorted(self._dirty_folders))
        self._last_flush = job
        self._dirty = set()
        self._dirty_folders = set()
        return job

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
            expected = self.units_per_file * UNIT_BYTES
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
        size = self.units_per_file * UNIT_BYTES
        file = self._with_descriptor(lambda: self._disk.create(path, size, reserve=False))
        self._dirty_folders.add(folder)
        self._keep(path, file)
        return file

    def _keep(self, path: str, file: DiskFile) -> None:
        self._files[path] = file
        if len(self._files) > self._max_open_files:
            self._files.popitem(last=False)[1].close()

    def _with_descriptor(self, get: Callable[[], DiskFile]) -> DiskFile:
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


class ConsumeQueueFlush:
    """Files to flush. `run` blocks and may be called in a worker thread, one job at a time."""

    __slots__ = ("_disk", "done", "folders", "paths")

    def __init__(self, disk: Disk, paths: Sequence[str], folders: Sequence[str]) -> None:
        self._disk = disk
        self.paths = paths
        self.folders = folders
        self.done = False

    def run(self) -> None:
        """Flush them.

        Raises:
            OSError: No descriptor is left; what was not flushed is in the next job.
            FlushFailedError: The node must stop.
        """
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
        self.done = True


class ConsumeQueue:
    """One queue. Offsets are logical: unit *n* stands at byte 20·n."""

    __slots__ = ("_begins", "_disk", "_folder", "_store", "queue_id", "topic")

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
        per_file = self._store.units_per_file
        done = 0
        while done < len(units):
            begin, within = self._locate(first_queue_offset + done)
            count = min(per_file - within, len(units) - done)
            path = self._path(begin)
            if begin in self._begins:
                file = self._store._open(path)
            else:
                file = self._store._create(self._folder, path)
                self._begins.add(begin)
                if within:
                    file.write_at(0, _fillers(within))
            part = units[done : done + count]
            file.write_at(within * UNIT_BYTES, np.ascontiguousarray(part, UNIT_DTYPE).tobytes())
            self._store._dirty.add(path)
            done += count

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
        if len(parts) == 1:
            return parts[0]
        units: Units = np.concatenate(parts) if parts else np.empty(0, UNIT_DTYPE)
        units.flags.writeable = False
        return units

    def truncate_to(self, max_offset: int) -> None:
        """Forget units at and after *max_offset*: files that hold no others are removed.

        In the file that stays nothing is overwritten; the state tables own the max offset.
        """
        for begin in [begin for begin in self._begins if begin >= max_offset]:
            self._remove(begin)

    def delete_before(self, min_offset: int) -> None:
        """Remove the files that hold only units before *min_offset*."""
        last = min_offset - self._store.units_per_file
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
        for begin in self._begins:
            self._store._drop(self._path(begin))
        self._begins = set()


def _fillers(count: int) -> bytes:
    units = np.zeros(count, UNIT_DTYPE)
    units["size"] = FILLER_SIZE
    return units.tobytes()
