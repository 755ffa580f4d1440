"""A disk in memory that forgets what was not flushed, sector by sector, and fails on demand."""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from typing_extensions import Buffer

from commitlog.errors import DiskFullError, FlushFailedError, StoreLockedError
from commitlog.seams import DiskFile, Lock
from dledger.testing.sectors import (
    Folders,
    Inode,
    Names,
    PendingNames,
    SectorFile,
    flush_names,
    names_after_power_cut,
)

TOTAL_BYTES: Final = 1 << 41
FREE_BYTES: Final = 1 << 40
"""Space is not counted: a test that needs a full disk sets `CrashDisk.fault`."""

Fault = Callable[[str, str], None]
"""Called with the kind of an act and its path before it has an effect; it may raise."""


def no_fault(kind: str, path: str) -> None:
    """Let everything succeed."""


class CrashFile(SectorFile):
    """An open file of a `CrashDisk`."""

    __slots__ = ("_disk",)

    def __init__(self, disk: CrashDisk, path: str, inode: Inode) -> None:
        super().__init__(path, inode)
        self._disk = disk

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write; volatile until flushed."""
        view = self.checked(offset, data)
        self._disk.step("write", self.path)
        if self.inode.takes_part_of_bad_sector(offset, offset + len(view)):
            raise OSError(errno.EIO, "input/output error", self.path)
        if view:
            self.inode.write(offset, view)

    def flush(self) -> None:
        """Make what was written so far durable."""
        self._disk.step("flush", self.path)
        self.inode.undo.clear()


class _Claim:
    """A lock file that is held."""

    __slots__ = ("_locks", "_path")

    def __init__(self, locks: dict[str, Lock], path: str) -> None:
        self._locks = locks
        self._path = path
        locks[path] = self

    def release(self) -> None:
        if self._locks.get(self._path) is self:
            del self._locks[self._path]


class CrashDisk:
    """A `commitlog.seams.Disk` in memory; `power_cut` gives the disk that the next process finds.

    Attributes:
        files: Every file by its path, as processes see them; a test may change their bytes.
        fault: Called before every act that changes something, with its kind (``create``,
            ``write``, ``flush``, ``replace``, ``unlink``, ``flush_dir``) and the path; may raise.
        steps: These acts so far; a test clears it.
    """

    def __init__(self) -> None:
        self.files: Names = {}
        self.durable_names: Names = {}
        self.pending_names: PendingNames = []
        self.fault: Fault = no_fault
        self.steps: list[tuple[str, str]] = []
        self._folders = Folders()
        self._locks: dict[str, Lock] = {}

    def step(self, kind: str, path: str) -> None:
        """Record an act and let `fault` refuse it."""
        self.steps.append((kind, path))
        self.fault(kind, path)

    def power_cut(self, survives: Callable[[], bool]) -> CrashDisk:
        """Return the disk as it is found after the power went; this one stays as it is.

        Args:
            survives: Called for every change of a name, in order, and for every dirty sector; the
                first change of a name that does not survive takes those behind it along.
        """
        names = names_after_power_cut(self.durable_names, self.pending_names, survives)
        return self._holding({path: file.after_power_cut(survives) for path, file in names.items()})

    def copy(self) -> CrashDisk:
        """Return the same files once more, all of them durable."""
        return self._holding(
            {path: Inode.holding(file.content) for path, file in self.files.items()}
        )

    def _holding(self, files: Names) -> CrashDisk:
        left = CrashDisk()
        left.files = files
        left.durable_names = dict(files)
        left._folders = self._folders.only_with(list(files))
        return left

    def _set_name(self, path: str, inode: Inode) -> None:
        self.files[path] = inode
        self.pending_names.append((path, inode))
        self._folders.link(path)

    def create(self, path: str, size: int, *, reserve: bool) -> DiskFile:
        """Make a zero-filled file and open it."""
        if path in self.files:
            raise FileExistsError(errno.EEXIST, "file exists", path)
        self.step("create", path)
        inode = Inode(size)
        self._set_name(path, inode)
        return CrashFile(self, path, inode)

    def open(self, path: str) -> DiskFile:
        """Open an existing file."""
        return CrashFile(self, path, self._file(path))

    def _file(self, path: str) -> Inode:
        inode = self.files.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return inode

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder is there."""
        return path in self.files or path in self._folders

    def list_dir(self, path: str) -> Sequence[str]:
        """Return the names in a folder, sorted."""
        return self._folders.names_in(path)

    def make_dir(self, path: str, *, durably: bool = True) -> None:
        """Make a folder and its parents, durably."""
        self._folders.make(path)

    def read(self, path: str) -> bytes:
        """Return the whole content of a small file."""
        return bytes(self._file(path).content)

    def replace(self, path: str, data: Buffer) -> None:
        """Set the whole content of a small file, atomically and durably."""
        self.step("replace", path)
        self._set_name(path, Inode.holding(data))
        # The flush of the folder makes durable whatever is pending in it.
        self._flush_names(posixpath.dirname(path))

    def unlink(self, path: str) -> None:
        """Remove a file; durable after `flush_dir`."""
        self.step("unlink", path)
        if path in self.files:
            del self.files[path]
            self.pending_names.append((path, None))
            self._folders.unlink(path)

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all below it."""
        for name in [name for name in self.files if name.startswith(path + "/")]:
            self.unlink(name)
        self._folders.remove_tree(path)

    def flush_dir(self, path: str) -> None:
        """Make names in that folder durable."""
        self.step("flush_dir", path)
        if path not in self._folders:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        self._flush_names(path)

    def _flush_names(self, folder: str) -> None:
        self.pending_names, _ = flush_names(self.durable_names, self.pending_names, folder)

    def flush_all(self, paths: Sequence[str], folders: Sequence[str]) -> None:
        """Flush them one by one."""
        for path in paths:
            with suppress(FileNotFoundError):
                self.open(path).flush()
        for folder in folders:
            with suppress(FileNotFoundError):
                self.flush_dir(folder)

    def free_bytes(self, path: str) -> int:
        """Return the space left, always the same."""
        return FREE_BYTES

    def total_bytes(self, path: str) -> int:
        """Return the size of the disk."""
        return TOTAL_BYTES

    def lock(self, path: str) -> Lock:
        """Take the exclusive lock file."""
        if path in self._locks:
            raise StoreLockedError(f"another process holds {path}")
        if path not in self.files:
            self.files[path] = self.durable_names[path] = Inode(0)
            self._folders.link(path)
        return _Claim(self._locks, path)


def disk_full(*, kind: str = "create", path_part: str = "") -> Fault:
    """Return a fault: no space for such acts on such paths."""

    def fault(found: str, path: str) -> None:
        if found == kind and path_part in path:
            raise DiskFullError(f"no space for {path}")

    return fault


def failing_flush(path_part: str = "") -> Fault:
    """Return a fault: flushes of such paths fail, and their pages are lost."""

    def fault(found: str, path: str) -> None:
        if found == "flush" and path_part in path:
            raise FlushFailedError(f"flush of {path} failed")

    return fault
