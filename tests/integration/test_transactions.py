"""Transactions against three brokers: the leader is killed between a half message and its end.

Real processes, sockets, files and signals.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.producer.transaction import HalfMessage
from dledger.client.producer.transaction_producer import (
    TransactionProducer,
    TransactionProducerConfig,
)
from tests.harness.cluster_questions import create_topic

pytestmark = pytest.mark.slow

SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": 16 << 20,
    "store.max_hash_slot_num": 100_000,
    "store.max_index_num": 1_000_000,
    "broker.transaction_timeout_ms": 1_000,
    "broker.transaction_check_interval_ms": 1_000,
    # A second each: a broker that starts slowly must not be what gives a transaction up.
    "broker.transaction_check_max": 120,
}
TOPIC = "orders"
COMMIT, ROLLBACK, UNKNOWN = (
    LocalTransactionState.COMMIT,
    LocalTransactionState.ROLLBACK,
    LocalTransactionState.UNKNOWN,
)


async def seen(client: ClientInstance) -> list[bytes]:
    """Return everything consumers can see, in the order of the only queue."""
    async with PullConsumer(client, "reader") as consumer:
        (queue,) = await consumer.fetch_message_queues(TOPIC)
        end = await consumer.max_offset(queue)
        found: list[bytes] = []
        while len(found) < end:
            pulled = await consumer.pull(queue, len(found), timeout_s=0)
            found += [message.body_bytes for message in pulled.messages]
        return found


async def kill_leader(cluster: LocalCluster) -> str:
    leader = await cluster.wait_healthy()
    await cluster.kill(leader)
    return leader


async def test_a_leader_killed_between_half_and_end_changes_nothing(tmp_path: Path) -> None:
    said: dict[str, LocalTransactionState] = {}
    asked: list[bytes] = []

    async def check(message: MessageExt) -> LocalTransactionState:
        asked.append(message.body_bytes)
        return said.get(message.message_id, UNKNOWN)

    async with local_cluster(tmp_path, settings=SETTINGS) as cluster:
        namesrvs = [cluster.namesrv_address]
        await create_topic(namesrvs, TOPIC, queues=1)
        async with connect(namesrvs) as client:
            config = TransactionProducerConfig(topics=(TOPIC,), end_timeout_s=60)
            async with TransactionProducer(client, "billing", check, config) as producer:

                async def local_of(half: HalfMessage) -> LocalTransactionState:
                    body = bytes(half.message.body)
                    said[half.transaction_id] = ROLLBACK if b"rollback" in body else COMMIT
                    if b"kill" in body:
                        killed = await kill_leader(cluster)
                        restarts.append(killed)
                    return said[half.transaction_id]

                restarts: list[str] = []
                for body in (b"1 commit", b"2 rollback, kill", b"3 commit, kill"):
                    result = await producer.send_in_transaction(Message(TOPIC, body), local_of)
                    assert result.is_confirmed, result.end_error
                    for name in restarts:
                        await cluster.start(name)
                    restarts.clear()
                assert await seen(client) == [b"1 commit", b"3 commit, kill"]

                # No producer answers, and the leader is killed: the next one asks.
                half = await producer.begin(Message(TOPIC, b"4 left open"))
                await producer.leave_open(half)
                said[half.transaction_id] = COMMIT
                killed = await kill_leader(cluster)
                with trio.fail_after(60):
                    while (await seen(client))[-1] != b"4 left open":
                        await trio.sleep(0.1)
                await cluster.start(killed)
                await cluster.wait_healthy()
                assert asked.count(b"4 left open") >= 1
                # It comes once, however often its end is sent.
                assert await producer.end(half, COMMIT)
                assert await seen(client) == [b"1 commit", b"3 commit, kill", b"4 left open"]
