"""What the platter of a simulated disk may hold: flushes half done, and bytes that went bad.

A power cut in the middle of blocking work finds its flushes half done (`Flight`); rot, bad sectors
and torn writes change what was durable (`Platter`).
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.jepsen_like.seeded_rng import SimRng
from dledger.testing.crash_disk import SECTOR_BYTES, SEGMENTS, Inode, Names


@dataclass(slots=True)
class FlushedFile:
    """A file whose bytes work has flushed."""

    what: Inode
    sectors: dict[int, bytes]

    def undo(self) -> None:
        """The flush has not begun."""
        self.what.put_back(self.sectors)
        for sector in self.sectors:
            self.what.undo.pop(sector, None)

    def leave_to_chance(self) -> None:
        """The flush has reached some sectors: they differ again, each for itself."""
        self.what.undo.update(self.sectors)


@dataclass(slots=True)
class FlushedNames:
    """The names of a folder that work has flushed."""

    what: str
    before: dict[str, Inode | None]
    durable: Names
    chance: Callable[[], float]

    def undo(self) -> None:
        """The flush has not begun."""
        for path, inode in self.before.items():
            if inode is None:
                self.durable.pop(path, None)
            else:
                self.durable[path] = inode

    def leave_to_chance(self) -> None:
        """The flush of a folder is whole, or has not happened."""
        if self.chance() < 0.5:
            self.undo()


@dataclass(slots=True)
class Flight:
    """What work has made durable whose time is not over yet, in order.

    A power cut finds the work at one of its steps: those before it are done, that one has reached
    some sectors, those behind it have not begun.
    """

    steps: list[FlushedFile | FlushedNames] = field(default_factory=list)

    def settle(self, what: Inode | str) -> None:
        """Forget the steps of a file, or of a folder, that a later flush has made durable."""
        self.steps = [step for step in self.steps if step.what != what]

    def cut(self, reached: int) -> None:
        """Undo what a power cut in step *reached* leaves undone; all steps: nothing."""
        for step in reversed(self.steps[reached + 1 :]):
            step.undo()
        if reached < len(self.steps):
            self.steps[reached].leave_to_chance()


# -- bytes that go bad ------------------------------------------------------------------------

ROT_TAIL_BYTES: Final = 2048
"""The end of a file, where what was acknowledged last stands."""

SPOILED: Final = (SEGMENTS, SEGMENTS, "/entryindex/", "/index/")
"""Where sectors go bad: in the log and in files that are read, not mapped, and made from it."""

IDENTITY: Final = "/raft/identity"

KEY_INDEX: Final = "/index/"

QUEUES: Final = "/consumequeue/"

ROTTEN: Final = (
    QUEUES,
    "/consumequeue.shared/",
    KEY_INDEX,
    "/raft/snapshot",
    IDENTITY,
    "/raft/entryindex/",
)
"""Parts of the paths of files that go bad and are no segments; as `Kind.FILE_ROT` counts them."""

LOG_BEGIN: Final = -(1 << 40)
"""Where files begin that have no place in the log: before every byte of it."""


class Platter:
    """The files of one disk, and what may happen to bytes that were durable.

    *names*, *durable_names*: the files by path, now and after a power cut.
    """

    def __init__(self, rng: SimRng) -> None:
        self.rng = rng
        self.names: Names = {}
        self.durable_names: Names = {}

    def rot(
        self, path_part: str = "/commitlog/", bits: int = 1, end: int | None = None
    ) -> list[tuple[str, int]]:
        """Flip bits of flushed bytes of files on such paths, half of the time at the end; return
        where.

        *end*: files are named after their first byte; bytes from this one on are left alone.
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

    def rot_file(self, part: str, bits: int, *, unreadable: bool) -> list[tuple[str, int]]:
        """Flip bits of one file with *part* in its path, or let a sector of it be unreadable.

        Returns:
            Path and byte offset of each; empty when there is no such file.
        """
        paths = [
            path
            for path, inode in sorted(self.names.items())
            if part in path
            and path in self.durable_names
            and inode.written_to
            # What a unit of it has for a tag is a time, which nothing compares.
            and SCHEDULE_TOPIC not in path
        ]
        if not paths:
            return []
        path = paths[self.rng.randrange(len(paths))]
        size = self.names[path].written_to
        if not unreadable:
            return self.flip(path, 0, size, bits)
        at = self.rng.randrange(size) // SECTOR_BYTES * SECTOR_BYTES
        self.spoil(path, at, min(at + SECTOR_BYTES, len(self.names[path].content)))
        return [(path, at)]

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
        """Let reads of some flushed sectors of files of `SPOILED` kinds fail; return where.

        *log_end*: bytes of segments from this one on are left alone.
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


def _begin_of(path: str, part: str) -> int:
    """Return the position of a segment's first byte; other files have no place in the log."""
    return int(posixpath.basename(path)) if part == SEGMENTS else LOG_BEGIN


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
