"""Messages with a time to live through the SDK: which reads get them, and which do not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from dledger.client.admin.admin import Admin
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.simple_consumer import SimpleConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import MessageIllegalError
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.client.producer.transaction_producer import TransactionProducer
from dledger.testing import EmbeddedCluster, embedded_cluster
from tests.harness.raw_pull import pull_all

QUEUE = MessageQueue("T", "broker-a", 0)
TTL_MS = 20_000
OVER_S = TTL_MS / 1000 + 1


@asynccontextmanager
async def cluster_of_one() -> AsyncIterator[tuple[EmbeddedCluster, ClientInstance]]:
    async with embedded_cluster(brokers=1, topics={"T": 1}) as cluster, cluster.client() as client:
        yield cluster, client


async def read(client: ClientInstance, *, with_expired: bool = False) -> list[bytes]:
    """Return what a consumer gets from the first offset on, over as many pulls as it takes."""
    consumer, found, offset = PullConsumer(client, "readers"), list[bytes](), 0
    while True:
        result = await consumer.pull(QUEUE, offset, timeout_s=0, with_expired=with_expired)
        found += [message.body for message in result.messages]
        if result.next_begin_offset == offset:
            return found
        offset = result.next_begin_offset


async def raw_offsets(client: ClientInstance) -> list[int]:
    """Return the offsets that a client without any code of this project gets."""
    leader = client.leaders.address("broker-a")
    assert leader is not None
    found = await trio.to_thread.run_sync(lambda: list(pull_all(leader, "T", 0)))
    return [int.from_bytes(record[20:28], "big") for record in found]


async def test_expired_messages_are_passed_over_and_kept(mock_clock: MockClock) -> None:
    mock_clock.rate = 1.0
    async with cluster_of_one() as (cluster, client), Producer(client, "p") as producer:
        for number in range(6):
            ttl_ms = TTL_MS if number % 2 else 0
            sent = await producer.send(Message("T", b"%d" % number, tags="a", ttl_ms=ttl_ms))
            assert sent.queue_offset == number
        assert len(await read(client)) == 6
        await cluster.advance(OVER_S)
        assert await read(client) == [b"0", b"2", b"4"]
        assert await raw_offsets(client) == [0, 2, 4]
        every = [b"%d" % number for number in range(6)]
        assert await read(client, with_expired=True) == every
        stored = await Admin(client).read_queue(QUEUE, 0, 10)
        assert [message.body for message in stored] == every
        assert stored[1].properties["EXPIRE_AFTER_MS"] == str(TTL_MS)
        async with SimpleConsumer(client, "poppers", {"T": "*"}) as popper:
            received = await popper.receive(10, invisible_s=30.0)
            assert [message.body for message in received] == [b"0", b"2", b"4"]


async def test_delayed_and_transactional_count_from_delivery(mock_clock: MockClock) -> None:
    mock_clock.rate = 1.0
    async with cluster_of_one() as (cluster, client), Producer(client, "p") as producer:

        async def commit(_: object) -> LocalTransactionState:
            await cluster.advance(TTL_MS / 2000)
            return LocalTransactionState.COMMIT

        await producer.send(Message("T", b"late", delay_ms=2 * TTL_MS, ttl_ms=TTL_MS))
        async with TransactionProducer(client, "tp", commit) as transactions:
            await transactions.send_in_transaction(Message("T", b"decided", ttl_ms=TTL_MS), commit)
        await cluster.advance(TTL_MS / 2000 + 1)
        assert await read(client) == [b"decided"], "its time began when it was committed"
        await cluster.advance(TTL_MS / 1000)
        with trio.fail_after(60):
            while await read(client) != [b"late"]:
                await cluster.advance(1)
        await cluster.advance(OVER_S)
        assert await read(client) == []
        assert await read(client, with_expired=True) == [b"decided", b"late"]


@pytest.mark.parametrize("ttl_ms", [-1, (1 << 53) + 1])
async def test_time_to_live_out_of_bounds_is_not_sent(ttl_ms: int) -> None:
    async with cluster_of_one() as (_, client), Producer(client, "p") as producer:
        with pytest.raises(MessageIllegalError, match="ttl_ms"):
            await producer.send(Message("T", b"a", ttl_ms=ttl_ms))
        with pytest.raises(MessageIllegalError, match="nor such that expire"):
            await producer.send_batch([Message("T", b"a", ttl_ms=5)])
        assert await read(client) == []
