"""A disk in memory that forgets what was not flushed, sector by sector, and fails on demand.

A file is one extent of bytes as the page cache has them, beside it, for each sector that differs,
what the platter still has. A flush forgets those old sectors; a power cut keeps or loses each of
them. Names have the same three states: as processes see them, as the platter has them, and the
changes in between, in order. Everything here is pure; `CrashDisk` and the simulator's disk decide.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from typing_extensions import Buffer

from dledger.commitlog.errors import (
    DiskFullError,
    FlushFailedError,
    InvariantBroken,
    OffsetOutOfRangeError,
    StoreLockedError,
)
from dledger.commitlog.seams import DiskFile, Lock

SECTOR_BYTES: Final = 512
"""What a disk writes whole or not at all."""

SEGMENTS: Final = "/commitlog/"
"""Part of the path of every segment of the log."""


class MappedReadFailed(Exception):  # noqa: N818  # a real process gets a signal
    """A bad sector was read through a mapping."""


class Inode:
    """A file's bytes.

    Attributes:
        undo: Sector number to what the platter has of it, for every sector that differs.
        lost: Sectors whose flush failed: only writing them again saves them.
        pages: Pages that take space, or None when all of the file does.
        unreadable: Bytes on bad sectors, begin and end of each run, until all of it is written.
    """

    __slots__ = ("content", "lost", "pages", "readable", "undo", "unreadable", "written_to")

    def __init__(self, size: int, *, reserve: bool = True) -> None:
        self.content = bytearray(size)
        self.readable = memoryview(self.content).toreadonly()
        self.undo: dict[int, bytes] = {}
        self.lost: dict[int, bytes] = {}
        self.pages: set[int] | None = None if reserve else set()
        self.written_to = 0
        self.unreadable: list[tuple[int, int]] = []

    @classmethod
    def holding(cls, content: Buffer) -> Inode:
        """Return a file with *content*, all of it on the platter."""
        view = memoryview(content).cast("B")
        inode = cls(len(view))
        inode.content[:] = view
        inode.written_to = len(view)
        return inode

    def write(self, offset: int, view: memoryview) -> None:
        """Change bytes; the platter's are kept aside."""
        end = offset + len(view)
        if self.unreadable:
            self.unreadable = [at for at in self.unreadable if end <= at[0] or at[1] <= offset]
        content, undo = self.content, self.undo
        for sector in range(offset // SECTOR_BYTES, (end + SECTOR_BYTES - 1) // SECTOR_BYTES):
            if sector not in undo:
                at = sector * SECTOR_BYTES
                undo[sector] = bytes(content[at : at + SECTOR_BYTES])
        content[offset:end] = view
        self.written_to = max(self.written_to, end)

    def is_unreadable(self, offset: int, end: int) -> bool:
        """Tell whether any of bytes [offset, end) is on a bad sector."""
        return any(offset < stop and start < end for start, stop in self.unreadable)

    def takes_part_of_bad_sector(self, offset: int, end: int) -> bool:
        """Tell whether a write of [offset, end) would have to read the rest of a bad sector."""
        return any(
            offset < stop and start < end and not offset <= start < stop <= end
            for start, stop in self.unreadable
        )

    def put_back(self, sectors: dict[int, bytes]) -> None:
        """Set sectors to what the platter has."""
        for sector, old in sectors.items():
            at = sector * SECTOR_BYTES
            self.content[at : at + len(old)] = old

    def after_power_cut(self, survives: Callable[[], bool]) -> Inode:
        """Return what the platter has once each unflushed sector survived or did not.

        Args:
            survives: Called for every such sector, in the order of their numbers.
        """
        left = Inode.holding(self.content)
        left.unreadable = list(self.unreadable)
        left.put_back({at: self.undo[at] for at in sorted(self.undo) if not survives()})
        return left


Names = dict[str, Inode]
"""Path to file."""

PendingNames = list[tuple[str, Inode | None]]
"""Changes of names that are not durable yet, in order; None: the name was removed."""


def flush_names(
    durable: Names, pending: PendingNames, folder: str
) -> tuple[PendingNames, dict[str, Inode | None]]:
    """Make the pending names in *folder* durable.

    Returns:
        What is still pending, and what the durable names stood for before.
    """
    before: dict[str, Inode | None] = {}
    left: PendingNames = []
    prefix = folder.rstrip("/") + "/"
    size = len(prefix)
    for change in pending:
        path, inode = change
        # What `posixpath.dirname` does for each, for ten thousand folders after one another.
        if not path.startswith(prefix) or path.find("/", size) >= 0:
            left.append(change)
            continue
        before.setdefault(path, durable.get(path))
        _set_name(durable, path, inode)
    return left, before


def names_after_power_cut(
    durable: Names, pending: PendingNames, survives: Callable[[], bool]
) -> Names:
    """Return the names a power cut leaves.

    Args:
        survives: Called for every change of a name; the first that does not survive takes those
            behind it along, because a journal keeps order.
    """
    names = dict(durable)
    for path, inode in pending:
        if not survives():
            break
        _set_name(names, path, inode)
    return names


def _set_name(names: Names, path: str, inode: Inode | None) -> None:
    if inode is None:
        names.pop(path, None)
    else:
        names[path] = inode


class Folders:
    """The tree of folders above a disk's files. Folders are made durably and stay."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, None]] = {"/": {}}

    def __contains__(self, path: str) -> bool:
        return path in self._entries

    def names_in(self, path: str) -> Sequence[str]:
        """Return the names in a folder, sorted; empty when the folder is missing."""
        return sorted(self._entries.get(path, ()))

    def make(self, path: str) -> None:
        """Make a folder and its parents."""
        if path not in self._entries:
            self._entries[path] = {}
            self.link(path)

    def link(self, path: str) -> None:
        """Put a name into its folder, which is made if it is missing."""
        entries_of = self._entries
        while path != "/":
            folder, name = posixpath.split(path)
            entries = entries_of.get(folder)
            if entries is None:
                entries = entries_of[folder] = {}
            elif name in entries:
                return
            entries[name] = None
            path = folder

    def unlink(self, path: str) -> None:
        """Remove a name from its folder."""
        folder, name = posixpath.split(path)
        self._entries.get(folder, {}).pop(name, None)

    def remove_tree(self, path: str) -> None:
        """Remove a folder and the folders below it; their files have been removed before."""
        below = path + "/"
        for folder in [f for f in self._entries if f == path or f.startswith(below)]:
            del self._entries[folder]
            self.unlink(folder)

    def only_with(self, paths: Sequence[str]) -> Folders:
        """Return the same folders with no files but these."""
        left = Folders()
        for folder in self._entries:
            left._entries.setdefault(folder, {})
            left.link(folder)
        for path in paths:
            left.link(path)
        return left


class SectorFile:
    """The reading half of an open file (`dledger.commitlog.seams.DiskFile`) over an `Inode`."""

    __slots__ = ("inode", "is_closed", "path", "size")

    def __init__(self, path: str, inode: Inode) -> None:
        self.inode = inode
        self.is_closed = False
        self.path = path
        self.size = len(inode.content)

    def checked(self, offset: int, data: Buffer) -> memoryview:
        """Return *data* as bytes that may be written at *offset*.

        Raises:
            InvariantBroken: The file is closed, or they do not lie inside of it.
        """
        view = memoryview(data).cast("B")
        if self.is_closed:
            raise InvariantBroken(f"write to the closed file {self.path}")
        if offset < 0 or offset + len(view) > self.size:
            raise InvariantBroken(
                f"write of {len(view)} bytes at {offset} leaves {self.path} of {self.size} bytes"
            )
        return view

    def view(self, offset: int, size: int) -> memoryview:
        """Return a read-only view of the page cache.

        A mapped page on a bad sector ends a process: so does this. Segments are mapped whole and
        read only where this process has written.
        """
        inode = self.inode
        if SEGMENTS not in self.path and inode.is_unreadable(offset, offset + size):
            raise MappedReadFailed(f"a mapped page of {self.path} cannot be brought in")
        self._check_range(offset, size)
        return inode.readable[offset : offset + size]

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy; bytes on a bad sector cannot be read until all of it is written."""
        self._check_range(offset, size)
        if self.inode.is_unreadable(offset, offset + size):
            self.on_read_error(offset, size)
            raise OSError(errno.EIO, "input/output error", self.path)
        return bytes(self.inode.readable[offset : offset + size])

    def on_read_error(self, offset: int, size: int) -> None:
        """Notice that bytes cannot be read; does nothing here."""

    def _check_range(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise OffsetOutOfRangeError(
                f"{size} bytes at {offset} are not all inside {self.path} of {self.size} bytes"
            )

    def close(self) -> None:
        """Give the file back; unflushed bytes stay in the page cache."""
        self.is_closed = True


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
