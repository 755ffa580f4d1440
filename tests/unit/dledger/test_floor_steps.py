"""With very many queues the floor moves in steps: none of them reads all queues."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.record import decode_record
from dledger.group import Group
from dledger.services import retention
from dledger.services.retention import RetentionService
from dledger.settings.tables import StoreTable
from dledger.state.table import StateChange
from dledger.state.tables import QueueBounds, StateTables
from dledger.store import ReplicaStore
from tests.harness.groups import SEGMENT_BYTES, Groups, Replica, running_groups
from tests.harness.raft_cluster import batch

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
