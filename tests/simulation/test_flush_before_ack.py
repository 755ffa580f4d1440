"""What an acknowledgement guarantees, in each mode, shown by stopping disks and networks.

========================  ======================================================
SYNC_FLUSH (default)      on disk at the leader and at a majority, then the ack
ASYNC_FLUSH               a majority has it in memory; disks follow in half a second
ASYNC_MASTER              on disk at the leader; reads are of committed entries only
========================  ======================================================

On virtual time, where a flush waits behind a gate. Real processes lose their power in
tests/integration/test_chaos.py.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from trio.testing import MockClock

from dledger.broker_errors import NotLeaderError, UnknownOutcomeError
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import FlushFailedError
from dledger.commitlog.seams import DiskFile
from dledger.group_api import Proposed
from dledger.testing.doubles import InlineExecutor
from tests.harness.groups import Groups, Replica, running_groups
from tests.harness.raft_cluster import batch

T = TypeVar("T")

LONG_S = 1.0
"""Far longer than a round trip, shorter than the wait for a majority."""


class GatedExecutor(InlineExecutor):
    """Lets flushes of the log wait until the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.open = trio.Event()
        self.open.set()
        self.flushes = 0

    def close_gate(self) -> None:
        self.open = trio.Event()

    def runs_inline(self, kind: str) -> bool:
        return False

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        if kind == "flush":
            await self.open.wait()
            self.flushes += 1
        return await super().run(work, kind=kind)


@asynccontextmanager
async def gated_groups(
    root: Path,
    *,
    sync_flush: bool = True,
    sync_replication: bool = True,
    disks: Callable[[], OsDisk] = OsDisk,
) -> AsyncIterator[tuple[Groups, Replica]]:
    """Run three replicas whose flushes can be held; give them and their leader."""
    async with trio.open_nursery() as nursery:
        groups = Groups(root, nursery, 3, disks)
        groups.executors = defaultdict(GatedExecutor)
        groups.sync_flush = sync_flush
        groups.sync_replication = sync_replication
        for name in groups.names:
            await groups.start(name)
        leader = await groups.leader()
        await leader.group.submit(batch(b"warm"))
        await groups.settle()
        yield groups, leader
        nursery.cancel_scope.cancel()
    for replica in groups.replicas.values():
        replica.group.store.close(clean=False)


def gate(groups: Groups, name: str) -> GatedExecutor:
    executor = groups.executors[name]
    assert isinstance(executor, GatedExecutor)
    return executor


def propose(replica: Replica, body: bytes, *, is_applied: bool = True) -> list[Proposed]:
    """Propose and return the list that the answer will be in."""
    answers: list[Proposed] = []
    replica.group.propose(batch(body), answers.append, is_applied=is_applied)
    replica.group.kick()
    return answers


def outcomes(answers: list[Proposed]) -> list[str]:
    return [answer.outcome for answer in answers]


# ------------------------------------------------------------------------------ SYNC_FLUSH


