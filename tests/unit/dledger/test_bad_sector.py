"""Bytes of the log that the disk does not give back: found, refused, repaired; no member ends."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import CorruptEntryError
from dledger.group import Group
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk
from tests.harness.groups import Replica, bodies, crash_disk, running_groups
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
