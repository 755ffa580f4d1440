"""Retention, and what it makes necessary: a replica that is behind the first kept entry."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from typing_extensions import Buffer

from dledger.commitlog.entry import Run
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import CorruptStoreError, DiskFullError
from dledger.commitlog.mark import Anchor
from dledger.commitlog.record import decode_record, encode_record
from dledger.commitlog.seams import Disk, utc
from dledger.group import Group
from dledger.raft.snapshot import Installation
from dledger.raft.wire import PeerFrame
from dledger.remoting.protocol.topic_names import HALF_TOPIC
from dledger.replica_records import InstallationRecord, Phase
from dledger.services.retention import Look, RetentionService, choose_floor, is_in_hours
from dledger.settings.tables import StoreTable
from dledger.state.state_record import FloorChange, TransactionsChange, state_batch
from dledger.state.tables import StateTables
from dledger.state.transactions import TransactionDecision
from dledger.store import ReplicaStore
from tests.harness.entry_frames import next_frame
from tests.harness.expired import EXPIRED
from tests.harness.fake_group import batch_of
from tests.harness.groups import SEGMENT_BYTES, Groups, Replica, running_groups
from tests.harness.present import present
from tests.harness.raft_cluster import batch
from tests.harness.replica_folders import install_at_once

pytestmark = pytest.mark.slow

BODY = bytes(20_000)
LONG_BODY = bytes(100_000)
"""Ten are a segment: what makes segments costs by the entry."""


def kept(group: Group, topic: str = "T", queue_id: int = 0) -> list[int]:
    """Read a queue from its first kept message on; return the queue offsets found in records."""
    low, high = group.state.min_offset(topic, queue_id), group.state.max_offset(topic, queue_id)
    units = group.queues.queue(topic, queue_id).read(low, high - low)
    return [
        decode_record(group.log.record_at(int(unit["phy_offset"]))).queue_offset for unit in units
    ]


def retention(leader: Replica, keep_segments: int) -> RetentionService:
    group = leader.group
    return RetentionService(
        group,
        lambda: group.store.log,
        StoreTable(
            mapped_file_size_commit_log=SEGMENT_BYTES, keep_bytes=keep_segments * SEGMENT_BYTES
        ),
        clock=leader.clock,
        saved_index=lambda: group.store.saved_index,
        disk_ratio=lambda: 0.0,
    )


async def fill(groups: Groups, messages: int, body: bytes = BODY) -> Replica:
    return await groups.fill([body] * messages)


async def give_up_entries(groups: Groups, leader: Replica) -> Anchor:
    """Let retention take what lies before the last segment, on every replica."""
    await groups.checkpointed()
    floor = present(await retention(leader, 1).check())
    await groups.checkpointed()
    return floor


async def left_behind(groups: Groups) -> tuple[Replica, str]:
    """Stop a follower until the leader does not keep what it lacks; return leader and follower."""
    leader = await fill(groups, 20)
    behind = groups.others(leader.name)[0]
    groups.replicas.pop(behind).kill()
    await fill(groups, 60, LONG_BODY)
    await give_up_entries(groups, leader)
    return leader, behind


async def test_floor_moves_on_every_replica(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await fill(groups, 200)
        floor = await give_up_entries(groups, leader)
        await groups.settle()
        for replica in groups.replicas.values():
            group = replica.group
            assert group.state.floor == floor
            assert group.store.log.first_index == floor.first_index
            low = group.state.min_offset("T", 0)
            assert 0 < low < 200
            assert kept(group) == list(range(low, 200))
        lows = {r.group.state.min_offset("T", 0) for r in groups.replicas.values()}
        assert len(lows) == 1


async def test_replica_behind_the_floor_gets_a_snapshot(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader, behind = await left_behind(groups)
        assert leader.group.store.log.first_index > 20
        again = await groups.start(behind)
        await groups.settle()
        await fill(groups, 5)
        await groups.settle()
        group = again.group
        assert group.node.installation.count == 1
        assert group.store.log.first_index == leader.group.store.log.first_index
        assert group.state.applied_chain == leader.group.state.applied_chain
        assert kept(group) == kept(leader.group)
        assert not group.store.refilling
        assert group.node.roster.is_self_voter


async def test_a_snapshot_that_comes_twice_is_installed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_chunks: list[tuple[str, PeerFrame]] = []
    on_chunk, finish = Installation.on_chunk, Installation.finish

    def keep_chunk(self: Installation, leader: str, frame: PeerFrame) -> None:
        last_chunks[:] = [(leader, frame)]
        on_chunk(self, leader, frame)

    def finish_and_repeat_chunk(
        self: Installation, leader: str, entry_log: EntryLog, index: int
    ) -> None:
        finish(self, leader, entry_log, index)
        assert self.state.journal.last_index < index
        on_chunk(self, *last_chunks[0])

    monkeypatch.setattr(Installation, "on_chunk", keep_chunk)
    monkeypatch.setattr(Installation, "finish", finish_and_repeat_chunk)
    async with running_groups(tmp_path) as groups:
        leader, behind = await left_behind(groups)
        again = await groups.start(behind)
        await groups.settle()
        assert last_chunks
        assert again.group.node.installation.count == 1
        assert kept(again.group) == kept(leader.group)


async def test_longer_log_is_replaced_after_one_snapshot(tmp_path: Path) -> None:
    """Its end lies above the leader's, so nothing but a comparison shows that it is another log."""
    async with running_groups(tmp_path) as groups:
        first = await fill(groups, 20)
        behind = groups.others(first.name)[0]
        groups.replicas.pop(behind).kill()
        groups.replicas.pop(first.name).kill()
        store = groups.open_store(behind)
        while store.log.last_index < 900:
            store.log.append(next_frame(store.log))
        store.close(clean=False)
        await groups.start(first.name)
        leader = await fill(groups, 300)
        assert leader.group.term > store.log.last_term
        await give_up_entries(groups, leader)
        assert leader.group.store.log.first_index > 25
        taken: list[int] = []
        take = leader.group.maintenance.take_snapshot

        def counted() -> tuple[int, bytes]:
            taken.append(leader.group.state.applied_index)
            assert len(taken) < 20, "snapshot after snapshot"
            return take()

        leader.group.node.owner.take_snapshot = counted
        again = await groups.start(behind)
        await groups.settle()
        assert again.group.node.installation.count == 1
        assert len(taken) <= 2
        assert kept(again.group) == kept(leader.group)


