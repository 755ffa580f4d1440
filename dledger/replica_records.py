"""What a replica records beside its log: lost or damaged entries, installations, checkpoints.

RocketMQ's checkpoint file holds up to which store time log, queues and key index are on disk; the
abort file is there while a broker runs, so that finding it at start means an unclean stop. A
checkpoint of the tables is what they were at an entry, encoded and written in a worker.

Spec: docs/reference/formats.md, sections 8 and 9.
"""

from __future__ import annotations

import posixpath
import struct
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Final

import cbor2
import structlog

from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import CorruptStoreError, DiskFullError, ForeignStoreError
from dledger.commitlog.key_index import KeyIndexFlush
from dledger.commitlog.mark import Anchor, Mark, SlotFile
from dledger.commitlog.queue_files import ConsumeQueueFlush
from dledger.commitlog.seams import CANNOT_BE_READ, NO_DESCRIPTOR, Disk, DiskFile
from dledger.commitlog.store_paths import StorePaths
from dledger.state.snapshot import Cut, Image, cut_everything, load, take_cut
from dledger.state.tables import StateTables

log = structlog.get_logger(__name__)

# ----------------------------------------------------------------------- checkpoint and abort files


CHECKPOINT_BYTES: Final = 4096

_FIELDS: Final = struct.Struct(">qqqqq")


@dataclass(slots=True)
class Checkpoint:
    """What was on disk when the checkpoint was taken; the newest such store times."""

    physic_msg_timestamp_ms: int = 0
    logics_msg_timestamp_ms: int = 0
    index_msg_timestamp_ms: int = 0
    master_flushed_offset: int = 0
    confirm_phy_offset: int = 0

    def encode(self) -> bytes:
        """Return the 40 bytes that are stored; the rest of the file is zero."""
        return _FIELDS.pack(*astuple(self))


class CheckpointFile:
    """The 4 KiB checkpoint file. It is a hint: a damaged one only makes recovery start earlier."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._file: DiskFile | None = None

    def load(self) -> Checkpoint:
        """Return what is stored; all zero when there is none, or none that can be read."""
        file = self._open()
        if file is None:
            return Checkpoint()
        try:
            return Checkpoint(*_FIELDS.unpack(file.read(0, _FIELDS.size)))
        except OSError as error:
            if error.errno not in CANNOT_BE_READ:
                raise
            return Checkpoint()

    def store(self, checkpoint: Checkpoint) -> None:
        """Write and flush *checkpoint*. Its 40 bytes lie in one sector, so they change together.

        Raises:
            DiskFullError: No space to make the file.
            FlushFailedError: The flush failed.
        """
        file = self._open()
        if file is None:
            file = self._disk.create(self._path, CHECKPOINT_BYTES, reserve=True)
            self._disk.flush_dir(posixpath.dirname(self._path))
            self._file = file
        file.write_at(0, checkpoint.encode())
        file.flush()

    def _open(self) -> DiskFile | None:
        if self._file is None and self._disk.exists(self._path):
            file = self._disk.open(self._path)
            if file.size == CHECKPOINT_BYTES:
                self._file = file
            else:
                file.close()
                self._disk.unlink(self._path)
        return self._file

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


class AbortFile:
    """Marks a broker as running."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path

    def exists(self) -> bool:
        """Tell whether the last broker in this folder did not stop clean."""
        return self._disk.exists(self._path)

    def create(self, pid: int) -> None:
        """Write the file, durably; its content is the process id, as RocketMQ 5 has it."""
        self._disk.replace(self._path, str(pid).encode())

    def remove(self) -> None:
        """Remove the file, durably: the last act of a clean stop."""
        self._disk.unlink(self._path)
        self._disk.flush_dir(posixpath.dirname(self._path))


# ---------------------------------------------------------------------------------- small records


DAMAGE_FORMAT: Final = 1
"""Version of the list of damaged entries."""


DAMAGED: Final = b"damaged"
TORN: Final = b"torn"
ASYNC: Final = b"async"
"""What `raft/doubt` holds: entries below the mark are lost, above it, or would be unflushed."""


