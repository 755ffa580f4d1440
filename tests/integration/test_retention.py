"""A broker that was away for longer than the log is kept comes back by itself, under load.

Real processes, sockets and files.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.errors import OffsetIllegalError
from dledger.client.core.route import MessageQueue
from tests.harness.eventually import all_statuses
from tests.harness.load import TOPIC, loaded, missing_in

pytestmark = pytest.mark.slow

SEGMENT_BYTES = 4 << 20
SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": SEGMENT_BYTES,
    "store.keep_bytes": 2 * SEGMENT_BYTES,
    "store.retention_interval_ms": 500,
    "raft.checkpoint_interval_ms": 500,
}
MESSAGES = 50_000
DEADLINE_S = 120.0


async def status_of(cluster: LocalCluster, name: str) -> dict[str, Any]:
    return (await all_statuses(cluster))[name]


async def lows_of(consumer: PullConsumer, queues: Sequence[MessageQueue]) -> dict[int, int]:
    return {queue.queue_id: await consumer.min_offset(queue) for queue in queues}


async def all_that_is_kept(
    consumer: PullConsumer, queues: Sequence[MessageQueue]
) -> tuple[dict[int, int], dict[tuple[int, int], bytes]]:
    """Return where each queue begins and what is there, read while nothing was given up."""
    with trio.fail_after(DEADLINE_S):
        while True:
            lows = await lows_of(consumer, queues)
            found = {}
            with suppress(OffsetIllegalError):
                async for queue, result in consumer.drain(queues):
                    for message in result.messages:
                        found[(queue.queue_id, message.queue_offset)] = bytes(message.body)
            if await lows_of(consumer, queues) == lows:
                return lows, found


async def test_broker_comes_back_after_retention_passed_it(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, settings=SETTINGS) as cluster:
        leader = await cluster.wait_leader()
        away = next(name for name in cluster.brokers if name != leader)
        async with loaded(cluster, senders=64, calm=1_000) as load:
            had = (await status_of(cluster, away))["last_index"]
            await cluster.kill(away)
            with trio.fail_after(DEADLINE_S):
                while (
                    len(load.acknowledged) < MESSAGES
                    or (await status_of(cluster, leader))["first_index"] <= had + 1
                ):
                    await trio.sleep(0.2)
            await cluster.start(away)
            await cluster.wait_caught_up(away, DEADLINE_S)
        async with connect([cluster.namesrv_address]) as client:
            async with PullConsumer(client, "readers") as consumer:
                queues = await consumer.fetch_message_queues(TOPIC)
                lows, found = await all_that_is_kept(consumer, queues)
            status = await status_of(cluster, away)
    assert status["installs"] == 1
    assert all(low > 0 for low in lows.values())
    kept = {place: body for place, body in load.acknowledged.items() if place[1] >= lows[place[0]]}
    assert len(kept) > 5_000
    assert missing_in(found, kept) == []