async def test_fruitless_snapshots_are_offered_with_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_groups(tmp_path) as groups:
        leader, behind = await left_behind(groups)
        taken: list[float] = []
        take = leader.group.maintenance.take_snapshot

        def counted() -> tuple[int, bytes]:
            taken.append(trio.current_time())
            return take()

        def asks_for_the_first(self: Installation, peer: str, frame: PeerFrame) -> None:
            self._reply(peer, frame.fields[0], frame.fields[2], 1)

        monkeypatch.setattr(Installation, "on_chunk", asks_for_the_first)
        leader.group.node.owner.take_snapshot = counted
        await groups.start(behind)
        await trio.sleep(5)
        stall_s = leader.group.node.replicator.stall_s
        pauses = [after - before for before, after in pairwise(taken)]
        assert len(taken) > 3
        assert min(pauses) >= stall_s


@pytest.mark.parametrize("error", [CorruptStoreError("no snapshot"), DiskFullError("no space")])
async def test_failed_installation_is_offered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    refused: list[int] = []
    offer = ReplicaStore.offer

    def refuse_twice(self: ReplicaStore, data: Buffer) -> None:
        if len(refused) < 2:
            refused.append(self.log.last_index)
            raise error
        offer(self, data)

    monkeypatch.setattr(ReplicaStore, "offer", refuse_twice)
    async with running_groups(tmp_path) as groups:
        leader, behind = await left_behind(groups)
        again = await groups.start(behind)
        await groups.settle()
        assert len(refused) == 2
        assert again.group.node.installation.count == 1
        assert kept(again.group) == kept(leader.group)


