"""The log of one replica: entries in segments, found by index, flushed by ticket.

Synchronous, and owned by one thread. Two things may run in a worker: `FlushTicket.run` and
`Allocator.reserve_next`. A log whose flush failed is poisoned: it can be read, nothing else.

Spec: docs/reference/formats.md, sections 5, 6 and 10.
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import Buffer

from dledger.commitlog.allocator import Allocator
from dledger.commitlog.damage import LogRepair
from dledger.commitlog.entry import EntryHeader, parse_header, verify_frame
from dledger.commitlog.entry_index import DEFAULT_UNITS_PER_FILE, EntryIndex
from dledger.commitlog.errors import (
    CorruptEntryError,
    DiskFullError,
    FlushFailedError,
    InvariantBroken,
    MQError,
)
from dledger.commitlog.log_reader import FlushTicket, LogFiles, LogReader
from dledger.commitlog.mark import (
    Anchor,
    Extent,
    Mark,
    SlotFile,
    Truncation,
    load_anchor,
    store_anchor,
)
from dledger.commitlog.recovery import (
    Recovered,
    Recovery,
    RecoveryReport,
    drop_segments,
    newest_store_time_ms,
)
from dledger.commitlog.seams import Disk
from dledger.commitlog.segment import (
    BLANK_BYTES,
    DEFAULT_SEGMENT_BYTES,
    LogFormat,
    Segment,
    check_format,
    place,
    segment_base,
)
from dledger.commitlog.store_paths import StorePaths


class Drop:
    """Segments that retention removes; made by `EntryLog.plan_drop`.

    `note` and `remove` may be called in a worker thread.
    """

    def __init__(self, disk: Disk, paths: StorePaths, anchor: Anchor) -> None:
        self._disk = disk
        self._paths = paths
        self.anchor = anchor
        self.segments: list[Segment] = []
        self.size_bytes = 0

    def note(self) -> None:
        """Note durably where the log begins. Blocking.

        Raises:
            DiskFullError: Nothing changed.
            FlushFailedError: Either begin may be there after a crash.
        """
        store_anchor(self._disk, self._paths.anchor, self.anchor)

    def remove(self) -> None:
        """Remove the files, durably. Blocking: a large file takes its time."""
        drop_segments(self._disk, self._paths, self.segments)


class EntryLog(LogReader):
    """Entries of one Raft log, identical bytes at identical positions on every replica.

    Attributes (read-only for callers):
        generation: Raised by every truncation; whatever was taken before one is void.
        allocator: Allocates space ahead of the end.
        repair: Keeps damaged entries from being read, and overwrites them.
    """

    def __init__(
        self,
        files: LogFiles,
        anchor: Anchor,
        extent_slots: SlotFile,
        truncation_slots: SlotFile,
        recovered: Recovered,
        report: RecoveryReport,
    ) -> None:
        super().__init__(files, anchor, recovered, report)
        self.generation = 0
        self.allocator = Allocator(files, self, extent_slots, recovered.spares)
        self.repair = LogRepair(files, self)
        self.on_lost_unit = self.repair.restore_unit
        self._files = files
        self._dirty = files.dirty
        self._health = files.health
        self._truncation_slots = truncation_slots
        self._tickets: list[FlushTicket] = []
        self._ticket_number = 0

    @classmethod
    def open(
        cls,
        disk: Disk,
        root: str,
        *,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        trusted: Mark | None = None,
        index_units_per_file: int = DEFAULT_UNITS_PER_FILE,
        repair: bool = False,
    ) -> EntryLog:
        """Open the log below the data folder *root* and recover it to its last good entry.

        Args:
            trusted: The commit mark this node persisted: a durable, committed entry. Entries up
                to it are not scanned again. Without one the whole log is.
            index_units_per_file: For a new folder; an old one keeps what it was made with.
            repair: Cut at damage instead of refusing it. What is cut may have been acknowledged, so
                the node must not vote before a leader has caught it up; `report.damage` has it.
        Returns:
            The log; all of it is durable. Look at `mark_valid` before trusting *trusted*.
        Raises:
            DamagedLogError: (a CorruptStoreError) Damage that is no torn tail; segments untouched.
            CorruptStoreError: A file beside the segments is damaged.
            ForeignStoreError: The folder has another layout.
            ConfigError: A size no log can have.
            DiskFullError, FlushFailedError: The disk refused; opening again is safe.
        """
        paths = StorePaths(root)
        wanted = LogFormat(segment_bytes, index_units_per_file)
        log_format = check_format(disk, paths, wanted)
        anchor = load_anchor(disk, paths.anchor)
        entry_index = EntryIndex(disk, paths, log_format.index_units_per_file)
        extent_slots = SlotFile(disk, paths.extent)
        truncation_slots = SlotFile(disk, paths.truncation)
        recovery = Recovery(
            disk,
            paths,
            log_format,
            anchor,
            entry_index,
            extent_slots,
            truncation_slots,
            trusted,
            repair,
        )
        try:
            recovered = recovery.run()
        except BaseException:
            recovery.close()
            raise
        files = LogFiles(
            disk,
            paths,
            log_format.segment_bytes,
            log_format.index_units_per_file,
            entry_index,
            recovered.segments,
        )
        return cls(files, anchor, extent_slots, truncation_slots, recovered, recovery.report)

    # -- appending ---------------------------------------------------------------------------

    def place(self, size: int) -> int:
        """Return the position at which a frame of *size* bytes would start.

        Raises InvariantBroken: no segment can hold it; callers cap their entries below that.
        """
        if size > self._segment_bytes - BLANK_BYTES:
            raise InvariantBroken(
                f"an entry of {size} bytes does not fit a segment of {self._segment_bytes}"
            )
        return place(self.end_position, size, self._segment_bytes)

    def append(
        self,
        frame: Buffer,
        *,
        sealed_here: bool = False,
        header: EntryHeader | None = None,
        verified_after: int | None = None,
    ) -> EntryHeader:
        """Write one sealed frame behind the newest entry; volatile until flushed.

        Args:
            frame: Copied; the caller may reuse it.
            sealed_here: This process sealed the frame just now for this very place: body and chain
                are not computed a second time.
            header: What `parse_header` returned for *frame*, where the caller has it already.
            verified_after: Chain with which `verify_frame` has passed *frame* and *header*: if it
                is the newest entry's here, that is not done a second time.

        Raises:
            CorruptEntryError: The frame is damaged, or belongs elsewhere. Nothing changed.
            DiskFullError: No space. Nothing changed.
            LogBusyError: `reserve_next` is making space in another thread. Nothing changed.
            FlushFailedError: The log is poisoned. Nothing changed.
        """
        if self._health.failure is not None or self._health.closed:
            raise self._health.refusal()
        if header is None:
            header = parse_header(frame)
        size = header.size
        end = self.end_position
        index = self.last_index + 1
        free_bytes = self._segment_bytes - end % self._segment_bytes
        position = end if size + BLANK_BYTES <= free_bytes else end + free_bytes
        view = memoryview(frame)
        if (
            header.index != index
            or header.position != position
            or header.term < self.last_term
            or view.nbytes != size
            or size + BLANK_BYTES > self._segment_bytes
        ):
            raise CorruptEntryError(
                f"entry {header.index} of term {header.term}, {size} bytes at {header.position}, "
                f"cannot follow entry {self.last_index} of term {self.last_term}: "
                f"index {index} at {position} is next"
            )
        if not sealed_here and verified_after != self.last_chain:
            verify_frame(view, header, self.last_chain)
        segment = self._segments.get(position - position % self._segment_bytes)
        if (
            segment is None
            or position + size > self.allocator.limit
            or not self._index.has_space(index)
            or position != end
        ):
            segment = self.allocator.make_room(index, end, position, size)
        try:
            segment.write(position, view)
            self._index.put(index, position, header.term, header.chain, size)
        except DiskFullError:
            self._wipe(segment, position, size)
            raise
        self._dirty[segment.base] = segment
        self.last_index = index
        self.last_term = header.term
        self.last_chain = header.chain
        self.end_position = position + size
        if header.store_time_ms > self.last_store_time_ms:
            self.last_store_time_ms = header.store_time_ms
        return header

    def _wipe(self, segment: Segment, position: int, size: int) -> None:
        # Half a frame must not stay behind the end. Where even zeros find no space, what is on
        # the disk is unknown.
        try:
            segment.zero(position, position + size)
        except DiskFullError as error:
            self._health.failure = str(error)

    # -- flushing ----------------------------------------------------------------------------

    def begin_flush(self) -> FlushTicket | None:
        """Return a ticket for all that was appended or rewritten, None when all of it is durable.

        Tickets may overlap: a later one covers what an earlier one has not finished.
        """
        if self.durable_index >= self.last_index and not self._dirty and not self._tickets:
            return None
        files = {segment.file: None for segment in self._dirty.values()}
        folder = self._files.new_names
        for ticket in self._tickets:
            files.update(dict.fromkeys(ticket.files))
            folder = folder or ticket.folder is not None
        self._dirty.clear()
        self._files.new_names = False
        self._ticket_number += 1
        ticket = FlushTicket(
            self._ticket_number,
            self.last_index,
            self.generation,
            tuple(files),
            (self._files.disk, self._files.paths.commitlog) if folder else None,
            self._health,
        )
        self._tickets.append(ticket)
        return ticket

    def complete_flush(self, ticket: FlushTicket) -> bool:
        """Take note of a finished ticket.

        Returns:
            Whether `durable_index` now covers the ticket; False when a truncation came between.
        Raises:
            FlushFailedError: The flush failed; nothing of it may be acknowledged.
        """
        if self._health.failure is not None:
            raise self._health.refusal()
        if not ticket.done:
            raise InvariantBroken("a flush ticket was completed before it was run")
        self._tickets = [other for other in self._tickets if other.number > ticket.number]
        if ticket.generation != self.generation:
            return False
        self.durable_index = max(self.durable_index, ticket.last_index)
        return True

    def flush(self) -> None:
        """Make everything durable now. Blocking.

        Raises FlushFailedError: the log is poisoned from now on.
        """
        if self._health.failure is not None:
            raise self._health.refusal()
        ticket = self.begin_flush()
        if ticket is not None:
            ticket.run()
            self.complete_flush(ticket)

    # -- cutting the end ---------------------------------------------------------------------

    def truncate_from(self, index: int) -> None:
        """Drop entry *index* and all after it; durable when it returns. Blocking, and rare.

        Nothing happens when the log has no entry *index*.

        Raises:
            InvariantBroken: *index* is below the first kept entry. Nothing changed.
            FlushFailedError: The log is poisoned; at the next open the cut is finished.
        """
        if self._health.failure is not None or self._health.closed:
            raise self._health.refusal()
        if index < self.first_index:
            raise InvariantBroken(f"truncation at entry {index} below {self.first_index}")
        if index > self.last_index:
            return
        # A segment that is allocated ahead may be one that is removed here.
        self.allocator.claim.wait()
        try:
            self._truncate(self.mark_at(index - 1), index)
        finally:
            self.allocator.claim.give_back()

    def _truncate(self, last: Mark, index: int) -> None:
        written_to = self.allocator.limit if self.allocator.limit_is_exact else self.end_position
        cut = Truncation(last.end_position, written_to)
        try:
            self._truncation_slots.store(cut.encode())
            self._cut(last)
            self._remove_behind(last.end_position, written_to)
            # Twice: with the newest slot damaged, the next open would make the cut once more, and
            # take what was appended since.
            self._truncation_slots.store_twice(replace(cut, done=True).encode())
        except (MQError, OSError) as error:
            self._health.failure = str(error)
            raise FlushFailedError(f"truncation at entry {index} failed: {error}") from error

    def _cut(self, last: Mark) -> None:
        self.generation += 1
        self.durable_index = min(self.durable_index, last.index)
        self.last_index = last.index
        self.last_term = last.term
        self.last_chain = last.chain
        self.end_position = last.end_position
        self._written_from = min(self._written_from, last.end_position)
        self.damaged.drop_outside(self.first_index, last.index)
        self._index.cut_to(last.index)
        self.last_store_time_ms = newest_store_time_ms(
            last.index, self.anchor, self._index, self._segments, self._segment_bytes
        )
        if last.end_position < self.allocator.indexed_end:
            self.allocator.index_stale = True

    def _remove_behind(self, end: int, written_to: int) -> None:
        base = segment_base(end, self._segment_bytes)
        dropped = [self._segments.pop(key) for key in sorted(self._segments) if key > base]
        for segment in dropped:
            self._dirty.pop(segment.base, None)
        drop_segments(self._files.disk, self._files.paths, dropped)
        active = self._segments.get(base)
        if active is not None:
            active.zero(end, written_to)
            active.file.flush()
        # What an unfinished ticket had taken stays dirty: a ticket of an old generation counts
        # for nothing.
        for ticket in self._tickets:
            self._files.new_names = self._files.new_names or ticket.folder is not None
            for file in ticket.files:
                for segment in self._segments.values():
                    if segment.file is file:
                        self._dirty[segment.base] = segment
        self._tickets.clear()

    # -- cutting the begin -------------------------------------------------------------------

    def drop_before(self, anchor: Anchor) -> int:
        """Forget everything before *anchor*, whole segments only; return the bytes given back.

        Blocking; `plan_drop` gives the steps. Does nothing while `reserve_next` runs.

        Raises: As `plan_drop` and `Drop.note`.
        """
        if not self.allocator.claim.take():
            return 0  # space is being allocated right now; the caller comes again
        try:
            drop = self.plan_drop(anchor)
            if drop is None:
                return 0
            drop.note()
            self.detach(drop)
            drop.remove()
        finally:
            self.allocator.claim.give_back()
        return drop.size_bytes

    def plan_drop(self, anchor: Anchor) -> Drop | None:
        """Return how to forget everything before *anchor*; None when there is nothing to do.

        `Drop.note`, `detach` and `Drop.remove` follow, in this order, beside no `reserve_next`. A
        crash between any two of them is finished at the next open. Views handed out stay valid.

        Args:
            anchor: From `anchor_at`.
        Raises:
            InvariantBroken: The anchor is not of this log, or not durable here. Nothing changed.
            FlushFailedError: The log is poisoned. Nothing changed.
        """
        if self._health.failure is not None or self._health.closed:
            raise self._health.refusal()
        if anchor.first_index <= self.first_index:
            return None
        if anchor.first_index > self.durable_index or not self._stands_at(anchor):
            raise InvariantBroken(
                f"retention up to entry {anchor.first_index} of a log that is durable up to "
                f"{self.durable_index}"
            )
        return Drop(self._files.disk, self._files.paths, anchor)

    def _stands_at(self, anchor: Anchor) -> bool:
        # Not the store time: it stands in the entry before, which may wait for its repair, for
        # ever where no other replica has it any more.
        before = anchor.first_index - 1
        there = (self.position_at(anchor.first_index), self.term_at(before), self.chain_at(before))
        return there == (anchor.position, anchor.prev_term, anchor.prev_chain)

    def detach(self, drop: Drop) -> None:
        """Begin with the anchor that *drop* has noted; what stands before it is not read again."""
        anchor = drop.anchor
        self.anchor = anchor
        self.first_index = anchor.first_index
        self.first_position = anchor.position
        self.damaged.drop_outside(self.first_index, self.last_index)
        base = segment_base(anchor.position, self._segment_bytes)
        dropped = [self._segments.pop(key) for key in sorted(self._segments) if key < base]
        for segment in dropped:
            self._dirty.pop(segment.base, None)
        drop.segments = dropped
        drop.size_bytes = len(dropped) * self._segment_bytes
        self._index.drop_before(anchor.first_index)

    @staticmethod
    def begin_at(disk: Disk, root: str, anchor: Anchor) -> None:
        """Empty the folder of a closed log, so that the next open begins at *anchor*.

        For a replica that is given a snapshot: what it had lies before the anchor. Doing it
        again after a crash is safe.

        Raises DiskFullError, FlushFailedError: doing it again is safe.
        """
        paths = StorePaths(root)
        # First what gives space back.
        for folder in (paths.commitlog, paths.entry_index):
            for name in disk.list_dir(folder):
                disk.unlink(f"{folder}/{name}")
            disk.flush_dir(folder)
        for path, payload in (
            (paths.truncation, b""),
            (paths.extent, Extent(anchor.position, anchor.mark, exact=False).encode()),
        ):
            slots = SlotFile(disk, path)
            slots.load()
            # What the older slot would hold is of the log that was removed.
            slots.store_twice(payload)
            slots.close()
        store_anchor(disk, paths.anchor, anchor)

    def close(self, *, clean: bool = True) -> None:
        """Give all files back. Idempotent; views handed out stay valid.

        Args:
            clean: Flush everything and note the exact end, so that the next open need not look
                for it. Must not run beside `FlushTicket.run` or `reserve_next`.
        Raises:
            FlushFailedError: The clean close did not come about; the files are closed anyway.
        """
        if self._health.closed:
            return
        try:
            if clean and self._health.failure is None and self.allocator.claim.take():
                self.flush()
                self._index.flush()
                self.allocator.store_exact_end()
        except FlushFailedError as error:
            self._health.failure = str(error)
            raise
        finally:
            self._health.closed = True
            for segment in self._segments.values():
                segment.close()
            self._index.close()
            self.allocator.close()
            self._truncation_slots.close()
