"""A simulated minute of a whole cluster: leader killed, split, and all its power cut.

Run as a program it prints a line of JSON per seed: ``python -m tests.simulation.first_scenario 1``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.jepsen_like.simulation.node import ClientNode
from dledger.jepsen_like.simulation.world import World, run_world
from dledger.jepsen_like.simulation.world_settings import WorldSettings

TOPIC = "Orders"
LOAD_S = 60.0
Place = tuple[int, int]


@dataclass
class Seen:
    """What the clients recorded."""

    acknowledged: dict[bytes, Place] = field(default_factory=dict)
    unknown: set[bytes] = field(default_factory=set)
    refused: int = 0
    read: dict[Place, bytes] = field(default_factory=dict)


class Scenario:
    """The programs of the clients and the course of events."""

    def __init__(self) -> None:
        self.seen = Seen()

    async def produce(self, node: ClientNode) -> None:
        assert node.instance is not None
        config = ProducerConfig(send_timeout_s=6.0)
        async with Producer(node.instance, "producers", config) as producer:
            number = 0
            while True:
                number += 1
                body = b"%s-%d-%d" % (node.name.encode(), node.incarnation, number)
                try:
                    sent = await producer.send(Message(TOPIC, body))
                except ClientError as error:
                    if error.outcome == "unknown":
                        self.seen.unknown.add(body)
                    else:
                        self.seen.refused += 1
                else:
                    self.seen.acknowledged[body] = (sent.message_queue.queue_id, sent.queue_offset)
                await node.clock.sleep(0.4)

    async def read_all(self, node: ClientNode) -> None:
        assert node.instance is not None
        async with PullConsumer(node.instance, "readers") as consumer:
            queues = await consumer.fetch_message_queues(TOPIC)
            async for queue, result in consumer.drain(queues):
                for message in result.messages:
                    place = (queue.queue_id, message.queue_offset)
                    self.seen.read[place] = bytes(message.body)

    async def run(self, world: World) -> dict[str, Any]:
        leader = await world.wait_for_leader()
        await world.client("producer").run(self.produce)
        await world.sleep_until(10)

        leader.kill()
        await world.sleep_until(20)
        await leader.start()
        await world.sleep_until(26)

        leader = await world.wait_for_leader()
        others = [name for name in world.brokers if name != leader.name]
        world.network.cut_between([leader.name], [*others, *world.name_servers])
        await world.sleep_until(36)
        world.network.mend_all(reset=0.5)
        await world.sleep_until(44)

        for node in world.brokers.values():
            node.power_cut()
        await world.sleep_until(47)
        for node in world.brokers.values():
            await node.start()
        await world.sleep_until(LOAD_S)
        world.clients["producer"].kill()

        await world.heal()
        await world.wait_for_agreement()
        reader = world.client("reader")
        await reader.run(self.read_all)
        assert reader.process is not None or reader.error is None
        if reader.process is not None:
            await reader.process.ended.wait()
        if reader.error is not None:
            raise reader.error
        return self.result(world)

    def result(self, world: World) -> dict[str, Any]:
        seen = self.seen
        lost = [b.decode() for b, place in seen.acknowledged.items() if seen.read.get(place) != b]
        bodies = set(seen.read.values())
        return {
            "digest": world.digest,
            "elapsed_s": round(world.elapsed_s, 6),
            "acknowledged": len(seen.acknowledged),
            "unknown": len(seen.unknown),
            "unknown_that_appeared": len(seen.unknown & bodies),
            "refused": seen.refused,
            "read": len(seen.read),
            "lost": lost,
            "sometimes": dict(sorted(world.sometimes.items())),
        }


def play(seed: int, settings: WorldSettings | None = None) -> dict[str, Any]:
    """Return what the scenario came to with *seed*."""
    return run_world(seed, Scenario().run, settings)


def main(arguments: Sequence[str]) -> None:
    for seed in arguments:
        print(json.dumps(play(int(seed))))


if __name__ == "__main__":
    main(sys.argv[1:])
