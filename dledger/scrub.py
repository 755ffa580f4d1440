"""Old entries are read again and again, slowly; what went bad is fetched from another replica.

Every replica compares its log with the checksums and the entry index, and the consume queues with
the log, all of it about once a day. A replica with a damaged entry neither votes nor leads nor
acknowledges until it has the entry's bytes again from any other member, for the same position.

Derived files that the disk does not give back are made again from the log. Meanwhile sends go on,
and pulls of all units that can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog
import trio

from dledger.commitlog.damage import PAGE_BYTES, check_entries
from dledger.commitlog.derive import Derived, derive_together
from dledger.commitlog.entry import KIND_CONFIG, EntryHeader, parse_header
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    CorruptStoreError,
    DiskFullError,
    RemoteProtocolError,
)
from dledger.commitlog.seams import CANNOT_BE_READ
from dledger.derived_files import give_up_differing, walk
from dledger.raft.acks import FLUSH
from dledger.raft.follower import split_frames
from dledger.raft.member import RaftNode
from dledger.raft.replicator import Repair
from dledger.remoting.seams import Clock, Executor
from dledger.state.apply import read_plain
from dledger.store import ReplicaStore
from dledger.waiting import Wakeup

# ---------------------------------------------------------------------------------- derived files


log = structlog.get_logger(__name__)

STEP_BYTES: Final = 256 << 10
"""Entries whose units or keys are put in one go: one or two milliseconds of the event loop."""

STEP_PAUSE_S: Final = 0.01
"""Between two of these: a quarter of a gigabyte of log in ten seconds, and time for all else."""

RETRY_S: Final = 1.0
"""How often is tried again what a damaged entry or a full disk prevents."""

KEYS: Final = "key index"
"""Name under which the executor measures flushes of keys."""


@dataclass(eq=False, repr=False)
class DerivedRepair:
    """Puts missing units and keys, on every replica, whatever its role.

    Args:
        lock: Held while a checkpoint is written or the log is replaced.
        can_be_repaired: Whether another member may have a copy of a damaged entry.
    """

    _store: ReplicaStore
    _clock: Clock
    _executor: Executor
    _lock: trio.Lock
    _can_be_repaired: Callable[[], bool]

    def __post_init__(self) -> None:
        self._wake = Wakeup()
        self._store.on_derived_behind = self._wake.set
        self._wake.set()

    async def run(self) -> None:
        """Put what is missing until cancelled.

        Raises FlushFailedError, OSError: the disk failed: the node must stop.
        """
        reason = ""
        while True:
            await self._wake.wait()
            while self._store.derived.is_behind:
                try:
                    await self._go_on()
                except (CorruptEntryError, CorruptStoreError, DiskFullError) as error:
                    if str(error) != reason:
                        reason = str(error)
                        log.warning("repair_of_derived_files_waits", reason=reason)
                    await self._clock.sleep(RETRY_S)

    async def _go_on(self) -> None:
        async with self._lock:
            try:
                self._store.put_missing_units(STEP_BYTES)
            finally:
                # Whatever units wait for, keys do not.
                if self._store.keys.is_due:
                    await self._put_keys()
        await self._clock.sleep(STEP_PAUSE_S)

    async def _put_keys(self) -> None:
        store = self._store
        skip_damaged = not self._can_be_repaired()
        was_behind = store.keys.is_behind
        job = store.put_missing_keys(STEP_BYTES, skip_damaged=skip_damaged)
        if job is None:
            return
        try:
            await self._executor.run(job.run, kind=KEYS)
        finally:
            store.key_index.end_flush()
        if was_behind and not store.keys.is_behind:
            log.info("key_index_is_whole", files_lost=store.key_index.files_lost)


# ---------------------------------------------------------------------------------- entries


SCRUB: Final = "scrub"
"""Name under which the executor measures checks."""

PASS_S: Final = 86_400.0
"""What a pass through the log takes unless a rate is set: a day."""

STEP_S: Final = 10.0
"""How often a piece is checked: often enough to be even, seldom enough to cost nothing."""

PIECE_BYTES_MIN: Final = 16 << 10
PIECE_BYTES_MAX: Final = 1 << 20
"""What is checked in one go: bounds the time that a worker thread, or the event loop, is busy."""

COMPARED_BYTES: Final = 32 << 10
"""Entries whose units are compared in one go: of a log of small entries, 3 ms of the event loop."""


def pace(log_bytes: int, bytes_per_s: int) -> tuple[int, float]:
    """Return how many bytes to check now and how long to wait afterwards, seconds."""
    rate = float(bytes_per_s) if bytes_per_s else max(log_bytes / PASS_S, PIECE_BYTES_MIN / STEP_S)
    piece = int(min(max(rate * STEP_S, PIECE_BYTES_MIN), PIECE_BYTES_MAX))
    return piece, piece / rate


@dataclass(eq=False, repr=False)
class ScrubService:
    """Finds damage and repairs it, on every replica, whatever its role.

    Args:
        lock: Held while the log is replaced or a checkpoint is written.
    """

    _store: ReplicaStore
    _node: RaftNode
    _clock: Clock
    _executor: Executor
    _lock: trio.Lock

    def __post_init__(self) -> None:
        self._next_index = 1
        self._wake = Wakeup()
        self._answer: memoryview | None = None
        self._repair = Repair(self._node.settings.election_timeout_s)
        self.passes = 0
        self.checked_bytes = 0
        self.found = 0
        self.repaired = 0
        self.files_differing = 0
        self._pages_lost = 0
        self.on_config_repaired: Callable[[], None] = lambda: None
        self._node.owner.on_suspect = self.suspect
        self._node.owner.on_fetched = self._on_fetched
        if len(self._store.log.damaged):
            self._wake.set()

    def status(self) -> dict[str, Any]:
        """Return what ``dledger raft status`` shows: progress of this pass, and damage."""
        entry_log = self._store.log
        first, last = entry_log.first_index, entry_log.last_index
        done = min(max(self._next_index - first, 0), last - first + 1)
        return {
            "passes": self.passes,
            "progress": round(done / (last - first + 1), 4) if last >= first else 1.0,
            "next_index": self._next_index,
            "checked_bytes": self.checked_bytes,
            "damaged_entries": len(entry_log.damaged),
            "first_damaged": entry_log.damaged.first,
            "found": self.found,
            "repaired": self.repaired,
            "index_pages_lost": entry_log.index_pages_lost,
            "queue_files_differing": self.files_differing,
        }

    def suspect(self, index: int) -> bool:
        """Look at entry *index*; if it is damaged take note, durably, and tell.

        This replica leads no longer then, unless it is the only voter.

        Raises DiskFullError, OSError: it could not be noted; the node must stop.
        """
        store = self._store
        if not store.log.first_index <= index <= store.log.last_index:
            return False
        if index in store.log.damaged:
            return True
        if store.is_whole(index):
            return False
        try:
            store.note_damaged(index)
        finally:
            self._node.step_down_if_damaged()  # also where the node is to stop
        self.found += 1
        log.error("entry_damaged", index=index, position=store.log.damaged.span(index)[0])
        self._wake.set()
        return True

    def suspect_bytes(self, position: int, size: int) -> None:
        """Look at the entries that hold *size* bytes from *position* on."""
        entry_log = self._store.log
        low = max(position, entry_log.first_position)
        high = min(position + size, entry_log.end_position)
        if low < high:
            for index in range(entry_log.index_of(low), entry_log.index_of(high - 1) + 1):
                self.suspect(index)

    async def run(self) -> None:
        """Check and repair until cancelled.

        Raises FlushFailedError, OSError: the disk failed: the node must stop.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._scrub_loop)
            nursery.start_soon(self._repair_loop)

    # -- finding ---------------------------------------------------------------------------

    async def _scrub_loop(self) -> None:
        while True:
            entry_log = self._store.log
            size = entry_log.end_position - entry_log.first_position
            piece, pause_s = pace(size, self._store.settings.scrub_bytes_per_s)
            await self._clock.sleep(pause_s)
            await self.check_piece(piece)

    async def check_piece(self, max_bytes: int) -> None:
        """Check the next entries, a limited number of bytes of them, and act on what is found."""
        entry_log = self._store.log
        if self._store.installing:
            return
        last = min(self._node.commit_index, entry_log.durable_index)
        first = max(self._next_index, entry_log.first_index)
        if first > last:
            self.passes += self._next_index > entry_log.first_index
            self._next_index = first = entry_log.first_index
            if first > last:
                return
        checked = await self._executor.run(
            partial(check_entries, entry_log, first, last, max_bytes), kind=SCRUB
        )
        self.checked_bytes += checked.size_bytes
        self._next_index = checked.next_index
        if entry_log.index_pages_lost > self._pages_lost:
            log.error("entry_index_unreadable", pages=entry_log.index_pages_lost)
        self._pages_lost = entry_log.index_pages_lost
        if entry_log is not self._store.log or self._store.installing:
            return  # a snapshot takes its place
        was_whole = not len(entry_log.damaged)
        for index in checked.suspects:
            self.suspect(index)
        if was_whole and len(entry_log.damaged):
            self._node.settle()
        await self._check_queues(entry_log, first, checked.next_index - 1)

    async def _check_queues(self, entry_log: EntryLog, first: int, last: int) -> None:
        """Compare the units that entries have in consume queues, some at a time."""
        store = self._store
        first, last = max(first, entry_log.first_index), min(last, store.derived_index)
        while first <= last and entry_log is store.log and not store.refilling:
            first = 1 + self._compare_some(entry_log, first, last)
            if first <= last:
                await self._clock.sleep(STEP_PAUSE_S)
                first = max(first, entry_log.first_index)

    def _compare_some(self, entry_log: EntryLog, first: int, last: int) -> int:
        """Compare units of entries from *first* to *last*; return the newest that was done."""
        delays = self._store.delays
        with suppress(CorruptEntryError, CorruptRecordError):
            frames, headers = read_plain(entry_log, first, last, COMPARED_BYTES)
            if headers:
                self._compare(derive_together(frames, headers, delay_ms=delays))
                return headers[-1].index
        # An entry among them is damaged, or has no records: one after the other.
        for index, derived in walk(
            entry_log, first, last, delays, COMPARED_BYTES, skip_damaged=True
        ):
            if derived is not None:
                self._compare(derived)
            first = index
        return first

    def _compare(self, derived: Derived) -> None:
        store = self._store
        self.files_differing += give_up_differing(store.queues, store.tables, store.log, derived)

    # -- repairing -------------------------------------------------------------------------

    def _on_fetched(self, peer: str, payload: memoryview) -> None:
        if len(payload) and self._repair.expects(peer):
            self._answer = payload
            self._wake.set()

    async def _repair_loop(self) -> None:
        while True:
            await self._wake.wait()
            while len(self._store.log.damaged):
                await self._repair_once()
            self._store.write_damage()  # a truncation or retention may have taken the last one

    async def _repair_once(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            await self._write_over(answer)
            return
        node, damaged = self._node, self._store.log.damaged
        reachable = [name for name in sorted(node.peers) if "data" in node.peers[name].up]
        now = self._clock.monotonic()
        fetch = self._repair.next_fetch(damaged.ranges(), reachable, now)
        if fetch is not None:
            node.sender.fetch(fetch.peer, fetch.first, fetch.last)
        await self._wake.wait_or(self._clock, self._repair.retry_s)

    def _write_copies(self, copies: list[tuple[EntryHeader, memoryview]]) -> list[int]:
        """Write them and return their indexes; none when that cannot be done now."""
        entry_log = self._store.log
        try:
            entry_log.repair.write_copies(copies)
        except DiskFullError as error:
            log.warning("no_space_for_repair", error=str(error))
            return []
        except OSError as error:
            if error.errno not in CANNOT_BE_READ:
                raise
            # What shares a page with them is damaged, too, and has to be written with them.
            log.warning("page_of_damaged_entry_unreadable", error=str(error))
            for header, _ in copies:
                first = header.position - header.position % PAGE_BYTES
                self.suspect_bytes(first, header.end_position - first + PAGE_BYTES)
            return []
        return [header.index for header, _ in copies]

    async def _write_over(self, payload: memoryview) -> None:
        store = self._store
        async with self._lock:
            entry_log = store.log
            copies: list[tuple[EntryHeader, memoryview]] = []
            try:
                for frame in split_frames(payload):
                    if frame.header.index in entry_log.damaged:
                        copies.append((entry_log.repair.accept(frame.data), frame.data))
            except (RemoteProtocolError, CorruptEntryError, DiskFullError) as error:
                log.warning("copy_of_damaged_entry_refused", error=str(error))
            written = self._write_copies(copies)
            ticket = entry_log.begin_flush()
            if ticket is not None:
                await self._executor.run(ticket.run, kind=FLUSH)
                entry_log.complete_flush(ticket)
            for index in written:
                if store.is_whole(index):
                    entry_log.repair.mark_whole(index)
                    self.repaired += 1
                    self._repair.mark_useful()
                    if parse_header(entry_log.frame(index)).kind == KIND_CONFIG:
                        self.on_config_repaired()
            store.write_damage()
        if written:
            log.info("entries_repaired", first=written[0], last=written[-1], count=len(written))
        self._node.settle()
