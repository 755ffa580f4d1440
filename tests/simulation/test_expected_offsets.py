"""Writers that expect offsets, through fail-overs: each offset is won by exactly one."""

from __future__ import annotations

from contextlib import suppress

import pytest

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.errors import (
    BrokerRefusedError,
    ClientError,
    OffsetNotExpectedError,
    UnknownOutcomeError,
)
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.jepsen_like.simulation.node import ClientNode
from dledger.jepsen_like.simulation.world import World, run_world
from tests.harness.leader_faults import pause_and_cut_leaders

pytestmark = pytest.mark.slow

WRITERS = ("w0", "w1", "w2")


class Claims:
    """What writers were answered."""

    def __init__(self) -> None:
        self.won: dict[bytes, int] = {}
        self.unknown: set[bytes] = set()
        self.lost: set[bytes] = set()

    async def write(self, node: ClientNode, name: str) -> None:
        """Expect one offset after the other, each time with another body."""
        assert node.instance is not None
        async with Producer(node.instance, name) as producer:
            queue = sorted(await producer.publish_queues("Orders"))[1]
            expected = number = 0
            while True:
                number += 1
                body = b"%s-%d" % (name.encode(), number)
                try:
                    result = await producer.send_to(
                        queue, Message("Orders", body), expected_queue_offset=expected, timeout_s=3
                    )
                    self.won[body] = result.queue_offset
                    assert result.queue_offset == expected
                    expected += 1
                except OffsetNotExpectedError as error:
                    self.lost.add(body)
                    expected = error.next_offset
                except UnknownOutcomeError:
                    self.unknown.add(body)
                except BrokerRefusedError:
                    self.lost.add(body)
                except ClientError:
                    self.lost.add(body)
                await node.clock.sleep(0.05)


async def make_topic(node: ClientNode) -> None:
    assert node.instance is not None
    async with Producer(node.instance, "makers") as producer:
        while True:
            with suppress(ClientError):
                queues = await producer.publish_queues("TBW102")
                queue = MessageQueue("Orders", queues[0].broker_name, 0)
                await producer.send_to(queue, Message("Orders", b"made"))
                return
            await node.clock.sleep(0.5)


async def read_all(node: ClientNode, bodies: list[bytes]) -> None:
    assert node.instance is not None
    async with PullConsumer(node.instance, "readers") as consumer:
        queue: MessageQueue = sorted(await consumer.fetch_message_queues("Orders"))[1]
        offset = 0
        while True:
            result = await consumer.pull(queue, offset, timeout_s=0)
            if not result.messages:
                return
            bodies.extend(bytes(message.body) for message in result.messages)
            offset = result.next_begin_offset


def test_each_expected_offset_is_won_by_exactly_one() -> None:
    claims, bodies = Claims(), list[bytes]()

    async def main(world: World) -> None:
        await world.wait_for_leader()
        await world.client("maker").run(make_topic)
        await world.sleep(5)
        for name in WRITERS:

            async def write(node: ClientNode, name: str = name) -> None:
                await claims.write(node, name)

            await world.client(name).run(write)
        await pause_and_cut_leaders(world, calm_s=8)
        await world.sleep(8)
        for name in WRITERS:
            world.clients[name].kill()
        await world.wait_for_agreement()

        async def read(node: ClientNode) -> None:
            await read_all(node, bodies)

        await world.client("reader").run(read)
        await world.sleep(5)

    run_world(5, main)
    assert len(claims.won) > 100
    assert len(set(claims.won.values())) == len(claims.won), "an offset has two winners"
    assert {offset: body for body, offset in claims.won.items()}.items() <= dict(
        enumerate(bodies)
    ).items()
    assert len(set(bodies)) == len(bodies)
    assert not claims.lost & set(bodies), "what was refused is stored"
    assert set(bodies) <= set(claims.won) | claims.unknown | _cut_short(claims, bodies)
    assert {body.split(b"-")[0] for body in claims.won} == {name.encode() for name in WRITERS}


def _cut_short(claims: Claims, bodies: list[bytes]) -> set[bytes]:
    """Return what writers were sending when they were killed."""
    answered = set(claims.won) | claims.unknown | claims.lost
    return {
        b"%s-%d" % (name.encode(), 1 + sum(body.startswith(name.encode()) for body in answered))
        for name in WRITERS
    }
