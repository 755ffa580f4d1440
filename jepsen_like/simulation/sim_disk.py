"""A disk in memory that tells apart what was written and what will still be there.

Every file is one extent of bytes as the page cache has them. Beside it stands, for each sector
that differs, what the platter still has. A flush forgets the old sectors; a power cut tosses a
coin for each of them. A flush that is under way when the power goes has reached some sectors only.

::

    Mount (one incarnation of a node) ─► SimDisk ─► names ─► Inode: content, undo
      ends with its node: a dead                     │
      node's calls change nothing                    └ names not yet durable, in order
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from typing_extensions import Buffer

from commitlog.errors import (
    DiskFullError,
    FlushFailedError,
    InvariantBroken,
    OffsetOutOfRangeError,
    StoreLockedError,
)
from commitlog.seams import DiskFile, Lock
from jepsen_like.seeded_rng import SimRng

SECTOR_BYTES: Final = 512
"""What a disk writes whole or not at all."""

PAGE_BYTES: Final = 4096
"""What a sparse file takes space by."""

ROT_TAIL_BYTES: Final = 2048
"""The end of a file, where what was promised last stands."""

SEGMENTS: Final = "/commitlog/"
SPOILED: Final = (SEGMENTS, SEGMENTS, "/entryindex/", "/index/")
"""Where sectors go bad: in the log and in files that are read, not mapped, and made from it."""

TOTAL_BYTES: Final = 1 << 40
"""Size of a disk without a limit."""


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

    def __init__(self, size: int, *, reserve: bool) -> None:
        self.content = bytearray(size)
        self.readable = memoryview(self.content).toreadonly()
        self.undo: dict[int, bytes] = {}
        self.lost: dict[int, bytes] = {}
        self.pages: set[int] | None = None if reserve else set()
        self.written_to = 0
        self.unreadable: list[tuple[int, int]] = []

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


@dataclass(slots=True)
class Flight:
    """What work has made durable whose time is not over yet, in order.

    A power cut finds the work at one of its steps: those before it are done, that one has reached
    some sectors, those behind it have not begun.

    Attributes:
        steps: How to undo each: the file and what the platter had of it, or the names and what
            they stood for.
    """

    steps: list[_FlushedFile | _FlushedNames] = field(default_factory=list)

    def settle(self, what: Inode | str) -> None:
        """A later flush of a file, or of the names in a folder, has ended: so has this one."""
        self.steps = [step for step in self.steps if step.what != what]


@dataclass(slots=True)
class _FlushedFile:
    inode: Inode
    sectors: dict[int, bytes]

    @property
    def what(self) -> Inode:
        return self.inode

    def undo(self) -> None:
        self.inode.put_back(self.sectors)
        for sector in self.sectors:
            self.inode.undo.pop(sector, None)

    def doubt(self) -> None:
        self.inode.undo.update(self.sectors)


@dataclass(slots=True)
class _FlushedNames:
    disk: SimDisk
    what: str
    before: dict[str, Inode | None]

    def undo(self) -> None:
        durable = self.disk.durable_names
        for path, inode in self.before.items():
            if inode is None:
                durable.pop(path, None)
            else:
                durable[path] = inode

    def doubt(self) -> None:
        if self.disk.rng.random() < 0.5:
            self.undo()


class SimDisk:
    """The disk of one node; outlives it. `mount` gives the seam to an incarnation.

    Attributes:
        capacity_bytes: None means no limit.
        delay_s: What every flush takes on top.
        flush_failures: How many of the next flushes fail and lose their pages.
        observe: Told of every act with its kind, path, offset and size, before it has an effect; a
            write after it. The node may be killed from there.
    """

    def __init__(self, rng: SimRng) -> None:
        self.rng = rng
        self.names: dict[str, Inode] = {}
        self.durable_names: dict[str, Inode] = {}
        self.pending_names: list[tuple[str, Inode | None]] = []
        self.folders: dict[str, dict[str, None]] = {"/": {}}
        self.locks: dict[str, Mount] = {}
        self.flights: list[Flight] = []
        self.capacity_bytes: int | None = None
        self.used_bytes = 0
        self.delay_s = 0.0
        self.flush_failures = 0
        self.observe: Callable[[str, str, int, int], None] = _nobody
        self.torn_sectors = 0

    def mount(self) -> Mount:
        """Return the disk as a new incarnation of its node sees it."""
        return Mount(self)

    # -- faults ----------------------------------------------------------------------------

    def kill(self, mount: Mount) -> None:
        """End an incarnation: its calls change nothing any more.

        The page cache stays, without the pages that a failed flush lost: what the next process
        reads there is on disk, or can still be flushed. Work under way is finished by the machine.
        """
        mount.is_gone = True
        for path in [path for path, owner in self.locks.items() if owner is mount]:
            del self.locks[path]
        self.flights.clear()
        self.evict()

    def power_cut(self) -> int:
        """Lose what was not flushed, sector by sector, by chance; return sectors lost."""
        chance = self.rng.random
        lost = 0
        for flight in reversed(self.flights):
            reached = self.rng.randrange(len(flight.steps) + 1)
            for step in reversed(flight.steps[reached + 1 :]):
                step.undo()
            if reached < len(flight.steps):
                flight.steps[reached].doubt()
        names = dict(self.durable_names)
        for path, now in self.pending_names:
            if chance() < 0.5:  # a journal keeps order: what comes behind is gone too
                break
            if now is None:
                names.pop(path, None)
            else:
                names[path] = now
        self.flights.clear()
        self.locks.clear()
        self.pending_names.clear()
        for inode in {id(inode): inode for inode in names.values()}.values():
            lost += self._lose_sectors(inode, chance)
        self._set_names(names)
        self.torn_sectors += lost
        return lost

    def _lose_sectors(self, inode: Inode, chance: Callable[[], float]) -> int:
        # Sometimes all, sometimes none, mostly a mixture: each is a way in which disks die.
        keep = (0.0, 0.5, 0.5, 1.0)[int(chance() * 4)]
        gone = {sector: old for sector, old in inode.undo.items() if chance() >= keep}
        inode.put_back(gone)
        inode.put_back(inode.lost)
        gone_for_good = len(gone) + len(inode.lost)
        inode.undo.clear()
        inode.lost.clear()
        return gone_for_good

    def wipe(self) -> None:
        """Lose everything, as with a new disk."""
        self.pending_names.clear()
        self.flights.clear()
        self.locks.clear()
        self.folders = {"/": {}}
        self._set_names({})

    def _set_names(self, names: dict[str, Inode]) -> None:
        self.names = dict(names)
        self.durable_names = dict(names)
        # Folders are made durably and stay.
        folders, self.folders = self.folders, {"/": {}}
        for path in folders:
            self.folders.setdefault(path, {})
            self._link(path)
        for path in names:
            self._link(path)
        self.used_bytes = sum(map(_space, {id(i): i for i in names.values()}.values()))

    def rot(
        self, path_part: str = "/commitlog/", bits: int = 1, end: int | None = None
    ) -> list[tuple[str, int]]:
        """Flip bits of flushed, written bytes of files on such paths, half of the time at the end.

        Args:
            end: Files are named after their first byte; bytes from this one on are left alone.
        Returns:
            Path and byte offset of each.
        """
        found: list[tuple[str, int]] = []
        sizes: dict[str, int] = {}
        for path, inode in sorted(self.names.items()):
            size = inode.written_to
            if end is not None and path_part in path:
                size = min(size, end - int(posixpath.basename(path)))
            if path_part in path and size > 0:
                sizes[path] = size
        paths = list(sizes)
        at_end = self.rng.random() < 0.5
        for _ in range(bits if paths else 0):
            path = paths[-1] if at_end else paths[self.rng.randrange(len(paths))]
            inode = self.names[path]
            area = min(sizes[path], ROT_TAIL_BYTES) if at_end else sizes[path]
            at = sizes[path] - 1 - self.rng.randrange(area)
            inode.content[at] ^= 1 << self.rng.randrange(8)
            found.append((path, at))
        return found

    def flip(self, path: str, start: int, end: int, bits: int = 1) -> list[tuple[str, int]]:
        """Flip bits of bytes [start, end) of one file; return path and byte offset of each."""
        content = self.names[path].content
        found = [(path, start + self.rng.randrange(end - start)) for _ in range(bits)]
        for _, at in found:
            content[at] ^= 1 << self.rng.randrange(8)
        return found

    def spoil(self, path: str, start: int, end: int) -> None:
        """Let reads of bytes [start, end) of one file fail until they are written again."""
        self.names[path].unreadable.append((start, end))

    def spoil_sectors(self, sectors: int, log_end: int) -> list[tuple[str, int]]:
        """Let reads of so many flushed sectors fail, each of a file of one of `SPOILED` kinds.

        Args:
            log_end: Bytes of segments from this one on are left alone.
        Returns:
            Path and byte offset of each.
        """
        found: list[tuple[str, int]] = []
        for _ in range(sectors):
            part = SPOILED[self.rng.randrange(len(SPOILED))]
            places = [
                (path, at)
                for path, inode in sorted(self.names.items())
                if part in path and path in self.durable_names
                for at in _written_sectors(inode, log_end - _begin_of(path, part))
            ]
            if places:
                path, at = places[self.rng.randrange(len(places))]
                self.spoil(path, at, at + SECTOR_BYTES)
                found.append((path, at))
        return found

    def tear_tail(self, path_part: str, size_bytes: int, begin: int) -> tuple[str, int] | None:
        """Write zeros or garbage over the newest *size_bytes* on such paths, as a torn write.

        Args:
            begin: Files are named after their first byte; bytes before this one are left alone.
        Returns:
            Path and byte offset of the first; None where nothing is written from *begin* on.
        """
        for path, inode in sorted(self.names.items(), reverse=True):
            if path_part not in path:
                continue
            end = len(inode.content[: inode.written_to].rstrip(b"\0"))
            start = max(0, begin - int(posixpath.basename(path)), end - size_bytes)
            if start < end:
                blank = self.rng.random() < 0.5
                size = end - start
                inode.content[start:end] = bytes(size) if blank else self.rng.randbytes(size)
                return path, start
        return None

    def evict(self) -> int:
        """Drop the page cache: pages that a failed flush lost are seen to be lost now."""
        lost = 0
        for inode in self.names.values():
            inode.put_back(inode.lost)
            lost += len(inode.lost)
            inode.lost.clear()
        return lost

    # -- what is certain -------------------------------------------------------------------

    def first_doubtful(self, path: str, start: int, end: int) -> int | None:
        """Return the first byte in [start, end) of a file that a power cut now might change."""
        inode = self.names.get(path)
        if inode is None or self.durable_names.get(path) is not inode:
            return start
        if any(path in names for names in self._doubtful_names()):
            return start
        first = end
        for sectors in self._doubtful_sectors(inode):
            for sector, old in sectors.items():
                at = sector * SECTOR_BYTES
                low, high = max(at, start), min(at + len(old), first)
                if low < high and old[low - at : high - at] != inode.content[low:high]:
                    first = low
        return None if first == end else first

    def certain(self, path: str) -> bytes | None:
        """Return a file's bytes as they are without everything a power cut now might undo."""
        inode = self.durable_names.get(path)
        if inode is None:
            return None
        content = bytearray(inode.content)
        for sectors in self._doubtful_sectors(inode):
            for sector, old in sectors.items():
                at = sector * SECTOR_BYTES
                content[at : at + len(old)] = old
        return bytes(content)

    def _doubtful_names(self) -> Iterator[dict[str, Inode | None]]:
        for flight in self.flights:
            for step in flight.steps:
                if isinstance(step, _FlushedNames):
                    yield step.before

    def _doubtful_sectors(self, inode: Inode) -> Iterator[dict[int, bytes]]:
        """Yield what the platter may have, the newest first."""
        yield inode.undo
        yield inode.lost
        for flight in reversed(self.flights):
            for step in reversed(flight.steps):
                if isinstance(step, _FlushedFile) and step.inode is inode:
                    yield step.sectors

    # -- names -----------------------------------------------------------------------------

    def _link(self, path: str) -> None:
        folders = self.folders
        while path != "/":
            folder, name = posixpath.split(path)
            entries = folders.get(folder)
            if entries is None:
                entries = folders[folder] = {}
            elif name in entries:
                return
            entries[name] = None
            path = folder

    def _unlink(self, path: str) -> None:
        folder, name = posixpath.split(path)
        self.folders.get(folder, {}).pop(name, None)

    def take(self, size: int, path: str) -> None:
        """Take space.

        Raises:
            DiskFullError: There is none; nothing was taken.
        """
        limit = self.capacity_bytes
        if limit is not None and self.used_bytes + size > limit:
            raise DiskFullError(f"no space for {size} bytes of {path}")
        self.used_bytes += size