async def test_an_emptied_log_without_space_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot found space, what follows does not: the node follows on, and finishes later."""
    tried: list[float] = []
    is_full = True
    begin_at = EntryLog.begin_at

    def without_space(disk: Disk, root: str, anchor: Anchor) -> None:
        begin_at(disk, root, anchor)
        tried.append(trio.current_time())
        if is_full:
            raise DiskFullError("no space for the anchor")

    async with running_groups(tmp_path) as groups:
        leader, behind = await left_behind(groups)
        monkeypatch.setattr(EntryLog, "begin_at", staticmethod(without_space))
        again = await groups.start(behind)
        await trio.sleep(30)
        assert len(tried) > 10
        group = again.group
        assert group.store.installing
        assert not group.readable
        assert group.node.leader_id == leader.name
        group.node.begin_election()
        assert leader.group.leadership is not None
        await fill(groups, 5)  # the others are a majority
        is_full = False
        await groups.settle()
        assert group.node.installation.count == 1
        assert not group.store.refilling
        assert kept(group) == kept(leader.group)
        again.kill()
        again = await groups.start(behind)
        await groups.settle()
        assert kept(again.group) == kept(leader.group)


async def test_next_start_finishes_an_emptied_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_groups(tmp_path) as groups:
        leader, behind = await left_behind(groups)

        def without_space(self: ReplicaStore, loaded: StateTables) -> EntryLog:
            self._empty_log(loaded.floor, Phase.REFILLING)
            raise DiskFullError("no space for the first files")

        with monkeypatch.context() as patch:
            patch.setattr(ReplicaStore, "empty_for", without_space)
            again = await groups.start(behind)
            await trio.sleep(10)
            assert again.group.store.installing
            again.scope.cancel()
            await trio.sleep(1)
            await again.group.close()
        again = await groups.start(behind)
        assert again.group.store.unclean
        await groups.settle()
        assert not again.group.node.eligibility.damaged
        assert kept(again.group) == kept(leader.group)


async def test_installation_voids_the_earlier_commit_mark(tmp_path: Path) -> None:
    """The anchor may lie below it; entries above the anchor are not here any more."""
    async with running_groups(tmp_path) as groups:
        leader = await fill(groups, 60)
        await groups.settle()
        behind = groups.replicas[groups.others(leader.name)[0]]
        node, store = behind.group.node, behind.group.store
        assert node.journal.commit_index >= 60
        await groups.isolate(behind.name)
        store._begin_log_anew(leader.group.store.log.anchor_at(30), Phase.REFILLING)
        node.installation.finish(leader.name, store.log, 61)
        assert node.journal.commit_index == node.core.known_commit_index == 29
        groups.heal()
        await fill(groups, 3)
        with trio.fail_after(30):
            while node.journal.last_index < leader.group.node.journal.last_index:
                await trio.sleep(0.1)
        assert store.log.chain_at(60) == leader.group.store.log.chain_at(60)


async def test_restart_finishes_an_installation(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader, behind = await left_behind(groups)
        _, data = leader.group.maintenance.take_snapshot()
        store = groups.open_store(behind)
        install = store.paths.install
        store.close(clean=False)
        groups.disks[behind].replace(install, data)
        record = InstallationRecord(groups.disks[behind], store.paths.installation)
        record.become(Phase.OFFERED)
        for _ in range(3):
            again = await groups.start(behind)
            assert again.group.store.refilling
            again.kill()
        again = await groups.start(behind)
        await groups.settle()
        assert kept(again.group) == kept(leader.group)
        await groups.checkpointed()
        assert not groups.disks[behind].exists(install)
        again.kill()
        again = await groups.start(behind)
        assert not again.group.store.refilling
        assert kept(again.group) == kept(leader.group)


async def test_a_refilling_replica_neither_leads_nor_serves_reads(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader, other = await left_behind(groups)
        _, data = leader.group.maintenance.take_snapshot()
        store = groups.open_store(other)
        assert install_at_once(store, data, 0)
        assert store.refilling
        assert store.log.last_index == store.log.first_index - 1
        store.close(clean=False)
        for name in groups.others(other):
            groups.replicas[name].kill()
            del groups.replicas[name]
        again = await groups.start(other)
        again.group.node.begin_election()
        assert not again.group.readable
        assert not again.group.node.is_leader


async def test_floor_stays_below_unsaved_and_undelivered(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await fill(groups, 3)
        await leader.group.submit(batch(b"waits", topic="SCHEDULE_TOPIC_XXXX", queue_id=0))
        waits_at = int(
            leader.group.queues.queue("SCHEDULE_TOPIC_XXXX", 0).read(0, 1)[0]["phy_offset"]
        )
        await fill(groups, 300)
        assert await retention(leader, 1).check() is None, "nothing was saved yet"
        await groups.checkpointed()
        floor = await retention(leader, 1).check()
        assert floor is None or floor.position <= waits_at


async def test_age_counts_at_its_hours_or_on_a_full_disk(tmp_path: Path) -> None:
    async with running_groups(tmp_path, 1) as groups:
        leader = await fill(groups, 200)
        entry_log = leader.group.store.log
        settings = StoreTable(
            mapped_file_size_commit_log=SEGMENT_BYTES,
            delete_when=(4,),
            clean_file_forcibly_enable=True,
        )
        later = leader.clock.wall_ms() // 86_400_000 * 86_400_000 + 5 * 86_400_000

        def floor(hour: int, ratio: float, reserved: int = 1) -> Anchor | None:
            now_ms = later + hour * 3_600_000
            look = Look(
                now_ms=now_ms,
                disk_ratio=ratio,
                limit_position=entry_log.end_position,
                is_hour=is_in_hours(now_ms, settings.delete_when, utc),
            )
            chosen = choose_floor(entry_log, replace(settings, file_reserved_time=reserved), look)
            return chosen and chosen[0]

        assert settings.keep_bytes == 0
        assert floor(3, 0.5) is None
        assert floor(4, 0.5) is not None
        assert floor(3, 0.8) is not None
        assert floor(4, 0.8, reserved=1000) is None
        assert floor(3, 0.9, reserved=1000) is not None


async def test_a_floor_is_an_ordinary_state_record(tmp_path: Path) -> None:
    async with running_groups(tmp_path, 1) as groups:
        leader = await fill(groups, 3)
        anchor = leader.group.store.log.anchor_at(2)
        await leader.group.submit(state_batch(FloorChange(anchor, EXPIRED)))
        assert leader.group.state.floor == anchor
        assert kept(leader.group) == [0, 1, 2][leader.group.state.min_offset("T", 0) :]


async def test_open_half_message_holds_the_floor(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        leader = await fill(groups, 40)
        half = encode_record(topic=HALF_TOPIC, queue_id=0, body=b"half", properties=b"")
        stored = await leader.group.submit(batch_of([half], Run(HALF_TOPIC, 0, 1)))
        await fill(groups, 160)
        await groups.checkpointed()
        service = retention(leader, 1)
        held_back = await service.check()
        assert held_back is None or held_back.position <= stored.phy_offset
        assert service.wanted_position > stored.phy_offset
        decided = TransactionsChange(decided=((0, TransactionDecision.ROLLBACK),))
        await leader.group.submit(state_batch(decided))
        await groups.checkpointed()
        floor = present(await service.check())
        assert floor.position > stored.phy_offset
        assert service.wanted_position == 0
