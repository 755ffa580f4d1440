"""One replica's data folder, opened for reading and for nothing else.

Every file is opened read-only and mapped; what is mapped stays readable when a running broker
removes the file. All replicas have the same entries at the same positions, so they are looked at
side by side. An entry is whole if it fits its checksums and continues the chain; where replicas
hold different whole entries, that one counts which replicas know to be committed.
"""

from __future__ import annotations

import fcntl
import mmap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import (
    ENTRY_HEADER_BYTES,
    ENTRY_MAGIC,
    KIND_RECORDS,
    EntryHeader,
    parse_header,
    record_sizes,
    verify_frame,
)
from dledger.commitlog.errors import (
    ConfigError,
    CorruptEntryError,
    CorruptStoreError,
    NewerEntryError,
)
from dledger.commitlog.mark import (
    SLOT_STRIDE_BYTES,
    Anchor,
    Extent,
    Mark,
    Truncation,
    decode_slot,
    load_anchor,
)
from dledger.commitlog.segment import (
    BLANK_BYTES,
    ZERO_CHUNK_BYTES,
    LogFormat,
    encode_blank,
    read_format,
    segment_base,
)
from dledger.commitlog.shared_units import Tails, read_tails
from dledger.commitlog.store_paths import StorePaths, parse_file_name

# ---------------------------------------------------------------------------------- the folder


EMPTY: Final = memoryview(b"")


class NotAFolderError(ConfigError):
    """What was named is no data folder; nothing was read."""


@dataclass(slots=True)
class ReplicaFolder:
    """A folder's own description, and its files.

    Attributes:
        mark: The newest entry this replica knows to be committed; None: it knows none.
        problems: Small files that could not be read: without them the audit cannot be sure.
        running: A broker holds the folder: it is read as it is just now.
        clean_stop: Everything up to the mark is in the derived files.
    """

    name: str
    root: Path
    log_format: LogFormat
    anchor: Anchor
    mark: Mark | None
    extent: Extent | None
    cut: Truncation | None
    segments: tuple[int, ...]
    clean_stop: bool
    running: bool
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _mapped: dict[Path, memoryview] = field(default_factory=dict)
    _tails: Tails | None = None

    @property
    def paths(self) -> StorePaths:
        """Names below the folder."""
        return StorePaths(str(self.root))

    @property
    def due(self) -> int:
        """Everything before this byte of the log is committed and must be here."""
        return 0 if self.mark is None else self.mark.end_position

    @property
    def derived_promised(self) -> bool:
        """Whether everything up to the commit mark must be in the derived files."""
        return self.clean_stop and not self.running

    def map(self, path: Path) -> memoryview:
        """Return a file's bytes, read-only; empty when there is none."""
        found = self._mapped.get(path)
        if found is None:
            try:
                with path.open("rb") as file:
                    size = file.seek(0, 2)
                    found = (
                        memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
                        if size
                        else EMPTY
                    )
            except FileNotFoundError:
                found = EMPTY
            self._mapped[path] = found
        return found

    @property
    def shared_tails(self) -> Tails:
        """Units that stand in no file of their queue, by topic and queue id."""
        if self._tails is None:
            self._tails = self._read_tails(attempts=3 if self.running else 1)
        return self._tails

    def _read_tails(self, attempts: int) -> Tails:
        try:
            return read_tails(self.paths.shared_units, lambda path: Path(path).read_bytes())
        except CorruptStoreError as error:
            if attempts > 1:  # a broker that runs has begun a new file meanwhile
                return self._read_tails(attempts - 1)
            self.problems.append(str(error))
            return {}

    def forget(self) -> None:
        """Give mapped files back as soon as they are not read any more."""
        self._mapped.clear()

    def segment_path(self, base: int) -> Path:
        """Return the file of the segment that begins at *base*."""
        return Path(self.paths.segment(base))

    def segment(self, base: int) -> memoryview:
        """Return the bytes of a segment; empty when it is not there."""
        return self.map(self.segment_path(base))

    def relative(self, path: Path) -> str:
        """Return the name of a file below the folder."""
        return path.relative_to(self.root).as_posix()

    def numbered(self, folder: Path) -> Iterator[tuple[int, Path]]:
        """Yield the files of a folder that are named by 20 digits, in order, with their number."""
        for path in sorted(folder.iterdir() if folder.is_dir() else ()):
            start = parse_file_name(path.name)
            if start is not None:
                yield start, path

    def ends_early(self, end: int) -> bool:
        """Whether the log was closed, or recovered, with more in it than up to *end*."""
        extent, cut = self.extent, self.cut
        if extent is None or not extent.exact or end >= extent.limit:
            return False
        return cut is None or cut.written_to < extent.limit or end < cut.end_position


