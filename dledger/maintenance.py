"""What keeps the files of a replica in order: space ahead, checkpoints, retention, snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
import trio

from dledger.applier import SPACE_RETRY_S
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import CorruptStoreError, DiskFullError, ForeignStoreError
from dledger.commitlog.mark import Anchor
from dledger.raft.journal import members_in
from dledger.raft.member import RaftNode
from dledger.raft.membership import Members, MembersLog
from dledger.remoting.seams import Clock, Executor
from dledger.replica_records import CHECKPOINT, goes_on_after
from dledger.scrub import ScrubService
from dledger.settings.tables import RaftTable
from dledger.state.snapshot import snapshot
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.waiting import Wakeup

log = structlog.get_logger(__name__)

FLUSH_POLL_S: Final = 0.001
"""How often the end of a flush is looked for before a snapshot replaces the log; rare."""

INSTALL: Final = "install"
DROP: Final = "drop"
"""Names under which the executor measures taking in a snapshot, and removing segments."""

CHECKPOINT_BYTES_PER_S: Final = 4 << 20
"""Tables are written whole: large ones less often, so that they never fill a disk's time."""


def members_of(store: ReplicaStore) -> MembersLog:
    """Return the lists of members that the tables and the log of *store* have."""
    tables = store.tables
    return members_in(
        store.log,
        after=tables.applied_index,
        index=tables.members_index,
        members=_applied_members(tables),
    )


def _applied_members(tables: StateTables) -> Members | None:
    return Members.decode(tables.members_body) if tables.members_index else None


