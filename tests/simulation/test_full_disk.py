"""A replica whose disk reports that it is full: sends are refused as not stored, space heals it.

With real processes on small file systems: tests/integration/test_full_disk.py.
"""

from pathlib import Path

import trio
from trio.testing import MockClock

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import DiskFullError, MQError
from dledger.commitlog.seams import DiskFile
from dledger.group import Group
from dledger.group_api import Proposed
from tests.harness.groups import Groups, bodies, running_groups
from tests.harness.raft_cluster import batch

BODY_BYTES = 60_000


class SmallDisk(OsDisk):
    """A disk that has no space for new files while it is full: for any, or for consume queues."""

    full = False
    full_of_queues = False

    def create(self, path: str, size: int, *, reserve: bool) -> DiskFile:
        if (self.full and reserve) or (self.full_of_queues and "/consumequeue/" in path):
            raise DiskFullError(f"no space for {path} of {size} bytes")
        return super().create(path, size, reserve=reserve)


def disk_of(groups: Groups, name: str) -> SmallDisk:
    disk = groups.disks[name]
    assert isinstance(disk, SmallDisk)
    return disk


async def test_a_leader_without_space_refuses_as_not_stored_and_heals(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with running_groups(tmp_path, disks=SmallDisk) as groups:
        leader = await groups.leader()
        disk = disk_of(groups, leader.name)
        stored: list[bytes] = []
        disk.full = True
        refused: MQError | None = None
        for number in range(100):
            body = str(number).encode().ljust(BODY_BYTES, b".")
            try:
                await leader.group.submit(batch(body))
            except DiskFullError as error:
                refused = error
                break
            stored.append(body)
        assert refused is not None
        assert (refused.outcome, refused.retriable) == ("not_stored", True)
        assert len(stored) > 20
        assert leader.group.leadership is not None
        disk.full = False
        with trio.fail_after(30):
            while True:
                try:
                    await leader.group.submit(batch(b"after"))
                    break
                except DiskFullError:
                    await trio.sleep(0.1)
        await groups.settle()
        for replica in groups.replicas.values():
            assert bodies(replica.group) == [*stored, b"after"]


async def test_a_follower_without_space_delays_none_and_catches_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with running_groups(tmp_path, disks=SmallDisk) as groups:
        leader = await groups.leader()
        follower = groups.others(leader.name)[0]
        disk_of(groups, follower).full = True
        sent = [str(number).encode().ljust(BODY_BYTES, b".") for number in range(60)]
        for body in sent:
            await leader.group.submit(batch(body))
        behind = groups.replicas[follower].group
        assert behind.state.max_offset("T", 0) < 60
        disk_of(groups, follower).full = False
        await groups.settle()
        assert bodies(behind) == sent


async def outcome_of(group: Group, body: bytes) -> str:
    try:
        await group.submit(batch(body))
    except MQError as error:
        return error.outcome
    return "stored"


async def test_sends_are_refused_while_a_majority_has_no_space(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with running_groups(tmp_path, disks=SmallDisk) as groups:
        leader = await groups.leader()
        for name in groups.others(leader.name):
            disk_of(groups, name).full = True
        outcomes: list[str] = []
        bodies_by_outcome: dict[str, list[bytes]] = {"stored": [], "unknown": [], "not_stored": []}
        for number in range(60):
            body = str(number).encode().ljust(BODY_BYTES, b".")
            outcomes.append(await outcome_of(leader.group, body))
            bodies_by_outcome[outcomes[-1]].append(body)
        assert outcomes.count("stored") > 5
        assert outcomes.count("unknown") == 1, outcomes
        assert set(outcomes[outcomes.index("unknown") + 1 :]) == {"not_stored"}
        for name in groups.others(leader.name):
            disk_of(groups, name).full = False
        with trio.fail_after(30):
            while (outcome := await outcome_of(leader.group, b"after")) != "stored":
                assert outcome == "not_stored"
                await trio.sleep(0.1)
        await groups.settle()
        expected = [*bodies_by_outcome["stored"], *bodies_by_outcome["unknown"], b"after"]
        for replica in groups.replicas.values():
            assert bodies(replica.group) == expected


async def test_no_space_for_a_queue_file_loses_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    answers: list[Proposed] = []
    async with running_groups(tmp_path, 1, disks=SmallDisk) as groups:
        leader = await groups.leader()
        disk = disk_of(groups, "n0")
        disk.full_of_queues = True
        leader.group.propose(batch(b"before"), answers.append)
        leader.group.kick()
        await trio.sleep(1)
        # Its unit waits in memory for a file: what the log has, a start derives again.
        assert [answer.outcome for answer in answers] == ["stored"]
        assert bodies(leader.group) == [b"before"]
        leader.kill()
        await groups.start("n0")
        leader = await groups.leader()
        assert bodies(leader.group) == [b"before"]
        await leader.group.submit(batch(b"after"))
        await trio.sleep(5)
        disk.full_of_queues = False
        leader.kill()
        await groups.start("n0")
        leader = await groups.leader()
        assert bodies(leader.group) == [b"before", b"after"]
