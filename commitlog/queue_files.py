"""The files of all consume queues: which are open, which are lost, and how they are flushed.

Of the open ones the least recently used are given up first. A flush reaches the shared units, the
files of queues, and what moves between them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from dledger.commitlog.errors import ForeignStoreError
from dledger.commitlog.queue_unit import UNIT_BYTES, fillers
from dledger.commitlog.seams import CANNOT_BE_READ, NO_DESCRIPTOR, Disk, DiskFile
from dledger.commitlog.shared_units import Row, RowKind, SharedUnits

# ----------------------------------------------------------------------------- which files are open


T = TypeVar("T")

QueueKey = tuple[str, int]
"""Topic and queue id."""


@dataclass(eq=False, repr=False)
class QueueFiles:
    """Files below one folder: ``<root>/<topic>/<queue id>/<20-digit byte offset>``.

    Fewer are open than may be where the process has no descriptor left.

    Args:
        on_unreadable: Called with the path of a file that cannot be read, and why.

    Attributes:
        lost: Files that the disk does not give back.
        dirty_folders: Folders whose names have changed since.
        topics: Those that may have files.
        late_topics: Topics that were deleted while a flush made files of theirs: nothing else makes
            any.
    """

    disk: Disk
    root: str
    units_per_file: int
    most: int
    _on_unreadable: Callable[[str, OSError], None]

    def __post_init__(self) -> None:
        self.lost = LostFiles()
        self.dirty: set[str] = set()
        self.dirty_folders: set[str] = set()
        self.late_topics: set[str] = set()
        self._file_bytes = self.units_per_file * UNIT_BYTES
        self._open: OrderedDict[str, DiskFile] = OrderedDict()
        self.disk.make_dir(self.root)  # durably: folders of topics are not made so
        self.topics = set(self.disk.list_dir(self.root))

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, path: str) -> bool:
        return path in self._open

    def open(self, path: str) -> DiskFile:
        """Return the file at *path*.

        Raises:
            ForeignStoreError: It has another size.
            OSError: It cannot be opened.
        """
        file = self._open.get(path)
        if file is not None:
            self._open.move_to_end(path)
            return file
        file = self._with_descriptor(lambda: self.disk.open(path))
        if file.size != self._file_bytes:
            file.close()
            if file.size == 0:
                # A crash came between making the file and giving it its size.
                self.disk.unlink(path)
                return self.create(path)
            raise ForeignStoreError(f"{path} has {file.size} bytes in place of {self._file_bytes}")
        self._keep(path, file)
        return file

    def create(self, path: str) -> DiskFile:
        """Return the file at *path*, which a flush may have made meanwhile.

        Raises DiskFullError: no space for it.
        """
        folder = path.rpartition("/")[0]
        # Not durably: that would stop the event loop twice for each queue. The next flush sees
        # to the names of all of them.
        self.disk.make_dir(folder, durably=False)
        file, _ = self._with_descriptor(lambda: made(self.disk, path, self._file_bytes))
        self.note_folder(folder)
        self._keep(path, file)
        return file

    def note_folder(self, folder: str) -> None:
        """Note a folder in which a file was made: its names are to be flushed, too.

        It may be new, and so may be the one of its topic.
        """
        self.dirty_folders.update((folder, folder.rpartition("/")[0], self.root))

    def lose(self, key: QueueKey, path: str, error: OSError) -> None:
        """Note that the disk does not give a file of a queue back.

        Raises OSError: the error is another one.
        """
        if error.errno not in CANNOT_BE_READ:
            raise error
        if self.lost.add(key, int(path.rpartition("/")[2]) // UNIT_BYTES):
            self._on_unreadable(path, error)

    def drop(self, path: str) -> None:
        """Close the file at *path*, if it is open; a flush need not reach it any more."""
        self.dirty.discard(path)
        file = self._open.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            self._open.popitem()[1].close()

    def _keep(self, path: str, file: DiskFile) -> None:
        self._open[path] = file
        if len(self._open) > self.most:
            self._open.popitem(last=False)[1].close()

    def _with_descriptor(self, get: Callable[[], T]) -> T:
        """Get a file; where no descriptor is left, give up half of those that are kept here."""
        while True:
            try:
                return get()
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR or not self._open:
                    raise
            for _ in range((len(self._open) + 1) // 2):
                self._open.popitem(last=False)[1].close()


class LostFiles:
    """Which files are lost, by queue and by the first offset they have.

    At first such a file takes no units. Once a new one stands in its place, it takes units, and
    gives none before `end`: some of them are still missing.
    """

    def __init__(self) -> None:
        self._unreadable: dict[QueueKey, set[int]] = {}
        self._filling: dict[QueueKey, set[int]] = {}

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._unreadable or self._filling)

    @property
    def unreadable(self) -> list[tuple[QueueKey, int]]:
        """Those in whose place no new file stands."""
        return [(key, begin) for key, begins in self._unreadable.items() for begin in begins]

    @property
    def filling(self) -> dict[QueueKey, list[int]]:
        """First offsets of the new files that do not have all their units yet, by queue."""
        return {key: sorted(begins) for key, begins in self._filling.items()}

    def add(self, key: QueueKey, begin: int) -> bool:
        """Note that a file is lost; tell whether that is new."""
        if not self.takes_units(key, begin):
            return False
        _discard(self._filling, key, begin)
        self._unreadable.setdefault(key, set()).add(begin)
        return True

    def has(self, key: QueueKey) -> bool:
        """Whether a file of that queue is lost."""
        return key in self._unreadable or key in self._filling

    def takes_units(self, key: QueueKey, begin: int) -> bool:
        """Whether units may be put into that file."""
        return begin not in self._unreadable.get(key, ())

    def gives_units(self, key: QueueKey, begin: int) -> bool:
        """Whether units may be read from that file."""
        return self.takes_units(key, begin) and begin not in self._filling.get(key, ())

    def fill(self, key: QueueKey, begin: int) -> None:
        """Note that a new file stands in the place of an unreadable one."""
        _discard(self._unreadable, key, begin)
        self._filling.setdefault(key, set()).add(begin)

    def forget(self, key: QueueKey, begin: int) -> None:
        """Note that a file is not wanted any more."""
        _discard(self._unreadable, key, begin)
        _discard(self._filling, key, begin)

    def end(self) -> None:
        """Note that the new files have their units."""
        self._filling.clear()


def _discard(begins_of: dict[QueueKey, set[int]], key: QueueKey, begin: int) -> None:
    begins = begins_of.get(key)
    if begins is not None:
        begins.discard(begin)
        if not begins:
            del begins_of[key]


def made(disk: Disk, path: str, size: int) -> tuple[DiskFile, bool]:
    """Return the file at *path*, and whether it was made now.

    One without a size was left by a crash, and is made again.
    """
    file, is_new = _created_or_opened(disk, path, size)
    if not file.size:
        file.close()
        disk.unlink(path)
        return _created_or_opened(disk, path, size)
    return file, is_new


def _created_or_opened(disk: Disk, path: str, size: int) -> tuple[DiskFile, bool]:
    try:
        return disk.create(path, size, reserve=False), True
    except FileExistsError:
        pass
    return disk.open(path), False


# ---------------------------------------------------------------------------------- their flush


FLUSH_TOGETHER: Final = 256
"""Above this number of files that were not open a flush asks for all of them at once: one after the
other takes a minute for 20,000 of them, and the next checkpoint waits for it."""


class Part(NamedTuple):
    """Units for one file."""

    path: str
    within: int
    """Unit of the file that they begin at."""
    units: bytes


class Move(NamedTuple):
    """Shared units that go into files of their queue."""

    topic: str
    queue_id: int
    end: int
    """Queue offset behind the last of them."""
    parts: Sequence[Part]


@dataclass(eq=False, repr=False)
class ConsumeQueueFlush:
    """What is to be made durable. `run` blocks and may be called in a worker, one job at a time."""

    _disk: Disk
    paths: Sequence[str]
    folders: Sequence[str]
    _shared: SharedUnits
    changes: Sequence[Row] = ()
    moves: Sequence[Move] = ()
    _file_bytes: int = 0

    def __post_init__(self) -> None:
        self.has_moved = False
        self.done = False
        self.unreadable: dict[QueueKey, tuple[str, OSError]] = {}
        """Queues whose shared units stay: a file of theirs could not be written, as the disk does
        not give the rest of a page back."""

    def run(self) -> None:
        """Make it durable: files first, then the changes of shared units, then what is moved.

        Raises:
            OSError: No descriptor is left; what was not flushed is in the next job.
            DiskFullError: No space for a new file; what was not flushed is in the next job.
            FlushFailedError: The node must stop.
        """
        self._flush_files()
        self._shared.write(self.changes)
        self.done = True
        if self.moves:
            self._write_moves()
            self._shared.write(
                [
                    Row(RowKind.FROM, move.topic, move.queue_id, move.end)
                    for move in self.moves
                    if (move.topic, move.queue_id) not in self.unreadable
                ]
            )
            self.has_moved = True

    def _flush_files(self) -> None:
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

    def _write_moves(self) -> None:
        parts = [part for move in self.moves for part in move.parts]
        many = len(parts) > FLUSH_TOGETHER
        folders: set[str] = set()
        for move in self.moves:
            for part in move.parts:
                try:
                    folders.update(self._write_part(part, many))
                except OSError as error:
                    if error.errno not in CANNOT_BE_READ:
                        raise
                    self.unreadable[move.topic, move.queue_id] = part.path, error
        if many:
            self._disk.flush_all([part.path for part in parts], sorted(folders))
        else:
            for folder in sorted(folders):
                self._disk.flush_dir(folder)

    def _write_part(self, part: Part, many: bool) -> Sequence[str]:
        """Write units into their file; return the folders whose names have changed."""
        path, within, units = part
        folder = path.rpartition("/")[0]
        if many:
            self._disk.make_dir(folder, durably=False)
        file, is_new = made(self._disk, path, self._file_bytes)
        try:
            if is_new and within:
                file.write_at(0, fillers(within))
            file.write_at(within * UNIT_BYTES, units)
            if not many:
                file.flush()
        finally:
            file.close()
        topic = folder.rpartition("/")[0]
        return (folder, topic, topic.rpartition("/")[0]) if is_new else ()
