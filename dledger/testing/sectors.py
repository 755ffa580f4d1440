"""The sector model of a simulated disk: what was written, and what a power cut leaves of it.

A file is one extent of bytes as the page cache has them. Beside it stands, for each sector that
differs, what the platter still has. A flush forgets those old sectors; a power cut keeps or loses
each of them. Names have the same three states: as processes see them, as the platter has them, and
the changes in between, in order. Everything here is pure; `CrashDisk` and the simulator's disk
decide when sectors are flushed, lost or unreadable.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable, Sequence
from typing import Final

from typing_extensions import Buffer

from commitlog.errors import InvariantBroken, OffsetOutOfRangeError

SECTOR_BYTES: Final = 512
"""What a disk writes whole or not at all."""

SEGMENTS: Final = "/commitlog/"
"""Part of the path of every segment of the log."""


class MappedReadFailed(Exception):  # noqa: N818  # a real process gets a signal
    """A bad sector was read through a mapping."""


class Inode:
    """A file's bytes.

    Attributes:
        content: What a reader sees; never resized.
        undo: Sector number to what the platter has of it, for every sector that differs.
        lost: Sectors whose flush failed: only writing them again saves them.
        pages: Pages that take space, or None when all of the file does.
        written_to: End of the highest write.
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
    for path, inode in pending:
        if posixpath.dirname(path) != folder:
            left.append((path, inode))
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
    """The reading half of an open file (`commitlog.seams.DiskFile`) over an `Inode`."""

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
