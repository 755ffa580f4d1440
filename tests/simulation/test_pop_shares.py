"""A thousand receivers on four queues: all get the same, and what a killed one had comes again."""

from collections import Counter

import pytest

from dledger.client.consumer.simple_consumer import SimpleConsumer
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.jepsen_like.simulation.node import ClientNode
from dledger.jepsen_like.simulation.world import World, run_world

RECEIVERS = 1000
KILLED = 100
MESSAGES = 6_000
SENT_PER_S = 400
WORK_S = 2.0
"""From receipt to acknowledgement: many messages are out when receivers are killed."""
INVISIBLE_S = 20.0
SPREAD_MAX = 1.5
AGAIN_WITHIN_S = 1.0
ON_ITS_WAY_S = 0.05
"""A message's time begins when the leader hands it out, a little before it is received."""


class Shares:
    """Which receiver got what, and when."""

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self.acknowledged: Counter[bytes] = Counter()
        self.out: dict[bytes, tuple[str, float]] = {}
        """What is not acknowledged: its receiver, and until when it is that one's."""
        self.lost: dict[bytes, tuple[str, float]] = {}
        """What was out of those that were killed."""
        self.again_s: dict[bytes, float] = {}

    async def receive(self, node: ClientNode) -> None:
        """Receive one message at a time."""
        assert node.instance is not None
        subscriptions: dict[str, str | SubscriptionExpression] = {"Shared": "*"}
        async with SimpleConsumer(
            node.instance, "sharers", subscriptions, invisible_s=INVISIBLE_S
        ) as consumer:
            while True:
                try:
                    for message in await consumer.receive(1, wait_s=15):
                        body, now_s = bytes(message.body), node.clock.monotonic()
                        self.received[node.name] += 1
                        if body in self.lost:
                            self.again_s.setdefault(body, now_s)
                        self.out[body] = (node.name, now_s + INVISIBLE_S)
                        await node.clock.sleep(WORK_S)
                        await consumer.ack(message)
                        self.acknowledged[body] += 1
                        self.out.pop(body, None)
                except ClientError:
                    await node.clock.sleep(0.5)

    def kill(self, names: set[str]) -> None:
        """Note what these have."""
        self.lost = {body: had for body, had in self.out.items() if had[0] in names}


async def send_all(node: ClientNode) -> None:
    assert node.instance is not None
    async with Producer(node.instance, "senders") as producer:
        for first in range(0, MESSAGES, 50):
            messages = [Message("Shared", b"%d" % number) for number in range(first, first + 50)]
            await producer.send_batch(messages)
            await node.clock.sleep(50 / SENT_PER_S)


@pytest.mark.slow
@pytest.mark.hunt
def test_thousand_receivers_share_and_lose_nothing() -> None:
    shares = Shares()
    names = [f"r{number}" for number in range(RECEIVERS)]

    async def main(world: World) -> None:
        await world.wait_for_leader()
        await world.client("sender").run(send_all)
        await world.sleep(1.0)  # of a thousand connections at once a NameServer refuses some
        for name in names:
            await world.client(name).run(shares.receive)
        await world.sleep(MESSAGES / SENT_PER_S / 2)
        shares.kill(set(names[:KILLED]))
        for name in names[:KILLED]:
            await world.clients[name].kill()
        await world.sleep(MESSAGES / SENT_PER_S / 2 + INVISIBLE_S + 5)

    run_world(3, main)
    living = [shares.received[name] for name in names[KILLED:]]
    assert max(living) <= SPREAD_MAX * min(living), (min(living), max(living))
    assert len(shares.lost) > KILLED / 2
    late = {
        body: shares.again_s.get(body, float("inf")) - until_s
        for body, (_, until_s) in shares.lost.items()
    }
    assert -ON_ITS_WAY_S < min(late.values()) <= max(late.values()) <= AGAIN_WITHIN_S, late
    assert len(shares.acknowledged) == MESSAGES
    assert max(shares.acknowledged.values()) == 1
