"""Search by time over fail-overs, on virtual time."""

import bisect
from pathlib import Path

import trio
from trio.testing import MockClock

from dledger.group_api import search_offset
from tests.harness.groups import Groups
from tests.harness.raft_cluster import batch


async def test_every_store_time_is_found_although_clocks_differ(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        groups = Groups(tmp_path, nursery)
        groups.skews_ms = {"n0": 0, "n1": -60_000, "n2": 90_000}
        for name in groups.names:
            await groups.start(name)
        times: list[int] = []
        leaders: set[str] = set()
        for leadership in range(8):
            leader = await groups.leader()
            leaders.add(leader.name)
            for number in range(5):
                times.append((await leader.group.submit(batch(b"x"))).store_time_ms)
                await trio.sleep(0.01 * number)
            if leadership < 7:
                await groups.isolate(leader.name)
                await groups.leader(among=groups.others(leader.name))
                groups.heal()
                await trio.sleep(2)
        await groups.settle()
        assert len(leaders) > 1
        assert times == sorted(times)
        asked = {0, times[-1] + 1} | {time + by for time in times for by in (-1, 0, 1)}
        for replica in groups.replicas.values():
            for time in asked:
                at_or_after = search_offset(replica.group, "T", 0, time, upper=False)
                assert at_or_after == bisect.bisect_left(times, time)
                at_or_before = search_offset(replica.group, "T", 0, time, upper=True)
                assert at_or_before == max(0, bisect.bisect_right(times, time) - 1)
        nursery.cancel_scope.cancel()
    for replica in groups.replicas.values():
        replica.group.store.close(clean=False)
