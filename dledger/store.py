"""What one replica keeps on disk: the log, and everything derived from its committed part.

Opening trusts nothing: the log is recovered first, then the commit mark is believed only if the
entry it names is there with the same chain, then the snapshot of the tables under the same
condition, and what lies between the two is applied again. Derived files are written on apply
only, so nothing in them ever has to be undone.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Final

import cbor2
import structlog
from typing_extensions import Buffer

from commitlog.checkpoint import AbortFile, Checkpoint, CheckpointFile
from commitlog.consume_queue import MAX_OPEN_FILES, ConsumeQueueStore, remove_all
from commitlog.consume_queue_flush import ConsumeQueueFlush
from commitlog.damage import check_entries
from commitlog.derive import Derived, derive
from commitlog.descriptors import NO_DESCRIPTOR
from commitlog.entry import parse_header
from commitlog.entry_log import Drop, EntryLog
from commitlog.errors import (
    CorruptStoreError,
    DiskFullError,
    ForeignStoreError,
    InvariantBroken,
)
from commitlog.key_index import KeyIndex, KeyIndexFlush
from commitlog.mark import Anchor, Mark
from commitlog.recovery import DamagedLogError
from commitlog.seams import Disk, Lock, UtcOffset, utc
from commitlog.slot_file import SlotFile
from commitlog.store_paths import StorePaths
from dledger.key_indexing import KeyIndexing
from dledger.replica_records import InstallationRecord, Phase
from dledger.state.apply import Applied, apply_entry, raise_min_offsets
from dledger.state.cut import Cut, cut_everything, take_cut
from dledger.state.image import Image
from dledger.state.snapshot import load
from dledger.state.state_record import QueueFloorsChange
from dledger.state.tables import QueueBounds, QueueKey, StateTables

log = structlog.get_logger(__name__)

DAMAGED: Final = b"damaged"
TORN: Final = b"torn"
ASYNC: Final = b"async"
"""What the doubt file says: entries below the mark are lost, above it, or would be unflushed."""

MAX_DELAY_LEVELS: Final = 64
"""More levels than a configuration may name."""

DAMAGE_FORMAT: Final = 1
"""Version of the list of damaged entries."""

SNAPSHOT_KIND: Final = "checkpoint"
LARGE_SNAPSHOT_KIND: Final = "large checkpoint"
"""Names under which the executor measures checkpoints: small ones may run on the event loop, and
what was learned of them must not bring a large one there."""

LARGE_SNAPSHOT_BYTES: Final = 256 << 10

CUT_ROWS: Final = 2_048
"""Changed rows that are copied in one go: about two milliseconds between two heartbeats."""

LOG_NUMBERS: Final = 1 << 62
"""Below it are indexes, positions, terms and times of entries: the log has 63 bits for each."""

CUTS_MAX: Final = 64
"""Copies that wait for a checkpoint. Beyond it rows that change are only marked."""


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
    sync_flush: bool = True
    """Off: after an unclean stop promises may be lost, and that is remembered."""
    queue_files_max: int = MAX_OPEN_FILES
    """Consume queue files that may be open."""
    utc_offset: UtcOffset = utc
    """Local time, for names of key index files."""


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
        noted = disk.read(self.paths.doubt).split() if disk.exists(self.paths.doubt) else []
        self.damaged = DAMAGED in noted
        self.torn = self.damaged or TORN in noted or (self.unclean and ASYNC in noted)
        self.tables = tables()
        self._installation = InstallationRecord(disk, self.paths.installation)
        if self._installation.phase is Phase.OFFERED:
            self._empty_as_offered()
        recorded = self._mark_slots.load()
        mark = None if recorded is None else Mark.decode(recorded)
        self.log = self._open_log(mark)
        self._note_doubt()
        # Damage below the mark may have been cut; what is left is committed all the same.
        committed = mark.index if mark and self.log.mark_valid else 0
        self.restored_commit_index = min(committed, self.log.last_index)
        self._checkpoint_file = CheckpointFile(disk, self.paths.checkpoint)
        self._delays = delays_of_levels(settings.delay_levels_ms)
        self.on_keys_behind: Callable[[], object] = lambda: None
        """Called when keys of applied entries are to be put again."""
        self._open_derived()
        self.derived_index = self.log.first_index - 1
        self._saved = (0, 0)
        self._noted_damage: list[tuple[int, int]] = []
        self.installing = False
        """A leader's snapshot replaces the log: nothing is applied, and the log is left alone."""
        self.saved_index = 0
        """Newest entry that a written checkpoint covers."""
        self._load_tables()
        self.keys.begin(nothing_derived=self.derived_index < self.log.first_index)
        self._abort.create(settings.pid)
        self._reserve()
        self._load_damage()
        self._begun_later: set[QueueKey] = set()
        """Queues that begin in a later file than the first one they may have."""
        self.replayed = self._replay()
        self._begin_image()

    def _begin_image(self) -> None:
        """Let the encoded tables begin with all there is; from here on they follow by cuts."""
        # Those found at the start may have files that a process which was killed has left.
        self._begun_later = {
            (queue.topic, queue.queue_id) for queue in self.queues.queues() if queue.has_files
        }
        self._image = Image()
        self._cuts: deque[Cut] = deque([cut_everything(self.tables)])
        self.saved_tables: tuple[int, bytes] | None = None
        """Index and bytes of the newest written tables, for replicas that are far behind."""

    @property
    def is_large(self) -> bool:
        """Whether encoding and writing the tables now may take more than a moment."""
        rows = sum(map(len, self._cuts))
        size = 0 if self.saved_tables is None else len(self.saved_tables[1])
        return rows > CUT_ROWS or size > LARGE_SNAPSHOT_BYTES

    def encode_tables(self, index: int) -> bytes:
        """Return the tables as they were at *index*, where a cut was taken. In the worker."""
        while self._cuts and self._cuts[0].applied_index <= index:
            self._image.take(self._cuts.popleft())
        return self._image.snapshot()

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
            self.damaged |= mark is not None and error.damage.index <= mark.index
            self._note_doubt()  # the cut takes the evidence away
            return EntryLog.open(
                self._disk,
                settings.root,
                segment_bytes=settings.segment_bytes,
                trusted=mark,
                repair=True,
            )
        if mark is not None and not entry_log.mark_valid:
            self._note_damaged_log(
                "log_ends_below_commit_mark", mark=mark.index, end=entry_log.last_index
            )
        if entry_log.report.torn_tail:
            cut, last = entry_log.report.cut_bytes, entry_log.last_index
            log.warning("torn_tail_cut", bytes=cut, last_index=last)
        return entry_log

    def _note_doubt(self) -> None:
        wanted = [
            word
            for word, holds in (
                (DAMAGED, self.damaged),
                (TORN, self.torn),
                (ASYNC, not self.settings.sync_flush),
            )
            if holds
        ]
        path = self.paths.doubt
        if wanted:
            self._disk.replace(path, b" ".join(wanted))
        elif self._disk.exists(path):
            self._disk.unlink(path)
            self._disk.flush_dir(self.paths.raft)

    def end_doubt(self) -> None:
        """Take note, durably, that a leader has made good what this replica may have lost."""
        if self.torn or self.damaged:
            self.torn = self.damaged = False
            self._note_doubt()

    def _open_derived(self) -> None:
        settings = self.settings
        self._derived_lost = False
        # All of it follows from the log: the replay begins with the first entry that is kept.
        self._derives_again = self._disk.exists(self.paths.derived_lost)
        if self._derives_again:
            self._remove_derived()
        try:
            self.queues: ConsumeQueueStore = self._open_queues()
        except CorruptStoreError as error:
            log.error("consume_queues_damaged", error=str(error))
            self._note_derived_lost()
            self._derives_again = True
            self._remove_derived()
            self.queues = self._open_queues()
        self.key_index = KeyIndex(
            self._disk,
            self.paths.index,
            slots=settings.index_slots,
            max_entries=settings.index_entries_max,
            utc_offset=settings.utc_offset,
            mark=self.paths.key_index_mark,
        )
        self.keys = KeyIndexing(self.key_index)
        self.keys.on_behind = self._note_keys_behind

    def _note_keys_behind(self) -> None:
        self.on_keys_behind()

    def _open_queues(self) -> ConsumeQueueStore:
        return ConsumeQueueStore(
            self._disk,
            self.paths.consumequeue,
            units_per_file=self.settings.queue_file_units,
            max_open_files=self.settings.queue_files_max,
            on_unreadable=self._on_unreadable,
        )

    def _on_unreadable(self, path: str, error: OSError) -> None:
        if not self._derived_lost:
            log.error(
                "consume_queue_unreadable",
                path=path,
                error=str(error),
                next_step="restart this broker: it derives its queues from the log again",
            )
            self._derived_lost = True
            self._note_derived_lost()

    def _note_derived_lost(self) -> None:
        """Write down that queues are lost, until a checkpoint has them again."""
        self._disk.replace(self.paths.derived_lost, b"queues\n")

    def _load_tables(self) -> None:
        own = self._decoded_file(self.paths.snapshot)
        given = self._given(own)
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

    def _given(self, own: StateTables | None) -> StateTables | None:
        """Return the tables of an installation under way; None when there is none."""
        if self._installation.phase is Phase.REFILLING:
            return self._decoded_file(self.paths.install)
        if self._installation.phase is not None:
            return None
        # A version without the record: a snapshot counts until a checkpoint has gone beyond it. Its
        # file may be an older one that a power cut has brought back.
        given = self._decoded_file(self.paths.install)
        if given is None or (own is not None and own.applied_index > given.applied_index):
            return None
        return None if given.floor.first_index < self.log.first_index else given

    def _note_damaged_log(self, event: str, **facts: int) -> None:
        """Write down that promises are lost, before the log that shows it is changed."""
        log.error(event, **facts)
        self.torn = self.damaged = True
        self._note_doubt()

    def _decoded_file(self, path: str) -> StateTables | None:
        """Return the tables in a file; None when it is not there, or has gone bad.

        What is in it can be made again, from the log or from a leader.
        """
        if not self._disk.exists(path):
            return None
        try:
            return self._decoded(self._disk.read(path))
        except ForeignStoreError as error:
            raise ForeignStoreError(f"{path}: {error}") from error
        except CorruptStoreError as error:
            log.error("tables_damaged", path=path, error=str(error))
            return None

    def _decoded(self, data: Buffer) -> StateTables:
        try:
            loaded = load(
                data,
                builtin_topics=self.tables.builtin_topics,
                builtin_groups=self.tables.builtin_groups,
            )
            _check_numbers(loaded)
        except (CorruptStoreError, ForeignStoreError):
            raise
        except Exception as error:
            # A checksum shows that it is whole, not who made it: it may be of any shape.
            raise CorruptStoreError(f"a state snapshot of another shape: {error!r}") from error
        floor = loaded.floor
        if not 1 <= floor.first_index <= loaded.applied_index + 1 or floor.position < 0:
            raise CorruptStoreError(
                f"a state snapshot of entry {loaded.applied_index} whose log begins with entry "
                f"{floor.first_index} at {floor.position}"
            )
        return loaded

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
        if self._derives_again:
            self.derived_index = self.log.first_index - 1
        self.restored_commit_index = max(self.restored_commit_index, loaded.applied_index)
        # Derived files may be ahead of the snapshot; they are cut back to it and grow again.
        for queue in self.queues.queues():
            bounds = loaded.queues.get((queue.topic, queue.queue_id))
            queue.truncate_to(bounds.max_offset if bounds else 0)
            if bounds and bounds.min_offset:
                queue.delete_before(bounds.min_offset)
        self.key_index.truncate_beyond(loaded.applied_end_position)

    def _refill_from(self, loaded: StateTables) -> None:
        """Take the tables; the log from their floor on comes from a leader, as does all derived.

        Of what the log has beyond its mark, nothing counts as committed before it is as far as the
        tables: it may be the end of a log that no other replica has.
        """
        if not self._reaches(loaded.floor):
            self._installation.become(Phase.OFFERED)
            self._begin_log_anew(loaded.floor, Phase.REFILLING)
        self._installation.become(Phase.REFILLING)
        self.tables.become(loaded)
        self._forget_derived()
        self.derived_index = self.log.first_index - 1
        proved = loaded.applied_index if self._holds(loaded) else self.restored_commit_index
        proved = min(proved, self.log.last_index)
        self.restored_commit_index = max(proved, self.log.first_index - 1)
        log.info(
            "refilling", first=self.log.first_index, last=self.log.last_index,
            up_to=loaded.applied_index,
        )  # fmt: skip

    def _reaches(self, floor: Anchor) -> bool:
        """Whether the log holds the entry before *floor*: a leader can go on from there."""
        return (
            self.log.first_index <= floor.first_index <= self.log.last_index + 1
            and self.log.chain_at(floor.first_index - 1) == floor.prev_chain
        )

    def _begin_log_anew(self, anchor: Anchor, phase: Phase) -> None:
        self.log.close(clean=False)
        self._empty_log(anchor, phase)
        self.log = EntryLog.open(
            self._disk, self.settings.root, segment_bytes=self.settings.segment_bytes
        )
        self.restored_commit_index = anchor.first_index - 1

    def _empty_log(self, anchor: Anchor, phase: Phase) -> None:
        EntryLog.begin_at(self._disk, self.settings.root, anchor)
        # The old mark names an entry that is gone on purpose.
        self._mark_slots.store(anchor.mark.encode())
        self._installation.become(phase)

    def _empty_as_offered(self) -> None:
        """A start between the offer and its end: what is left of the log is not looked at."""
        given = self._decoded_file(self.paths.install)
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

    def _forget_derived(self) -> None:
        self.queues.close()
        self.key_index.close()
        self._remove_derived()
        self._open_derived()

    def _remove_derived(self) -> None:
        remove_all(self._disk, self.paths.consumequeue)
        self._disk.remove_tree(self.paths.index)

    # -- snapshots of a leader -------------------------------------------------------------

    @property
    def refilling(self) -> bool:
        """Whether the tables are ahead of the log: nothing is read here, nobody led."""
        return self.installing or self.derived_index < self.tables.applied_index

    def install(self, data: Buffer, commit_index: int) -> bool:
        """Replace everything by a leader's snapshot; the log begins anew at its floor.

        All steps of an installation in one go. Blocking. Nobody may flush, checkpoint or read
        meanwhile; `log`, `queues` and `key_index` are new objects afterwards, `tables` is the same
        one. A crash at any moment is finished at the next open.

        Args:
            commit_index: Newest entry known to be committed here.
        Returns:
            False when the log goes as far as the floor: nothing changed, see `goes_on_after`.
        Raises:
            CorruptStoreError: *data* is no snapshot, or contradicts what is committed here.
                Nothing changed.
            DiskFullError: No space for it. Nothing changed, or `installing` holds: to be gone on
                with from `empty_for` on when there is space.
            FlushFailedError: The node must stop; the next open goes on.
        """
        loaded = self.decode(data)
        if not self.needs(loaded, commit_index):
            return False
        self.offer(data)
        self.installing = True
        self.take_over(loaded, self.empty_for(loaded)).close(clean=False)
        self._reserve()
        return True

    def decode(self, data: Buffer) -> StateTables:
        """Return the tables in a leader's snapshot. May be called in a worker thread.

        Raises:
            CorruptStoreError, ForeignStoreError: It is none that this version knows.
        """
        return self._decoded(data)

    def needs(self, loaded: StateTables, commit_index: int) -> bool:
        """Tell whether a snapshot has to be installed: the log does not go as far as its floor.

        Raises:
            CorruptStoreError: It contradicts what is committed here.
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

        From then on the log promises nothing any more.

        Raises:
            DiskFullError: No space for it. The log is kept.
            FlushFailedError: The node must stop; the next open may go on with it.
        """
        self._disk.replace(self.paths.install, data)
        self._installation.become(Phase.OFFERED)

    def empty_for(self, loaded: StateTables) -> EntryLog:
        """Empty the folder for a snapshot that was offered, and open the log that begins anew.

        May be called in a worker thread while `installing` holds. The old log can be read
        meanwhile: its files stay as long as they are open.

        Raises:
            DiskFullError: To be called again when there is space.
            FlushFailedError: The node must stop; the next open goes on.
        """
        self._empty_log(loaded.floor, Phase.REFILLING)
        self._remove_derived()
        return EntryLog.open(
            self._disk, self.settings.root, segment_bytes=self.settings.segment_bytes
        )

    def take_over(self, loaded: StateTables, entry_log: EntryLog) -> EntryLog:
        """Go on with a snapshot's tables and the empty log; return the old one, to be closed.

        Raises:
            FlushFailedError: The node must stop; the next open goes on.
        """
        before, self.log = self.log, entry_log
        self.restored_commit_index = loaded.floor.first_index - 1
        self._refill_from(loaded)
        self.keys.begin(nothing_derived=True)
        self._begin_image()
        self.installing = False
        return before

    def going_on_after(self, data: Buffer, commit_index: int) -> tuple[int, int]:
        """Return the index of a snapshot that is not needed, and from where entries will do."""
        return goes_on_after(self.decode(data), commit_index)

    def drop_before_floor(self, floor: Anchor) -> int:
        """Remove what stands before *floor*, the floor of a written checkpoint; return bytes."""
        if floor.first_index > self.log.durable_index or self.refilling:
            return 0
        dropped = self.log.drop_before(floor)
        self._forget_before(floor, dropped)
        return dropped

    def plan_drop(self, floor: Anchor) -> Drop | None:
        """Return how to do that in steps: `Drop.note`, `detach`, `Drop.remove`."""
        if floor.first_index > self.log.durable_index or self.refilling:
            return None
        return self.log.plan_drop(floor)

    def detach(self, drop: Drop) -> None:
        """Begin with what *drop* keeps; its files are still to be removed."""
        self.log.detach(drop)
        self._forget_before(drop.anchor, drop.size_bytes)

    def _forget_before(self, floor: Anchor, dropped: int) -> None:
        if dropped:
            begun_later, self._begun_later = self._begun_later, set()
            for key in begun_later:
                bounds = self.tables.queues.get(key)
                if bounds:
                    self.queues.queue(*key).delete_before(bounds.min_offset)
            self.key_index.delete_before(floor.position)

    def _first_kept(self, topic: str, queue_id: int, bounds: QueueBounds) -> tuple[int, int]:
        """Return the first offset of a queue whose message stands at or after the floor, and where.

        Without such a message: its end, and 0.
        """
        queue, floor = self.queues.queue(topic, queue_id), self.tables.floor.position
        low, high, position = bounds.min_offset, bounds.max_offset, 0
        while low < high:
            middle = (low + high) // 2
            found = int(queue.read(middle, 1)[0]["phy_offset"])
            if found < floor:
                low = middle + 1
            else:
                high, position = middle, found
        if queue.keeps_before(low, bounds.min_offset):
            self._begun_later.add((topic, queue_id))
        return low, position

    def _reserve(self) -> None:
        if not self.log.allocator.needs_reserve:
            return
        try:
            self.log.allocator.reserve_next()
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
            for index in range(first, last + 1):
                self.apply(index)
        except DiskFullError as error:
            # The rest is applied when there is space; what was applied can be read meanwhile.
            log.error("apply_without_space", index=index, error=str(error))
        return self.derived_index + 1 - first

    # -- damaged entries -------------------------------------------------------------------

    def applicable(self, commit_index: int) -> int:
        """Return up to where entries may be applied: committed, and before the first damaged."""
        return self.log.damaged.whole_until(self.derived_index + 1, commit_index)

    def is_whole(self, index: int) -> bool:
        """Look at entry *index* once more; its unit in the entry index is put right by the way."""
        self.log.repair.restore_unit(index)
        return not check_entries(self.log, index, index, 0).suspects

    def note_damaged(self, index: int) -> None:
        """Remember durably that entry *index* is damaged; nobody reads it until it was repaired."""
        self.log.repair.mark_damaged(index)
        self.write_damage()

    def write_damage(self) -> None:
        """Write down which entries are damaged, if that has changed."""
        ranges = self.log.damaged.ranges()
        if ranges == self._noted_damage:
            return
        if ranges:
            self._disk.replace(self.paths.damage, encode_damage(ranges))
        else:
            self._disk.unlink(self.paths.damage)
            self._disk.flush_dir(self.paths.raft)
        self._noted_damage = ranges

    def _load_damage(self) -> None:
        if not self._disk.exists(self.paths.damage):
            return
        ranges = decode_damage(self._disk.read(self.paths.damage), self.paths.damage)
        first, last = self.log.first_index, self.log.last_index
        if ranges is None:
            log.error("list_of_damage_damaged", path=self.paths.damage)
            ranges = [(first, last)]
        self._noted_damage = ranges
        for low, high in ranges:
            for index in range(max(low, first), min(high, last) + 1):
                if not self.is_whole(index):
                    self.log.repair.mark_damaged(index)
        self.write_damage()

    def apply(self, index: int) -> Applied:
        """Apply the entry at *index*, which must be committed and durable here.

        Raises:
            InvariantBroken: The entry contradicts the tables: stop the node.
            DiskFullError: A derived file could not grow. Tables and `derived_index` are as they
                were; applying it again when there is space does the whole of it. Of a message that
                has several keys one may then be missing in the key index.
        """
        frame = self.log.frame(index)
        header = parse_header(frame)
        if header.index != index:
            raise InvariantBroken(f"entry {header.index} stands where {index} should")
        derived = derive(frame, header, delay_ms=self._delays)
        if index <= self.tables.applied_index:
            # The tables know this entry already: units and keys only, of queues that still exist.
            self._put_derived(derived, self.tables.queues)
            self.derived_index = index
            return Applied(index, [], [], topics_changed=False, deleted_topics=())
        # Before the tables, which say what counts: on a full disk nothing has happened then.
        self._put_derived(derived, None)
        applied = apply_entry(self.tables, frame, header, derived)
        self.derived_index = index
        for topic in applied.deleted_topics:
            self.queues.delete_topic(topic)
        if applied.floor_moved:
            raise_min_offsets(self.tables, self._first_kept)
        for change in applied.changes:
            if isinstance(change, QueueFloorsChange):
                self._begun_later.update((topic, queue_id) for topic, queue_id, _ in change.floors)
        if self._rows_to_copy >= CUT_ROWS and len(self._cuts) < CUTS_MAX:
            self._cuts.append(take_cut(self.tables))
        return applied

    @property
    def _rows_to_copy(self) -> int:
        return len(self.tables.marks) + self.tables.producers.touched_count

    def _put_derived(self, derived: Derived, known: Container[tuple[str, int]] | None) -> None:
        """Write units and keys, the units only of queues in *known* if that is given."""
        for topic, queue_id, where in derived.groups:
            if (known is None or (topic, queue_id) in known) and len(derived.queue_offset[where]):
                first = int(derived.queue_offset[where][0])
                self.queues.queue(topic, queue_id).put(first, derived.units[where])
        self.keys.put(derived)

    def put_missing_keys(self, max_bytes: int, *, skip_damaged: bool) -> bool:
        """Put keys of applied entries that the key index lacks; see `KeyIndexing.step`."""
        if self.refilling:
            return False
        return self.keys.step(
            self.log, self.derived_index, self._delays, max_bytes, skip_damaged=skip_damaged
        )

    def begin_checkpoint(self, commit_index: int) -> Checkpointing | None:
        """Take the picture that the next start begins from; None when nothing is new.

        Args:
            commit_index: Newest index that is committed and stable here.
        """
        index = min(commit_index, self.log.durable_index)
        tables = self.tables
        if self.refilling or index < self.log.first_index or tables.applied_index > index:
            return None
        if (index, tables.applied_index) == self._saved:
            return None
        mark = Mark(
            index=index,
            term=self.log.term_at(index),
            position=self.log.position_at(index),
            chain=self.log.chain_at(index),
            end_position=self.log.position_at(index) + self.log.size_at(index),
        )
        self._cuts.append(take_cut(tables))
        return Checkpointing(
            store=self,
            # Not when one was lost since: that is for the next start.
            has_derived=self._derives_again and not self._derived_lost,
            mark=mark,
            index=tables.applied_index,
            floor=tables.floor,
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
        # Files of a log that a snapshot replaces are not its own any more.
        self.log.close(clean=not self.installing)
        self._checkpoint_file.close()
        self._mark_slots.close()
        self._installation.close()
        self.vote_slots.close()
        if clean and not self.installing:
            self._abort.remove()
        self._lock.release()


def goes_on_after(loaded: StateTables, commit_index: int) -> tuple[int, int]:
    """Return the index of a snapshot that is not needed, and from where entries will do."""
    return loaded.applied_index, max(loaded.floor.first_index, commit_index + 1)


def delays_of_levels(levels_ms: Sequence[int]) -> dict[int, int]:
    """Return the delay of every level there can be; one that is configured no more waits longest.

    Messages of such a level may be there, from before; none of them is to be early.
    """
    longest = max(levels_ms, default=0)
    delays = dict.fromkeys(range(1, MAX_DELAY_LEVELS + 1), longest) if levels_ms else {}
    delays.update(enumerate(levels_ms, start=1))
    return delays


def encode_damage(ranges: list[tuple[int, int]]) -> bytes:
    """Return the content of the damage file: a checksum, then CBOR."""
    body = cbor2.dumps({"v": DAMAGE_FORMAT, "ranges": [list(pair) for pair in ranges]})
    return zlib.crc32(body).to_bytes(4, "big") + body


def decode_damage(data: bytes, path: str) -> list[tuple[int, int]] | None:
    """Return the damaged entries as runs (first, last); None when the file itself is damaged.

    Raises:
        ForeignStoreError: A newer version wrote it.
    """
    if zlib.crc32(data[4:]).to_bytes(4, "big") != data[:4]:
        return None
    record = cbor2.loads(data[4:])
    if record["v"] > DAMAGE_FORMAT:
        raise ForeignStoreError(
            f"{path} has format {record['v']}; this version knows up to {DAMAGE_FORMAT}"
        )
    return [(first, last) for first, last in record["ranges"]]


@dataclass(slots=True)
class Checkpointing:
    """A checkpoint that was taken and waits to be written."""

    store: ReplicaStore
    mark: Mark
    index: int
    floor: Anchor
    flushes: tuple[ConsumeQueueFlush, KeyIndexFlush]
    checkpoint: Checkpoint
    has_derived: bool = False
    """Whether it has queues and keys that were lost before this start."""

    @property
    def kind(self) -> str:
        """Under which name the executor measures it."""
        return LARGE_SNAPSHOT_KIND if self.store.is_large else SNAPSHOT_KIND

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
        store = self.store
        for flush in self.flushes:
            flush.run()
        tables = store.encode_tables(self.index)
        store._disk.replace(store.paths.snapshot, tables)
        store._mark_slots.store(self.mark.encode())
        store._checkpoint_file.store(self.checkpoint)
        store.saved_index = self.index
        store.saved_tables = (self.index, tables)
        store._saved = (self.mark.index, self.index)
        store._end_installation()
        if self.has_derived:
            store._derives_again = False
            store._disk.unlink(store.paths.derived_lost)
            store._disk.flush_dir(store.paths.raft)


def _check_numbers(tables: StateTables) -> None:
    """Let tables pass whose places in the log are numbers that a log comes to.

    Raises:
        CorruptStoreError: They are none.
    """
    floor = tables.floor
    numbers = (
        tables.applied_index,
        tables.members_index,
        floor.first_index,
        floor.position,
        floor.prev_term,
        floor.prev_store_time_ms,
    )
    if not all(type(number) is int and 0 <= number < LOG_NUMBERS for number in numbers):
        raise CorruptStoreError("a state snapshot of a place that no log comes to")