class DoubtRecord:
    """Whether acknowledged entries may be lost here, in a file that is there while they may.

    *sync_flush*: whether what is acknowledged is flushed before.
    """

    def __init__(self, disk: Disk, paths: StorePaths, *, sync_flush: bool) -> None:
        self._disk = disk
        self._paths = paths
        self._sync_flush = sync_flush

    def load(self, *, unclean: bool) -> tuple[bool, bool]:
        """Return whether entries below the mark are lost, and whether any may be.

        *unclean*: the last run did not end in order.
        """
        path = self._paths.doubt
        if not self._disk.exists(path):
            return False, False
        noted = set(self._disk.read(path).split())
        if not noted or noted - {DAMAGED, TORN, ASYNC}:
            # It is there for a reason, which is not known any more: the worst one counts.
            log.error("reason_of_doubt_damaged", path=path)
            return True, True
        damaged = DAMAGED in noted
        return damaged, damaged or TORN in noted or (unclean and ASYNC in noted)

    def store(self, *, damaged: bool, torn: bool) -> None:
        """Record it, durably."""
        wanted = [
            word
            for word, holds in ((DAMAGED, damaged), (TORN, torn), (ASYNC, not self._sync_flush))
            if holds
        ]
        path = self._paths.doubt
        if wanted:
            self._disk.replace(path, b" ".join(wanted))
        elif self._disk.exists(path):
            self._disk.unlink(path)
            self._disk.flush_dir(self._paths.raft)


class DamageRecord:
    """The list of damaged entries, in a file that is there while there are some."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        # None: a file without content.
        self._recorded: list[tuple[int, int]] | None = []

    def load(self) -> list[tuple[int, int]] | None:
        """Return the damaged entries as runs (first, last); None when the file itself is damaged.

        Raises ForeignStoreError: a newer version wrote it.
        """
        if not self._disk.exists(self._path):
            return []
        ranges = decode_damage(self._disk.read(self._path), self._path)
        self._recorded = ranges
        return ranges

    def store(self, ranges: list[tuple[int, int]]) -> None:
        """Record *ranges*, durably, if they have changed.

        Raises:
            DiskFullError: No space; the older list holds.
            FlushFailedError: Either list may be there after a crash.
        """
        if ranges == self._recorded:
            return
        if ranges:
            self._disk.replace(self._path, encode_damage(ranges))
        else:
            self._disk.unlink(self._path)
            self._disk.flush_dir(self._path.rpartition("/")[0])
        self._recorded = ranges


def encode_damage(ranges: list[tuple[int, int]]) -> bytes:
    """Return the content of the damage file: a checksum, then CBOR."""
    body = cbor2.dumps({"v": DAMAGE_FORMAT, "ranges": [list(pair) for pair in ranges]})
    return zlib.crc32(body).to_bytes(4, "big") + body


def decode_damage(data: bytes, path: str) -> list[tuple[int, int]] | None:
    """Return the damaged entries as runs (first, last); None when the file itself is damaged.

    Raises ForeignStoreError: a newer version wrote it.
    """
    if zlib.crc32(data[4:]).to_bytes(4, "big") != data[:4]:
        return None
    record = cbor2.loads(data[4:])
    if record["v"] > DAMAGE_FORMAT:
        raise ForeignStoreError(
            f"{path} has format {record['v']}; this version knows up to {DAMAGE_FORMAT}"
        )
    return [(first, last) for first, last in record["ranges"]]


class Phase(Enum):
    """Of an installation; the value is what stands on disk."""

    OFFERED = b"offered"
    REFILLING = b"refilling"
    DONE = b"done"


class InstallationRecord:
    """How far the installation of a leader's snapshot has come, in a slot file.

    ::

        done ──► offered ──► refilling ──► done

    * *offered*: the snapshot is on disk and replaces the log, whatever the log holds by now. The
      next start empties the log before it opens it.
    * *refilling*: the log was emptied and begins at the snapshot's floor. What it holds has come
      since, from leaders, and is kept. Derived files are made again from it.
    * *done*: the log is as far as the snapshot, and so is a checkpoint of this replica. A file of
      a snapshot that is still there means nothing.

    Attributes:
        phase: None when none was ever recorded: there was no installation.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        """Load the record.

        Raises:
            CorruptStoreError: Both copies are damaged.
            ForeignStoreError: A newer version wrote a phase that is unknown here.
        """
        self._slots = SlotFile(disk, path)
        recorded = self._slots.load()
        try:
            self.phase = None if recorded is None else Phase(recorded)
        except ValueError as error:
            raise ForeignStoreError(f"{path} holds {recorded!r}, an unknown phase") from error

    def become(self, phase: Phase) -> None:
        """Record *phase*, durably.

        Raises:
            DiskFullError: No space to make the file; the phase is as it was.
            FlushFailedError: Either phase may be there after a crash.
        """
        if phase is not self.phase:
            # Twice: damage to the newest slot must not bring the phase before back. After
            # *refilling* that one would have the log emptied of what was acknowledged since.
            self._slots.store_twice(phase.value)
            self.phase = phase

    def close(self) -> None:
        """Give the file back. Idempotent."""
        self._slots.close()


