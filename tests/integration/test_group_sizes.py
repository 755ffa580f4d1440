"""Groups of every size start, say what they warn of, and serve. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.client.connect import connect
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from tests.harness.cluster_questions import create_topic
from tests.harness.eventually import logged
from tests.harness.groups import running_groups
from tests.harness.local_settings import SMALL_FILES
from tests.harness.stored_messages import bodies_at

pytestmark = pytest.mark.slow

SENDS = 50


def warnings_of(cluster: LocalCluster, name: str) -> list[str]:
    log_path = cluster.brokers[name].log_path
    return [str(event["text"]) for event in logged(log_path, "config_warning")]


async def send_and_read(cluster: LocalCluster, first: int = 0) -> None:
    """Send some messages and read all that were ever sent, and nothing else."""
    wanted = [b"%d" % number for number in range(first + SENDS)]
    async with (
        connect([cluster.namesrv_address]) as client,
        Producer(client, "p", ProducerConfig(send_timeout_s=20)) as producer,
    ):
        for number in range(first, first + SENDS):
            await producer.send(Message("t", b"%d" % number))
    assert await bodies_at(cluster.namesrv_address, "t") == wanted


@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_group_of_each_size_survives_a_minority(tmp_path: Path, size: int) -> None:
    async with local_cluster(tmp_path, brokers=size, settings=SMALL_FILES) as cluster:
        await create_topic([cluster.namesrv_address], "t", queues=1)
        await send_and_read(cluster)
        for name in cluster.brokers:
            assert [
                text.startswith("raft.peers: a group of 2 ") for text in warnings_of(cluster, name)
            ] == ([True] if size == 2 else [])
        minority = (size - 1) // 2
        for _ in range(minority):
            leader = await cluster.wait_leader()
            await cluster.kill(leader)
            await cluster.wait_leader(other_than=leader)
        await send_and_read(cluster, SENDS)
        for name, node in cluster.brokers.items():
            if not node.running:
                await cluster.start(name)
        await cluster.wait_healthy()
    for node in cluster.nodes:
        assert node.process is not None
        assert node.process.returncode == 0, node.last_log_lines()


async def test_a_member_alone_does_not_wait_for_a_leader(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    for _ in range(2):  # a new folder, then one that is known
        async with running_groups(tmp_path, 1) as groups:
            began = trio.current_time()
            await groups.leader()
            assert trio.current_time() - began < 0.25