def open_folder(root: Path) -> ReplicaFolder:
    """Return what stands in the data folder *root*; nothing is written, not even a lock.

    Raises:
        NotAFolderError: It is none.
        StoreError: It is another program's or a newer version's, or its begin is not known.
    """
    paths = StorePaths(str(root))
    if not Path(paths.commitlog).is_dir():
        raise NotAFolderError(
            f"{root} is not a data folder: there is no commitlog in it; "
            "give the folder that store.path_root_dir names"
        )
    disk = OsDisk()
    if not Path(paths.format).is_file():
        raise NotAFolderError(f"{root} was not written by this program: raft/format is missing")
    problems: list[str] = []
    notes: list[str] = []
    payloads: dict[str, bytes | None] = {}
    for path in (paths.commit_mark, paths.extent, paths.truncation):
        try:
            payloads[path] = newest_slot(Path(path), notes)
        except CorruptStoreError as error:
            payloads[path] = None
            problems.append(str(error))
    mark, extent, cut = (payloads[p] for p in (paths.commit_mark, paths.extent, paths.truncation))
    running = is_running(root)
    folder = ReplicaFolder(
        name=str(root),
        root=root,
        log_format=read_format(disk, paths),
        anchor=load_anchor(disk, paths.anchor),
        mark=None if mark is None else Mark.decode(mark),
        extent=None if extent is None else Extent.decode(extent),
        cut=None if cut is None else Truncation.decode(cut),
        segments=(),
        clean_stop=not Path(paths.abort).exists() and not Path(paths.install).exists(),
        running=running,
        problems=problems,
        notes=notes,
    )
    folder.segments = tuple(
        base
        for base, path in folder.numbered(Path(paths.commitlog))
        if path.stat().st_size == folder.log_format.segment_bytes
    )
    if running:
        folder.notes.append("a broker runs on it: read as it was just then")
    elif not folder.clean_stop:
        folder.notes.append("not stopped cleanly: derived files may miss what is newest")
    return folder


def newest_slot(path: Path, notes: list[str]) -> bytes | None:
    """Return the newest whole value of a slot file; None when there is none.

    Raises CorruptStoreError: the file is there and neither slot is whole.
    """
    if not path.is_file():
        return None
    data = path.read_bytes()
    slots = [decode_slot(data[at : at + SLOT_STRIDE_BYTES]) for at in (0, SLOT_STRIDE_BYTES)]
    whole = [slot for slot in slots if slot is not None]
    if whole:
        if len(whole) < len(slots):
            notes.append(f"one of the two slots of raft/{path.name} is not whole")
        return max(whole)[1]
    if any(data):
        raise CorruptStoreError(f"{path}: neither slot is whole")
    return None


def is_running(root: Path) -> bool:
    """Whether a broker holds the folder; the question is asked without keeping it out."""
    lock = root / "lock"
    if not lock.exists():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# ---------------------------------------------------------------------------------- whole entries


MAGIC: Final = ENTRY_MAGIC.to_bytes(4, "big")


@dataclass(slots=True)
class Side:
    """One replica within one segment.

    *equal_end*, *equal_index*: up to where, and up to which entry, it was last found equal to what
    stands there; -1: never.
    """

    folder: ReplicaFolder
    base: int
    view: memoryview
    first: int
    due: int
    equal_end: int = -1
    equal_index: int = -1

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self.folder.name

    def bytes_at(self, position: int, size: int) -> memoryview:
        """Return bytes of the segment; fewer, or none, where the file is missing."""
        at = position - self.base
        return self.view[at : at + size]


