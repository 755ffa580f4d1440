"""Search by time over fail-overs: store times never go back, so every time has one place."""

from __future__ import annotations

import bisect
from pathlib import Path

import pytest

from dledger.cli.local_cluster import local_cluster
from dledger.cli.topic_command import create_topic
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from tests.harness.local_settings import SMALL_FILES


@pytest.mark.slow
async def test_a_client_finds_messages_by_time_over_killed_leaders(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, settings=SMALL_FILES) as cluster:
        await create_topic([cluster.namesrv_address], "t", queues=1)
        async with (
            connect([cluster.namesrv_address]) as client,
            Producer(client, "p", ProducerConfig(send_timeout_s=60)) as producer,
            PullConsumer(client, "c") as consumer,
        ):
            (queue,) = await consumer.fetch_message_queues("t")
            for leadership in range(3):
                for number in range(30):
                    await producer.send(Message("t", b"%d-%d" % (leadership, number)))
                if leadership < 2:
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
