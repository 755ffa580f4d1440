"""What one replica keeps on disk: the log, and everything derived from its committed part.

Opening trusts nothing: the log is recovered first, then the commit mark is believed only if the
entry it names is there with the same chain, then the snapshot of the tables under the same
condition, and what lies between the two is applied again. Derived files are written on apply
only, so nothing in them ever has to be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from commitlog.checkpoint import AbortFile, Checkpoint, CheckpointFile
from commitlog.consume_queue import ConsumeQueueFlush, ConsumeQueueStore
from commitlog.derive import derive
from commitlog.entry import parse_header
from commitlog.entry_log import EntryLog
from commitlog.errors import DiskFullError, InvariantBroken
from commitlog.key_index import KeyIndex, KeyIndexFlush
from commitlog.mark import Mark
from commitlog.recovery import DamagedLogError
from commitlog.seams import Disk, Lock
from commitlog.slot_file import SlotFile
from commitlog.store_paths import StorePaths
from dledger.state.apply import Applied, apply_entry
from dledger.state.snapshot import load, snapshot
from dledger.state.tables import StateTables

log = structlog.get_logger(__name__)

SNAPSHOT_KIND: Final = "checkpoint"
"""Name under which the executor measures checkpoints."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Sizes and places of a replica's files."""

    root: str
    segment_bytes: int = 1 << 30
    queue_file_units: int = 300_000
    index_slots: int = 5_000_000
    index_entries_max: int = 20_000_000
    delay_levels_ms: tuple[int, ...] = ()
    pid: int = 0


