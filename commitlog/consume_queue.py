"""Consume queues: for each queue its 20-byte units, which point into the commit log.

A queue has files of its own, or its newest units stand with those of others in a shared file
(`commitlog.shared_units`): they do until a flush has made a file for them, and while as many files
are open as may be. Making a file takes a millisecond, which a put does not spend.

Units are derived from committed entries only and can be written again at any time. How many units
count is not recorded here: the state tables own each queue's min and max offset, so bytes at or
past the max offset may be left-overs and mean nothing.

Spec: docs/reference/formats.md, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

import numpy as np

from commitlog.consume_queue_flush import ConsumeQueueFlush, Move, Part
from commitlog.errors import (
    InvariantBroken,
    OffsetOutOfRangeError,
)
from commitlog.queue_files import QueueFiles
from commitlog.queue_unit import UNIT_BYTES, UNIT_DTYPE, Units, fillers
from commitlog.seams import Disk
from commitlog.shared_units import Row, RowKind, SharedUnits, Tail

UNITS_PER_FILE: Final = 300_000
"""RocketMQ's file of 6,000,000 bytes."""

MAX_OPEN_FILES: Final = 200
"""Open consume queue files, a descriptor each: they are read by `pread`. 1,024 descriptors is
the usual limit of a process."""

EAGER_QUEUES: Final = 1_000
"""Queues with files that are looked for when the store is opened; with more of them each is looked
for when it is asked for, so that a start does not read a hundred thousand folders."""

SHARED_BYTES_MAX: Final = 32 << 20
"""Shared units in memory. Beyond it units are written into files of their queue at once."""

SHARED_QUEUE_BYTES: Final = 32 << 10
"""Shared units of one queue; with more of them it gets files of its own at the next flush."""

MOVED_TOGETHER: Final = 256
"""Queues that one flush gives files of their own: about a quarter of a second of a worker."""

_NAME_DIGITS: Final = 20


