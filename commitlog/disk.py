"""The real disk: POSIX files behind :mod:`dledger.commitlog.seams`.

Linux is the platform. Where a call is missing (`posix_fallocate`, `fdatasync`) the nearest one
stands in: space is then asked for at write, and a flush is the strongest one there is.
`Descriptors` decides whether a file has a descriptor; one that was given back is opened again by
its path.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from typing_extensions import Buffer

from dledger.commitlog.errors import (
    DiskFullError,
    FlushFailedError,
    InvariantBroken,
    OffsetOutOfRangeError,
    StoreLockedError,
)
from dledger.commitlog.seams import NO_DESCRIPTOR, DiskFile, Lock

T = TypeVar("T")


class DescriptorUser(Protocol):
    """What this module sees of a file."""

    last_use: int
    """`Descriptors.uses` at its last use."""

    @property
    def descriptors(self) -> int:
        """How many it has: a mapping holds one of its own."""

    def give_up_descriptors(self) -> bool:
        """Close what is not in use; tell whether anything was closed. Called under the lock."""


class Descriptors:
    """Files with a descriptor, of one disk.

    *count*: descriptors that the files have now. *uses*: goes up with each use of a file. Without
    the lock: it only decides which one goes first.
    """

    def __init__(self, most: int | None) -> None:
        """Hold none yet; *most*: number that is kept; None: as many as the process may have."""
        # A file that is opened gives others up, under the same lock.
        self.lock = threading.RLock()
        self._most = most
        self.uses = 0
        self.count = 0
        self._files: dict[DescriptorUser, None] = {}

    def taken(self, file: DescriptorUser, more: int) -> None:
        """Note that *file* has *more* descriptors than before; others give theirs back for it."""
        with self.lock:
            self.count += more
            self._files[file] = None
            while self._most is not None and self.count > self._most:
                if not self._give_one_back(file):
                    return

    def given_back(self, file: DescriptorUser, count: int) -> None:
        """Note that *file* has *count* descriptors less."""
        with self.lock:
            self.count -= count
            if not file.descriptors:
                self._files.pop(file, None)

    def opened(self, get: Callable[[], T]) -> T:
        """Return what *get* opens; where no descriptor is left, files give theirs back first.

        Raises OSError: as *get*; with EMFILE or ENFILE when no file has one that can be given back.
        """
        while True:
            try:
                return get()
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR:
                    raise
                with self.lock:
                    if not self._give_one_back(None):
                        raise

    def _give_one_back(self, spared: DescriptorUser | None) -> bool:
        """Close the file that was not used for longest; tell whether there was one."""
        others = (file for file in self._files if file is not spared)
        return any(
            file.give_up_descriptors() for file in sorted(others, key=lambda file: file.last_use)
        )


if sys.platform != "win32":
    import fcntl

_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOT_SUPPORTED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_OPEN_FLAGS: Final = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_TEMPORARY_SUFFIX: Final = ".tmp"

FILE_MODE: Final = 0o640
"""Files hold bodies of messages: others of this machine may not read them, a group may."""

FOLDER_MODE: Final = 0o750

_FULL_SYNC: Final[int | None] = (
    None if sys.platform == "win32" else getattr(fcntl, "F_FULLFSYNC", None)
)


def _stronger_sync(fd: int) -> None:
    if _FULL_SYNC is None:
        os.fsync(fd)
    else:
        fcntl.fcntl(fd, _FULL_SYNC)


_data_sync = getattr(os, "fdatasync", _stronger_sync)
_reserve = getattr(os, "posix_fallocate", None)


_sync_file_system: Final = (
    None if sys.platform == "win32" else getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
)
"""Linux has it; since 5.8 it also reports what could not be written."""


def _flush_each(disk: OsDisk, paths: Sequence[str], folders: Sequence[str]) -> None:
    for path in paths:
        try:
            file = disk.open(path)
        except FileNotFoundError:
            continue
        try:
            file.flush()
        finally:
            file.close()
    for folder in folders:
        try:
            disk.flush_dir(folder)
        except FileNotFoundError:
            continue


class OsFile:
    """An open file (see `dledger.commitlog.seams.DiskFile`). `flush` may run in a worker thread.

    It may have no descriptor while it is not used: `dledger.commitlog.disk` takes it back.
    """

    __slots__ = ("_closed", "_fd", "_pool", "_users", "_view", "last_use", "path", "size")

    def __init__(self, path: str, fd: int, size: int, pool: Descriptors) -> None:
        self.path = path
        self._fd = fd
        self.size = size
        self._pool = pool
        self._view: memoryview | None = None
        # Calls that use the descriptor now, in whatever thread.
        self._users = 0
        self._closed = False
        self._note_use()
        pool.taken(self, 1)

    def write_at(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        if self._closed:
            raise InvariantBroken(f"write to the closed file {self.path}")
        if offset < 0 or offset + len(view) > self.size:
            raise InvariantBroken(
                f"write of {len(view)} bytes at {offset} leaves {self.path} of {self.size} bytes"
            )
        fd = self._borrow()
        try:
            while view:
                written = os.pwrite(fd, view, offset)
                offset += written
                view = view[written:]
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise DiskFullError(f"no space to write to {self.path}") from error
            raise
        finally:
            self._give_back(fd)

    def view(self, offset: int, size: int) -> memoryview:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise OffsetOutOfRangeError(
                f"{size} bytes at {offset} are not all inside {self.path} of {self.size} bytes"
            )
        whole = self._view
        if whole is None:
            if size == 0:
                return memoryview(b"")
            whole = self._map()
        self._note_use()
        return whole[offset : offset + size]

    def _note_use(self) -> None:
        pool = self._pool
        pool.uses = self.last_use = pool.uses + 1

    def _map(self) -> memoryview:
        fd = self._borrow()
        if fd < 0:
            raise InvariantBroken(f"view of the closed file {self.path}")
        try:
            mapping = self._pool.opened(lambda: mmap.mmap(fd, self.size, access=mmap.ACCESS_READ))
        finally:
            self._give_back(fd)
        view = memoryview(mapping)
        with self._pool.lock:
            if not self._closed and self._fd >= 0:
                self._view = view
                self._pool.taken(self, 1)
        return view

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise OffsetOutOfRangeError(
                f"{size} bytes at {offset} are not all inside {self.path} of {self.size} bytes"
            )
        fd = self._borrow()
        if fd < 0:
            raise OSError(errno.EBADF, "read of a closed file", self.path)
        try:
            parts = []
            while size > 0 and (part := os.pread(fd, size, offset)):
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
        finally:
            self._give_back(fd)
        if size:
            raise OSError(errno.EIO, "the file is shorter than it was", self.path)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def flush(self) -> None:
        fd = self._borrow()
        if fd < 0:
            self._flush_closed()
            return
        try:
            _data_sync(fd)
        except OSError as error:
            raise FlushFailedError(f"flush of {self.path} failed: {error}") from error
        finally:
            self._give_back(fd)

    def _borrow(self) -> int:
        """Return a descriptor that stays open until `_give_back`.

        -1: the file is closed; or removed, and its owner is about to close it.
        """
        with self._pool.lock:
            if self._closed or (self._fd < 0 and not self._open_again()):
                return -1
            self._users += 1
            self._pool.uses = self.last_use = self._pool.uses + 1
            return self._fd

    def _open_again(self) -> bool:
        try:
            self._fd = self._pool.opened(lambda: os.open(self.path, _OPEN_FLAGS))
        except FileNotFoundError:
            return False
        self._pool.taken(self, 1)
        return True

    def _give_back(self, fd: int) -> None:
        with self._pool.lock:
            self._users -= 1
            last = self._closed and self._users == 0
        if last:
            os.close(fd)

    @property
    def descriptors(self) -> int:
        """How many descriptors it has: the mapping holds one of its own."""
        return 0 if self._fd < 0 or self._closed else 1 + (self._view is not None)

    def give_up_descriptors(self) -> bool:
        """Close what no call uses now; views that were handed out keep the mapping alive."""
        if self._closed or self._users or self._fd < 0:
            return False
        count = self.descriptors
        fd, self._fd, self._view = self._fd, -1, None
        os.close(fd)
        self._pool.given_back(self, count)
        return True

    def _flush_closed(self) -> None:
        # Its pages may still be dirty: any descriptor of the file will do. A file that is missing
        # (a truncation overtook the flush) has nothing left to keep.
        try:
            fd = self._pool.opened(lambda: os.open(self.path, _OPEN_FLAGS))
        except FileNotFoundError:
            return
        try:
            _data_sync(fd)
        except OSError as error:
            raise FlushFailedError(f"flush of {self.path} failed: {error}") from error
        finally:
            os.close(fd)

    def close(self) -> None:
        with self._pool.lock:
            if self._closed:
                return
            count = self.descriptors
            self._closed = True
            # Only the reference goes: views handed out keep the mapping alive.
            self._view = None
            # A flush under way in a worker closes the descriptor when it is done with it.
            now = self._users == 0 and self._fd >= 0
            if count:
                self._pool.given_back(self, count)
        if now:
            os.close(self._fd)


class OsLock:
    """An exclusive `flock`; the kernel drops it when the process dies."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class OsDisk:
    """The file system of this machine (see `dledger.commitlog.seams.Disk`).

    Where the process has no descriptor left, files that are not used just now give theirs back.
    """

    def __init__(self, descriptors_max: int | None = None) -> None:
        """Open nothing yet."""
        self._descriptors = Descriptors(descriptors_max)

    @property
    def descriptors(self) -> int:
        """How many descriptors its files have now."""
        return self._descriptors.count

    def _open(self, path: str, flags: int, mode: int = FILE_MODE) -> int:
        return self._descriptors.opened(lambda: os.open(path, flags, mode))

    def create(self, path: str, size: int, *, reserve: bool) -> DiskFile:
        self.make_dir(os.path.dirname(path))
        # O_EXCL: a name that is already there may hold acknowledged bytes.
        fd = self._open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL)
        try:
            _set_size(fd, size, reserve=reserve)
        except OSError as error:
            os.close(fd)
            os.unlink(path)
            if error.errno in _NO_SPACE:
                raise DiskFullError(f"no space for {path} of {size} bytes") from error
            raise
        return OsFile(path, fd, size, self._descriptors)

    def open(self, path: str) -> DiskFile:
        fd = self._open(path, _OPEN_FLAGS)
        try:
            size = os.fstat(fd).st_size
        except OSError:
            os.close(fd)
            raise
        return OsFile(path, fd, size, self._descriptors)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list_dir(self, path: str) -> Sequence[str]:
        try:
            return sorted(self._descriptors.opened(lambda: os.listdir(path)))
        except FileNotFoundError:
            return []

    def make_dir(self, path: str, *, durably: bool = True) -> None:
        missing: list[str] = []
        while path and not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            os.makedirs(folder, FOLDER_MODE, exist_ok=True)
            if durably:
                self.flush_dir(os.path.dirname(folder) or ".")

    def read(self, path: str) -> bytes:
        with self._descriptors.opened(lambda: open(path, "rb")) as file:
            try:
                return file.read()
            except OSError as error:
                error.filename = path  # a read by descriptor does not know it
                raise

    def replace(self, path: str, data: Buffer) -> None:
        folder = os.path.dirname(path)
        self.make_dir(folder)
        temporary = path + _TEMPORARY_SUFFIX
        flags = _OPEN_FLAGS | os.O_CREAT | os.O_TRUNC
        fd = self._open(temporary, flags)
        try:
            view = memoryview(data).cast("B")
            while view:
                view = view[os.write(fd, view) :]
            _data_sync(fd)
        except OSError as error:
            os.unlink(temporary)
            if error.errno in _NO_SPACE:
                raise DiskFullError(f"no space to replace {path}") from error
            raise FlushFailedError(f"{path} could not be replaced: {error}") from error
        finally:
            os.close(fd)
        os.replace(temporary, path)
        self.flush_dir(folder)

    def unlink(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return

    def remove_tree(self, path: str) -> None:
        try:
            self._descriptors.opened(lambda: shutil.rmtree(path))
        except FileNotFoundError:
            return

    def flush_dir(self, path: str) -> None:
        if sys.platform == "win32":
            return  # a folder cannot be opened there, and its file system keeps a journal of names
        fd = self._open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            raise FlushFailedError(f"flush of the folder {path} failed: {error}") from error
        finally:
            os.close(fd)

    def flush_all(self, paths: Sequence[str], folders: Sequence[str]) -> None:
        if _sync_file_system is None or not (paths or folders):
            _flush_each(self, paths, folders)
            return
        # One commit of the file system's own journal in place of one for each file.
        root = os.path.commonpath([*paths, *folders])
        while not os.path.exists(root):
            root = os.path.dirname(root)
        fd = self._open(root, os.O_RDONLY)
        try:
            if _sync_file_system(fd) != 0:
                number = ctypes.get_errno()
                raise FlushFailedError(f"flush of {root} failed: {os.strerror(number)}")
        finally:
            os.close(fd)

    def free_bytes(self, path: str) -> int:
        while not os.path.exists(path):
            path = os.path.dirname(path) or "."
        return shutil.disk_usage(path).free

    def total_bytes(self, path: str) -> int:
        """Return used and available bytes of the file system that holds *path*, as `df` does."""
        stat = os.statvfs(path)
        # What is reserved for the superuser is neither used nor available.
        return (stat.f_blocks - stat.f_bfree + stat.f_bavail) * stat.f_frsize

    def lock(self, path: str) -> Lock:
        if sys.platform == "win32":
            raise OSError(errno.ENOSYS, "a broker needs POSIX: no folder can be locked here")
        self.make_dir(os.path.dirname(path))
        fd = self._open(path, _OPEN_FLAGS | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise StoreLockedError(f"another process holds {path}") from error
        except OSError:
            os.close(fd)
            raise
        return OsLock(fd)


def _set_size(fd: int, size: int, *, reserve: bool) -> None:
    if reserve and _reserve is not None and size:
        try:
            _reserve(fd, 0, size)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        else:
            return
    os.ftruncate(fd, size)
