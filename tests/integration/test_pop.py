"""POP by the SDK over three brokers, while leaders are killed: nothing lost, nothing done again."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

import pytest
import trio

from dledger.client.admin.admin import Admin
from dledger.client.admin.groups import FIRST_MS
from dledger.client.consumer.simple_consumer import SimpleConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BrokerUnreachableError,
    ReceiptStaleError,
    RequestFailedError,
    RequestTimedOutError,
)
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.testing.clusters import EmbeddedCluster, embedded_cluster

MESSAGES = 120
WORKERS = 5
pytestmark = pytest.mark.slow


async def send(client: ClientInstance, count: int, topic: str = "T") -> set[bytes]:
    bodies = {b"%d" % number for number in range(count)}
    async with Producer(client, "p") as producer:
        for body in sorted(bodies):
            await producer.send(Message(topic, body))
    return bodies


async def test_each_message_is_done_once_whatever_leader_dies() -> None:
    done: Counter[bytes] = Counter()
    unsure: set[bytes] = set()
    async with (
        embedded_cluster(topics={"T": 2}) as cluster,
        cluster.client() as client,
        cluster.client() as killing,
    ):
        bodies = await send(killing, MESSAGES)

        async with SimpleConsumer(client, "g", {"T": "*"}, invisible_s=3) as consumer:

            async def work() -> None:
                while done.keys() | unsure < bodies:
                    await _one_round(consumer, done, unsure)

            with trio.fail_after(200):
                async with trio.open_nursery() as nursery:
                    for _ in range(WORKERS):
                        nursery.start_soon(work)
                    await trio.sleep(0.5)
                    await _kill_and_restart(cluster)
                    await trio.sleep(1)
                    await _kill_and_restart(cluster)
                await trio.sleep(3.5)
                left = await consumer.receive(wait_s=0)
    assert {bytes(message.body) for message in left} <= unsure - done.keys()
    assert done.keys() | unsure == bodies
    assert [body for body, count in done.items() if count > 1] == []


async def _one_round(consumer: SimpleConsumer, done: Counter[bytes], unsure: set[bytes]) -> None:
    try:
        received = await consumer.receive(max_messages=3, wait_s=1)
    except (RequestFailedError, BrokerUnreachableError):
        return
    for message in received:
        try:
            await consumer.ack(message)
        except ReceiptStaleError:
            pass  # another one has it
        except (RequestTimedOutError, BrokerUnreachableError):
            unsure.add(message.body)
        else:
            done[message.body] += 1


async def _kill_and_restart(cluster: EmbeddedCluster) -> None:
    leader = await cluster.leader()
    await cluster.kill(leader)
    await trio.sleep(2)
    await cluster.start(leader)


@pytest.mark.parametrize("is_connected", [True, False])
async def test_reset_by_the_sdk_ends_what_is_out(is_connected: bool) -> None:
    async with embedded_cluster(topics={"T": 1}) as cluster, cluster.client() as client:
        await send(client, 3)
        async with AsyncExitStack() as stack:
            other = await stack.enter_async_context(cluster.client())
            first = SimpleConsumer(other, "g", {"T": "*"}, invisible_s=60)
            await stack.enter_async_context(first)
            old = await first.receive(max_messages=3, wait_s=5)
            await first.ack(old[0])
            if not is_connected:
                await stack.aclose()
            reset = await Admin(client).reset_offsets("g", "T", FIRST_MS)
            changed = reset.notified if is_connected else reset.stored
            assert list(changed.values()) == [0]
        async with SimpleConsumer(client, "g", {"T": "*"}, invisible_s=60) as consumer:
            for message in old:
                with pytest.raises(ReceiptStaleError):
                    await consumer.ack(message)
            again = await consumer.receive(max_messages=3, wait_s=5)
            assert [bytes(message.body) for message in again] == [b"0", b"1", b"2"]
            await consumer.ack_all(again)
            assert await consumer.receive(wait_s=0) == []
