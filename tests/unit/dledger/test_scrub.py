"""Damage on one replica: found by the scrub or by a read, repaired from the others."""

from pathlib import Path

import pytest
import trio

from dledger.commitlog.errors import CorruptEntryError, ForeignStoreError
from dledger.raft.library import Role
from dledger.replica_records import decode_damage, encode_damage
from dledger.scrub import PIECE_BYTES_MAX, PIECE_BYTES_MIN, pace
from dledger.testing.crash_disk import CrashDisk
from tests.harness.groups import Groups, Replica, bodies, crash_disk, running_groups
from tests.harness.raft_cluster import batch

pytestmark = pytest.mark.slow

ROOT = Path("/memory")
MESSAGES = [str(number).encode() * 40 for number in range(12)]


def segments(groups: Groups) -> list[dict[str, bytes]]:
    return [
        {
            path.removeprefix(f"{ROOT}/{name}"): bytes(file.content)
            for path, file in crash_disk(groups, name).files.items()
            if "/commitlog/" in path
        }
        for name in groups.replicas
    ]


def spoil(groups: Groups, replica: Replica, index: int, byte: int = 120) -> None:
    position = replica.group.store.log.position_at(index) + byte
    path = f"{ROOT}/{replica.name}/commitlog/{0:020d}"
    crash_disk(groups, replica.name).files[path].content[position] ^= 1


async def filled(groups: Groups) -> Replica:
    leader = await groups.fill(MESSAGES)
    await groups.settle()
    return leader


def follower_of(groups: Groups, leader: Replica) -> Replica:
    return groups.replicas[groups.others(leader.name)[0]]


async def scrubbed(replica: Replica) -> None:
    await replica.group.scrub.check_piece(1 << 30)


async def repaired(replica: Replica, count: int) -> None:
    with trio.fail_after(20):
        while replica.group.scrub.repaired < count:
            await trio.sleep(0.01)
    assert len(replica.group.store.log.damaged) == 0


def whole(groups: Groups) -> None:
    first, *others = segments(groups)
    assert all(other == first for other in others)
    for replica in groups.replicas.values():
        assert bodies(replica.group)[: len(MESSAGES)] == MESSAGES


async def test_damaged_follower_repairs_itself() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        follower = follower_of(groups, await filled(groups))
        for index in (4, 5, 9):
            spoil(groups, follower, index)
        await scrubbed(follower)
        scrub = follower.group.scrub.status()
        assert (scrub["damaged_entries"], scrub["first_damaged"], scrub["found"]) == (3, 4, 3)
        await repaired(follower, 3)
        whole(groups)
        assert not crash_disk(groups, follower.name).exists(follower.group.store.paths.damage)


async def test_the_scrub_finds_it_by_itself() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        follower = follower_of(groups, await filled(groups))
        spoil(groups, follower, 4)
        await trio.sleep(60)
        assert follower.group.scrub.status()["repaired"] == 1
        assert follower.group.scrub.passes > 0
        whole(groups)


async def test_a_damaged_leader_leads_no_longer_and_repairs_itself() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        leader = await filled(groups)
        spoil(groups, leader, 6)
        await scrubbed(leader)
        assert leader.group.leadership is None
        await repaired(leader, 1)
        await (await groups.leader()).group.submit(batch(b"after"))
        await groups.settle()
        whole(groups)


async def test_candidate_that_finds_a_hole_gives_up() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        leader = await filled(groups)
        follower = follower_of(groups, leader)
        spoil(groups, follower, 6)
        node = follower.group.node
        assert node.candidate.on_timeout_now(leader.name, 0)
        term = node.term
        assert node.core.role is Role.CANDIDATE
        assert follower.group.scrub.suspect(6)
        node.settle()
        assert (node.core.role, node.term) == (Role.FOLLOWER, term + 1)
        await repaired(follower, 1)
        await (await groups.leader()).group.submit(batch(b"after"))
        await groups.settle()
        whole(groups)


async def test_member_with_a_hole_neither_votes_nor_leads() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        leader = await filled(groups)
        follower, third = (groups.replicas[name] for name in groups.others(leader.name))
        for replica in (leader, third):
            # No other member helps.
            replica.group.node.sender.on_fetch = lambda *_: None  # type: ignore[method-assign]  # sends no repair
        spoil(groups, follower, 6)
        await scrubbed(follower)
        node = follower.group.node
        assert node.state.has_hole
        groups.replicas.pop(third.name).kill()
        await trio.sleep(0.1)
        before = leader.group.state.applied_index
        with pytest.raises(Exception, match="stored"):
            await leader.group.submit(batch(b"one is no majority"))
        assert leader.group.state.applied_index == before
        leader.kill()
        del groups.replicas[leader.name]
        third = await groups.start(third.name)
        await trio.sleep(30)
        assert not node.is_leader
        assert third.group.leadership is None, "it got no vote"
        with pytest.raises(CorruptEntryError):
            follower.group.log.record_at(follower.group.store.log.position_at(6) + 76)


