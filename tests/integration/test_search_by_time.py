"""Search by time over fail-overs: store times never go back, so every time has one place."""

from __future__ import annotations

import bisect
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from client.connect import connect
from client.message import Message
from client.producer import Producer, ProducerConfig
from client.pull_consumer import PullConsumer
from dledger.cli.local_cluster import local_cluster
from dledger.cli.topic_command import create_topic
from dledger.processors.offsets import search_offset
from tests.harness.groups import Groups
from tests.harness.raft_cluster import batch

SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": 16 << 20,
    "store.max_hash_slot_num": 10_000,
    "store.max_index_num": 40_000,
}


async def test_every_store_time_is_found_on_every_replica_although_leaders_clocks_differ(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        groups = Groups(tmp_path, nursery)
        groups.skews_ms = {"n0": 0, "n1": -60_000, "n2": 90_000}
        for name in groups.names:
            await groups.start(name)
        times: list[int] = []
        leaders: set[str] = set()
        for reign in range(8):
            leader = await groups.leader()
            leaders.add(leader.name)
            for number in range(5):
                times.append((await leader.group.submit(batch(b"x"))).store_time_ms)
                await trio.sleep(0.01 * number)
            if reign < 7:
                groups.network.isolate(leader.name, groups.others(leader.name))
                await groups.leader(among=groups.others(leader.name))
                groups.network.heal()
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


@pytest.mark.slow
@pytest.mark.side_by_side
async def test_a_client_finds_messages_by_time_over_killed_leaders(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, settings=SETTINGS) as cluster:
        await create_topic([cluster.namesrv_address], "t", queues=1)
        async with (
            connect([cluster.namesrv_address]) as client,
            Producer(client, "p", ProducerConfig(send_timeout_s=60)) as producer,
            PullConsumer(client, "c") as consumer,
        ):
            (queue,) = await consumer.fetch_message_queues("t")
            for reign in range(3):
                for number in range(30):
                    await producer.send(Message("t", b"%d-%d" % (reign, number)))
                if reign < 2:
                    leader = await cluster.wait_leader()
                    await cluster.kill(leader)
                    await cluster.wait_leader(other_than=leader)
                    await cluster.start(leader)
            found = []
            async for _, result in consumer.drain([queue]):
                found += [(m.queue_offset, m.store_timestamp_ms) for m in result.messages]
            times = [time for _, time in found]
            assert len(times) == 90
            assert times == sorted(times)
            for time in {times[0], times[45], times[-1], times[0] - 1, times[-1] + 1}:
                assert await consumer.search_offset(queue, time) == bisect.bisect_left(times, time)
