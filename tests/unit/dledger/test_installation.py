"""The installation of a leader's snapshot: what is taken in, what is refused."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cbor2
import pytest

from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import CorruptStoreError
from dledger.replica_records import goes_on_after
from dledger.settings.tables import StoreTable
from dledger.state.snapshot import _HEADER, SNAPSHOT_FORMAT, SNAPSHOT_MAGIC, snapshot
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk
from tests.harness.entry_frames import next_frame
from tests.harness.replica_folders import install_at_once

pytestmark = pytest.mark.slow

ROOT = "/memory"
SETTINGS = StoreTable(path_root_dir=ROOT, mapped_file_size_commit_log=4096)
FLOOR, APPLIED, END, COMMITTED = 20, 30, 34, 11
"""First kept entry of the leader, what its snapshot covers, its newest entry, and
what the follower knows to be committed."""


class PowerCut(BaseException):
    """The disk stops."""


def opened(disk: CrashDisk) -> ReplicaStore:
    return ReplicaStore(disk, SETTINGS, StateTables)


def append(log: EntryLog, upto: int, term: int, fill: int = 0x78) -> None:
    while log.last_index < upto:
        log.append(next_frame(log, 40, term=term, fill=fill))
    log.flush()


@dataclass
class Leader:
    """A leader's log, its snapshot, and what its tables are at the end."""

    frames: dict[int, bytes]
    chains: dict[int, int]
    snapshot: bytes
    tables: bytes

    @classmethod
    def make(cls) -> Leader:
        store = opened(CrashDisk())
        append(store.log, FLOOR - 6, 1)
        append(store.log, FLOOR + 2, 2)
        append(store.log, END, 4)
        for index in range(1, APPLIED + 1):
            store.apply(index)
        store.tables.floor = store.log.anchor_at(FLOOR)
        taken = snapshot(store.tables)
        for index in range(APPLIED + 1, END + 1):
            store.apply(index)
        log = store.log
        return cls(
            {index: bytes(log.frame(index)) for index in range(1, END + 1)},
            {index: log.chain_at(index) for index in range(END + 1)},
            taken,
            snapshot(store.tables),
        )

    def refill(self, store: ReplicaStore) -> None:
        """Send what *store* lacks as a leader does, and let it apply all of it."""
        log = store.log
        index = store.restored_commit_index + 1
        while index <= log.last_index and log.chain_at(index) == self.chains[index]:
            index += 1
        log.truncate_from(index)
        for missing in range(log.last_index + 1, END + 1):
            log.append(self.frames[missing])
        log.flush()
        for each in range(store.derived_index + 1, END + 1):
            store.apply(each)


def follower(leader: Leader, shared: int, own: int) -> CrashDisk:
    """Return the disk of a follower with *shared* entries of the leader and *own* ones."""
    disk = CrashDisk()
    store = opened(disk)
    for index in range(1, shared + 1):
        store.log.append(leader.frames[index])
    append(store.log, shared + own, 3, fill=0x79)
    for index in range(1, COMMITTED + 1):
        store.apply(index)
    write_checkpoint(store, COMMITTED)
    store.close(clean=False)
    return disk.copy()


def write_checkpoint(store: ReplicaStore, commit_index: int) -> None:
    checkpoint = store.begin_checkpoint(commit_index)
    assert checkpoint is not None
    checkpoint.write()


def with_snapshot(leader: Leader) -> CrashDisk:
    """Return the disk of a follower that installed the leader's snapshot and has all entries."""
    disk = follower(leader, *BEHIND)
    store = opened(disk)
    install_at_once(store, leader.snapshot, COMMITTED)
    leader.refill(store)
    write_checkpoint(store, END)
    store.close(clean=False)
    return disk.copy()


BEHIND = (FLOOR - 9, 0)
REACHES_THE_FLOOR = (FLOOR + 2, 0)
CONFLICT_ABOVE_THE_FLOOR = (FLOOR + 2, 5)
CONFLICT_BELOW_THE_FLOOR = (FLOOR - 6, 12)


