"""The key index: from hashes of ``topic#key`` to positions in the commit log.

It is a row of runs (`dledger.commitlog.key_run`) without a gap: files that are never changed, and
the keys of the newest entries in memory. A flush writes those into a file of their own and makes
one file of several small ones. A file that is damaged, or that the disk does not give back, is
removed; what it covered is a gap then, also for the next start, and its owner fills it from the
log. What a flush has not reached is put again by the replay.

Spec: docs/reference/formats.md, section 4.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger.commitlog.errors import CorruptStoreError, DiskFullError
from dledger.commitlog.java_hash import index_key_hash
from dledger.commitlog.key_run import Keys, Run, is_run_name, open_run, write_run
from dledger.commitlog.seams import CANNOT_BE_READ, Disk

MAX_QUERY_RESULTS: Final = 64
"""RocketMQ's maxMsgsNumBatch."""

FLUSH_KEYS: Final = 1 << 18
"""Keys in memory, 12 bytes each, from which on a flush is due before the next checkpoint."""

KEYS_MAX: Final = 1 << 20
"""Keys in memory beyond which they are flushed at once, unless a flush is under way: a replay has
no checkpoints."""

MERGED_TOGETHER: Final = 4
"""Runs that are merged, at the least: a key is written some five times until its run is long."""

MERGED_ALWAYS_KEYS: Final = 4_096
"""Up to here a run is merged with shorter ones, however short they are."""

MERGED_KEYS_MAX: Final = 1 << 20
"""Keys of a merged run: 13 MB in the file, four times that in the worker that merges."""

FOREVER: Final = 1 << 62
"""A position behind every log."""


class KeyIndexFlush:
    """Runs to be written. `run` blocks and may be called in a worker thread, one at a time.

    Attributes:
        done: Whether `run` has come to its end, or failed.
        written: Those that are durable.
        unreadable: Those that were to be merged and cannot be read, and why.
    """

    def __init__(
        self,
        disk: Disk,
        root: str,
        keys: Keys,
        merged: Sequence[Run] = (),
        obsolete: Sequence[str] = (),
    ) -> None:
        self._obsolete = obsolete
        self._disk = disk
        self._root = root
        self._keys = keys
        self._merged = merged
        self.written: list[Run] = []
        self.unreadable: list[tuple[Run, Exception]] = []
        self.done = False

    def run(self) -> None:
        """Remove what was merged before, merge, then write the keys.

        Raises:
            DiskFullError: What is not written is in the next job.
            FlushFailedError: The node must stop.
        """
        try:
            for path in self._obsolete:
                self._disk.unlink(path)
            if self._merged:
                self._merge()
            keys = self._keys
            if keys.first <= keys.last:
                run = write_run(self._disk, self._root, keys.first, keys.last, keys.pairs())
                self.written.append(run)
        finally:
            self.done = True

    def _merge(self) -> None:
        parts = []
        for run in self._merged:
            try:
                parts.append(run.read(self._disk))
            except (CorruptStoreError, OSError) as error:
                if not _is_loss(error):
                    raise
                self.unreadable.append((run, error))
                return
        first, last = self._merged[0].first, self._merged[-1].last
        # Without space for it, there may be some for the keys.
        with suppress(DiskFullError):
            run = write_run(self._disk, self._root, first, last, np.concatenate(parts))
            self.written.append(run)