@dataclass(frozen=True, slots=True)
class Before:
    """The entry before a place, as far as it is known: at the begin of a segment it is not."""

    index: int
    term: int
    chain: int
    store_time_ms: int


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole entry and the replicas that hold it."""

    header: EntryHeader
    frame: memoryview
    holders: tuple[Side, ...]


def whole_at(side: Side, position: int, before: Before | None) -> Whole | None:
    """Return the entry that stands at *position* of one replica, if it is whole.

    Raises NewerEntryError: it is whole, and of a format that this version does not know.
    """
    try:
        header = parse_header(side.view, position - side.base)
        if header.position != position or header.end_position + BLANK_BYTES > side.base + len(
            side.view
        ):
            return None
        frame = side.bytes_at(position, header.size)
        if before is not None:
            if (
                header.index != before.index + 1
                or header.term < before.term
                or header.store_time_ms < before.store_time_ms
            ):
                return None
            verify_frame(frame, header, before.chain)
        elif not fits_itself(frame, header):
            return None
    except NewerEntryError:
        raise
    except CorruptEntryError:
        return None
    return Whole(header, frame, (side,))


def follow(
    folder: ReplicaFolder, index: int, position: int, before: Before | None = None
) -> Iterator[Whole]:
    """Yield the whole entries behind entry *index*, which ends at *position*.

    They end where none follows the one before. *before*: that entry, as far as it is known.

    Raises NewerEntryError: as `whole_at`.
    """
    size = folder.log_format.segment_bytes
    while True:
        position = after_blank(folder, position)
        base = segment_base(position, size)
        side = Side(folder, base, folder.segment(base), folder.anchor.position, folder.due)
        found = whole_at(side, position, before) if len(side.view) else None
        if found is None or found.header.index != index + 1:
            return
        yield found
        header = found.header
        before = Before(header.index, header.term, header.chain, header.store_time_ms)
        index, position = header.index, header.end_position


def after_blank(folder: ReplicaFolder, position: int) -> int:
    """Return *position*, or the end of its segment where a blank fills that."""
    size = folder.log_format.segment_bytes
    base = segment_base(position, size)
    head = folder.segment(base)[position - base : position - base + BLANK_BYTES]
    is_blank = position > base and head == encode_blank(base + size - position)
    return base + size if is_blank else position


def first_written(folder: ReplicaFolder, position: int) -> int:
    """Return the first byte from *position* on in its segment that is not zero; -1: none is."""
    base = segment_base(position, folder.log_format.segment_bytes)
    view = folder.segment(base)
    for at in range(position - base, len(view), ZERO_CHUNK_BYTES):
        written = np.flatnonzero(np.frombuffer(view[at : at + ZERO_CHUNK_BYTES], np.uint8))
        if len(written):
            return base + at + int(written[0])
    return -1


def fits_itself(frame: memoryview, header: EntryHeader) -> bool:
    """Whether a frame fits its own checksums; what stands before it is not known."""
    if zlib.crc32(frame[ENTRY_HEADER_BYTES:]) != header.body_crc:
        return False
    if header.kind != KIND_RECORDS:
        return True
    return int(record_sizes(frame, header).sum(dtype=np.int64)) == header.size - header.body_start


def choose(found: Sequence[Whole]) -> Whole:
    """Return the entry that counts: most replicas that must have it, then most, then most known."""
    groups: list[Whole] = []
    for one in found:
        for number, group in enumerate(groups):
            if group.frame == one.frame:
                groups[number] = Whole(group.header, group.frame, (*group.holders, *one.holders))
                break
        else:
            groups.append(one)
    return max(groups, key=_weight)


def _weight(group: Whole) -> tuple[int, int, int]:
    end = group.header.end_position
    return (
        sum(side.due >= end for side in group.holders),
        len(group.holders),
        max(side.due for side in group.holders),
    )


def next_whole(sides: Sequence[Side], position: int) -> int | None:
    """Return where the next entry that fits itself begins at or after *position*, on any side."""
    found: list[int] = []
    for side in sides:
        data = bytes(side.view[position - side.base :]) if position >= side.base else b""
        at = data.find(MAGIC)
        while at >= 0:
            if whole_at(side, position + at, None) is not None:
                found.append(position + at)
                break
            at = data.find(MAGIC, at + 1)
    return min(found, default=None)
