"""What a failing disk does to the files of a node that is down: flipped bits, torn tails, nothing.

Damage destroys what was acknowledged: it is for a minority of a group at a time. Nothing is touched
unless the folder is a broker's and no broker runs on it. What takes a folder blocks for as long as
reading its files takes: call it from a worker thread.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum, unique
from pathlib import Path
from typing import Final

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import StoreLockedError
from dledger.commitlog.store_paths import StorePaths, parse_file_name
from dledger.jepsen_like.chaos.loop_disk import data_extents
from dledger.jepsen_like.nemesis.ground import FaultError, marked_end
from dledger.remoting.seams import Rng

SECTOR_BYTES: Final = 512
"""What a disk loses at once; also how wide the head and the tail of a file are."""

CHUNK_BYTES: Final = 1 << 20
"""Bytes of a file looked at in one piece."""

SHOWN_BYTES: Final = 8
"""Bytes of a damage that its description shows."""


@unique
class Place(StrEnum):
    """Which files of a broker are hit."""

    SEGMENT = "segment"
    """The log itself."""
    INDEX = "index"
    """Message keys; can be made again from the log."""
    SNAPSHOT = "snapshot"
    """The tables as of the last checkpoint; can be made again from the log that is kept."""
    VOTE = "vote"
    """Term and vote, in two slots that hold the same."""


@unique
class Part(StrEnum):
    """Where in what is written there."""

    HEAD = "head"
    """The first sector of the first file."""
    MIDDLE = "middle"
    """Anything between head and tail."""
    TAIL = "tail"
    """The last sector of the last file, up to the last byte that is not zero."""


@unique
class Filling(StrEnum):
    """What a torn write leaves in place of what was meant."""

    ZEROS = "zeros"
    GARBAGE = "garbage"


@dataclass(frozen=True, slots=True, order=True)
class Stretch:
    """Bytes *start* … *end* of a file that hold something."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Damage:
    """
    What was done to one place of one file: bytes *before*, and as many *after*, from *offset* on.
    """

    path: str
    offset: int
    before: bytes
    after: bytes

    def __str__(self) -> str:
        """Return it in one line, for the detail of an event."""
        dots = "…" if len(self.before) > SHOWN_BYTES else ""
        return (
            f"{self.path}: {len(self.before)} bytes at {self.offset}, "
            f"{self.before[:SHOWN_BYTES].hex()}{dots} became {self.after[:SHOWN_BYTES].hex()}{dots}"
        )


# -- choice ---------------------------------------------------------------------------------------


def choose_byte(rng: Rng, written: Sequence[Stretch], part: Part) -> tuple[str, int]:
    """Return (path, offset) of one byte in *part* of what is written, which is not nothing."""
    sizes = [stretch.end - stretch.start for stretch in written]
    end = sum(sizes)
    head_end, tail_start = min(SECTOR_BYTES, sizes[0]), end - min(SECTOR_BYTES, sizes[-1])
    low, high = {
        Part.HEAD: (0, head_end),
        Part.MIDDLE: (head_end, tail_start),
        Part.TAIL: (tail_start, end),
    }[part]
    number = low + rng.randrange(high - low) if low < high else rng.randrange(end)
    for stretch, size in zip(written, sizes, strict=True):
        if number < size:
            return stretch.path, stretch.start + number
        number -= size
    raise AssertionError("the number drawn is less than the sum")


def flipped(rng: Rng, before: bytes) -> bytes:
    """Return *before* with one bit of one byte the other way round."""
    place, bit = rng.randrange(len(before)), rng.randrange(8)
    return before[:place] + bytes([before[place] ^ 1 << bit]) + before[place + 1 :]


def torn(rng: Rng, before: bytes, filling: Filling) -> bytes:
    """Return what a write that was cut off leaves in place of *before*; never *before* itself."""
    if filling is Filling.ZEROS:
        return bytes(len(before))
    after = rng.randbytes(len(before))
    return after if after != before else flipped(rng, before)


# -- looking --------------------------------------------------------------------------------------


def files_at(paths: StorePaths, place: Place) -> list[Path]:
    """Return the files of one kind that are there, in the order of what they hold."""
    match place:
        case Place.SEGMENT:
            folder = Path(paths.commitlog)
            every = folder.iterdir() if folder.is_dir() else ()
            found = sorted(path for path in every if parse_file_name(path.name) is not None)
        case Place.INDEX:
            found = sorted(Path(paths.index).glob("*"))
        case Place.SNAPSHOT:
            found = [Path(paths.snapshot)]
        case Place.VOTE:
            found = [Path(paths.vote)]
    return [path for path in found if path.is_file()]


