"""Starts with a checkpoint from before a floor, a deletion, or both: what queues have then."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.commitlog.errors import DiskFullError
from dledger.commitlog.queue_unit import UNIT_BYTES
from dledger.state.snapshot import snapshot
from dledger.state.state_record import FloorChange, state_batch
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk, disk_full, no_fault
from tests.harness.expired import EXPIRED
from tests.harness.present import present
from tests.harness.replica_folders import SEGMENT_BYTES, Writer, settings
from tests.unit.dledger.test_shared_queues import checkpoint, units

SETTINGS = settings(Path("/n0"))


class Replica:
    """A replica that gets the entries of a log as they are written."""

    def __init__(self) -> None:
        self.log, self.disk = Writer(), CrashDisk()
        self.store = ReplicaStore(self.disk, SETTINGS, StateTables)
        self.log.no_op()
        self.log.topics(put=["T", "U"])
        for _ in range(20):
            self.log.messages("U", 0, 3)
            self.log.messages("T", 0, 2)
        # The second checkpoint finds the units in files of their queues.
        for _ in range(2):
            self.log.messages("T", 0, 1)
            self.follow()
            checkpoint(self.store)

    def follow(self) -> None:
        for frame in self.log.frames[self.store.log.last_index :]:
            self.store.log.append(frame)
        self.store.log.flush()
        self.apply()

    def apply(self) -> None:
        while self.store.derived_index < self.log.index:
            self.store.apply_next(self.log.index)

    def move_floor(self, index: int) -> None:
        self.log.batch(state_batch(FloorChange(self.store.log.anchor_at(index), EXPIRED)))

    def first_of_segment(self, number: int) -> int:
        log = self.store.log
        return next(i for i in range(1, 99) if log.position_at(i) >= number * SEGMENT_BYTES)

    def kill(self) -> None:
        """Start once more with what the last process wrote."""
        self.disk = self.disk.copy()
        self.store = ReplicaStore(self.disk, SETTINGS, StateTables)

    def check(self) -> None:
        """Compare with a replica that never stopped."""
        whole = ReplicaStore(CrashDisk(), SETTINGS, StateTables)
        for frame in self.log.frames:
            whole.log.append(frame)
        whole.log.flush()
        for index in range(1, self.log.index + 1):
            whole.apply(index)
        assert snapshot(self.store.tables) == snapshot(whole.tables)
        assert units(self.store) == units(whole)


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_start_passes_a_floor_before_a_deletion(is_made_again: bool) -> None:
    replica = Replica()
    replica.move_floor(25)
    replica.log.topics(delete=["U"])
    if is_made_again:
        replica.log.topics(put=["U"])
        replica.log.messages("U", 0, 9)
    replica.follow()
    assert not replica.disk.exists("/n0/consumequeue/U")
    replica.kill()
    replica.apply()
    replica.check()


@pytest.mark.parametrize("floors", [(1, 2), (2, 4)], ids=["in one file", "over two files"])
def test_queue_files_stay_while_a_checkpoint_needs_them(floors: tuple[int, int]) -> None:
    replica = Replica()
    store = replica.store
    replica.move_floor(replica.first_of_segment(floors[0]))
    replica.follow()
    taken = present(store.begin_checkpoint(replica.log.index))
    replica.move_floor(replica.first_of_segment(floors[1]))
    replica.follow()
    taken.write()
    drop = present(store.plan_drop(taken.floor))
    drop.note()
    store.detach(drop)
    drop.remove()
    replica.kill()
    replica.apply()
    replica.check()
    checkpoint(replica.store)
    drop = present(replica.store.plan_drop(replica.store.tables.floor))
    before = len(replica.disk.files)
    replica.store.detach(drop)
    assert len(replica.disk.files) < before, "they go with the next one"


def test_a_floor_is_finished_when_there_is_space() -> None:
    replica = Replica()
    store = replica.store
    replica.disk.files[f"/n0/consumequeue/U/0/{16 * UNIT_BYTES:020d}"].unreadable.append((0, 320))
    replica.disk.fault = disk_full(path_part="/consumequeue/U/")
    replica.move_floor(25)
    with pytest.raises(DiskFullError):
        replica.follow()
    with pytest.raises(DiskFullError):
        replica.apply()
    assert store.begin_checkpoint(replica.log.index) is None
    replica.disk.fault = no_fault
    replica.apply()
    replica.check()
