"""Bits that flip in queue files are found by a comparison with the log, and made good."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from commitlog.derive import SCHEDULE_TOPIC, derive_together
from commitlog.queue_unit import UNIT_BYTES
from dledger.applied_together import read_plain
from dledger.queue_check import give_up_differing, points_to
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk
from tests.harness.groups import bodies, crash_disk, running_groups
from tests.harness.replica_folders import Writer
from tests.unit.dledger.test_bad_queue_file import (
    disk,
    log,
    queue_files,
    repaired,
    store,
)
from tests.unit.dledger.test_scrub import filled, follower_of, scrubbed
from tests.unit.dledger.test_shared_queues import units

__all__ = ["disk", "log", "store"]


def checked(store: ReplicaStore, max_bytes: int = 0) -> int:
    """Compare all entries, those of up to *max_bytes* at once; return how many files are lost."""
    given_up = 0
    index, last = store.log.first_index, store.derived_index
    while index <= last:
        frames, headers = read_plain(store.log, index, last, max_bytes)
        if headers:
            derived = derive_together(frames, headers, delay_ms=store.delays)
            given_up += give_up_differing(store.queues, store.tables, store.log, derived)
        index += max(len(headers), 1)
    return given_up


PIECES = pytest.mark.parametrize("max_bytes", [0, 700, 1 << 20])


@PIECES
def test_whole_files_are_left_alone(store: ReplicaStore, max_bytes: int) -> None:
    assert checked(store, max_bytes) == 0
    assert not store.queues.lost


@PIECES
@pytest.mark.parametrize("byte", [3, 7, 10, 14, 19])
def test_each_file_with_a_flipped_bit_is_made_again(
    store: ReplicaStore, disk: CrashDisk, byte: int, max_bytes: int
) -> None:
    wanted = units(store)
    for path in queue_files(disk):
        is_time = SCHEDULE_TOPIC in path and byte >= 12
        disk.files[path].content[byte] ^= 1
        assert checked(store, max_bytes) == (not is_time), path
        if is_time:
            disk.files[path].content[byte] ^= 1
            continue
        repaired(store)
        assert units(store) == wanted, path
        assert checked(store, max_bytes) == 0


def test_a_unit_points_to_its_own_message_alone(store: ReplicaStore, log: Writer) -> None:
    for (topic, queue_id), bounds in store.tables.queues.items():
        found = store.queues.queue(topic, queue_id).read(0, bounds.max_offset)
        for offset, unit in enumerate(found):
            assert points_to(store.log, unit, topic, queue_id, offset)
            assert not points_to(store.log, unit, topic, queue_id, offset + 1)
            assert not points_to(store.log, unit, f"{topic}x", queue_id, offset)


def test_two_flipped_files_of_a_queue_are_both_made_again(
    store: ReplicaStore, disk: CrashDisk
) -> None:
    wanted, files = units(store), queue_files(disk)
    for path in files:
        content = disk.files[path].content
        for begin in range(0, len(content), UNIT_BYTES):
            if any(content[begin : begin + UNIT_BYTES]):
                content[begin + 5] ^= 0x10
    assert checked(store) == len(files)
    repaired(store)
    assert units(store) == wanted


@pytest.mark.usefixtures("autojump_clock")
async def test_the_scrub_finds_a_flipped_bit_in_a_queue_file() -> None:
    root = Path("/memory")
    async with running_groups(root, disks=CrashDisk) as groups:
        follower = follower_of(groups, await filled(groups))
        group = follower.group
        wanted = bodies(group)
        disk = crash_disk(groups, follower.name)
        for _ in range(3):  # units that were shared are moved into files of their queue
            group.store.queues.flush()
        path = f"{root}/{follower.name}/consumequeue/T/0/{0:020d}"
        disk.files[path].content[6] ^= 1
        await scrubbed(follower)
        assert group.scrub.status()["queue_files_differing"] == 1
        with trio.fail_after(20):
            while group.store.derived.is_behind:
                await trio.sleep(0.01)
        assert bodies(group) == wanted
