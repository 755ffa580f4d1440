"""What one replica keeps on disk: the log, and everything derived from its committed part.

Opening trusts nothing: the log is recovered first, then the commit mark is believed only if the
entry it names is there with the same chain, then the snapshot of the tables under the same
condition, and what lies between the two is applied again. Derived files are written on apply
only, so nothing in them ever has to be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
from typing_extensions import Buffer

from dledger.commitlog.consume_queue_store import MAX_OPEN_FILES
from dledger.commitlog.damage import check_entries
from dledger.commitlog.derive import derive
from dledger.commitlog.entry import parse_header
from dledger.commitlog.entry_log import Drop, EntryLog
from dledger.commitlog.errors import (
    CorruptStoreError,
    DiskFullError,
    InvariantBroken,
)
from dledger.commitlog.key_index import KeyIndexFlush
from dledger.commitlog.mark import Anchor, Mark, SlotFile
from dledger.commitlog.recovery import DamagedLogError
from dledger.commitlog.seams import Disk, Lock
from dledger.commitlog.store_paths import StorePaths
from dledger.derived_files import DerivedFiles
from dledger.floor_pass import FloorPass
from dledger.replica_records import (
    AbortFile,
    CheckpointFile,
    Checkpointing,
    DamageRecord,
    DoubtRecord,
    InstallationRecord,
    Phase,
    TableImage,
    checkpoint_of,
    decoded_file,
    mark_at,
)
from dledger.settings.tables import StoreTable
from dledger.settings.text import delays_of_levels
from dledger.state.apply import (
    Applied,
    EntriesTogether,
    apply_entry,
    apply_together,
    raise_min_offsets,
    read_together,
)
from dledger.state.snapshot import load
from dledger.state.state_record import QueueFloorsChange
from dledger.state.tables import StateTables

log = structlog.get_logger(__name__)

ALONE_MAX: Final = 64
"""Entries that are applied one by one before it is looked again whether they may be together."""


class ReplicaStore:
    """All files of one replica. One owner; only `Checkpointing.write` may run in a worker."""

    def __init__(
        self,
        disk: Disk,
        settings: StoreTable,
        tables: Callable[[], StateTables],
        *,
        pid: int = 0,
        queue_files_max: int = MAX_OPEN_FILES,
    ) -> None:
        """Open the folder: lock, recover, replay.

        Args:
            settings: Without `sync_flush` acknowledgements may be lost by an unclean stop, and that
                is remembered.
            queue_files_max: Consume queue files that may be open.
            tables: Makes empty tables with the built-in topics and groups.
        Raises:
            StoreLockedError: Another process owns the folder.
            ForeignStoreError: It was written with other sizes or by a newer version.
            CorruptStoreError: A small file that nothing can replace is damaged.
            DiskFullError: No space for the first files.
        """
        self.settings = settings
        self.paths = StorePaths(settings.path_root_dir)
        self._disk = disk
        disk.make_dir(settings.path_root_dir)
        self._lock: Lock = disk.lock(self.paths.lock)
        self.lacks_space = False
        self._abort = AbortFile(disk, self.paths.abort)
        self.unclean = self._abort.exists()
        self._mark_slots = SlotFile(disk, self.paths.commit_mark)
        self.vote_slots = SlotFile(disk, self.paths.vote)
        self._doubt = DoubtRecord(disk, self.paths, sync_flush=settings.sync_flush)
        self.damaged, self.torn = self._doubt.load(unclean=self.unclean)
        self.tables = tables()
        self.image = TableImage(self.tables)
        self._installation = InstallationRecord(disk, self.paths.installation)
        if self._installation.phase is Phase.OFFERED:
            self._empty_as_offered()
        recorded = self._mark_slots.load()
        mark = None if recorded is None else Mark.decode(recorded)
        self.log = self._open_log(mark)
        self._doubt.store(damaged=self.damaged, torn=self.torn)
        # The mark's entry proves those before it. What a cut below it leaves may be of a leader
        # whose entries were replaced, and the others are lost: a leader has to confirm it.
        is_proven = mark and self.log.mark_valid and mark.index <= self.log.last_index
        self.restored_commit_index = mark.index if mark and is_proven else 0
        self._checkpoint_file = CheckpointFile(disk, self.paths.checkpoint)
        self.delays = delays_of_levels(settings.delay_levels_ms)
        self.on_derived_behind: Callable[[], object] = lambda: None
        """Called when units or keys of applied entries are to be put again."""
        self.derived = DerivedFiles(
            disk, self.paths, settings, self._note_derived_behind, queue_files_max
        )
        self._refer_to_derived()
        self.derived_index = self.log.first_index - 1
        self._alone, self._alone_next = range(0), 1
        """Entries that are not applied together with others, and how many the next such are."""
        self._unfinished: Applied | None = None
        """An entry that the tables have, while queues are still to begin later because of it."""
        self._saved = (0, 0)
        self._damage_record = DamageRecord(disk, self.paths.damage)
        self.installing = False
        """A leader's snapshot replaces the log: nothing is applied, and the log is left alone."""
        self.saved_index = 0
        """Newest entry that a written checkpoint covers."""
        self._load_tables()
        self.key_index.begin(self.log.first_index, self.derived_index)
        self._abort.create(pid)
        self._reserve()
        self._load_damage()
        self.replayed = self._replay()
        self._begin_image()

    def _begin_image(self) -> None:
        """Let the encoded tables begin with all there is; from here on they follow by cuts."""
        self.derived.find_begun_later()
        self.image.begin()

    def _open_log(self, mark: Mark | None) -> EntryLog:
        try:
            entry_log = self._log_in_folder(mark)
        except DamagedLogError as error:
            # Above the mark a power cut may have kept a later entry and torn an earlier one, none
            # of them acknowledged. Below it acknowledgements are lost. Either way the log is kept
            # up to the damage and this replica follows until a leader has refilled it.
            log.error("log_damaged", error=str(error))
            self.torn = True
            self.damaged |= mark is not None and error.damage.index <= mark.index
            self._doubt.store(
                damaged=self.damaged, torn=self.torn
            )  # the cut takes the evidence away
            return self._log_in_folder(mark, repair=True)
        if mark is not None and not entry_log.mark_valid:
            self._note_damaged_log(
                "log_ends_below_commit_mark", mark=mark.index, end=entry_log.last_index
            )
        if entry_log.report.torn_tail:
            cut, last = entry_log.report.cut_bytes, entry_log.last_index
            log.warning("torn_tail_cut", bytes=cut, last_index=last)
        return entry_log

    def _log_in_folder(self, mark: Mark | None = None, *, repair: bool = False) -> EntryLog:
        settings = self.settings
        return EntryLog.open(
            self._disk,
            settings.path_root_dir,
            segment_bytes=settings.mapped_file_size_commit_log,
            trusted=mark,
            repair=repair,
        )

    def end_doubt(self) -> None:
        """Take note, durably, that a leader has made good what this replica may have lost."""
        if self.torn or self.damaged:
            self.torn = self.damaged = False
            self._doubt.store(damaged=self.damaged, torn=self.torn)

    def _note_derived_behind(self) -> None:
        self.on_derived_behind()

    def _refer_to_derived(self) -> None:
        derived = self.derived
        self.queues, self.key_index, self.keys = derived.queues, derived.key_index, derived.keys

    def _load_tables(self) -> None:
        own = self._tables_in(self.paths.snapshot)
        if self._installation.phase is Phase.REFILLING:
            given = self._tables_in(self.paths.install)
            if given is not None:
                self._refill_from(given)
                return
        self._end_installation()
        if own is not None and self._holds(own):
            self._continue_from(own)
            return
        if own is not None and self.log.last_index < own.applied_index:
            # The log was cut below its own checkpoint. Derived files are made again, and a start
            # that comes before the next checkpoint must not rely on the old one's word for them.
            self._note_damaged_log("log_ends_below_checkpoint", checkpoint=own.applied_index)
            self._disk.replace(self.paths.install, self._disk.read(self.paths.snapshot))
            self._refill_from(own)
            return
        if own is not None:
            log.error("snapshot_does_not_fit", applied_index=own.applied_index)
        if self.log.first_index > 1:
            # A log without its beginning is of no use without tables that fit.
            self._note_damaged_log("log_without_tables", first_index=self.log.first_index)
            self._begin_log_anew(Anchor(), Phase.DONE)
            self._derive_from_first()

    def _note_damaged_log(self, event: str, **facts: int) -> None:
        """Record that acknowledgements are lost, before the log that shows it is changed."""
        log.error(event, **facts)
        self.torn = self.damaged = True
        self._doubt.store(damaged=self.damaged, torn=self.torn)

    def _tables_in(self, path: str) -> StateTables | None:
        return decoded_file(self._disk, path, self.tables)

    def _holds(self, loaded: StateTables) -> bool:
        """Whether the log holds the entry that these tables were taken after."""
        index = loaded.applied_index
        return (
            self.log.first_index <= index + 1
            and index <= self.log.last_index
            and self.log.chain_at(index) == loaded.applied_chain
        )

    def _continue_from(self, loaded: StateTables) -> None:
        self.tables.become(loaded)
        self.derived_index = self.saved_index = loaded.applied_index
        if self.derived.derives_again:
            self.derived_index = self.log.first_index - 1
        self.restored_commit_index = max(self.restored_commit_index, loaded.applied_index)
        # Derived files may be ahead of the snapshot; they are cut back to it and grow again.
        for queue in self.queues.queues():
            bounds = loaded.queues.get((queue.topic, queue.queue_id))
            queue.truncate_to(bounds.max_offset if bounds else 0)
            if bounds and bounds.min_offset:
                queue.delete_before(bounds.min_offset)

    def _refill_from(self, loaded: StateTables) -> None:
        """Take the tables; the log from their floor on comes from a leader, as does all derived."""
        if not self._reaches(loaded.floor):
            self._installation.become(Phase.OFFERED)
            self._begin_log_anew(loaded.floor, Phase.REFILLING)
        self._installation.become(Phase.REFILLING)
        self.tables.become(loaded)
        self._derive_from_first()
        proved = loaded.applied_index if self._holds(loaded) else self.restored_commit_index
        proved = min(proved, self.log.last_index)
        self.restored_commit_index = max(proved, self.log.first_index - 1)
        log.info(
            "refilling", first=self.log.first_index, last=self.log.last_index,
            up_to=loaded.applied_index,
        )  # fmt: skip

    def _derive_from_first(self) -> None:
        """Remove what follows from entries; it is derived again from the first one of the log."""
        self.derived.begin_empty()
        self._refer_to_derived()
        self.derived_index = self.log.first_index - 1

    def _reaches(self, floor: Anchor) -> bool:
        """Whether the log holds the entry before *floor*: a leader can go on from there."""
        return (
            self.log.first_index <= floor.first_index <= self.log.last_index + 1
            and self.log.chain_at(floor.first_index - 1) == floor.prev_chain
        )

    def _begin_log_anew(self, anchor: Anchor, phase: Phase) -> None:
        self.log.close(clean=False)
        self._empty_log(anchor, phase)
        self.log = self._log_in_folder()
        self.restored_commit_index = anchor.first_index - 1

    def _empty_log(self, anchor: Anchor, phase: Phase) -> None:
        EntryLog.begin_at(self._disk, self.settings.path_root_dir, anchor)
        # The old mark names an entry that was removed on purpose.
        self._mark_slots.store(anchor.mark.encode())
        self._installation.become(phase)

    def _empty_as_offered(self) -> None:
        """A start between the offer and its end: what is left of the log is not looked at."""
        given = self._tables_in(self.paths.install)
        if given is None:
            self._note_damaged_log("offered_snapshot_damaged")
            self._empty_log(Anchor(), Phase.DONE)
        else:
            self._empty_log(given.floor, Phase.REFILLING)

    def _end_installation(self) -> None:
        """Record that no snapshot is being installed; then its file means nothing."""
        if self._installation.phase is not None or self._disk.exists(self.paths.install):
            self._installation.become(Phase.DONE)
            self._disk.unlink(self.paths.install)

    # -- snapshots of a leader -------------------------------------------------------------

    @property
    def refilling(self) -> bool:
        """Whether the tables are ahead of the log: nothing is read here, there was no leader."""
        return self.installing or self.derived_index < self.tables.applied_index

    def decode(self, data: Buffer) -> StateTables:
        """Return the tables in a leader's snapshot. May be called in a worker thread.

        Raises CorruptStoreError, ForeignStoreError: it is none that this version knows.
        """
        return load(data, self.tables)

    def needs(self, loaded: StateTables, commit_index: int) -> bool:
        """Tell whether a snapshot has to be installed: the log does not go as far as its floor.

        Raises CorruptStoreError: it contradicts what is committed here.
        """
        floor = loaded.floor
        if floor.first_index < self.log.first_index or self._reaches(floor):
            return False
        if floor.first_index - 1 <= commit_index:
            raise CorruptStoreError(
                f"a snapshot has another entry {floor.first_index - 1} than is committed here"
            )
        return True

    def offer(self, data: Buffer) -> None:
        """Put a snapshot on disk, to replace the log. May be called in a worker thread.

        From then on the log guarantees nothing any more.

        Raises:
            DiskFullError: No space for it. The log is kept.
            FlushFailedError: The node must stop; the next open may go on with it.
        """
        self._disk.replace(self.paths.install, data)
        self._installation.become(Phase.OFFERED)

    def empty_for(self, loaded: StateTables) -> EntryLog:
        """Empty the folder for a snapshot that was offered; open the log that begins at its floor.

        May be called in a worker thread while `installing` holds. The old log can be read
        meanwhile: its files stay as long as they are open.

        Raises:
            DiskFullError: To be called again when there is space.
            FlushFailedError: The node must stop; the next open goes on.
        """
        self._empty_log(loaded.floor, Phase.REFILLING)
        self.derived.remove()
        return self._log_in_folder()

    def take_over(self, loaded: StateTables, entry_log: EntryLog) -> EntryLog:
        """Go on with a snapshot's tables and the empty log; return the old one, to be closed.

        Raises FlushFailedError: the node must stop; the next open goes on.
        """
        before, self.log = self.log, entry_log
        self._unfinished = None
        self.restored_commit_index = loaded.floor.first_index - 1
        self._refill_from(loaded)
        self.key_index.begin(self.log.first_index, self.derived_index)
        self._begin_image()
        self.installing = False
        return before

    def plan_drop(self, floor: Anchor) -> Drop | None:
        """Return how to do that in steps: `Drop.note`, `detach`, `Drop.remove`."""
        if floor.first_index > self.log.durable_index or self.refilling:
            return None
        return self.log.plan_drop(floor)

    def detach(self, drop: Drop) -> None:
        """Begin with what *drop* keeps; its files are still to be removed."""
        self.log.detach(drop)
        if drop.size_bytes:
            self.derived.delete_before(drop.anchor, self.tables)

    @property
    def fits_segment(self) -> bool:
        """Whether the disk has space for one more segment of the log."""
        settings = self.settings
        free_bytes = self._disk.free_bytes(settings.path_root_dir)
        return free_bytes >= settings.mapped_file_size_commit_log

    def reserve(self) -> None:
        """Allocate ahead of the log's end. Blocking; may run in a worker thread.

        Raises DiskFullError, FlushFailedError: as `Allocator.reserve_next`; see `lacks_space`.
        """
        allocator = self.log.allocator
        self.lacks_space = not (allocator.has_reserve or self.fits_segment)
        if self.lacks_space:  # trying would fill the disk for a moment
            raise DiskFullError("less space is left on the disk than a segment takes")
        try:
            allocator.reserve_next()
        except DiskFullError:
            self.lacks_space = True
            raise

    def _reserve(self) -> None:
        if not self.log.allocator.needs_reserve:
            return
        try:
            self.reserve()
        except DiskFullError as error:
            if not self.log.last_index:
                raise
            # Without a reserve a replica does not stand for election, but it keeps its vote and
            # comes back by itself when there is space.
            log.error("no_space_for_next_segment", error=str(error))

    def _replay(self) -> int:
        first, commit = self.derived_index + 1, self.restored_commit_index
        # Recovery trusts what stands below the mark; tables made from bad bytes would be worse.
        for index in check_entries(self.log, first, commit, self.log.end_position).suspects:
            if not self.is_whole(index):
                self.note_damaged(index)
        last = self.applicable(commit)
        try:
            while self.derived_index < last:
                self.apply_next(last)
        except DiskFullError as error:
            # The rest is applied when there is space; what was applied can be read meanwhile.
            log.error("apply_without_space", index=self.derived_index + 1, error=str(error))
        return self.derived_index + 1 - first

    # -- damaged entries -------------------------------------------------------------------

    def applicable(self, commit_index: int) -> int:
        """Return up to where entries may be applied: committed, and before the first damaged."""
        return self.log.damaged.whole_until(self.derived_index + 1, commit_index)

    def is_whole(self, index: int) -> bool:
        """Check entry *index* once more; its unit in the entry index is restored, too."""
        self.log.repair.restore_unit(index)
        return not check_entries(self.log, index, index, 0).suspects

    def note_damaged(self, index: int) -> None:
        """Record durably that entry *index* is damaged; it is not read until it was repaired."""
        self.log.repair.mark_damaged(index)
        self.write_damage()

    def write_damage(self) -> None:
        """Record which entries are damaged, if that has changed."""
        self._damage_record.store(self.log.damaged.ranges())

    def _load_damage(self) -> None:
        ranges = self._damage_record.load()
        first, last = self.log.first_index, self.log.last_index
        if ranges is None:
            log.error("list_of_damage_damaged", path=self.paths.damage)
            ranges = [(first, last)]
        for low, high in ranges:
            for index in range(max(low, first), min(high, last) + 1):
                if not self.is_whole(index):
                    self.log.repair.mark_damaged(index)
        self.write_damage()

    def apply_next(self, last: int) -> Applied:
        """Apply the next entry, and those after it up to *last* that can be applied with it.

        Entries up to *last* are committed, durable here, and not known to be damaged. The result is
        that of `apply` for each of them; `Applied.index` is the newest one. Raises like `apply`.
        """
        first = self.derived_index + 1
        entries: EntriesTogether | None = None
        while entries is None:
            if first < self._alone.start:
                last = min(last, self._alone.start - 1)
            if last <= first or first in self._alone or first <= self.tables.applied_index:
                return self.apply(first)
            found = read_together(self.log, first, last, self.delays)
            if isinstance(found, int):
                # They come in rows, and each look reads up to a thousand records for nothing.
                self._alone = range(found, found + self._alone_next)
                self._alone_next = min(2 * self._alone_next, ALONE_MAX)
            else:
                entries = found
        # Before the tables, which say what counts: on a full disk nothing has happened then.
        self.derived.put(entries.headers[-1].index, entries.derived, None)
        self._alone_next = max(1, self._alone_next // 2)
        applied = apply_together(self.tables, entries)
        self.derived_index = applied.index
        self.image.copy_changes()
        return applied

    def apply(self, index: int) -> Applied:
        """Apply the entry at *index*, which must be committed and durable here.

        Raises:
            InvariantBroken: The entry contradicts the tables: stop the node.
            DiskFullError: A derived file could not grow. Tables and `derived_index` are as they
                were; applying it again when there is space does the whole of it.
        """
        if self._unfinished is not None:
            return self._finish(self._unfinished)
        frame = self.log.frame(index)
        header = parse_header(frame)
        if header.index != index:
            raise InvariantBroken(f"entry {header.index} stands where {index} should")
        derived = derive(frame, header, delay_ms=self.delays)
        if index <= self.tables.applied_index:
            # The tables know this entry already: units and keys only, of queues that still exist.
            self.derived.put(index, derived, self.tables.queues)
            self.derived_index = index
            return Applied(index, [], [], topics_changed=False, deleted_topics=())
        # Before the tables, which say what counts: on a full disk nothing has happened then.
        self.derived.put(index, derived, None)
        self._unfinished = apply_entry(self.tables, frame, header, derived)
        return self._finish(self._unfinished)

    def _finish(self, applied: Applied) -> Applied:
        """Let queues begin later after a floor; on a full disk that can be done again."""
        if applied.floor_moved:
            floor = self.tables.floor.position
            passing = FloorPass(self.log, self.derived, self.delays, applied.index, floor)
            raise_min_offsets(self.tables, passing.first_kept)
        self._unfinished = None
        self.derived_index = applied.index
        for topic in applied.deleted_topics:
            self.queues.delete_topic(topic)
        for change in applied.changes:
            if isinstance(change, QueueFloorsChange):
                self.derived.begun_later.update(
                    (topic, queue_id) for topic, queue_id, _ in change.floors
                )
        self.image.copy_changes()
        return applied

    def put_missing_units(self, max_bytes: int) -> bool:
        """Put units that queue files lack, of a few entries; see `QueueRepair.step`."""
        if self.refilling:
            return False
        return self.derived.put_units_again(self.log, self.derived_index, self.delays, max_bytes)

    def put_missing_keys(self, max_bytes: int, *, skip_damaged: bool) -> KeyIndexFlush | None:
        """Read keys of applied entries that the key index lacks; see `KeyIndexing.step`."""
        if self.installing or (self.refilling and not self.key_index.is_long):
            return None
        return self.keys.step(self.log, self.delays, max_bytes, skip_damaged=skip_damaged)

    def begin_checkpoint(self, commit_index: int) -> Checkpointing | None:
        """Take the picture that the next start begins from; None when nothing is new.

        *commit_index*: newest index that is committed and stable here.
        """
        index = min(commit_index, self.log.durable_index)
        tables = self.tables
        if self.refilling or index < self.log.first_index or tables.applied_index > index:
            return None
        if (index, tables.applied_index) == self._saved and not self.derived.are_again:
            return None
        mark = mark_at(self.log, index)
        self.image.copy()
        self.derived.note_begins(tables)
        return Checkpointing(
            disk=self._disk,
            path=self.paths.snapshot,
            image=self.image,
            on_written=self._checkpoint_written,
            has_derived=self.derived.are_again,
            mark=mark,
            index=tables.applied_index,
            floor=tables.floor,
            flushes=(self.queues.begin_flush(), self.key_index.begin_flush()),
            checkpoint=checkpoint_of(tables, mark),
        )

    def _checkpoint_written(self, written: Checkpointing, tables: bytes) -> None:
        """Write the mark of a checkpoint whose tables are durable. In the worker."""
        self._mark_slots.store(written.mark.encode())
        self._checkpoint_file.store(written.checkpoint)
        self.saved_index = written.index
        self.image.saved = (written.index, tables)
        self._saved = (written.mark.index, written.index)
        self._end_installation()
        if written.has_derived:
            self.derived.end_deriving()

    def close(self, *, clean: bool) -> None:
        """Close all files and give the folder back.

        *clean*: a checkpoint of everything was written; the next start need not recover.
        """
        self.derived.close()
        # Files of a log that a snapshot replaces are not its own any more.
        self.log.close(clean=not self.installing)
        self._checkpoint_file.close()
        self._mark_slots.close()
        self._installation.close()
        self.vote_slots.close()
        if clean and not self.installing:
            self._abort.remove()
        self._lock.release()
