"""A member alone has no other to repair it: retention gives up damaged entries all the same."""

from __future__ import annotations

from pathlib import Path

from dledger.services.retention import RetentionService, segment_starts
from dledger.settings.tables import StoreTable
from tests.harness.groups import SEGMENT_BYTES, running_groups
from tests.harness.raft_cluster import batch


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
