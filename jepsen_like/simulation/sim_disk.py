"""The disk of a simulated node: power cuts and failed flushes by a seeded chance, and its executor.

Files and names follow the sector model of `dledger.testing.crash_disk`. A power cut tosses a coin
for each sector that differs from the platter; a flush that is under way then has reached some
sectors only. What goes bad later is in `platter`. Blocking work is done in virtual time, never in a
thread.

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
from typing import Final, TypeVar

from typing_extensions import Buffer

from dledger.commitlog.errors import DiskFullError, FlushFailedError, StoreLockedError
from dledger.commitlog.seams import DiskFile, Lock
from dledger.jepsen_like.seeded_rng import SimRng
from dledger.jepsen_like.simulation.platter import Flight, FlushedFile, FlushedNames, Platter
from dledger.jepsen_like.simulation.virtual_time import SimClock
from dledger.testing.crash_disk import (
    SECTOR_BYTES,
    SEGMENTS,
    Folders,
    Inode,
    PendingNames,
    SectorFile,
    flush_names,
    names_after_power_cut,
)

PAGE_BYTES: Final = 4096
"""What a sparse file takes space by."""

TOTAL_BYTES: Final = 1 << 40  # of a disk without a limit


class SimDisk(Platter):
    """The disk of one node; outlives it. `mount` gives the seam to an incarnation.

    Attributes:
        capacity_bytes: None means no limit.
        delay_s: What every flush takes on top.
        late_s: How late work begins at most.
        flush_failures: How many of the next flushes fail and lose their pages.
        observe: Called for every act with its kind, path, offset and size, before it has an effect;
            a write after it. The node may be killed from there.
    """

    def __init__(self, rng: SimRng) -> None:
        super().__init__(rng)
        self.pending_names: PendingNames = []
        self.folders = Folders()
        self.locks: dict[str, Mount] = {}
        self.flights: list[Flight] = []
        self.capacity_bytes: int | None = None
        self.used_bytes = 0
        self.delay_s = 0.0
        self.late_s = 0.0
        self._lied: dict[Inode, dict[int, bytes]] | None = None
        self.flush_failures = 0
        self.observe: Callable[[str, str, int, int], None] = lambda *_: None

    def mount(self) -> Mount:
        """Return the disk as a new incarnation of its node sees it."""
        return Mount(self)

    def install(self, path: str, content: bytes) -> None:
        """Let a small file be there, durably, as an operator would before a start."""
        if path not in self.names:
            self.names[path] = self.durable_names[path] = Inode.holding(content)
            self.folders.link(path)

    # -- faults ----------------------------------------------------------------------------

    def kill(self, mount: Mount) -> int:
        """End an incarnation: its calls change nothing any more; return sectors lost.

        The page cache stays, without the pages that a failed flush lost: what the next process
        reads there is on disk, or can still be flushed. Work under way is finished by the machine.
        """
        mount.is_gone = True
        for path in [path for path, owner in self.locks.items() if owner is mount]:
            del self.locks[path]
        self.flights.clear()
        return self.evict()

    def power_cut(self) -> int:
        """Lose what was not flushed, sector by sector, by chance; return sectors lost."""
        chance = self.rng.random
        lost = 0
        for flight in reversed(self.flights):
            flight.cut(self.rng.randrange(len(flight.steps) + 1))
        names = names_after_power_cut(
            self.durable_names, self.pending_names, lambda: chance() >= 0.5
        )
        self.flights.clear()
        self.locks.clear()
        self.pending_names.clear()
        for inode in {id(inode): inode for inode in names.values()}.values():
            lost += self._lose_sectors(inode, chance)
        self._set_names(names)
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

    def lie(self, *, lies: bool) -> None:
        """Remember, or forget, what flushes of the log have replaced on the platter."""
        self._lied = {} if lies else None

    def undo_lies(self) -> int:
        """Put back, by chance, sectors whose flush was none; return how many."""
        undone, chance = 0, self.rng.random
        for inode, sectors in (self._lied or {}).items():
            keep = chance()
            gone = {at: old for at, old in sectors.items() if chance() >= keep}
            inode.put_back(gone)
            undone += len(gone)
        self._lied = None
        return undone

    def note_flushed(self, path: str, inode: Inode) -> None:
        """Remember what a flush of a segment replaces while the disk lies."""
        if self._lied is not None and SEGMENTS in path:
            self._lied[inode] = {**inode.undo, **self._lied.get(inode, {})}

    def wipe(self) -> None:
        """Lose everything, as with a new disk."""
        self.pending_names.clear()
        self.flights.clear()
        self.locks.clear()
        self.folders = Folders()
        self._set_names({})

    def _set_names(self, names: dict[str, Inode]) -> None:
        self.names = dict(names)
        self.durable_names = dict(names)
        self.folders = self.folders.only_with(list(names))
        self.used_bytes = sum(map(_space, {id(i): i for i in names.values()}.values()))

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
                if isinstance(step, FlushedNames):
                    yield step.before

    def _doubtful_sectors(self, inode: Inode) -> Iterator[dict[int, bytes]]:
        """Yield what the platter may have, the newest first."""
        yield inode.undo
        yield inode.lost
        for flight in reversed(self.flights):
            for step in reversed(flight.steps):
                if isinstance(step, FlushedFile) and step.what is inode:
                    yield step.sectors

    # -- space -----------------------------------------------------------------------------

    def take(self, size: int, path: str) -> None:
        """Take space. Raises DiskFullError: there is none; nothing was taken."""
        limit = self.capacity_bytes
        if limit is not None and self.used_bytes + size > limit:
            raise DiskFullError(f"no space for {size} bytes of {path}")
        self.used_bytes += size


def _space(inode: Inode) -> int:
    return len(inode.content) if inode.pages is None else PAGE_BYTES * len(inode.pages)


class SimFile(SectorFile):
    """An open file of a `Mount`."""

    __slots__ = ("_mount",)

    def __init__(self, mount: Mount, path: str, inode: Inode) -> None:
        super().__init__(path, inode)
        self._mount = mount

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write; volatile until flushed."""
        view = self.checked(offset, data)
        size = len(view)
        mount = self._mount
        if mount.is_gone or not size:
            return
        disk, inode = mount.disk, self.inode
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

    def on_read_error(self, offset: int, size: int) -> None:
        """Report bytes that cannot be read."""
        self._mount.disk.observe("read_error", self.path, offset, size)

    def flush(self) -> None:
        """Make what was written so far durable."""
        mount = self._mount
        if not mount.is_gone:
            mount.flush_inode(self.path, self.inode)


