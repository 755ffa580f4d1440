"""Files of consume queues that are kept open, the least recently used ones given up first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from commitlog.descriptors import NO_DESCRIPTOR
from commitlog.errors import ForeignStoreError
from commitlog.seams import Disk, DiskFile

T = TypeVar("T")


class QueueFiles:
    """Open files by path; fewer than may be where the process has no descriptor left.

    Args:
        file_bytes: Size of each.
        most: Files kept open.
        on_made: Called with the folder of a file that was made.
    """

    __slots__ = ("_disk", "_file_bytes", "_on_made", "_open", "most")

    def __init__(
        self, disk: Disk, file_bytes: int, most: int, on_made: Callable[[str], None]
    ) -> None:
        self.most = most
        self._disk = disk
        self._file_bytes = file_bytes
        self._on_made = on_made
        self._open: OrderedDict[str, DiskFile] = OrderedDict()

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
        file = self._with_descriptor(lambda: self._disk.open(path))
        if file.size != self._file_bytes:
            file.close()
            if file.size == 0:
                # A crash came between making the file and giving it its size.
                self._disk.unlink(path)
                return self.create(path)
            raise ForeignStoreError(f"{path} has {file.size} bytes in place of {self._file_bytes}")
        self._keep(path, file)
        return file

    def create(self, path: str) -> DiskFile:
        """Return the file at *path*, which a flush may have made meanwhile.

        Raises:
            DiskFullError: No space for it.
        """
        folder = path.rpartition("/")[0]
        # Not durably: that would stop the event loop twice for each queue. The next flush sees
        # to the names of all of them.
        self._disk.make_dir(folder, durably=False)
        file, _ = self._with_descriptor(lambda: made(self._disk, path, self._file_bytes))
        self._on_made(folder)
        self._keep(path, file)
        return file

    def drop(self, path: str) -> None:
        """Close the file at *path*, if it is open."""
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
