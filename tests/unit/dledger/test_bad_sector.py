"""Bytes of the log that the disk does not give back: found, refused, repaired; no member ends.

With very many queues the floor moves in steps: none of them reads all queues.
A member alone has no other to repair it: retention gives up damaged entries all the same.
"""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import CorruptEntryError
from dledger.commitlog.record import decode_record
from dledger.group import Group
from dledger.services import retention
from dledger.services.retention import RetentionService, segment_starts
from dledger.settings.tables import StoreTable
from dledger.state.table import StateChange
from dledger.state.tables import QueueBounds, StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk
from tests.harness.groups import SEGMENT_BYTES, Groups, Replica, bodies, crash_disk, running_groups
from tests.harness.keyed_messages import ALWAYS, keyed
from tests.harness.raft_cluster import batch

ROOT = Path("/memory")
SECTOR_BYTES = 512


def spoil(disk: CrashDisk, store: ReplicaStore, index: int) -> None:
    """Let the sector in which entry *index* begins be unreadable."""
    position = store.log.position_at(index)
    start = position - position % SECTOR_BYTES
    disk.files[store.paths.segment(0)].unreadable.append((start, start + SECTOR_BYTES))


async def repaired(group: Group) -> None:
    """Wait until nothing of a replica's log is known to be damaged."""
    with trio.fail_after(60):
        while len(group.store.log.damaged):
            await trio.sleep(0.1)


def test_a_read_that_fails_is_an_error_and_not_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = OsDisk().create(str(tmp_path / "f"), 8192, reserve=True)
    file.write_at(4090, b"across a page")
    assert file.read(4090, 13) == b"across a page"
    assert file.read(0, 0) == b""

    def bad(_fd: int, _size: int, _offset: int) -> bytes:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", bad)
        with pytest.raises(OSError, match="input/output error"):
            file.read(0, 1)
    file.close()
    with pytest.raises(OSError, match="closed file"):
        file.read(0, 1)


async def test_a_start_meets_a_bad_sector_and_is_repaired_from_a_peer() -> None:
    """What lies between the newest checkpoint and the mark is read again at every start."""
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        leader = await groups.fill(str(number).encode() * 300 for number in range(12))
        await groups.settle()
        name = groups.others(leader.name)[0]
        stopped = groups.replicas.pop(name)
        index = stopped.group.store.log.last_index - 5
        stopped.kill()
        spoil(crash_disk(groups, name), stopped.group.store, index)
        again = await groups.start(name)
        await leader.group.submit(batch(b"after"))
        with trio.fail_after(60):
            while again.group.state.applied_index < leader.group.state.applied_index:
                await trio.sleep(0.1)
        assert bodies(again.group) == bodies(leader.group)
        assert not again.group.node.state.has_hole


async def whole_again(replica: Replica) -> None:
    with trio.fail_after(60):
        while replica.group.key_index.is_behind:
            await trio.sleep(0.1)


def positions(replica: Replica) -> dict[str, list[int]]:
    index = replica.group.key_index
    return {key: index.query("T", key, 64, *ALWAYS) for key in ("id0", "id99", "k3", "id130")}


async def test_damaged_entry_withholds_its_keys() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        leader = await groups.leader()
        for first in range(131):
            await leader.group.submit(keyed(first, 1))
        await groups.settle()
        await trio.sleep(4)
        name = groups.others(leader.name)[0]
        disk, wanted = crash_disk(groups, name), positions(groups.replicas[name])
        store = groups.replicas[name].group.store
        index = store.log.index_of(wanted["id99"][0])
        groups.replicas.pop(name).kill()
        disk.remove_tree(f"{ROOT}/{name}/index")
        spoil(disk, store, index)
        again = await groups.start(name)
        await whole_again(again)
        assert positions(again) == wanted
        assert again.group.scrub.repaired >= 1


async def test_entries_that_share_a_bad_sector_are_repaired_together() -> None:
    """A sector is written as a whole or not at all, so all that it holds has to be there."""
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        leader = await groups.leader()
        for number in range(30):
            await leader.group.submit(batch(str(number).encode() * 10))
        await groups.settle()
        behind = groups.replicas[groups.others(leader.name)[0]].group
        disk = crash_disk(groups, groups.others(leader.name)[0])
        spoil(disk, behind.store, behind.store.log.last_index - 12)
        spoil(disk, behind.store, behind.store.log.last_index)
        behind.scrub.suspect(behind.store.log.last_index - 12)
        behind.scrub.suspect(behind.store.log.last_index)
        with trio.fail_after(60):
            while len(behind.store.log.damaged):
                await trio.sleep(0.1)
        assert disk.files[behind.store.paths.segment(0)].unreadable == []
        assert bodies(behind) == bodies(leader.group)


async def test_read_on_a_bad_sector_is_repaired() -> None:
    """What this process has not written may not be in memory: it is read, not mapped."""
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        leader = await groups.fill(str(number).encode() * 300 for number in range(12))
        await groups.settle()
        await trio.sleep(4)  # a checkpoint: nothing is read again at the start
        name = groups.others(leader.name)[0]
        groups.replicas.pop(name).kill()
        again = (await groups.start(name)).group
        index = again.store.log.last_index - 5
        spoil(crash_disk(groups, name), again.store, index)
        with pytest.raises(CorruptEntryError, match="cannot be read"):
            again.store.log.frame(index)
        assert len(again.store.log.damaged) >= 1
        await repaired(again)
        assert bodies(again) == bodies(leader.group)


