"""Space for a log ahead of its end: segments, index files, and how far the log may be written.

Spec: docs/reference/formats.md, sections 5 and 6.
"""

from __future__ import annotations

from threading import Lock
from typing import Final

from dledger.commitlog.errors import FlushFailedError, LogBusyError
from dledger.commitlog.log_reader import LogFiles, LogReader
from dledger.commitlog.mark import Extent, Mark, SlotFile
from dledger.commitlog.segment import Segment, encode_blank, segment_base

EXTENT_WINDOW_BYTES: Final = 64 << 20
"""How far ahead the extent is noted: what recovery reads at most behind the last entry."""


class Claim:
    """Keeps the thread that appends and one that allocates ahead for it from each other's files."""

    def __init__(self) -> None:
        self._lock = Lock()

    def take(self) -> bool:
        """Take it if it is free; tell whether it was."""
        return self._lock.acquire(blocking=False)

    def wait(self) -> None:
        """Take it as soon as it is free. Blocking."""
        self._lock.acquire()

    def give_back(self) -> None:
        """Let the next one have it."""
        self._lock.release()


class Allocator:
    """Allocates for one log; only `reserve_next` may run in a worker thread.

    Attributes:
        limit: The log may be written up to this position; recovery reads no further.
        limit_is_exact: The limit is the end of the log, and nothing stands behind it.
        indexed_end: End of the newest entry that the extent names.
        index_stale: Set by a truncation below `indexed_end`: the extent is to be written again.
        claim: Held while space is allocated, and while segments are removed.
    """

    def __init__(
        self, files: LogFiles, log: LogReader, extent_slots: SlotFile, spares: dict[int, Segment]
    ) -> None:
        self._files = files
        self._log = log
        self._extent_slots = extent_slots
        self._spares = spares
        # Written behind an exact end only after the extent was moved, so a shortened log shows.
        self.limit = log.end_position
        self.limit_is_exact = True
        self.indexed_end = log.end_position
        self.index_stale = False
        self.claim = Claim()

    def make_room(self, index: int, end: int, position: int, size: int) -> Segment:
        """Have segment, extent and index ready for a frame; write the blank of a roll."""
        rolls = position != end
        wanted = [segment_base(end, self._files.segment_bytes)] if rolls else []
        wanted.append(segment_base(position, self._files.segment_bytes))
        missing = [base for base in wanted if base not in self._files.segments]
        to_make = [base for base in missing if base not in self._spares]
        if to_make or position + size > self.limit or not self._files.index.has_space(index):
            if not self.claim.take():
                raise LogBusyError("space is being allocated right now; nothing was written")
            try:
                for base in to_make:
                    self._spares[base] = self._create(base)
                    self._files.new_names = True
                self._files.index.make_room(index)
                if position + size > self.limit:
                    self._extend(position + size + EXTENT_WINDOW_BYTES)
            finally:
                self.claim.give_back()
        for base in missing:
            # In this order: `reserve_next` is never to find it in neither.
            self._files.segments[base] = self._spares[base]
            del self._spares[base]
        if rolls:
            old = self._files.segments[wanted[0]]
            old.write(end, encode_blank(old.end - end))
            self._files.dirty[old.base] = old
        return self._files.segments[wanted[-1]]

    def _create(self, base: int) -> Segment:
        path = self._files.paths.segment(base)
        return Segment(base, self._files.disk.create(path, self._files.segment_bytes, reserve=True))

    def _extend(self, limit: int) -> None:
        """Note durably that the log may be written up to *limit*."""
        durable = self._log.durable_index
        indexed = self._log.anchor.mark
        if durable >= self._log.first_index:
            # From the file, not from memory: this may run beside the thread that appends.
            unit = self._files.index.stored(durable)
            if unit is not None:
                position, term, chain, size = unit
                indexed = Mark(durable, term, position, chain, position + size)
        limit = max(limit, self.limit)
        try:
            self.index_stale = False
            self._files.index.flush()
            self._extent_slots.store(Extent(limit, indexed, exact=False).encode())
        except FlushFailedError as error:
            self._files.health.failure = str(error)
            raise
        self.limit = limit
        self.limit_is_exact = False
        self.indexed_end = indexed.end_position

    def _next_base(self) -> int:
        base = segment_base(self._log.end_position, self._files.segment_bytes)
        return base + self._files.segment_bytes if base in self._files.segments else base

    @property
    def has_reserve(self) -> bool:
        """Whether the next segment is allocated: a roll cannot find the disk full."""
        return self._next_base() in self._spares

    @property
    def needs_reserve(self) -> bool:
        """Whether `reserve_next` has something to do. Cheap."""
        files, end = self._files, self._log.end_position
        return files.health.failure is None and (
            not self.has_reserve
            or self.limit - end < EXTENT_WINDOW_BYTES // 2
            or self.index_stale
            or not files.index.has_space(self._log.last_index + self._files.units_per_file // 2 + 1)
        )

    def reserve_next(self) -> None:
        """Allocate ahead: next segment, extent, index file. Blocking; may run in a worker thread.

        Does nothing when another call is under way.

        Raises:
            DiskFullError: The log goes on until the segment at hand is full.
            FlushFailedError: The log is poisoned from now on.
        """
        health = self._files.health
        if health.failure is not None or health.closed:
            raise health.refusal()
        if not self.claim.take():
            return
        try:
            self._files.index.make_room(self._log.last_index + self._files.units_per_file // 2 + 1)
            self._extend(self._log.end_position + EXTENT_WINDOW_BYTES)
            base = self._next_base()
            if base not in self._spares and base not in self._files.segments:
                segment = self._create(base)
                try:
                    segment.file.flush()
                    self._files.disk.flush_dir(self._files.paths.commitlog)
                except FlushFailedError as error:
                    self._files.health.failure = str(error)
                    raise
                self._spares[base] = segment
        finally:
            self.claim.give_back()

    def store_exact_end(self) -> None:
        """Note durably where the log ends; it is not written afterwards."""
        log = self._log
        end = Extent(log.end_position, log.mark_at(log.last_index), exact=True)
        self._extent_slots.store(end.encode())

    def close(self) -> None:
        """Give the files back."""
        for segment in self._spares.values():
            segment.close()
        self._extent_slots.close()