@dataclass(eq=False, repr=False)
class Maintenance:
    """Maintains the files of one replica.

    Attributes:
        reserve_wake: Set it when the log needs space ahead of its end.
        store_lock: Held while the store is written: one checkpoint or installation at a time.
    """

    _store: ReplicaStore
    _node: RaftNode
    _scrub: ScrubService
    _settings: RaftTable
    _kick: Callable[[], None]
    _store_lock: trio.Lock
    _clock: Clock
    _executor: Executor

    def __post_init__(self) -> None:
        self.reserve_wake = Wakeup()
        self._install_wake = Wakeup()
        self._snapshot: tuple[str, bytes] | None = None
        self._node.owner.take_snapshot = self.take_snapshot
        self._node.owner.on_snapshot = self._on_snapshot
        self._scrub.on_config_repaired = self._on_repaired
        self._store.log.on_unreadable = self._on_unreadable

    async def allocate_ahead(self) -> None:
        """Allocate the next segment when it is asked for, until cancelled."""
        while True:
            await self.reserve_wake.wait()
            if self._store.log.allocator.needs_reserve:
                lacked_space = self._store.lacks_space
                try:
                    async with self._store_lock:
                        await self._executor.run(self._store.reserve, kind="reserve")
                except DiskFullError as error:
                    if not lacked_space:  # once for each time without
                        log.error("no_space_for_next_segment", error=str(error))
                    await self._clock.sleep(self._settings.checkpoint_interval_ms / 1000)
                    self.reserve_wake.set()
            self._kick()  # what met a log that was being enlarged is sealed now

    async def write_checkpoints(self) -> None:
        """Write a checkpoint now and then, and remove what retention gave up, until cancelled.

        Raises FlushFailedError: this replica must stop.
        """
        while True:
            await self._clock.sleep(self._checkpoint_pause_s())
            async with self._store_lock:
                checkpoint = self._store.begin_checkpoint(self._node.commit_index)
                if checkpoint is None:
                    continue
                try:
                    await self._executor.run(checkpoint.write, kind=CHECKPOINT)
                except DiskFullError as error:
                    log.error("no_space_for_checkpoint", error=str(error))
                    continue
                if not self._node.holds_log(self._clock.monotonic()):
                    try:
                        await self._drop_before(checkpoint.floor)
                    except DiskFullError as error:
                        log.error("no_space_for_retention", error=str(error))

    def _checkpoint_pause_s(self) -> float:
        saved = self._store.image.saved
        size = 0 if saved is None else len(saved[1])
        return max(self._settings.checkpoint_interval_ms / 1000, size / CHECKPOINT_BYTES_PER_S)

    async def _drop_before(self, floor: Anchor) -> None:
        drop = self._store.plan_drop(floor)
        if drop is None:
            return
        await self._executor.run(drop.note, kind=DROP)
        self._store.detach(drop)
        self._node.journal.anchor_moved()
        # Giving back gigabytes takes a file system its time.
        await self._executor.run(drop.remove, kind=DROP)
        log.info("segments_removed", bytes=drop.size_bytes, first_index=floor.first_index)

    def _on_unreadable(self, position: int, size: int) -> None:
        if self._store.installing:
            return
        try:
            trio.lowlevel.current_trio_token()
        except RuntimeError:
            # A cold read in a worker thread. What follows is this node's own state.
            trio.from_thread.run_sync(self._scrub.suspect_bytes, position, size)
        else:
            self._scrub.suspect_bytes(position, size)

    def _on_repaired(self) -> None:
        # An entry that was skipped when the log was read may have brought a list of members.
        self._node.journal.members.become(members_of(self._store))

    def take_snapshot(self) -> tuple[int, bytes]:
        """Return the index and the bytes of the tables, for a replica that is far behind."""
        # What a checkpoint has written will do: the log goes on from its floor.
        return self._store.image.saved or (
            self._store.tables.applied_index,
            snapshot(self._store.tables),
        )

    def _on_snapshot(self, leader: str, data: bytes) -> None:
        self._snapshot = (leader, data)
        self._install_wake.set()

    async def install_snapshots(self) -> None:
        """Install what leaders send to this replica because it is far behind, until cancelled.

        Raises FlushFailedError, InvariantBroken: this replica must stop.
        """
        while True:
            await self._install_wake.wait()
            if self._snapshot is None:
                continue
            leader, data = self._snapshot
            self._snapshot = None
            async with self._store_lock:
                await self._install(leader, data)

    async def _install(self, leader: str, data: bytes) -> None:
        store = self._store
        try:
            loaded = await self._executor.run(partial(store.decode, data), kind=INSTALL)
            commit = self._node.journal.commit_index
            if not store.needs(loaded, commit):
                index, following = goes_on_after(loaded, commit)
                log.info("snapshot_not_needed", index=index, next_index=following)
                self._node.declined(leader, index, following)
                return
            await self._executor.run(partial(store.offer, data), kind=INSTALL)
        except (CorruptStoreError, ForeignStoreError, DiskFullError) as error:
            # Nothing was changed. What a peer sends, or a full disk, is no reason to stop.
            log.error("snapshot_refused", leader=leader, error=str(error))
            self._node.refused()
            return
        entry_log = await self._empty_for(loaded)
        while self._node.flusher.flushing:
            await self._clock.sleep(FLUSH_POLL_S)
        before = store.take_over(loaded, entry_log)
        store.log.on_unreadable = self._on_unreadable
        store.write_damage()
        self._node.journal.members.reset(
            self._store.tables.members_index, _applied_members(self._store.tables)
        )
        self._node.installed(leader, store.log, self._store.tables.applied_index)
        await self._executor.run(partial(before.close, clean=False), kind=DROP)

    async def _empty_for(self, loaded: StateTables) -> EntryLog:
        """Empty the folder; on a full disk this node follows, and tries again until it succeeds."""
        self._store.installing = True
        is_waiting = False
        while True:
            try:
                return await self._executor.run(
                    partial(self._store.empty_for, loaded), kind=INSTALL
                )
            except DiskFullError as error:
                if not is_waiting:
                    log.error("installation_without_space", error=str(error))
                    # Files that are removed give their space back once they are closed.
                    close = partial(self._store.log.close, clean=False)
                    await self._executor.run(close, kind=DROP)
                is_waiting = True
                await self._clock.sleep(SPACE_RETRY_S)
