"""A schedule on three brokers: leaders are killed, all members restarted; no instant comes twice.

Real processes, sockets, files and signals.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.cli.schedule_command import add, ls, pause, rm
from dledger.cli.topic_command import create_topic
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.message_ext import MessageExt
from dledger.output import CliError
from tests.harness.eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.side_by_side]

SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": 16 << 20,
    "store.max_hash_slot_num": 100_000,
    "store.max_index_num": 1_000_000,
}
TOPIC = "reports"
SECOND_MS = 1000


async def stored(cluster: LocalCluster) -> list[MessageExt]:
    """Return all messages of the topic's only queue."""
    async with (
        connect([cluster.namesrv_address]) as client,
        PullConsumer(client, "reader") as consumer,
    ):
        (queue,) = await consumer.fetch_message_queues(TOPIC)
        end = await consumer.max_offset(queue)
        found: list[MessageExt] = []
        while len(found) < end:
            found += (await consumer.pull(queue, len(found), timeout_s=0)).messages
        return found


async def reach(cluster: LocalCluster, more: int) -> None:
    """Wait until *more* messages came."""
    count = len(await stored(cluster)) + more

    async def reached() -> bool:
        return len(await stored(cluster)) >= count

    await eventually(f"{count} messages", reached)


async def shown(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    await ls(namesrv=cluster.namesrv_address, output="json")
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


async def test_no_instant_comes_twice_through_kills_and_restarts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with local_cluster(tmp_path, settings=SETTINGS) as cluster:
        namesrv = cluster.namesrv_address
        with pytest.raises(CliError, match="no route to topic not-there; nothing was changed"):
            await add("beat", "@every 1s", "tick", topic="not-there", namesrv=namesrv)
        await create_topic([namesrv], TOPIC, queues=1)
        await add("beat", "@every 1s", "tick", topic=TOPIC, tag="a", dry_run=True, namesrv=namesrv)
        assert await shown(cluster, capsys) == {}
        await add("beat", "@every 1s", "tick", topic=TOPIC, tag="a", namesrv=namesrv)
        for _ in range(2):
            await reach(cluster, 2)
            leader = await cluster.wait_healthy()
            await cluster.kill(leader)
            await reach(cluster, 2)
            await cluster.start(leader)
        await cluster.stop_all()
        for node in cluster.nodes:
            await cluster.start(node.name)
        await cluster.wait_healthy()
        await reach(cluster, 3)
        await pause("beat", namesrv=namesrv)
        messages = await stored(cluster)
        row = (await shown(cluster, capsys))["beat"]
        assert row["state"] == "paused"
        assert row["fired"] == len(messages)
        missed = [int(found.properties.get("SCHEDULE_MISSED", 0)) for found in messages]
        assert row["missed"] == sum(missed)
        assert sum(missed) > 0, "a restart of all takes longer than an instant"
        dues = [int(found.properties["SCHEDULE_DUE_MS"]) for found in messages]
        assert [later - earlier for earlier, later in pairwise(dues)] == [
            SECOND_MS * (1 + count) for count in missed[1:]
        ]
        assert {(bytes(found.body), found.tags) for found in messages} == {(b"tick", "a")}
        await rm("beat", namesrv=namesrv)
        assert await shown(cluster, capsys) == {}
