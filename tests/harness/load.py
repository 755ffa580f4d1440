"""Clients that send without a pause while a test does something, and what they were answered."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from dledger.cli.local_cluster import LocalCluster
from dledger.client.connect import connect
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from tests.harness.cluster_questions import create_topic
from tests.harness.eventually import LOOK_S, eventually
from tests.harness.stored_messages import bodies_by_place

TOPIC = "t"
REACHED_S = 120.0


@dataclass
class Load:
    """What the senders were answered."""

    acknowledged: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Queue and offset of an acknowledgement to the body that was sent."""
    failed: list[MQError] = field(default_factory=list)
    is_over: bool = False

    async def send(self, producer: Producer, number: int, body_bytes: int) -> None:
        """Send until it is over."""
        sent = 0
        while not self.is_over:
            body = (b"%d-%d" % (number, sent)).ljust(body_bytes, b".")
            sent += 1
            try:
                result = await producer.send(Message(TOPIC, body))
            except MQError as error:
                self.failed.append(error)
                await trio.sleep(LOOK_S)
            else:
                self.acknowledged[result.message_queue.queue_id, result.queue_offset] = body

    async def more(self, count: int) -> None:
        """Wait until *count* more sends were acknowledged."""
        end = len(self.acknowledged) + count

        async def are_acknowledged() -> bool:
            return len(self.acknowledged) >= end

        await eventually(f"{count} more sends", are_acknowledged, REACHED_S)

    async def is_stored(self, cluster: LocalCluster) -> None:
        """Demand that every acknowledged message is where its acknowledgement has it."""
        assert missing_in(await stored(cluster), self.acknowledged) == []


def missing_in(
    found: dict[tuple[int, int], bytes], acknowledged: dict[tuple[int, int], bytes]
) -> list[bytes]:
    """Return the acknowledged messages that are not found in their places."""
    return [body for at, body in acknowledged.items() if found.get(at) != body]


async def stored(cluster: LocalCluster) -> dict[tuple[int, int], bytes]:
    """Return queue and offset to body of all that is in the topic."""
    return await bodies_by_place(cluster.namesrv_address, TOPIC)


@asynccontextmanager
async def loaded(
    cluster: LocalCluster,
    *,
    senders: int = 48,
    calm: int = 2_000,
    body_bytes: int = 256,
    config: ProducerConfig | None = None,
) -> AsyncIterator[Load]:
    """Keep sending while the block runs, which begins when *calm* sends were acknowledged."""
    namesrvs = [cluster.namesrv_address]
    await create_topic(namesrvs, TOPIC, queues=4)
    load, config = Load(), config or ProducerConfig(send_timeout_s=60)
    async with (
        connect(namesrvs) as client,
        Producer(client, "p", config) as producer,
        trio.open_nursery() as nursery,
    ):
        for number in range(senders):
            nursery.start_soon(load.send, producer, number, body_bytes)
        await load.more(calm)
        yield load
        load.is_over = True