class ReplicaStore:
    """All files of one replica. One owner; only `Checkpointing.write` may run in a worker."""

    def __init__(
        self,
        disk: Disk,
        settings: StoreSettings,
        tables: Callable[[], StateTables],
    ) -> None:
        """Open the folder: lock, recover, replay.

        Args:
            tables: Makes empty tables with the built-in topics and groups.
        Raises:
            StoreLockedError: Another process owns the folder.
            ForeignStoreError: It was written with other sizes or by a newer version.
            CorruptStoreError: A small file that nothing can replace is damaged.
            DiskFullError: No space for the first files.
        """
        self.settings = settings
        self.paths = StorePaths(settings.root)
        self._disk = disk
        disk.make_dir(settings.root)
        self._lock: Lock = disk.lock(self.paths.lock)
        self._abort = AbortFile(disk, self.paths.abort)
        self.unclean = self._abort.exists()
        self._mark_slots = SlotFile(disk, self.paths.commit_mark)
        self.vote_slots = SlotFile(disk, self.paths.vote)
        recorded = self._mark_slots.load()
        mark = None if recorded is None else Mark.decode(recorded)
        self.torn = self.damaged = False
        self.log = self._open_log(mark)
        self.restored_commit_index = mark.index if mark and self.log.mark_valid else 0
        self._checkpoint_file = CheckpointFile(disk, self.paths.checkpoint)
        self.queues = ConsumeQueueStore(
            disk, self.paths.consumequeue, units_per_file=settings.queue_file_units
        )
        self.key_index = KeyIndex(
            disk,
            self.paths.index,
            slots=settings.index_slots,
            max_entries=settings.index_entries_max,
        )
        self._delays = dict(enumerate(settings.delay_levels_ms, start=1))
        self.tables = self._load_tables(tables)
        self._abort.create(settings.pid)
        self._reserve()
        self.replayed = self._replay()

    def _open_log(self, mark: Mark | None) -> EntryLog:
        settings = self.settings
        try:
            entry_log = EntryLog.open(
                self._disk, settings.root, segment_bytes=settings.segment_bytes, trusted=mark
            )
        except DamagedLogError as error:
            # Above the mark a power cut may have kept a later entry and torn an earlier one, none
            # of them promised. Below it promises are gone. Either way the log is kept up to the
            # damage and this replica follows until a leader has refilled it.
            log.error("log_damaged", error=str(error))
            self.torn = True
            self.damaged = mark is not None and error.damage.index <= mark.index
            return EntryLog.open(
                self._disk,
                settings.root,
                segment_bytes=settings.segment_bytes,
                trusted=mark,
                repair=True,
            )
        if mark is not None and not entry_log.mark_valid:
            log.error("log_ends_below_commit_mark", mark=mark.index, end=entry_log.last_index)
            self.damaged = True
        return entry_log

    def _load_tables(self, tables: Callable[[], StateTables]) -> StateTables:
        loaded = empty = tables()
        if self._disk.exists(self.paths.snapshot):
            loaded = load(
                self._disk.read(self.paths.snapshot),
                builtin_topics=empty.builtin_topics,
                builtin_groups=empty.builtin_groups,
            )
        index = loaded.applied_index
        if index and not (
            index <= self.log.last_index and self.log.chain_at(index) == loaded.applied_chain
        ):
            log.warning("snapshot_does_not_fit", applied_index=index)
            loaded, index = empty, 0
        self.restored_commit_index = max(self.restored_commit_index, index)
        # Derived files may be ahead of the snapshot; they are cut back to it and grow again.
        for queue in self.queues.queues():
            bounds = loaded.queues.get((queue.topic, queue.queue_id))
            queue.truncate_to(bounds.max_offset if bounds else 0)
        self.key_index.truncate_beyond(loaded.applied_end_position)
        return loaded

    def _reserve(self) -> None:
        if not self.log.needs_reserve:
            return
        try:
            self.log.reserve_next()
        except DiskFullError as error:
            if not self.log.last_index:
                raise
            # Without a reserve a replica does not stand for election, but it keeps its vote and
            # comes back by itself when there is space.
            log.error("no_space_for_next_segment", error=str(error))

    def _replay(self) -> int:
        first = self.tables.applied_index + 1
        for index in range(first, self.restored_commit_index + 1):
            self.apply(index)
        return self.restored_commit_index + 1 - first

    def apply(self, index: int) -> Applied:
        """Apply the entry at *index*, which must be committed and durable here.

        Raises:
            InvariantBroken: The entry contradicts the tables: stop the node.
            DiskFullError: A derived file could not grow. Stop the node: the entry is half
                applied in memory; on disk it will be applied again.
        """
        frame = self.log.frame(index)
        header = parse_header(frame)
        if header.index != index:
            raise InvariantBroken(f"entry {header.index} stands where {index} should")
        derived = derive(frame, header, delay_ms=self._delays)
        applied = apply_entry(self.tables, frame, header, derived)
        for units in applied.units:
            self.queues.queue(units.topic, units.queue_id).put(units.first, units.units)
        if len(derived.key_hashes):
            self.key_index.put_bulk(
                derived.key_hashes, derived.key_phy_offsets, derived.key_store_times
            )
        for topic in applied.deleted_topics:
            self.queues.delete_topic(topic)
        return applied

    def begin_checkpoint(self, commit_index: int) -> Checkpointing | None:
        """Take the picture that the next start begins from; None when nothing is new.

        Args:
            commit_index: Newest index that is committed and stable here.
        """
        index = min(commit_index, self.log.durable_index)
        tables = self.tables
        if index < self.log.first_index or tables.applied_index > index:
            return None
        mark = Mark(
            index=index,
            term=self.log.term_at(index),
            position=self.log.position_at(index),
            chain=self.log.chain_at(index),
            end_position=self.log.position_at(index) + self.log.size_at(index),
        )
        return Checkpointing(
            store=self,
            mark=mark,
            tables=snapshot(tables),
            flushes=(self.queues.begin_flush(), self.key_index.begin_flush()),
            checkpoint=Checkpoint(
                physic_msg_timestamp_ms=tables.last_store_time_ms,
                logics_msg_timestamp_ms=tables.last_store_time_ms,
                index_msg_timestamp_ms=0,
                master_flushed_offset=mark.end_position,
                confirm_phy_offset=mark.end_position,
            ),
        )

    def close(self, *, clean: bool) -> None:
        """Close all files and give the folder back.

        Args:
            clean: A checkpoint of everything was written; the next start need not recover.
        """
        self.queues.close()
        self.key_index.close()
        self.log.close()
        self._checkpoint_file.close()
        self._mark_slots.close()
        self.vote_slots.close()
        if clean:
            self._abort.remove()
        self._lock.release()


@dataclass(slots=True)
class Checkpointing:
    """A checkpoint that was taken and waits to be written."""

    store: ReplicaStore
    mark: Mark
    tables: bytes
    flushes: tuple[ConsumeQueueFlush, KeyIndexFlush]
    checkpoint: Checkpoint

    def write(self) -> None:
        """Write it. Blocking, safe in a worker thread, one at a time.

        The order matters: derived files, then the tables that claim them, then the mark.

        Raises:
            FlushFailedError, DiskFullError: The older checkpoint still holds.
        """
        store = self.store
        for flush in self.flushes:
            flush.run()
        store._disk.replace(store.paths.snapshot, self.tables)
        store._mark_slots.store(self.mark.encode())
        store._checkpoint_file.store(self.checkpoint)