def _begin_of(path: str, part: str) -> int:
    """Return the position of a segment's first byte; other files have no place in the log."""
    return int(posixpath.basename(path)) if part == SEGMENTS else -TOTAL_BYTES


def _written_sectors(inode: Inode, end: int) -> Iterator[int]:
    """Yield where flushed sectors begin that hold something and lie before *end*."""
    for at in range(0, min(inode.written_to, end) - SECTOR_BYTES + 1, SECTOR_BYTES):
        number = at // SECTOR_BYTES
        if (
            number not in inode.undo
            and number not in inode.lost
            and any(inode.content[at : at + SECTOR_BYTES])
            and not inode.is_unreadable(at, at + SECTOR_BYTES)
        ):
            yield at


def _nobody(kind: str, path: str, offset: int, size: int) -> None:
    """Watch nothing."""


def _space(inode: Inode) -> int:
    return len(inode.content) if inode.pages is None else PAGE_BYTES * len(inode.pages)


class MappedReadFailed(Exception):  # noqa: N818  # what a real process is told by a signal
    """A bad sector was read through a mapping."""


class SimFile:
    """An open file of a `Mount`."""

    __slots__ = ("_inode", "_is_closed", "_mount", "path", "size")

    def __init__(self, mount: Mount, path: str, inode: Inode) -> None:
        self._mount = mount
        self._inode = inode
        self._is_closed = False
        self.path = path
        self.size = len(inode.content)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write; volatile until flushed."""
        view = memoryview(data).cast("B")
        size = len(view)
        if self._is_closed:
            raise InvariantBroken(f"write to the closed file {self.path}")
        if offset < 0 or offset + size > self.size:
            raise InvariantBroken(
                f"write of {size} bytes at {offset} leaves {self.path} of {self.size} bytes"
            )
        mount = self._mount
        if mount.is_gone or not size:
            return
        disk, inode = mount.disk, self._inode
        if inode.takes_part_of_bad_sector(offset, offset + size):
            disk.observe("read_error", self.path, offset, size)
            raise OSError(errno.EIO, "input/output error", self.path)
        if inode.pages is not None:
            pages = range(offset // PAGE_BYTES, (offset + size - 1) // PAGE_BYTES + 1)
            fresh = [page for page in pages if page not in inode.pages]
            if fresh:
                disk.take(PAGE_BYTES * len(fresh), self.path)
                inode.pages.update(fresh)
        inode.write(offset, view)
        disk.observe("write", self.path, offset, size)

    def view(self, offset: int, size: int) -> memoryview:
        """Return a read-only view of the page cache.

        A mapped page on a bad sector ends a process: so does this. Segments are mapped whole and
        looked at only where they were written by this process.
        """
        if SEGMENTS not in self.path and self._inode.is_unreadable(offset, offset + size):
            raise MappedReadFailed(f"a mapped page of {self.path} cannot be brought in")
        if offset < 0 or size < 0 or offset + size > self.size:
            raise OffsetOutOfRangeError(
                f"{size} bytes at {offset} are not all inside {self.path} of {self.size} bytes"
            )
        return self._inode.readable[offset : offset + size]

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy; bytes on a bad sector cannot be read until all of it is written."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise OffsetOutOfRangeError(
                f"{size} bytes at {offset} are not all inside {self.path} of {self.size} bytes"
            )
        if self._inode.is_unreadable(offset, offset + size):
            self._mount.disk.observe("read_error", self.path, offset, size)
            raise OSError(errno.EIO, "input/output error", self.path)
        return bytes(self._inode.readable[offset : offset + size])

    def flush(self) -> None:
        """Make what was written so far durable."""
        mount = self._mount
        if not mount.is_gone:
            mount.flush_inode(self.path, self._inode)

    def close(self) -> None:
        """Give the file back; unflushed bytes stay in the page cache."""
        self._is_closed = True


class _Claim:
    """A lock held by a mount."""

    __slots__ = ("_mount", "_path")

    def __init__(self, mount: Mount, path: str) -> None:
        self._mount = mount
        self._path = path

    def release(self) -> None:
        locks = self._mount.disk.locks
        if locks.get(self._path) is self._mount:
            del locks[self._path]


class Mount:
    """`commitlog.seams.Disk` of one incarnation of a node.

    Attributes:
        is_gone: The incarnation has ended: nothing it does reaches the disk any more.
    """

    __slots__ = ("_flight", "disk", "is_gone")

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.is_gone = False
        self._flight: Flight | None = None

    @property
    def delay_s(self) -> float:
        """What a flush takes on top at this moment."""
        return self.disk.delay_s

    # -- work that takes time --------------------------------------------------------------

    def take_off(self) -> Flight:
        """Begin work whose flushes stay doubtful until `land`; it must not await meanwhile."""
        flight = self._flight = Flight()
        self.disk.flights.append(flight)
        return flight

    def land(self, flight: Flight) -> None:
        """End that work: what it flushed is durable."""
        if flight is self._flight:
            self._flight = None
        flights = self.disk.flights
        if self.is_gone or flight not in flights:
            return
        begun_before = flights[: flights.index(flight)]
        flights.remove(flight)
        for step in flight.steps:
            for other in begun_before:
                other.settle(step.what)

    def work_done(self) -> None:
        """What is flushed from now on belongs to no work."""
        self._flight = None

    def flush_inode(self, path: str, inode: Inode) -> None:
        """Make a file's bytes durable, or doubtful while work is under way."""
        disk, undo = self.disk, inode.undo
        if disk.flush_failures > 0:
            disk.flush_failures -= 1
            disk.observe("flush_failed", path, 0, len(undo))
            if not self.is_gone:
                inode.lost = {**undo, **inode.lost}
                inode.undo = {}
            raise FlushFailedError(f"flush of {path} failed: {errno.errorcode[errno.EIO]}")
        disk.observe("flush", path, 0, len(undo))
        if self.is_gone:
            return
        for sector in undo if inode.lost else ():
            inode.lost.pop(sector, None)  # written again, and now whole
        self._under_way(_FlushedFile(inode, undo))
        inode.undo = {}

    def _under_way(self, step: _FlushedFile | _FlushedNames) -> None:
        """Doubt a flush until its work is over; one outside of work has waited for all others."""
        if self._flight is not None:
            self._flight.steps.append(step)
            return
        for flight in self.disk.flights:
            flight.settle(step.what)

    # -- the seam --------------------------------------------------------------------------

    def create(self, path: str, size: int, *, reserve: bool) -> DiskFile:
        """Make a zero-filled file and open it."""
        disk = self.disk
        inode = Inode(size, reserve=reserve)
        if self.is_gone:
            return SimFile(self, path, inode)
        if path in disk.names:
            raise FileExistsError(errno.EEXIST, "file exists", path)
        if reserve:
            disk.take(size, path)
        disk.observe("create", path, 0, size)
        if self.is_gone:  # struck at this very point
            return SimFile(self, path, inode)
        disk.names[path] = inode
        disk.pending_names.append((path, inode))
        disk._link(path)
        return SimFile(self, path, inode)

    def open(self, path: str) -> DiskFile:
        """Open an existing file."""
        inode = self.disk.names.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return SimFile(self, path, inode)

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder is there."""
        return path in self.disk.names or path in self.disk.folders

    def list_dir(self, path: str) -> Sequence[str]:
        """Return the names in a folder, sorted."""
        return sorted(self.disk.folders.get(path, ()))

    def make_dir(self, path: str, *, durably: bool = True) -> None:
        """Make a folder and its parents, durably."""
        if not self.is_gone and path not in self.disk.folders:
            self.disk.folders[path] = {}
            self.disk._link(path)

    def read(self, path: str) -> bytes:
        """Return the whole content of a small file."""
        inode = self.disk.names.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return bytes(inode.content)

    def replace(self, path: str, data: Buffer) -> None:
        """Set the whole content of a small file, atomically and durably."""
        if self.is_gone:
            return
        disk = self.disk
        content = bytes(memoryview(data).cast("B"))
        if disk.flush_failures > 0:
            disk.flush_failures -= 1
            disk.observe("flush_failed", path, 0, len(content))
            raise FlushFailedError(f"{path} could not be replaced: EIO")
        before = disk.names.get(path)
        disk.take(len(content) - (len(before.content) if before else 0), path)
        disk.observe("replace", path, 0, len(content))
        if self.is_gone:
            return
        inode = Inode(len(content), reserve=True)
        inode.content[:] = content
        inode.written_to = len(content)
        disk.names[path] = inode
        disk.pending_names.append((path, inode))
        # The flush of the folder makes durable whatever is pending in it.
        self._settle_names(posixpath.dirname(path))
        disk._link(path)

    def unlink(self, path: str) -> None:
        """Remove a file; durable after `flush_dir`."""
        disk = self.disk
        if self.is_gone or path not in disk.names:
            return
        disk.observe("unlink", path, 0, 0)
        if self.is_gone:
            return
        disk.used_bytes -= _space(disk.names.pop(path))
        disk.pending_names.append((path, None))
        disk._unlink(path)

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all below it."""
        if self.is_gone:
            return
        below = path + "/"
        for name in [name for name in self.disk.names if name.startswith(below)]:
            self.unlink(name)
        for folder in [f for f in self.disk.folders if f == path or f.startswith(below)]:
            del self.disk.folders[folder]
            self.disk._unlink(folder)

    def flush_all(self, paths: Sequence[str], folders: Sequence[str]) -> None:
        """Flush them one by one."""
        for path in paths:
            with suppress(FileNotFoundError):
                self.open(path).flush()
        for folder in folders:
            with suppress(FileNotFoundError):
                self.flush_dir(folder)

    def flush_dir(self, path: str) -> None:
        """Make names in that folder durable."""
        if self.is_gone:
            return
        if path not in self.disk.folders:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        self._settle_names(path)

    def _settle_names(self, folder: str) -> None:
        disk = self.disk
        durable = disk.durable_names
        before: dict[str, Inode | None] = {}
        left: list[tuple[str, Inode | None]] = []
        for path, inode in disk.pending_names:
            if posixpath.dirname(path) != folder:
                left.append((path, inode))
                continue
            before.setdefault(path, durable.get(path))
            if inode is None:
                durable.pop(path, None)
            else:
                durable[path] = inode
        disk.pending_names = left
        self._under_way(_FlushedNames(disk, folder, before))

    def free_bytes(self, path: str) -> int:
        """Return the space left."""
        return max(0, self.total_bytes(path) - self.disk.used_bytes)

    def total_bytes(self, path: str) -> int:
        """Return the size of the disk."""
        limit = self.disk.capacity_bytes
        return TOTAL_BYTES if limit is None else max(1, limit)

    def lock(self, path: str) -> Lock:
        """Take the exclusive lock file."""
        disk = self.disk
        if not self.is_gone:
            if path in disk.locks:
                raise StoreLockedError(f"another process holds {path}")
            disk.locks[path] = self
            if path not in disk.names:
                disk.names[path] = disk.durable_names[path] = Inode(0, reserve=True)
                disk._link(path)
        return _Claim(self, path)
