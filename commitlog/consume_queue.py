"""A consume queue: its 20-byte units, which point into the commit log.

Its newest units stand with those of others in a shared file (`commitlog.shared_units`) until a
flush has made a file for them, and while as many files are open as may be. Units are derived from
committed entries only and can be written again at any time. The state tables own each queue's min
and max offset: bytes at or past the max offset mean nothing.

Spec: docs/reference/formats.md, section 3.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Final

import numpy as np

from dledger.commitlog.errors import InvariantBroken, OffsetOutOfRangeError
from dledger.commitlog.queue_files import Move, Part, QueueFiles, QueueKey
from dledger.commitlog.queue_unit import UNIT_BYTES, UNIT_DTYPE, Units, fillers
from dledger.commitlog.shared_units import Row, RowKind, Tail

SHARED_QUEUE_BYTES: Final = 32 << 10
"""Shared units of one queue; with more of them it gets files of its own at the next flush."""

SHARED_BYTES_MAX: Final = 32 << 20
"""Shared units in memory. Beyond it units are written into files of their queue at once."""

_NAME_DIGITS: Final = 20


class Sharing:
    """The queues of a store that have shared units.

    Attributes:
        queues: Those, the ones that have had some for the longest time first.
        long: Those of them that have too many.
        changes: Of shared units, since the last flush.
    """

    def __init__(self) -> None:
        self.queues: dict[ConsumeQueue, None] = {}
        self.long: dict[ConsumeQueue, None] = {}
        self.size_bytes = 0
        self.changes: list[Row] = []

    @property
    def is_half_full(self) -> bool:
        """Whether more than half of the shared units that may be are there."""
        return self.size_bytes > SHARED_BYTES_MAX // 2


class ConsumeQueue:
    """One queue. Offsets are logical: unit *n* stands at byte 20·n of its files."""

    __slots__ = (
        "_files",
        "_known_begins",
        "_moving",
        "_sharing",
        "_tail",
        "_wanted_min",
        "queue_id",
        "topic",
    )

    def __init__(self, files: QueueFiles, sharing: Sharing, topic: str, queue_id: int) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self._files = files
        self._sharing = sharing
        # First offsets of its files; None before anything has asked for them.
        self._known_begins: set[int] | None = None
        # Shared units: the newest ones, behind all that is in files.
        self._tail: Tail | None = None
        # Those that a flush moves into files, as they were then; None when it does not.
        self._moving: Tail | None = None
        self._wanted_min = 0

    @property
    def _key(self) -> QueueKey:
        return self.topic, self.queue_id

    @property
    def _folder(self) -> str:
        return f"{self._files.root}/{self.topic}/{self.queue_id}"

    @property
    def _begins(self) -> set[int]:
        if self._known_begins is None:
            self._known_begins = self._find_begins()
        return self._known_begins

    def _find_begins(self) -> set[int]:
        files = self._files
        if self.topic not in files.topics or self.topic in files.late_topics:
            return set()
        folder = self._folder
        begins = {
            int(name) // UNIT_BYTES
            for name in files.disk.list_dir(folder)
            if len(name) == _NAME_DIGITS and name.isdecimal()
        }
        if begins:
            # A process that was killed may have left names that no flush has reached.
            files.note_folder(folder)
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
        sharing, tail = self._sharing, self._tail
        sharing.size_bytes += more
        if tail is None or not tail.units:
            self._tail = None
            sharing.queues.pop(self, None)
            sharing.long.pop(self, None)
            return
        sharing.queues[self] = None
        if len(tail.units) > SHARED_QUEUE_BYTES:
            sharing.long[self] = None

    def _share(self, first: int, units: Units) -> bool:
        """Let units be shared ones, if that is how they are to be stored."""
        files, tail, size = self._files, self._tail, len(units) * UNIT_BYTES
        if tail is None:
            if self.topic not in files.late_topics:
                lacks_file = self._lacks_file(first, len(units))
                if not lacks_file and self._path(self._locate(first)[0]) in files:
                    return False
                if not self._may_share(size, lacks_file=lacks_file):
                    return False
            tail = Tail()
        elif self._moving is not None or self.topic in files.late_topics:
            if not tail.takes(first):
                # Those of a topic of this name that was deleted since: the others may be moved.
                self._count(-len(tail.units))
                tail = Tail()
        elif not tail.takes(first) or not self._may_share(
            size, lacks_file=self._lacks_file(tail.first, first + len(units) - tail.first)
        ):
            self._write_shared()
            return False
        before = len(tail.units)
        data = np.ascontiguousarray(units, UNIT_DTYPE).tobytes()
        tail.put(first, data)
        self._tail = tail
        self._count(len(tail.units) - before)
        self._sharing.changes.append(Row(RowKind.UNITS, self.topic, self.queue_id, first, data))
        return True

    def _may_share(self, size: int, *, lacks_file: bool) -> bool:
        """Whether units may be shared ones: of a file that is not there, or is not open."""
        is_wanted = lacks_file or len(self._files) >= self._files.most
        return is_wanted and self._sharing.size_bytes + size <= SHARED_BYTES_MAX

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
        self._sharing.changes.append(Row(RowKind.FROM, self.topic, self.queue_id, offset))

    def _begin_move(self) -> Move:
        tail = self._tail
        if tail is None:
            raise InvariantBroken(f"{self.topic} queue {self.queue_id} has no shared units")
        # Found now: while a flush makes files, the content of the folder proves nothing.
        _ = self._begins
        self._files.topics.add(self.topic)
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
        self._sharing.long.pop(self, None)
        if end is None:
            # Some of its files may have been made. Looked for now: a deletion closes what is known.
            self._known_begins = self._find_begins()
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
            self._files.open(self._path(begin))

    def put(self, first_queue_offset: int, units: Units) -> None:
        """Write *units* at *first_queue_offset* and on, over whatever is there.

        Holes are allowed: that offsets are dense is for the caller to see to.

        Raises DiskFullError: some of them may have been written; putting them again is harmless.
        """
        if first_queue_offset < 0:
            raise InvariantBroken(f"queue offset {first_queue_offset} is negative")
        if len(units) and not self._share(first_queue_offset, units):
            self._put_files(first_queue_offset, units)

    def put_again(self, first_queue_offset: int, units: Units) -> None:
        """Write units into a file that was made again, over whatever is there; as `put`."""
        self._put_files(first_queue_offset, units)

    def give_up(self, offset: int) -> bool:
        """Note that the file with the unit at *offset* holds what was not put there.

        Returns:
            Whether a file was given up; not one that had been, and not for a unit in memory.
        """
        begin, _ = self._locate(offset)
        tail = self._tail
        is_in_memory = tail is not None and tail.first <= offset < tail.end
        if is_in_memory or begin not in self._begins:
            return False
        if not self._files.lost.takes_units(self._key, begin):
            return False
        path = self._path(begin)
        error = OSError(errno.EIO, f"the unit at offset {offset} is not what was put", path)
        self._files.lose(self._key, path, error)
        return True

    def has_file(self, begin: int) -> bool:
        """Whether there is a file whose first unit is that of offset *begin*."""
        return begin in self._begins

    def _put_files(self, first: int, units: Units) -> None:
        begin, within = self._locate(first)
        if within + len(units) <= self._files.units_per_file:
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
            part = min(self._files.units_per_file - within, end - first)
            yield first, begin, within, part
            first += part

    def _put_file(self, begin: int, within: int, units: Units) -> None:
        path = self._path(begin)
        if not self._files.lost.takes_units(self._key, begin):
            return  # they are put again from the log, with the others
        if begin in self._begins:
            file = self._files.open(path)
        else:
            file = self._files.create(path)
            self._files.topics.add(self.topic)
            self._begins.add(begin)
            if within:
                file.write_at(0, fillers(within))
        self._files.dirty.add(path)
        try:
            file.write_at(within * UNIT_BYTES, np.ascontiguousarray(units, UNIT_DTYPE).tobytes())
        except OSError as error:
            self._files.lose(self._key, path, error)  # the rest of a page cannot be read

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
            path = self._path(begin)
            if not self._files.lost.gives_units(self._key, begin):
                raise OSError(errno.EIO, "units are being put again from the log", path)
            file = self._files.open(path)
            try:
                # Not a view: a bad sector below that ends the process.
                parts.append(file.read(within * UNIT_BYTES, part * UNIT_BYTES))
            except OSError as error:
                self._files.lose(self._key, path, error)
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
            self._sharing.changes.append(
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
        last = min_offset - self._files.units_per_file
        for begin in [begin for begin in self._begins if begin <= last]:
            self._remove(begin)

    def keeps_before(self, offset: int, min_offset: int) -> bool:
        """Whether `delete_before` *offset* gives something up that *min_offset* did not."""
        if self._tail is not None and self._tail.first < offset:
            return True
        per_file = self._files.units_per_file
        return offset // per_file > min_offset // per_file

    @property
    def has_files(self) -> bool:
        """Whether some of its units are in files of its own."""
        return bool(self._begins)

    def _locate(self, queue_offset: int) -> tuple[int, int]:
        within = queue_offset % self._files.units_per_file
        return queue_offset - within, within

    def _path(self, begin: int) -> str:
        return f"{self._folder}/{begin * UNIT_BYTES:020d}"

    def _remove(self, begin: int) -> None:
        path = self._path(begin)
        self._files.lost.forget(self._key, begin)
        self._files.drop(path)
        self._files.disk.unlink(path)
        self._files.dirty_folders.add(self._folder)
        self._begins.discard(begin)

    def _forget(self) -> None:
        if self._tail is not None:
            gone, self._tail = len(self._tail.units), None
            self._count(-gone)
        for begin in self._known_begins or ():
            self._files.lost.forget(self._key, begin)
            self._files.drop(self._path(begin))
        self._known_begins = set()
        self._moving = None