class KeyIndex:
    """All runs below one folder.

    Not thread-safe; only the job that `begin_flush` or `begin_fill` returns may run elsewhere.

    Attributes:
        files_lost: Files removed since the start because they were damaged, or unreadable.
        on_unreadable: Called with the path of such a file, and why.
        on_long: Called when a flush is due.
    """

    # Invariant: runs are in log order, and no two have the same entry; memory is behind them.

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._root = root
        self._first = 1
        self._keys = Keys(1)
        self._job: KeyIndexFlush | None = None
        self._runs: list[Run] = []
        # Merged runs, which the next flush removes: that takes milliseconds.
        self._obsolete: list[str] = []
        self.files_lost = 0
        self.on_unreadable: Callable[[str, str], object] = lambda _path, _why: None
        self.on_long: Callable[[], object] = lambda: None
        found: list[Run] = []
        for name in disk.list_dir(root):
            path = f"{root}/{name}"
            try:
                if not is_run_name(name):
                    raise CorruptStoreError(f"{path} is no file of this index")
                found.append(open_run(disk, path))
            except (CorruptStoreError, OSError) as error:
                if not _is_loss(error):
                    raise
                self.files_lost += is_run_name(name)
                disk.unlink(path)
        # A stop came between a merged run and the end of those that it is made of.
        for run in sorted(found, key=lambda run: (run.first, -run.last)):
            if self._runs and run.first <= self._runs[-1].last:
                disk.unlink(run.path)
            else:
                self._runs.append(run)

    def begin(self, first: int, last: int) -> None:
        """Make ready for the entry after *last*; the log begins with entry *first*. Blocking.

        Runs beyond *last* are removed: their entries are put again.
        """
        self.delete_before(first)
        beyond = [run for run in self._runs if run.last > last]
        for run in beyond:
            self._remove(run)
        if beyond:
            self._disk.flush_dir(self._root)
        self._keys = Keys(last + 1)

    @property
    def gap(self) -> tuple[int, int] | None:
        """The first entries in a row whose keys are missing; None when all are there."""
        next_index = self._first
        covered = [(run.first, run.last) for run in self._runs]
        for first, last in (*covered, (self._keys.first, self._keys.last)):
            if first > next_index:
                return next_index, first - 1
            next_index = max(next_index, last + 1)
        return None

    @property
    def is_behind(self) -> bool:
        """Whether keys of applied entries are missing."""
        return self.gap is not None

    @property
    def is_long(self) -> bool:
        """Whether a flush is due."""
        return len(self._keys) >= FLUSH_KEYS

    def put(
        self, last: int, hashes: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> None:
        """Add the keys of the entries that follow, up to *last*, in log order.

        Nothing happens for entries that were put already.

        Args:
            hashes: From `index_key_hash`, none negative.
            positions: Of the record that each key belongs to.
        Raises:
            DiskFullError: Nothing was added; come again when there is space.
        """
        if last <= self._keys.last:
            return
        if len(self._keys) >= KEYS_MAX and (self._job is None or self._job.done):
            self.flush()
        was_long = self.is_long
        self._keys.add(last, hashes, positions)
        if self.is_long and not was_long:
            self.on_long()

    def query(self, topic: str, key: str, max_num: int, low: int, high: int) -> list[int]:
        """Return positions of records that may have *key*, newest first.

        Other keys with the same hash are among them: the caller reads the records.

        Args:
            max_num: At most 64 are returned.
            low, high: Where the records begin: from the one on, before the other.
        """
        found = self.candidates(topic, key, low, high)
        limit = max(0, min(max_num, MAX_QUERY_RESULTS))
        return list(islice((position for position in found if position is not None), limit))

    def candidates(self, topic: str, key: str, low: int, high: int) -> Iterator[int | None]:
        """Yield what `query` returns without end to it, one step a look at a pair or into a run.

        What is put while the caller pauses may be missing.

        Yields:
            A position, or None for a run, for a position out of bounds, and for the record before,
            which may have the key twice: the caller bounds the steps.
        """
        before: int | None = None
        for position in self._positions(index_key_hash(topic, key), low, high):
            if position is None:
                yield None
                continue
            if position < low:
                return
            # Nor one that a flush has moved from memory into a run meanwhile.
            is_new = before is None or position < before
            yield position if position < high and is_new else None
            before = position if is_new else before

    def _positions(self, key_hash: int, low: int, high: int) -> Iterator[int | None]:
        """Yield all positions of a hash, newest first, where one may be within bounds.

        None: a run ends.
        """
        end = self._keys.first
        yield from self._keys.positions_of(key_hash)
        # Runs may be merged while the caller pauses: found by their entries, not by their number.
        while older := bisect_left(self._runs, end, key=attrgetter("first")):
            run = self._runs[older - 1]
            end = run.first
            if run.count and run.high < low:
                return
            if not run.count or run.low >= high:
                continue
            try:
                for positions in run.walk(self._disk, key_hash):
                    yield from positions
            except (CorruptStoreError, OSError) as error:
                self._give_up(run, error)
            yield None

    # -- files -----------------------------------------------------------------------------

    def _give_up(self, run: Run, error: Exception) -> None:
        if not _is_loss(error):
            raise error
        if run in self._runs:
            self._remove(run)
            self.files_lost += 1
            self.on_unreadable(run.path, str(error))

    def _remove(self, run: Run) -> None:
        self._runs.remove(run)
        self._disk.unlink(run.path)

    def delete_before(self, first: int) -> None:
        """Remove runs with entries before *first* only, with which the log begins now."""
        self._first = first
        for run in [run for run in self._runs if run.last < first]:
            self._remove(run)

    def begin_flush(self) -> KeyIndexFlush:
        """Return the job that makes all keys put so far durable. Run one before the next."""
        self.end_flush()
        keys, merged = self._keys.copy(), plan_merge(self._runs)
        self._job = KeyIndexFlush(self._disk, self._root, keys, merged, self._obsolete)
        self._obsolete = []
        return self._job

    def begin_fill(self, keys: Keys) -> KeyIndexFlush:
        """Return the job that writes *keys*, which fill a gap. Run one before the next."""
        self.end_flush()
        self._job = KeyIndexFlush(self._disk, self._root, keys)
        return self._job

    def end_flush(self) -> None:
        """Go on with what the last job has written; it does not run any more."""
        job, self._job = self._job, None
        if job is None:
            return
        for run in job.written:
            if run.first == self._keys.first:
                self._keys.cut(run.last, run.count)
            self._take(run)
        for lost, error in job.unreadable:
            self._give_up(lost, error)

    def _take(self, run: Run) -> None:
        """Take a run in the place of those that it is made of."""
        for other in [each for each in self._runs if run.first <= each.first <= run.last]:
            self._runs.remove(other)
            if other.path != run.path:
                self._obsolete.append(other.path)
        self._runs.append(run)
        self._runs.sort(key=lambda run: run.first)

    def flush(self) -> None:
        """Make everything put so far durable. Raises like `KeyIndexFlush.run`."""
        self.begin_flush().run()
        self.end_flush()


def plan_merge(runs: Sequence[Run]) -> list[Run]:
    """Return runs that follow each other and are to be one, the newest such; or none.

    A run goes with the newer ones if it is not longer than two times all of these together.
    """
    for end in range(len(runs), MERGED_TOGETHER - 1, -1):
        group, count = [runs[end - 1]], runs[end - 1].count
        for run in reversed(runs[: end - 1]):
            is_longer = run.count > max(2 * count, MERGED_ALWAYS_KEYS)
            count += run.count
            if is_longer or count > MERGED_KEYS_MAX or run.last + 1 != group[-1].first:
                break
            group.append(run)
        if len(group) >= MERGED_TOGETHER:
            return group[::-1]
    return []


def _is_loss(error: Exception) -> bool:
    """Whether a file is damaged, not there, or on a bad sector."""
    return isinstance(error, (CorruptStoreError, FileNotFoundError)) or (
        isinstance(error, OSError) and error.errno in CANNOT_BE_READ
    )