QUEUES = 40
STEP = 7


async def fill(groups: Groups, messages: int) -> Replica:
    leader = await groups.leader()
    for number in range(messages):
        await leader.group.submit(batch(bytes(20_000), queue_id=number % QUEUES))
    await groups.settle()
    return leader


def kept(store: ReplicaStore) -> dict[tuple[str, int], list[int]]:
    found = {}
    for (topic, queue_id), bounds in store.tables.queues.items():
        low = bounds.min_offset
        units = store.queues.queue(topic, queue_id).read(low, bounds.max_offset - low)
        records = [store.log.record_at(int(unit["phy_offset"])) for unit in units]
        found[topic, queue_id] = [decode_record(record).queue_offset for record in records]
        assert found[topic, queue_id] == list(range(low, bounds.max_offset))
    return found


def lows(group: Group) -> dict[tuple[str, int], int]:
    return {key: bounds.min_offset for key, bounds in group.state.queues.items()}


class StoppedError(Exception):
    """The leader ends between two steps."""


@pytest.mark.slow
async def test_floor_steps_move_few_queues_each_and_may_end_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "QUEUES_PER_STEP", STEP)
    async with running_groups(tmp_path) as groups:
        leader = await fill(groups, 20)
        behind = groups.others(leader.name)[0]
        groups.replicas.pop(behind).kill()
        await fill(groups, 400)
        await groups.checkpointed()
        group = leader.group
        moved: list[int] = []
        store, most = RetentionService._store, 9

        async def counted(service: RetentionService, change: StateChange) -> bool:
            if len(moved) == most:
                raise StoppedError
            before = lows(group)
            taken = await store(service, change)
            moved.append(sum(lows(group)[key] != low for key, low in before.items()))
            return taken

        monkeypatch.setattr(RetentionService, "_store", counted)
        service = RetentionService(
            group,
            lambda: group.store.log,
            StoreTable(mapped_file_size_commit_log=SEGMENT_BYTES, keep_bytes=SEGMENT_BYTES),
            clock=leader.clock,
            saved_index=lambda: group.store.saved_index,
            disk_ratio=lambda: 0.0,
        )
        with pytest.raises(StoppedError):
            await service.check()
        assert group.state.floor.position % SEGMENT_BYTES > 0
        await groups.checkpointed()
        await groups.settle()

        # A member that begins with this floor, and one that starts again with it.
        again = await groups.start(behind)
        await groups.settle()
        assert again.group.node.installation.count == 1
        assert again.group.state.floor == group.state.floor
        assert kept(again.group.store) == kept(group.store)
        shutil.copytree(tmp_path / leader.name, tmp_path / "copy")
        copy = ReplicaStore(
            OsDisk(),
            replace(group.store.settings, path_root_dir=str(tmp_path / "copy")),
            StateTables,
        )
        assert kept(copy) == kept(group.store)
        copy.close(clean=True)

        most = 10_000
        floor = await service.check()
        assert floor is not None
        assert floor.position % SEGMENT_BYTES == 0
        assert max(moved) <= STEP + 1
        assert sum(moved) >= QUEUES
        await groups.checkpointed()
        await groups.settle()
        assert kept(again.group.store) == kept(group.store)
        assert lows(again.group) == lows(group)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 12))
def test_first_position_of_counts_queues_from_the_oldest(positions: list[int], count: int) -> None:
    tables = StateTables()
    for number, position in enumerate(positions):
        tables.queues["T", number] = QueueBounds(0, 1)
        tables.set_first("T", number, position)
    wanted = sorted(positions)[count] if len(positions) > count else None
    assert tables.first_position_of(count) == wanted


async def test_member_alone_gives_up_what_it_cannot_repair(tmp_path: Path) -> None:
    async with running_groups(tmp_path, 1) as groups:
        leader = await groups.leader()
        store = leader.group.store
        while store.log.end_position < 5 * SEGMENT_BYTES:
            await leader.group.submit(batch(bytes(60_000)))
        await groups.checkpointed()
        starts = list(segment_starts(store.log, SEGMENT_BYTES))
        service = RetentionService(
            leader.group,
            lambda: store.log,
            StoreTable(mapped_file_size_commit_log=SEGMENT_BYTES, keep_bytes=SEGMENT_BYTES),
            clock=leader.clock,
            saved_index=lambda: store.saved_index,
            disk_ratio=lambda: 0.0,
        )
        store.log.repair.mark_damaged(starts[0] - 1)
        floor = await service.check()
        assert floor is not None
        # Found after the floor has moved, before the files go.
        store.log.repair.mark_damaged(floor.first_index - 1)
        await groups.checkpointed()
        assert store.log.first_index == floor.first_index
        assert not store.log.damaged
        assert (await leader.group.submit(batch(b"more"))).outcome == "stored"
