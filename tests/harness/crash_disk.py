"""A disk in memory that forgets what was not flushed, sector by sector, and fails on demand."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from typing_extensions import Buffer

from commitlog.errors import (
    DiskFullError,
    FlushFailedError,
    InvariantBroken,
    StoreLockedError,
)
from commitlog.seams import DiskFile, Lock

SECTOR_BYTES = 512


class Inode:
    """Content as the page cache has it, and what the platter has where that differs."""

    def __init__(self, content: bytes | bytearray) -> None:
        self.content = bytearray(content)
        self.durable: dict[int, bytes] = {}
        """Sector that was written since its last flush → what it was then."""
        self.unreadable: list[tuple[int, int]] = []
        """Bytes on bad sectors, until they are written."""

    def write(self, offset: int, data: memoryview) -> None:
        if not data:
            return
        end = offset + len(data)
        self.unreadable = [each for each in self.unreadable if end <= each[0] or each[1] <= offset]
        for sector in range(offset // SECTOR_BYTES, (offset + len(data) - 1) // SECTOR_BYTES + 1):
            if sector not in self.durable:
                self.durable[sector] = bytes(self.content[_part(sector)])
        self.content[offset : offset + len(data)] = data

    def flush(self) -> None:
        self.durable.clear()

    def flush_sectors(self, sectors: Iterable[int]) -> None:
        for sector in sectors:
            self.durable.pop(sector, None)

    def after_power_cut(self, survives: Callable[[], bool]) -> Inode:
        left = Inode(self.content)
        left.unreadable = list(self.unreadable)
        for sector in sorted(self.durable):
            if not survives():
                left.content[_part(sector)] = self.durable[sector]
        return left


def _part(sector: int) -> slice:
    return slice(sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES)


class MappedReadFailed(BaseException):  # it stands for the end of the process
    """A read through a mapping met a bad sector."""


class CrashFile:
    """An open file of a `CrashDisk`."""

    def __init__(self, disk: CrashDisk, path: str, inode: Inode) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self.closed = False

    @property
    def path(self) -> str:
        return self._path

    @property
    def size(self) -> int:
        return len(self._inode.content)

    def write_at(self, offset: int, data: Buffer) -> None:
        if self.closed:
            raise InvariantBroken("write to a closed file")
        view = memoryview(data).cast("B")
        if offset < 0 or offset + len(view) > self.size:
            raise InvariantBroken("write outside the file")
        self._disk.step("write", self._path)
        end = offset + len(view)
        for start, stop in self._inode.unreadable:
            if offset < stop and start < end and not offset <= start < stop <= end:
                raise OSError(5, "input/output error", self._path)  # the rest is to be read first
        self._inode.write(offset, view)

    def view(self, offset: int, size: int) -> memoryview:
        # Segments are mapped whole, and looked at only where this process has written.
        if "/commitlog/" not in self._path and self._is_unreadable(offset, size):
            raise MappedReadFailed(f"a mapped page of {self._path} cannot be brought in: SIGBUS")
        return memoryview(self._inode.content).toreadonly()[offset : offset + size]

    def read(self, offset: int, size: int) -> bytes:
        if self._is_unreadable(offset, size):
            raise OSError(5, "input/output error", self._path)
        return bytes(self.view(offset, size))

    def _is_unreadable(self, offset: int, size: int) -> bool:
        return any(offset < end and start < offset + size for start, end in self._inode.unreadable)

    def flush(self) -> None:
        self._disk.step("flush", self._path)
        self._inode.flush()

    def close(self) -> None:
        self.closed = True


class _NoLock:
    def release(self) -> None:
        return


class CrashDisk:
    """A `commitlog.seams.Disk` in memory.

    `fault` is called before every act that changes something, with its kind (``create``,
    ``write``, ``flush``, ``replace``, ``unlink``, ``flush_dir``) and the path; it may raise.
    """

    def __init__(self) -> None:
        self.files: dict[str, Inode] = {}
        self.durable_names: dict[str, Inode] = {}
        self.pending_names: list[tuple[str, Inode | None]] = []
        self.fault: Callable[[str, str], None] = lambda kind, path: None
        self.steps: list[tuple[str, str]] = []

    def step(self, kind: str, path: str) -> None:
        self.steps.append((kind, path))
        self.fault(kind, path)

    def power_cut(self, survives: Callable[[], bool]) -> CrashDisk:
        """Return the disk as it is found after the power went.

        Args:
            survives: Asked for every dirty sector and, in order, for every change of a name;
                the first change of a name that does not survive takes those behind it along.
        """
        names = dict(self.durable_names)
        for path, inode in self.pending_names:
            if not survives():
                break
            if inode is None:
                names.pop(path, None)
            else:
                names[path] = inode
        left = CrashDisk()
        left.files = {path: inode.after_power_cut(survives) for path, inode in names.items()}
        left.durable_names = dict(left.files)
        return left

    def copy(self) -> CrashDisk:
        """Return the same files once more, all of them durable."""
        left = CrashDisk()
        for path, inode in self.files.items():
            left.files[path] = Inode(inode.content)
        left.durable_names = dict(left.files)
        return left

    def _name(self, path: str, inode: Inode | None) -> None:
        if inode is None:
            self.files.pop(path, None)
        else:
            self.files[path] = inode
        self.pending_names.append((path, inode))

    def create(self, path: str, size: int, *, reserve: bool) -> DiskFile:
        if path in self.files:
            raise FileExistsError(path)
        self.step("create", path)
        inode = Inode(bytes(size))
        self._name(path, inode)
        return CrashFile(self, path, inode)

    def open(self, path: str) -> DiskFile:
        if path not in self.files:
            raise FileNotFoundError(path)
        return CrashFile(self, path, self.files[path])

    def exists(self, path: str) -> bool:
        return path in self.files or any(name.startswith(path + "/") for name in self.files)

    def list_dir(self, path: str) -> Sequence[str]:
        prefix = path + "/"
        return sorted(
            {name[len(prefix) :].split("/")[0] for name in self.files if name.startswith(prefix)}
        )

    def make_dir(self, path: str, *, durably: bool = True) -> None:
        return

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return bytes(self.files[path].content)

    def replace(self, path: str, data: Buffer) -> None:
        self.step("replace", path)
        inode = Inode(bytes(data))
        self.files[path] = inode
        self.durable_names[path] = inode

    def unlink(self, path: str) -> None:
        self.step("unlink", path)
        if path in self.files:
            self._name(path, None)

    def remove_tree(self, path: str) -> None:
        for name in [name for name in self.files if name.startswith(path + "/")]:
            self.unlink(name)

    def flush_all(self, paths: Sequence[str], folders: Sequence[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                self.open(path).flush()
        for folder in folders:
            with suppress(FileNotFoundError):
                self.flush_dir(folder)

    def flush_dir(self, path: str) -> None:
        self.step("flush_dir", path)
        left: list[tuple[str, Inode | None]] = []
        for name, inode in self.pending_names:
            if posixpath.dirname(name) != path:
                left.append((name, inode))
            elif inode is None:
                self.durable_names.pop(name, None)
            else:
                self.durable_names[name] = inode
        self.pending_names = left

    def free_bytes(self, path: str) -> int:
        return 1 << 40

    def total_bytes(self, path: str) -> int:
        return 1 << 41

    def lock(self, path: str) -> Lock:
        if path in self.files:
            raise StoreLockedError(path)
        return _NoLock()


def disk_full(*, kind: str = "create", path_part: str = "") -> Callable[[str, str], None]:
    """Return a fault: no space for such acts on such paths."""

    def fault(found: str, path: str) -> None:
        if found == kind and path_part in path:
            raise DiskFullError(f"no space for {path}")

    return fault


def failing_flush(path_part: str = "") -> Callable[[str, str], None]:
    """Return a fault: flushes of such paths fail, and their pages are lost."""

    def fault(found: str, path: str) -> None:
        if found == "flush" and path_part in path:
            raise FlushFailedError(f"flush of {path} failed")

    return fault