class ConsumeQueueStore:
    """All consume queues below one folder: ``<root>/<topic>/<queue id>/<20-digit byte offset>``.

    Not thread-safe; only the job that `begin_flush` returns may run elsewhere.
    """

    __slots__ = (
        "_changes",
        "_dirty",
        "_dirty_folders",
        "_disk",
        "_files",
        "_last_flush",
        "_late_folders",
        "_long",
        "_moving",
        "_on_unreadable",
        "_queues",
        "_queues_of",
        "_root",
        "_shared",
        "_shared_bytes",
        "_sharing",
        "_topics_with_files",
        "units_per_file",
    )

    def __init__(
        self,
        disk: Disk,
        root: str,
        units_per_file: int = UNITS_PER_FILE,
        *,
        max_open_files: int = MAX_OPEN_FILES,
        on_unreadable: Callable[[str, OSError], None] = lambda _path, _error: None,
    ) -> None:
        """Find the queues below *root*.

        Args:
            max_open_files: Files kept open; fewer where the process has no descriptor left.
            on_unreadable: Called with the path of a file that cannot be read, and why.
        Raises:
            ForeignStoreError: Their files have another size.
            CorruptStoreError: Units are lost; after `remove_all` they can be derived again.
        """
        self._disk = disk
        self._root = root
        self._on_unreadable = on_unreadable
        self.units_per_file = units_per_file
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._queues_of: dict[str, dict[int, ConsumeQueue]] = {}
        self._files = QueueFiles(disk, self.file_bytes, max_open_files, self._note_folder)
        self._dirty: set[str] = set()
        self._dirty_folders: set[str] = set()
        self._last_flush: ConsumeQueueFlush | None = None
        self._shared = SharedUnits(disk, shared_folder(root))
        self._shared_bytes = 0
        # Queues with shared units, those that have had some for the longest time first; and those
        # of them that have too many.
        self._sharing: dict[ConsumeQueue, None] = {}
        self._long: dict[ConsumeQueue, None] = {}
        # Changes of shared units since the last flush.
        self._changes: list[Row] = []
        # Those whose shared units the last flush moves into files, in its order.
        self._moving: list[ConsumeQueue] = []
        # Topics that were deleted while a flush made files of theirs: nothing else makes any.
        self._late_folders: set[str] = set()
        disk.make_dir(root)  # durably: folders of topics are not made so
        self._topics_with_files = set(disk.list_dir(root))
        self._find()

    def _find(self) -> None:
        for topic, tails in self._shared.tails.items():
            for queue_id, tail in tails.items():
                self.queue(topic, queue_id)._take_shared(tail)
        eager = 0
        for topic in sorted(self._topics_with_files):
            for name in self._disk.list_dir(f"{self._root}/{topic}"):
                if name.isdecimal():
                    self.queue(topic, int(name))._check()
                    eager += 1
                if eager >= EAGER_QUEUES:
                    return

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue; files are made when they are needed."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            if not topic or topic in (".", "..") or "/" in topic or "\0" in topic:
                raise InvariantBroken(f"topic {topic!r} cannot name a folder")
            if queue_id < 0:
                raise InvariantBroken(f"queue id {queue_id} of {topic} is negative")
            queue = ConsumeQueue(self, topic, queue_id)
            self._queues[topic, queue_id] = queue
            self._queues_of.setdefault(topic, {})[queue_id] = queue
        return queue

    def queues(self) -> Sequence[ConsumeQueue]:
        """Return the queues that were asked for, or found at the start, in no special order.

        Those with shared units are all among them, those with files while there are less than
        `EAGER_QUEUES`.
        """
        return list(self._queues.values())

    def delete_topic(self, topic: str) -> None:
        """Remove all queues of *topic* and their files; arrays read before stay valid."""
        had_shared = is_moving = False
        for queue in self._queues_of.pop(topic, {}).values():
            del self._queues[topic, queue.queue_id]
            had_shared |= queue._has_shared
            is_moving |= queue._is_moving
            queue._forget()
        if had_shared:
            self._changes.append(Row(RowKind.TOPIC_DELETED, topic))
        if topic not in self._topics_with_files:
            return
        folder = f"{self._root}/{topic}"
        self._dirty_folders = {
            path for path in self._dirty_folders if not f"{path}/".startswith(f"{folder}/")
        }
        if is_moving:
            self._late_folders.add(topic)
            return
        self._remove_folder(topic)

    def _remove_folder(self, topic: str) -> None:
        self._topics_with_files.discard(topic)
        self._disk.remove_tree(f"{self._root}/{topic}")
        self._disk.flush_dir(self._root)

    def begin_flush(self) -> ConsumeQueueFlush:
        """Return the job that makes all units put so far durable.

        What an earlier job did not come to is in it again.
        """
        last, self._last_flush = self._last_flush, None
        if last is not None:
            self._end_flush(last)
        moves = self._begin_moves()
        job = ConsumeQueueFlush(
            self._disk,
            sorted(self._dirty),
            sorted(self._dirty_folders),
            shared=self._shared,
            changes=self._changes,
            moves=moves,
            file_bytes=self.file_bytes,
        )
        self._last_flush = job
        self._dirty = set()
        self._dirty_folders = set()
        self._changes = []
        return job

    def _end_flush(self, job: ConsumeQueueFlush) -> None:
        """Take in what *job*, which has ended, came to."""
        if not job.done:
            self._dirty.update(job.paths)
            self._dirty_folders.update(job.folders)
            self._changes = [*job.changes, *self._changes]
        for queue, move in zip(self._moving, job.moves, strict=True):
            queue._end_move(move.end if job.has_moved else None)
        for topic in self._late_folders:
            self._remove_folder(topic)
        self._late_folders.clear()

    def _begin_moves(self) -> list[Move]:
        """Choose queues that get files of their own, as many as one flush is to make."""
        chosen = list(islice(self._long, MOVED_TOGETHER))
        wanted = MOVED_TOGETHER - len(chosen)
        if self._shared_bytes <= SHARED_BYTES_MAX // 2:
            # A store of few queues gives each its files, as RocketMQ has them.
            wanted = min(wanted, self._files.most - len(self._topics_with_files))
        if wanted > 0:
            chosen += [queue for queue in islice(self._sharing, wanted) if queue not in self._long]
        self._moving = chosen
        return [queue._begin_move() for queue in chosen]

    @property
    def file_bytes(self) -> int:
        """Size of a file."""
        return self.units_per_file * UNIT_BYTES

    @property
    def shared_bytes(self) -> int:
        """Size of the units that are in no file of their queue."""
        return self._shared_bytes

    def _may_share(self, size: int, *, lacks_file: bool) -> bool:
        """Whether units may be shared ones: of a file that is not there, or is not open."""
        is_wanted = lacks_file or len(self._files) >= self._files.most
        return is_wanted and self._shared_bytes + size <= SHARED_BYTES_MAX

    def flush(self) -> None:
        """Make all units put so far durable.

        Raises:
            FlushFailedError: The node must stop.
        """
        self.begin_flush().run()

    def close(self) -> None:
        """Give all descriptors back; what was not flushed stays in the page cache, or is lost."""
        self._shared.close()
        self._files.close()

    def _note_folder(self, folder: str) -> None:
        """Note a folder in which a file was made: its names are to be flushed, too.

        It may be new, and so may be the one of its topic.
        """
        self._dirty_folders.update((folder, folder.rpartition("/")[0], self._root))

    def _drop(self, path: str) -> None:
        self._dirty.discard(path)
        self._files.drop(path)