def written_in(path: Path) -> list[Stretch]:
    """Return the runs of sectors of a file that hold anything, without the zeros at their ends."""
    found: list[Stretch] = []
    sector_end = -1
    for offset, sector in _sectors_in_use(path):
        end = offset + len(sector.rstrip(b"\0"))
        if offset == sector_end:
            found[-1] = replace(found[-1], end=end)
        else:
            start = offset + len(sector) - len(sector.lstrip(b"\0"))
            found.append(Stretch(str(path), start, end))
        sector_end = offset + SECTOR_BYTES
    return found


def _sectors_in_use(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for start, end in data_extents(file.fileno()):
            for base in range(start - start % SECTOR_BYTES, end, CHUNK_BYTES):
                file.seek(base)
                chunk = file.read(min(CHUNK_BYTES, end - base))
                if chunk.count(0) == len(chunk):
                    continue
                for place in range(0, len(chunk), SECTOR_BYTES):
                    sector = chunk[place : place + SECTOR_BYTES]
                    if sector.count(0) < len(sector):
                        yield base + place, sector


# -- doing ----------------------------------------------------------------------------------------


def flip_bits(root: Path, rng: Rng, place: Place, part: Part, *, bits: int = 1) -> list[Damage]:
    """Flip *bits* bits of a stopped broker's files, durably; return a row for each.

    Of the log only what is at rest is hit: see `dledger.jepsen_like.nemesis.ground`. Two bits may
    be the same one and cancel each other. None are flipped when nothing is written at *place* yet.

    Raises FaultError: no broker's folder, or a broker runs on it; nothing was changed.
    """
    with _stopped(root) as paths:
        written = [found for path in files_at(paths, place) for found in written_in(path)]
        if place is Place.SEGMENT:
            mark = Path(paths.commit_mark)
            end = marked_end(mark.read_bytes()) if mark.exists() else 0
            written = [piece for stretch in written for piece in _up_to(stretch, end)]
        if not written:
            return []
        if place is Place.VOTE:  # a bad sector does not reach both slots
            written = [_slot_of(rng, written, part)]
        return [_flip_one(rng, *choose_byte(rng, written, part)) for _ in range(bits)]


def _slot_of(rng: Rng, written: Sequence[Stretch], part: Part) -> Stretch:
    if part is Part.MIDDLE:
        return written[rng.randrange(len(written))]
    return written[0 if part is Part.HEAD else -1]


def tear_tail(
    root: Path, rng: Rng, size_bytes: int, filling: Filling, *, keep_marked: bool = False
) -> Damage | None:
    """Write over the last *size_bytes* of a stopped broker's log, as a torn write would; durably.

    Returns what was done, None when there is nothing to be written over. *keep_marked* leaves alone
    what the commit mark covers: see `jepsen_like.nemesis.ground`.

    Raises FaultError: no broker's folder, or a broker runs on it; nothing was changed.
    """
    with _stopped(root) as paths:
        written = [found for path in files_at(paths, Place.SEGMENT) for found in written_in(path)]
        if not written:
            return None
        last = written[-1]
        mark = Path(paths.commit_mark)
        kept = marked_end(mark.read_bytes()) if keep_marked and mark.exists() else 0
        start = max(last.start, last.end - size_bytes, kept - int(Path(last.path).name))
        if start >= last.end:
            return None
        before = _read(last.path, start, last.end - start)
        return _written_over(Damage(last.path, start, before, torn(rng, before, filling)))


def wipe(root: Path) -> int:
    """
    Remove all a stopped broker has, as a new disk would; return how many files. The folder stays.

    Raises:
        FaultError: No broker's folder, or a broker runs on it; nothing was removed.
    """
    with _stopped(root):
        files = sum(path.is_file() for path in root.rglob("*"))
        for path in root.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        OsDisk().flush_dir(str(root))
        return files


def _up_to(stretch: Stretch, end: int) -> Iterator[Stretch]:
    last = min(stretch.end, end - int(Path(stretch.path).name))
    if stretch.start < last:
        yield replace(stretch, end=last)


@contextmanager
def _stopped(root: Path) -> Iterator[StorePaths]:
    """Keep brokers out of a folder that is theirs while the block runs."""
    paths = StorePaths(str(root))
    if not os.path.exists(paths.format):
        raise FaultError(f"{root} is no broker's data folder; nothing there was touched")
    try:
        lock = OsDisk().lock(paths.lock)
    except StoreLockedError as error:
        raise FaultError(f"{root} is in use; stop its broker first") from error
    try:
        yield paths
    finally:
        lock.release()


def _flip_one(rng: Rng, path: str, offset: int) -> Damage:
    before = _read(path, offset, 1)
    return _written_over(Damage(path, offset, before, flipped(rng, before)))


def _read(path: str, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def _written_over(damage: Damage) -> Damage:
    with open(damage.path, "r+b") as file:
        file.seek(damage.offset)
        file.write(damage.after)
        file.flush()
        os.fsync(file.fileno())
    return damage
