"""Three brokers with a hundred descriptors each hold more queues and segments, and go on."""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.client.connect import connect
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.log_report import verify_store
from tests.harness.cluster_questions import create_topic
from tests.harness.stored_messages import messages_of

pytestmark = pytest.mark.slow

OPEN_FILES = 100
QUEUES = 130
IDLE = 80
SEGMENT = 512 << 10
SEGMENTS = 60
SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": SEGMENT,
    "store.max_message_size": SEGMENT // 8,
    "raft.max_entry_bytes": SEGMENT // 2,
    "store.mapped_file_size_consume_queue": 2_000,
}
CAPPED = (
    f'#!/bin/sh\nulimit -Sn {OPEN_FILES} && ulimit -Hn {OPEN_FILES} && exec {sys.executable} "$@"\n'
)


def ended(cluster: LocalCluster) -> dict[str, str]:
    return {node.name: node.last_log_lines(3) for node in cluster.nodes if not node.running}


def descriptors(cluster: LocalCluster) -> list[int]:
    return [len(os.listdir(f"/proc/{node.pid}/fd")) for node in cluster.brokers.values()]


def segments(cluster: LocalCluster) -> list[int]:
    paths = (node.store_path for node in cluster.brokers.values())
    return [len(os.listdir(path / "commitlog")) for path in paths if path is not None]


@pytest.mark.hunt
async def test_broker_serves_more_queues_than_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capped = tmp_path / "capped"
    capped.write_text(CAPPED)
    capped.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(capped))
    async with local_cluster(tmp_path / "c", settings=SETTINGS) as cluster:
        monkeypatch.undo()
        leader = cluster.brokers[await cluster.wait_leader()]
        await create_topic([cluster.namesrv_address], "t", queues=QUEUES)
        async with connect([cluster.namesrv_address]) as client, Producer(client, "p") as producer:
            queues = await producer.publish_queues("t")
            assert len(queues) == QUEUES
            for queue in queues:
                await producer.send_to(queue, Message("t", b"first"))
            assert not ended(cluster)
            host, _, port = leader.address.partition(":")
            idle = [await trio.open_tcp_stream(host, int(port)) for _ in range(IDLE)]
            for queue in queues:
                await producer.send_to(queue, Message("t", b"second"))
            assert not ended(cluster)
            large = Message("t", os.urandom(SEGMENT // 10))
            for number in range(10 * SEGMENTS):
                await producer.send_to(queues[number % QUEUES], large)
            assert all(count >= SEGMENTS for count in segments(cluster))
            assert not ended(cluster)
            assert max(descriptors(cluster)) <= OPEN_FILES
            found = await read_all(client)
            for stream in idle:
                await stream.aclose()
            assert sorted(found) == [b"first"] * QUEUES + [b"second"] * QUEUES
            assert not ended(cluster)
            assert await cluster.leader() == leader.name

            # Most queues share a file: what is in it survives every process.
            await cluster.kill(leader.name)
            await cluster.wait_leader(other_than=leader.name)
            for queue in queues:
                await producer.send_to(queue, Message("t", b"third"))
            await cluster.start(leader.name)
            await cluster.wait_caught_up(leader.name)
            for name in cluster.brokers:
                await cluster.stop(name)
            for name in cluster.brokers:
                assert verify_store(folder_of(cluster, name)).problems == []
                shared = folder_of(cluster, name) / "consumequeue.shared"
                assert any(path.name.isdecimal() for path in shared.iterdir())
                await cluster.start(name)
            await cluster.wait_healthy()
            assert Counter(await read_all(client)) == dict.fromkeys(
                (b"first", b"second", b"third"), QUEUES
            )


async def read_all(client: ClientInstance) -> list[bytes]:
    bodies = [message.body_bytes for message in await messages_of(client, "t")]
    return [body for body in bodies if len(body) < SEGMENT // 10]


def folder_of(cluster: LocalCluster, name: str) -> Path:
    folder = cluster.brokers[name].store_path
    assert folder is not None
    return folder
