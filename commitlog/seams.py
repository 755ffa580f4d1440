"""The disk as the store sees it, and local time. Simulated ones can stand in for the real ones."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from typing_extensions import Buffer

CANNOT_BE_READ: Final = frozenset({errno.EIO, errno.EBADF, errno.ENODATA})
"""What `DiskFile.read` raises for a bad sector, as file systems report it; or for a closed file."""

NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""The process, or the machine, has no descriptor left: the disk itself may be sound."""

UtcOffset = Callable[[int], int]
"""Wall time in ms to the milliseconds that local time is ahead of UTC then."""


def utc(_wall_ms: int) -> int:
    """Return the offset of UTC."""
    return 0


class DiskFile(Protocol):
    """An open file of a size fixed when it was made. Writes are volatile until flushed."""

    @property
    def path(self) -> str:
        """Path as it was opened."""

    @property
    def size(self) -> int:
        """Size in bytes; it does not change while the file is open."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of *data* at byte *offset*; volatile until `flush`.

        Raises:
            DiskFullError: No space. What was at these bytes is undefined, the rest untouched.
            OSError: The rest of a page cannot be read; whole pages of 4 KiB need no rest.
        """

    def view(self, offset: int, size: int) -> memoryview:
        """Return a read-only view of bytes *offset* … *offset+size*, kept by the page cache.

        It sees later writes. It pins the mapping: the file stays mapped while a view exists,
        even after `close`.
        """

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of bytes *offset* … *offset+size*. May be called from a worker thread.

        For what may be on a bad sector: a view of that ends the process when it is looked at.

        Raises OSError: they cannot be read.
        """

    def flush(self) -> None:
        """Make everything written so far durable. May be called from a worker thread.

        Raises FlushFailedError: the flush failed. Never retry: the pages may be lost.
        """

    def close(self) -> None:
        """Give the descriptor back. Unflushed bytes stay in the page cache. Idempotent."""


class Lock(Protocol):
    """An exclusive claim on a folder, held until released or the process dies."""

    def release(self) -> None:
        """Give the claim back. Idempotent."""


class Disk(Protocol):
    """A file system. Paths are absolute strings; names become durable by `flush_dir` only."""

    def create(self, path: str, size: int, *, reserve: bool) -> DiskFile:
        """Make a zero-filled file of *size* bytes and open it; the folder is made if missing.

        Args:
            reserve: Take the space now, so that a later write cannot find the disk full.
        Raises:
            DiskFullError: No space; the file was removed again.
        """

    def open(self, path: str) -> DiskFile:
        """Open an existing file for reading and writing.

        Raises FileNotFoundError: there is none.
        """

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder of that name is there."""

    def list_dir(self, path: str) -> Sequence[str]:
        """Return the names in a folder, sorted; empty when the folder is missing."""

    def make_dir(self, path: str, *, durably: bool = True) -> None:
        """Make the folder and its parents, if they are missing.

        *durably*: else `flush_all` makes them durable, of their parents and themselves.
        """

    def read(self, path: str) -> bytes:
        """Return the whole content of a small file. Raises FileNotFoundError: there is none."""

    def replace(self, path: str, data: Buffer) -> None:
        """Set the whole content of a small file, atomically and durably.

        Temporary file, flush, rename, flush of the folder: after a crash the file has the old
        or the new content, never a mixture.
        """

    def unlink(self, path: str) -> None:
        """Remove a file; durable after `flush_dir`. Missing is fine."""

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all below it. Missing is fine."""

    def flush_dir(self, path: str) -> None:
        """Make names created, renamed or removed in that folder durable."""

    def flush_all(self, paths: Sequence[str], folders: Sequence[str]) -> None:
        """Make the content of these files and the names in these folders durable, all together.

        For many of them: it may flush the whole file system. What was removed is passed over.

        Raises FlushFailedError: the flush failed; nothing is known of any of them.
        """

    def free_bytes(self, path: str) -> int:
        """Return the space left on the file system that holds *path*."""

    def total_bytes(self, path: str) -> int:
        """Return what is used and what is left on the file system that holds *path*, together."""

    def lock(self, path: str) -> Lock:
        """Take the exclusive lock file at *path*.

        Raises StoreLockedError: another process holds it.
        """