async def test_no_ack_before_the_leaders_own_flush(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with gated_groups(tmp_path) as (groups, leader):
        gate(groups, leader.name).close_gate()
        answers = propose(leader, b"x")
        await trio.sleep(LONG_S)
        index = leader.group.store.log.last_index
        for other in groups.others(leader.name):
            assert groups.replicas[other].group.store.log.durable_index == index
        assert answers == []
        assert leader.group.state.applied_index < index
        gate(groups, leader.name).open.set()
        await trio.sleep(0.1)
        assert outcomes(answers) == ["stored"]


async def test_no_ack_while_only_the_leader_has_it_on_disk(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with gated_groups(tmp_path) as (groups, leader):
        for other in groups.others(leader.name):
            gate(groups, other).close_gate()
        answers = propose(leader, b"x")
        await trio.sleep(LONG_S)
        log = leader.group.store.log
        assert log.durable_index == log.last_index
        for other in groups.others(leader.name):
            behind = groups.replicas[other].group.store.log
            assert (behind.last_index, behind.durable_index) == (log.last_index, log.last_index - 1)
        assert answers == []
        gate(groups, groups.others(leader.name)[0]).open.set()
        await trio.sleep(0.1)
        assert outcomes(answers) == ["stored"]


async def test_a_follower_with_a_slow_disk_delays_no_other(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with gated_groups(tmp_path) as (groups, leader):
        gate(groups, groups.others(leader.name)[0]).close_gate()
        with trio.fail_after(0.1):
            await leader.group.submit(batch(b"x"))


class BrokenDisk(OsDisk):
    """Flushes of the log fail on request."""

    broken = False

    def open(self, path: str) -> DiskFile:
        return _BrokenFile(super().open(path), self)

    def create(self, path: str, size: int, *, reserve: bool) -> DiskFile:
        return _BrokenFile(super().create(path, size, reserve=reserve), self)


class _BrokenFile:
    def __init__(self, file: DiskFile, disk: BrokenDisk) -> None:
        self._file = file
        self._disk = disk
        self.path, self.size = file.path, file.size
        self.write_at, self.view, self.close = file.write_at, file.view, file.close
        self.read = file.read

    def flush(self) -> None:
        if self._disk.broken:
            raise FlushFailedError(f"flush of {self.path} failed")
        self._file.flush()


async def test_a_failed_flush_stops_the_node_without_an_ack(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    answers: list[Proposed] = []
    with pytest.RaisesGroup(FlushFailedError, flatten_subgroups=True):
        async with running_groups(tmp_path, 1, disks=BrokenDisk) as groups:
            leader = await groups.leader()
            disk = groups.disks["n0"]
            assert isinstance(disk, BrokenDisk)
            disk.broken = True
            answers = propose(leader, b"x")
            await trio.sleep(LONG_S)
    assert "stored" not in outcomes(answers)


# ------------------------------------------------------------------------------ ASYNC_FLUSH


async def test_async_flush_acks_from_memory_and_flushes_later(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with gated_groups(tmp_path, sync_flush=False) as (groups, leader):
        await trio.sleep(LONG_S)
        before = gate(groups, leader.name).flushes
        for name in groups.names:
            gate(groups, name).close_gate()
        with trio.fail_after(0.1):
            await leader.group.submit(batch(b"x"))
        log = leader.group.store.log
        assert log.durable_index < log.last_index
        for name in groups.names:
            gate(groups, name).open.set()
        await trio.sleep(LONG_S)
        assert log.durable_index == log.last_index
        assert gate(groups, leader.name).flushes - before <= 3


async def test_async_flush_still_wants_a_majority(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with gated_groups(tmp_path, sync_flush=False) as (groups, leader):
        await groups.isolate(leader.name)
        with pytest.raises((UnknownOutcomeError, NotLeaderError)):
            await leader.group.submit(batch(b"x"))


# ------------------------------------------------------------------------------ ASYNC_MASTER


async def test_async_master_acks_after_its_own_flush(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with gated_groups(tmp_path, sync_replication=False) as (groups, leader):
        visible = leader.group.state.max_offset("T", 0)
        for name in groups.names:
            gate(groups, name).close_gate()
        change = propose(leader, b"what is read when it is answered")
        await trio.sleep(0.2)
        answers = propose(leader, b"x", is_applied=False)
        await trio.sleep(0.2)
        assert answers == []
        gate(groups, leader.name).open.set()
        await trio.sleep(0.2)
        assert outcomes(answers) == ["stored"]
        assert change == [], "it waits for a majority in any role"
        assert answers[0].first_offsets == (visible + 1,)
        assert answers[0].index > leader.group.state.applied_index
        assert leader.group.state.max_offset("T", 0) == visible
        for other in groups.others(leader.name):
            gate(groups, other).open.set()
        with trio.fail_after(1):
            while not change:
                await trio.sleep(0.01)
        assert leader.group.state.max_offset("T", 0) > visible


async def test_async_master_may_lose_its_tail_and_logs_agree(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with gated_groups(tmp_path, sync_replication=False) as (groups, leader):
        visible = leader.group.state.max_offset("T", 0)
        await groups.isolate(leader.name)
        answers = propose(leader, b"the tail", is_applied=False)
        await trio.sleep(0.2)
        assert [answer.first_offsets for answer in answers] == [(visible,)]
        new = await groups.leader(among=groups.others(leader.name))
        assert (await new.group.submit(batch(b"in its place"))).first_offsets == (visible,)
        groups.heal()
        with trio.fail_after(30):
            while leader.group.state.max_offset("T", 0) != visible + 1:
                await trio.sleep(0.05)
        await groups.settle()
        chains = {replica.group.state.applied_chain for replica in groups.replicas.values()}
        assert len(chains) == 1