# ---------------------------------------------------------------------------------- checkpoints


CHECKPOINT: Final = "checkpoint"
"""Name under which the executor measures checkpoints."""

CUT_ROWS: Final = 512
"""Changed rows that are copied in one go: about a millisecond."""

CUTS_MAX: Final = 256
"""Copies that wait for a checkpoint. Beyond it rows that change are only marked."""


class TableImage:
    """The encoded tables, which follow the tables by copies of the rows that change.

    Nothing is copied before `begin`: the tables are being loaded and replayed then.

    *saved*: index and bytes of the newest written tables, for replicas that are far behind.
    """

    def __init__(self, tables: StateTables) -> None:
        self.saved: tuple[int, bytes] | None = None
        self._tables = tables
        self._image = Image()
        self._cuts: deque[Cut] = deque()
        self._has_begun = False

    def begin(self) -> None:
        """Begin with all there is; from here on the image follows by copies of what changes."""
        self.saved = None
        self._image = Image()
        self._cuts = deque([cut_everything(self._tables)])
        self._has_begun = True

    def copy_changes(self) -> None:
        """Copy the rows that have changed, if there are enough of them."""
        tables = self._tables
        if tables.changed_count >= CUT_ROWS and len(self._cuts) < CUTS_MAX and self._has_begun:
            self._cuts.append(take_cut(tables))

    def copy(self) -> None:
        """Copy the rows that have changed."""
        self._cuts.append(take_cut(self._tables))

    def encode(self, index: int) -> bytes:
        """Return the tables as they were at *index*, where they were copied. In the worker."""
        while self._cuts and self._cuts[0].applied_index <= index:
            self._image.take(self._cuts.popleft())
        return self._image.snapshot()


@dataclass(slots=True)
class Checkpointing:
    """A checkpoint that was taken and waits to be written.

    Attributes:
        path: Of the file of the tables.
        on_written: Called with the tables when their file is durable; writes the mark.
        index: Newest entry that the tables have.
    """

    disk: Disk
    path: str
    image: TableImage
    on_written: Callable[[Checkpointing, bytes], None]
    mark: Mark
    index: int
    floor: Anchor
    flushes: tuple[ConsumeQueueFlush, KeyIndexFlush]
    checkpoint: Checkpoint
    has_derived: bool = False
    """Whether it has queues and keys that were lost before this start."""

    def write(self) -> None:
        """Write it. Blocking, safe in a worker thread, one at a time.

        The order matters: derived files, then the tables that claim them, then the mark.

        Raises FlushFailedError, DiskFullError: the older checkpoint still holds.
        """
        try:
            self._write()
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR:
                raise
            raise DiskFullError(f"no descriptor is left for a checkpoint: {error}") from error

    def _write(self) -> None:
        for flush in self.flushes:
            flush.run()
        tables = self.image.encode(self.index)
        self.disk.replace(self.path, tables)
        self.on_written(self, tables)


def mark_at(entry_log: EntryLog, index: int) -> Mark:
    """Return the mark of the entry at *index*, which the log holds."""
    position = entry_log.position_at(index)
    return Mark(
        index=index,
        term=entry_log.term_at(index),
        position=position,
        chain=entry_log.chain_at(index),
        end_position=position + entry_log.size_at(index),
    )


def checkpoint_of(tables: StateTables, mark: Mark) -> Checkpoint:
    """Return RocketMQ's checkpoint file for these tables and this mark."""
    return Checkpoint(
        physic_msg_timestamp_ms=tables.last_store_time_ms,
        logics_msg_timestamp_ms=tables.last_store_time_ms,
        index_msg_timestamp_ms=0,
        master_flushed_offset=mark.end_position,
        confirm_phy_offset=mark.end_position,
    )


def decoded_file(disk: Disk, path: str, like: StateTables) -> StateTables | None:
    """Return the tables in a file; None when it is not there, damaged, or on a bad sector.

    Raises ForeignStoreError: a newer version wrote it.
    """
    if not disk.exists(path):
        return None
    try:
        return load(disk.read(path), like)
    except ForeignStoreError as error:
        raise ForeignStoreError(f"{path}: {error}") from error
    except CorruptStoreError as error:
        log.error("tables_damaged", path=path, error=str(error))
    except OSError as error:
        if error.errno not in CANNOT_BE_READ:
            raise
        log.error("tables_damaged", path=path, error=str(error))
    return None


def goes_on_after(loaded: StateTables, commit_index: int) -> tuple[int, int]:
    """Return the index of a snapshot that is not needed, and from where entries will do."""
    return loaded.applied_index, max(loaded.floor.first_index, commit_index + 1)