def stopping_at(step: int, disk: CrashDisk) -> Callable[[str, str], None]:
    def fault(_kind: str, _path: str) -> None:
        if len(disk.steps) > step:
            raise PowerCut

    return fault


def cuts(disk: CrashDisk) -> list[CrashDisk]:
    """Return what may be left of *disk*: all, nothing of what was not flushed, every other one."""
    toggle = iter(range(1 << 30))
    survivors = (lambda: True, lambda: False, lambda: next(toggle) % 2 == 0)
    return [disk.power_cut(survives) for survives in survivors]


@pytest.mark.parametrize("log_of", [REACHES_THE_FLOOR, CONFLICT_ABOVE_THE_FLOOR])
def test_a_log_that_reaches_the_floor_keeps_its_entries(log_of: tuple[int, int]) -> None:
    leader = Leader.make()
    disk = follower(leader, *log_of)
    store = opened(disk)
    disk.steps.clear()
    assert not install_at_once(store, leader.snapshot, COMMITTED)
    assert disk.steps == []
    assert goes_on_after(store.decode(leader.snapshot), COMMITTED) == (APPLIED, FLOOR)
    assert store.log.last_index == sum(log_of)


def test_contradictory_snapshot_changes_nothing() -> None:
    leader = Leader.make()
    disk = follower(leader, *CONFLICT_BELOW_THE_FLOOR)
    store = opened(disk)
    disk.steps.clear()
    with pytest.raises(CorruptStoreError, match="another entry 19 than is committed here"):
        install_at_once(store, leader.snapshot, FLOOR)
    assert disk.steps == []
    assert store.log.last_index == sum(CONFLICT_BELOW_THE_FLOOR)


@pytest.mark.parametrize(
    "change",
    [
        {"queues": 3},
        {"floor": None},
        {"applied_index": FLOOR - 2},
        {"topics": {"T": []}},
        {"transactions": b""},
    ],
)
def test_a_hostile_snapshot_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    leader = Leader.make()
    store = opened(follower(leader, *BEHIND))
    value = cbor2.loads(leader.snapshot[_HEADER.size :])
    body = cbor2.dumps({**value, **change}, canonical=True)
    head = _HEADER.pack(SNAPSHOT_MAGIC, SNAPSHOT_FORMAT, zlib.crc32(body), len(body))
    with pytest.raises(CorruptStoreError):
        install_at_once(store, head + body, COMMITTED)
    assert store.log.last_index == BEHIND[0]


def test_returned_snapshot_file_is_ignored() -> None:
    leader = Leader.make()
    disk = with_snapshot(leader)
    disk.replace(f"{ROOT}/raft/install", leader.snapshot)
    damaged = disk.files[f"{ROOT}/raft/snapshot"].content
    damaged[-1] ^= 1
    again = opened(disk)
    assert again.damaged, "a log without its beginning and without tables is no log"
    assert again.log.last_index == 0


def test_a_log_emptied_without_tables_derives_all_again() -> None:
    leader = Leader.make()
    disk = with_snapshot(leader)
    disk.files[f"{ROOT}/raft/snapshot"].content[-1] ^= 1
    for path in [path for path in disk.files if path.startswith(f"{ROOT}/index/")]:
        del disk.files[path]
    again = opened(disk)
    assert (again.log.first_index, again.log.last_index, again.derived_index) == (1, 0, 0)
    assert again.queues.queues() == []
    assert not again.put_missing_keys(1 << 20, skip_damaged=False)
    for index in range(1, END + 1):
        again.log.append(leader.frames[index])
    again.log.flush()
    for index in range(1, END + 1):
        again.apply(index)
    assert again.tables.applied_chain == leader.chains[END]


def test_damage_is_recorded_before_the_log_is_emptied() -> None:
    before = with_snapshot(Leader.make())
    before.files[f"{ROOT}/raft/snapshot"].content[-1] ^= 1
    step, opens = 0, False
    while not opens:
        disk = before.copy()
        disk.fault = stopping_at(step, disk)
        try:
            opened(disk)
            opens = True
        except PowerCut:
            pass
        for left in cuts(disk):
            again = opened(left)
            assert (again.damaged, again.torn) == (True, True), step
        step += 1
    assert step > 10
