"""Checkpoints of a replica: what the tables were at an entry, encoded and written in a worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from commitlog.checkpoint import Checkpoint
from commitlog.consume_queue_flush import ConsumeQueueFlush
from commitlog.descriptors import NO_DESCRIPTOR
from commitlog.entry_log import EntryLog
from commitlog.errors import CorruptStoreError, DiskFullError, ForeignStoreError
from commitlog.key_index import KeyIndexFlush
from commitlog.mark import Anchor, Mark
from commitlog.seams import CANNOT_BE_READ, Disk
from dledger.state.cut import Cut, cut_everything, take_cut
from dledger.state.image import Image
from dledger.state.snapshot import load_checked
from dledger.state.tables import StateTables

log = structlog.get_logger(__name__)

CHECKPOINT: Final = "checkpoint"
"""Name under which the executor measures checkpoints."""

CUT_ROWS: Final = 512
"""Changed rows that are copied in one go. Topics with five queues take about four milliseconds."""

CUTS_MAX: Final = 256
"""Copies that wait for a checkpoint. Beyond it rows that change are only marked."""


class TableImage:
    """The encoded tables, which follow the tables by copies of the rows that change.

    Nothing is copied before `begin`: the tables are being loaded and replayed then.

    Attributes:
        saved: Index and bytes of the newest written tables, for replicas that are far behind.
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
        rows = len(tables.marks) + tables.producers.touched_count
        if rows >= CUT_ROWS and len(self._cuts) < CUTS_MAX and self._has_begun:
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

        Raises:
            FlushFailedError, DiskFullError: The older checkpoint still holds.
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

    What is in it can be made again, from the log or from a leader.

    Raises:
        ForeignStoreError: A newer version wrote it.
    """
    if not disk.exists(path):
        return None
    try:
        return load_checked(disk.read(path), like)
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