class _Claim:
    """A lock held by a mount."""

    __slots__ = ("_is_released", "_mount", "_path")

    def __init__(self, mount: Mount, path: str) -> None:
        self._is_released = False
        self._mount = mount
        self._path = path

    def release(self) -> None:
        locks = self._mount.disk.locks
        if not self._is_released and locks.get(self._path) is self._mount:
            del locks[self._path]
        self._is_released = True


class Mount:
    """`dledger.commitlog.seams.Disk` of one incarnation of a node.

    *is_gone*: the incarnation has ended: nothing it does reaches the disk any more.
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

    @property
    def late_s(self) -> float:
        """How late work begins at most."""
        return self.disk.late_s

    # -- work that takes time --------------------------------------------------------------

    def take_off(self) -> Flight:
        """Begin work whose flushes stay uncertain until `land`; it must not await meanwhile."""
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
        """Make a file's bytes durable, or uncertain while work is under way."""
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
        disk.note_flushed(path, inode)
        for sector in undo if inode.lost else ():
            inode.lost.pop(sector, None)  # written again, and now whole
        self._under_way(FlushedFile(inode, undo))
        inode.undo = {}

    def _under_way(self, step: FlushedFile | FlushedNames) -> None:
        """Keep a flush uncertain until its work ends; outside of work none is under way."""
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
        disk.folders.link(path)
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
        return self.disk.folders.names_in(path)

    def make_dir(self, path: str, *, durably: bool = True) -> None:
        """Make a folder and its parents, durably."""
        if not self.is_gone:
            self.disk.folders.make(path)

    def read(self, path: str) -> bytes:
        """Return the whole content of a small file."""
        inode = self.disk.names.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        if inode.unreadable:
            self.disk.observe("read_error", path, 0, len(inode.content))
            raise OSError(errno.EIO, "input/output error", path)
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
        inode = Inode.holding(content)
        disk.names[path] = inode
        disk.pending_names.append((path, inode))
        # The flush of the folder makes durable whatever is pending in it.
        self._settle_names(posixpath.dirname(path))
        disk.folders.link(path)

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
        disk.folders.unlink(path)

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all below it."""
        if self.is_gone:
            return
        below = path + "/"
        for name in [name for name in self.disk.names if name.startswith(below)]:
            self.unlink(name)
        self.disk.folders.remove_tree(path)

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
        disk.pending_names, before = flush_names(disk.durable_names, disk.pending_names, folder)
        self._under_way(FlushedNames(folder, before, disk.durable_names, disk.rng.random))

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
                disk.names[path] = disk.durable_names[path] = Inode(0)
                disk.folders.link(path)
        return _Claim(self, path)


T = TypeVar("T")

WORK_S: Final = 0.0008
"""What blocking work usually takes: one flush of a common disk."""

SEEN_EARLY: Final = frozenset({"reserve"})
"""Work whose result others find in memory, not in what it returns: it is done when its time is
over. Done at once it would show a file whose name is not durable yet, as no thread does."""

INLINE_CHANCE: Final = 0.5
"""How often a healthy disk passes for one not worth waiting for: both ways must be right."""


class SimExecutor:
    """`dledger.remoting.seams.Executor` of one incarnation of a node.

    The work is done at once and its result held back for as long as the disk takes. Meanwhile
    what it flushed is on its way: a power cut still decides sector by sector.
    """

    __slots__ = ("_clock", "_mount", "_rng")

    def __init__(self, clock: SimClock, mount: Mount, rng: SimRng) -> None:
        self._clock = clock
        self._mount = mount
        self._rng = rng

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work*, let the disk's time pass, and return its result; errors pass through."""
        mount = self._mount
        if mount.late_s:
            await self._clock.wait(mount.late_s * self._rng.random())
        if kind in SEEN_EARLY:
            await self._disk_time()
            return work()
        flight = mount.take_off()
        try:
            try:
                return work()
            finally:
                mount.work_done()
        finally:
            try:
                await self._disk_time()
            finally:
                mount.land(flight)

    async def _disk_time(self) -> None:
        await self._clock.wait(WORK_S * (0.5 + self._rng.random()) + self._mount.delay_s)

    def runs_inline(self, kind: str) -> bool:
        """Toss a coin while the disk is healthy; a slow one is never waited for inline."""
        mount = self._mount
        return not (mount.delay_s or mount.late_s) and self._rng.random() < INLINE_CHANCE

    def run_inline(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* in no time at all."""
        return work()