async def test_two_with_holes_help_each_other_without_any_leader() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        leader = await filled(groups)
        other, third = (groups.replicas[name] for name in groups.others(leader.name))
        groups.replicas.pop(third.name).kill()
        spoil(groups, leader, 4)
        spoil(groups, other, 5)
        spoil(groups, other, 7)
        for replica in (leader, other):
            await scrubbed(replica)
        await repaired(leader, 1)
        await repaired(other, 2)
        await (await groups.leader()).group.submit(batch(b"after"))
        whole(groups)


async def test_a_copy_is_read_before_it_is_sent() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        leader = await filled(groups)
        helper, other = (groups.replicas[name] for name in groups.others(leader.name))
        spoil(groups, helper, 4)
        helper.group.node.sender.on_fetch(other.name, 4, 4)
        await trio.sleep(0.05)
        assert helper.group.scrub.status()["found"] == 1
        await repaired(helper, 1)
        whole(groups)


async def test_a_hole_is_remembered_over_a_restart() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        follower = follower_of(groups, await filled(groups))
        await trio.sleep(4)
        await groups.isolate(follower.name)
        spoil(groups, follower, 4)
        await scrubbed(follower)
        follower.kill()
        again = await groups.start(follower.name)
        assert again.group.store.log.damaged.indexes == [4]
        assert again.group.node.state.has_hole
        groups.heal()
        await repaired(again, 1)
        await groups.settle()
        whole(groups)


async def test_damage_stops_the_replay_until_repaired() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        follower = follower_of(groups, await filled(groups))
        await trio.sleep(4)
        await groups.isolate(follower.name)
        follower.kill()
        spoil(groups, follower, 4)
        disk = crash_disk(groups, follower.name)
        disk.unlink(follower.group.store.paths.snapshot)
        again = await groups.start(follower.name)
        assert again.group.state.applied_index == 3
        await trio.sleep(5)
        assert again.group.state.applied_index == 3
        groups.heal()
        await repaired(again, 1)
        await groups.settle()
        whole(groups)


async def test_a_leader_that_would_send_bad_bytes_notices_it() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        leader = await groups.leader()
        away = groups.others(leader.name)[0]
        groups.replicas.pop(away).kill()
        for message in MESSAGES:
            await leader.group.submit(batch(message))
        spoil(groups, leader, 6)
        await groups.start(away)
        await groups.settle()
        await repaired(leader, 1)
        await groups.leader()
        await groups.settle()
        whole(groups)


async def test_only_voter_leads_and_refuses_damaged_reads() -> None:
    async with running_groups(ROOT, 1, disks=CrashDisk) as groups:
        leader = await filled(groups)
        spoil(groups, leader, 6)
        await scrubbed(leader)
        assert leader.group.leadership is not None
        await leader.group.submit(batch(b"after"))
        with pytest.raises(CorruptEntryError):
            bodies(leader.group)


async def test_bad_bytes_met_by_a_read_are_repaired() -> None:
    async with running_groups(ROOT, disks=CrashDisk) as groups:
        follower = follower_of(groups, await filled(groups))
        spoil(groups, follower, 4)
        position = follower.group.store.log.position_at(4)
        follower.group.report_damage(position + 80, 10)
        await repaired(follower, 1)
        whole(groups)


def test_the_pace_is_a_pass_a_day_unless_a_rate_is_set() -> None:
    for size in (0, 1 << 20, 1 << 30, 1 << 40):
        piece, pause_s = pace(size, 0)
        assert PIECE_BYTES_MIN <= piece <= PIECE_BYTES_MAX
        assert size / (piece / pause_s) <= 86_400 * 1.01
    piece, pause_s = pace(1 << 30, 50 << 20)
    assert piece / pause_s == pytest.approx(50 << 20)


def test_the_list_of_damaged_entries() -> None:
    data = encode_damage([(3, 4), (9, 9)])
    assert decode_damage(data, "damage") == [(3, 4), (9, 9)]
    assert decode_damage(data[:-1], "damage") is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dledger.replica_records.DAMAGE_FORMAT", 2)
        newer = encode_damage([(3, 4)])
    with pytest.raises(ForeignStoreError, match="format 2; this version knows up to 1"):
        decode_damage(newer, "damage")