def shared_folder(root: str) -> str:
    """Return where the units of many queues stand together, beside their folder *root*."""
    return f"{root}.shared"


def remove_all(disk: Disk, root: str) -> None:
    """Remove all there is of the queues below *root*: it is to be derived from the log."""
    disk.remove_tree(root)
    disk.remove_tree(shared_folder(root))


class ConsumeQueue:
    """One queue. Offsets are logical: unit *n* stands at byte 20·n of its files."""

    __slots__ = (
        "_known_begins",
        "_moving",
        "_store",
        "_tail",
        "_wanted_min",
        "queue_id",
        "topic",
    )

    def __init__(self, store: ConsumeQueueStore, topic: str, queue_id: int) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self._store = store
        # First offsets of its files; None before anything has asked for them.
        self._known_begins: set[int] | None = None
        # Shared units: the newest ones, behind all that is in files.
        self._tail: Tail | None = None
        # Those that a flush moves into files, as they were then; None when it does not.
        self._moving: Tail | None = None
        self._wanted_min = 0

    @property
    def _folder(self) -> str:
        return f"{self._store._root}/{self.topic}/{self.queue_id}"

    @property
    def _begins(self) -> set[int]:
        if self._known_begins is None:
            self._known_begins = self._find_begins()
        return self._known_begins

    def _find_begins(self) -> set[int]:
        store = self._store
        if self.topic not in store._topics_with_files or self.topic in store._late_folders:
            return set()
        folder = self._folder
        begins = {
            int(name) // UNIT_BYTES
            for name in store._disk.list_dir(folder)
            if len(name) == _NAME_DIGITS and name.isdecimal()
        }
        if begins:
            # A process that was killed may have left names that no flush has reached.
            store._note_folder(folder)
        return begins

    # -- shared units ----------------------------------------------------------------------

    @property
    def _has_shared(self) -> bool:
        return self._tail is not None

    @property
    def _is_moving(self) -> bool:
        return self._moving is not None

    def _take_shared(self, tail: Tail) -> None:
        """Begin with what the shared file had when the store was opened."""
        self._tail = Tail(tail.first, tail.units)
        self._count(len(tail.units))

    def _count(self, more: int) -> None:
        """Note that there are *more* bytes of shared units, or less."""
        store, tail = self._store, self._tail
        store._shared_bytes += more
        if tail is None or not tail.units:
            self._tail = None
            store._sharing.pop(self, None)
            store._long.pop(self, None)
            return
        store._sharing[self] = None
        if len(tail.units) > SHARED_QUEUE_BYTES:
            store._long[self] = None

    def _share(self, first: int, units: Units) -> bool:
        """Let units be shared ones, if that is how they are to be stored."""
        store, tail, size = self._store, self._tail, len(units) * UNIT_BYTES
        if tail is None:
            if self.topic not in store._late_folders:
                lacks_file = self._lacks_file(first, len(units))
                if not lacks_file and self._path(self._locate(first)[0]) in store._files:
                    return False
                if not store._may_share(size, lacks_file=lacks_file):
                    return False
            tail = Tail()
        elif self._moving is not None or self.topic in store._late_folders:
            if not tail.takes(first):
                # Those of a topic of this name that was deleted since: the others may be moved.
                self._count(-len(tail.units))
                tail = Tail()
        elif not tail.takes(first) or not store._may_share(
            size, lacks_file=self._lacks_file(tail.first, first + len(units) - tail.first)
        ):
            self._write_shared()
            return False
        before = len(tail.units)
        data = np.ascontiguousarray(units, UNIT_DTYPE).tobytes()
        tail.put(first, data)
        self._tail = tail
        self._count(len(tail.units) - before)
        store._changes.append(Row(RowKind.UNITS, self.topic, self.queue_id, first, data))
        return True

    def _lacks_file(self, first: int, count: int) -> bool:
        """Whether a file would have to be made for *count* units from *first* on."""
        return any(begin not in self._begins for _, begin, _, _ in self._pieces(first, count))

    def _write_shared(self) -> None:
        """Write all shared units into files, here and now."""
        tail = self._tail
        if tail is None:
            return
        self._put_files(tail.first, np.frombuffer(bytes(tail.units), UNIT_DTYPE))
        self._cut_shared_before(tail.end)

    def _cut_shared_before(self, offset: int) -> None:
        tail = self._tail
        if tail is None or offset <= tail.first:
            return
        before = len(tail.units)
        tail.cut_before(offset)
        self._count(len(tail.units) - before)
        self._store._changes.append(Row(RowKind.FROM, self.topic, self.queue_id, offset))

    def _begin_move(self) -> Move:
        tail = self._tail
        if tail is None:
            raise InvariantBroken(f"{self.topic} queue {self.queue_id} has no shared units")
        # Found now: while a flush makes files, the content of the folder proves nothing.
        _ = self._begins
        self._store._topics_with_files.add(self.topic)
        self._moving = tail
        parts = [
            Part(self._path(begin), within, tail.within(first, first + count))
            for first, begin, within, count in self._pieces(
                tail.first, len(tail.units) // UNIT_BYTES
            )
        ]
        return Move(self.topic, self.queue_id, tail.end, parts)

    def _end_move(self, end: int | None) -> None:
        """Forget the shared units before *end*, which are in files now; None: they are not."""
        moved, self._moving = self._moving, None
        if moved is None:
            return  # its topic was deleted
        self._store._long.pop(self, None)
        if end is None:
            self._known_begins = None  # some of its files may have been made
        else:
            self._begins.update(
                begin for _, begin, _, _ in self._pieces(moved.first, end - moved.first)
            )
        if self._tail is moved and end is not None:
            before = len(moved.units)
            moved.cut_before(end)
            self._count(len(moved.units) - before)
        else:
            self._count(0)
        if self._wanted_min:
            self.delete_before(self._wanted_min)

    # -- units -----------------------------------------------------------------------------

    def _check(self) -> None:
        # One file decides: files of two sizes never lie side by side.
        for begin in sorted(self._begins)[:1]:
            self._store._files.open(self._path(begin))

    def put(self, first_queue_offset: int, units: Units) -> None:
        """Write *units* at *first_queue_offset* and on, over whatever is there.

        Holes are allowed: that offsets are dense is for the caller to see to.

        Raises:
            DiskFullError: Some of them may have been written; putting them again is harmless.
        """
        if first_queue_offset < 0:
            raise InvariantBroken(f"queue offset {first_queue_offset} is negative")
        if len(units) and not self._share(first_queue_offset, units):
            self._put_files(first_queue_offset, units)

    def _put_files(self, first: int, units: Units) -> None:
        begin, within = self._locate(first)
        if within + len(units) <= self._store.units_per_file:
            self._put_file(begin, within, units)
            return
        for offset, begin, within, count in self._pieces(first, len(units)):
            at = offset - first
            self._put_file(begin, within, units[at : at + count])

    def _pieces(self, first: int, count: int) -> Iterable[tuple[int, int, int, int]]:
        """Yield queue offset, first offset of the file, unit in it and number of units, by file."""
        end = first + count
        while first < end:
            begin, within = self._locate(first)
            part = min(self._store.units_per_file - within, end - first)
            yield first, begin, within, part
            first += part

    def _put_file(self, begin: int, within: int, units: Units) -> None:
        path = self._path(begin)
        if begin in self._begins:
            file = self._store._files.open(path)
        else:
            file = self._store._files.create(path)
            self._store._topics_with_files.add(self.topic)
            self._begins.add(begin)
            if within:
                file.write_at(0, fillers(within))
        file.write_at(within * UNIT_BYTES, np.ascontiguousarray(units, UNIT_DTYPE).tobytes())
        self._store._dirty.add(path)

    def read(self, first: int, count: int) -> Units:
        """Return a read-only copy of *count* units from *first* on.

        The caller stays between the queue's min and max offset; bytes outside mean nothing.

        Raises:
            OffsetOutOfRangeError: There is no file for one of them.
            OSError: They cannot be read.
        """
        if first < 0 or count < 0:
            raise OffsetOutOfRangeError(f"{count} units at queue offset {first}")
        end, late = first + count, b""
        if self._tail is not None:
            late = self._tail.within(first, end)
            # What is in files comes first; no hole can be before what is shared.
            end -= len(late) // UNIT_BYTES
        parts = []
        for offset, begin, within, part in self._pieces(first, end - first):
            if begin not in self._begins:
                raise OffsetOutOfRangeError(
                    f"{self.topic} queue {self.queue_id} has no file for queue offset {offset}"
                )
            file = self._store._files.open(self._path(begin))
            try:
                # Not a view: a bad sector below that ends the process.
                parts.append(file.read(within * UNIT_BYTES, part * UNIT_BYTES))
            except OSError as error:
                self._store._on_unreadable(file.path, error)
                raise
        data = b"".join([*parts, late]) if parts else late
        return np.frombuffer(data, UNIT_DTYPE)

    def truncate_to(self, max_offset: int) -> None:
        """Forget units at and after *max_offset*: files that hold no others are removed.

        In the file that stays nothing is overwritten; the state tables own the max offset.
        """
        tail = self._tail
        if tail is not None and tail.end > max_offset:
            before = len(tail.units)
            tail.cut_from(max_offset)
            self._count(len(tail.units) - before)
            # Nothing from there on: what is put there later may stand in a file.
            self._store._changes.append(
                Row(RowKind.UNITS, self.topic, self.queue_id, max_offset, b"")
            )
        for begin in [begin for begin in self._begins if begin >= max_offset]:
            self._remove(begin)

    def delete_before(self, min_offset: int) -> None:
        """Remove the files that hold only units before *min_offset*, and such shared units."""
        if self._moving is not None:
            self._wanted_min = min_offset
            return
        self._wanted_min = 0
        self._cut_shared_before(min_offset)
        last = min_offset - self._store.units_per_file
        for begin in [begin for begin in self._begins if begin <= last]:
            self._remove(begin)

    def keeps_before(self, offset: int, min_offset: int) -> bool:
        """Whether `delete_before` *offset* gives something up that *min_offset* did not."""
        if self._tail is not None and self._tail.first < offset:
            return True
        per_file = self._store.units_per_file
        return offset // per_file > min_offset // per_file

    @property
    def has_files(self) -> bool:
        """Whether some of its units are in files of its own."""
        return bool(self._begins)

    def _locate(self, queue_offset: int) -> tuple[int, int]:
        within = queue_offset % self._store.units_per_file
        return queue_offset - within, within

    def _path(self, begin: int) -> str:
        return f"{self._folder}/{begin * UNIT_BYTES:020d}"

    def _remove(self, begin: int) -> None:
        path = self._path(begin)
        self._store._drop(path)
        self._store._disk.unlink(path)
        self._store._dirty_folders.add(self._folder)
        self._begins.discard(begin)

    def _forget(self) -> None:
        if self._tail is not None:
            gone, self._tail = len(self._tail.units), None
            self._count(-gone)
        for begin in self._known_begins or ():
            self._store._drop(self._path(begin))
        self._known_begins = set()
        self._moving = None
