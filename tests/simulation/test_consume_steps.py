"""Exactly-once steps under faults: every message of one topic is worked into the other once."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.errors import ClientError, StepOvertakenError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.jepsen_like.simulation.node import ClientNode
from dledger.jepsen_like.simulation.world import World, run_world
from tests.harness.leader_faults import pause_and_cut_leaders

pytestmark = pytest.mark.slow

MESSAGES = 400
WORKERS = ("w0", "w1", "w2")


class Outcomes:
    """How the steps of all workers ended."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.overtaken: Counter[str] = Counter()
        self.failed = 0


async def make_topics(node: ClientNode) -> None:
    assert node.instance is not None
    async with Producer(node.instance, "makers") as producer:
        for topic in ("In", "Out"):
            made = False
            while not made:
                with suppress(ClientError):
                    queues = await producer.publish_queues("TBW102")
                    queue = MessageQueue(topic, queues[0].broker_name, 0)
                    await producer.send_to(queue, Message(topic, b"made"))
                    made = True
                await node.clock.sleep(0.5)
        for number in range(MESSAGES):
            stored = False
            while not stored:
                with suppress(ClientError):
                    await producer.send_to(queue_of("In", queues), Message("In", b"%d" % number))
                    stored = True


def queue_of(topic: str, queues: tuple[MessageQueue, ...]) -> MessageQueue:
    return MessageQueue(topic, queues[0].broker_name, 1)


async def work(node: ClientNode, name: str, outcomes: Outcomes) -> None:
    """Work with the others of the group on the same queue, which no rebalance shares out."""
    assert node.instance is not None
    async with PullConsumer(node.instance, "workers") as consumer:
        while True:
            try:
                queue = sorted(await consumer.fetch_message_queues("In"))[1]
                offset = await consumer.committed_offset(queue) or 0
                while True:
                    result = await consumer.pull(queue, offset, max_messages=8, timeout_s=0)
                    bodies = [bytes(message.body) for message in result.messages]
                    if bodies:
                        async with consumer.transaction(timeout_s=4) as step:
                            for body in bodies:
                                step.send(Message("Out", b"from %s" % body))
                            step.commit(queue, result.next_begin_offset)
                        outcomes.stored += bodies
                        assert len(step.stored) == len(bodies)
                        offset = result.next_begin_offset
                    await node.clock.sleep(0.2)
            except StepOvertakenError:
                outcomes.overtaken[name] += 1
            except ClientError:
                outcomes.failed += 1
                await node.clock.sleep(0.2)


async def read_all(node: ClientNode, bodies: list[bytes]) -> None:
    assert node.instance is not None
    async with PullConsumer(node.instance, "readers") as consumer:
        for queue in await consumer.fetch_message_queues("Out"):
            async for message in consumer.iter_messages(queue, 0):
                bodies.append(bytes(message.body))


def test_each_message_is_worked_on_exactly_once() -> None:
    outcomes, bodies = Outcomes(), list[bytes]()

    async def main(world: World) -> None:
        await world.wait_for_leader()
        await world.client("maker").run(make_topics)
        await world.sleep(5)
        for name in WORKERS:

            async def run(node: ClientNode, name: str = name) -> None:
                await work(node, name, outcomes)

            await world.client(name).run(run)
        await pause_and_cut_leaders(world, calm_s=6, off_s=12)
        await world.sleep(40)
        for name in WORKERS:
            world.clients[name].kill()
        await world.wait_for_agreement()

        async def read(node: ClientNode) -> None:
            await read_all(node, bodies)

        await world.client("reader").run(read)
        await world.sleep(10)

    run_world(7, main)
    worked = Counter(body for body in bodies if body.startswith(b"from "))
    assert sorted(worked) == sorted(b"from %d" % number for number in range(MESSAGES))
    assert max(worked.values()) == 1, worked.most_common(3)
    assert len(set(outcomes.stored)) == len(outcomes.stored), "two steps stored one message"
    assert sum(outcomes.overtaken.values()) > 10
    assert outcomes.failed > 3
