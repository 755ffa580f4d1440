"""Members of a consumer group in simulated clusters: which owns what, and what is received."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest
import trio

from dledger.client.admin.admin import Admin
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, DeliveredMessage
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.simulation.node import ClientNode
from dledger.jepsen_like.simulation.world import World, run_world
from dledger.remoting.protocol.bodies import MessageModel

pytestmark = pytest.mark.slow

TOPIC = "Orders"
QUEUES = 8
FIRST = PushConfig(consume_from=FROM_FIRST)


class Members:
    """Consumers on machines of their own, and what they received."""

    def __init__(self, world: World, config: PushConfig = FIRST) -> None:
        self.world = world
        self.config = config
        self.consumers: dict[str, PushConsumer] = {}
        self.heard: list[tuple[str, DeliveredMessage]] = []
        self.sent: list[bytes] = []
        self.leave: dict[str, trio.Event] = {}

    async def prepare(self) -> None:
        """Make the topic; the cluster serves when this returns."""
        await self.world.wait_for_leader()

        async def make(node: ClientNode) -> None:
            assert node.instance is not None
            while True:
                with suppress(MQError):
                    await Admin(node.instance).create_topic(TOPIC, queue_nums=QUEUES)
                    route = await node.instance.route(TOPIC, fresh=True)
                    if len(route.subscribe_queues) == QUEUES:
                        return
                await node.clock.sleep(0.5)

        await self.run_to_end("admin", make)

    async def run_to_end(self, name: str, program: Callable[[ClientNode], Awaitable[None]]) -> None:
        node = self.world.client(name)
        await node.run(program)
        if node.process is not None:
            await node.process.ended.wait()
        assert node.error is None

    async def join(self, name: str) -> None:
        """Start a member; it may own nothing yet when this returns."""
        await self.world.client(name).run(self._consume)

    async def _consume(self, node: ClientNode) -> None:
        async def listener(messages: Sequence[DeliveredMessage], context: ConsumeContext) -> None:
            self.heard += [(node.name, message) for message in messages]

        assert node.instance is not None
        leave = self.leave[node.name] = trio.Event()
        consumer = PushConsumer(node.instance, "group", listener, {TOPIC: "*"}, self.config)
        async with consumer:
            self.consumers[node.name] = consumer
            try:
                await leave.wait()
            finally:
                del self.consumers[node.name]

    async def kill(self, name: str) -> None:
        await self.world.clients[name].kill()
        self.consumers.pop(name, None)

    async def produce(self, node: ClientNode) -> None:
        """Send until cancelled, and remember what was acknowledged."""
        assert node.instance is not None
        async with Producer(node.instance, "p", ProducerConfig(send_timeout_s=6)) as producer:
            number = 0
            while True:
                number += 1
                body = b"%d" % number
                with suppress(ClientError):
                    await producer.send(Message(TOPIC, body))
                    self.sent.append(body)
                await node.clock.sleep(0.2)

    def owned(self) -> Counter[int]:
        return Counter(
            queue.queue_id
            for consumer in self.consumers.values()
            for queue in consumer.queues
            if queue.topic == TOPIC
        )

    def is_settled(self, *names: str) -> bool:
        return (
            sorted(self.consumers) == sorted(names)
            and all(any(q.topic == TOPIC for q in c.queues) for c in self.consumers.values())
            and self.owned() == Counter(range(QUEUES))
        )

    async def settle(self, *names: str, within_s: float = 3.0) -> None:
        """Wait until *names* own each queue once; fails after *within_s* of simulated time."""
        end_s = self.world.now_s + within_s
        while not self.is_settled(*names):
            assert self.world.now_s < end_s, (names, self.owned())
            await self.world.sleep(0.02)

    async def heard_all(self, within_s: float = 30.0) -> None:
        end_s = self.world.now_s + within_s
        while missing := set(self.sent) - {m.body_bytes for _, m in self.heard}:
            assert self.world.now_s < end_s, sorted(missing)
            await self.world.sleep(0.1)

    def changes(self) -> int:
        return sum(c.counts["rebalance_changes"] for c in self.consumers.values())


def test_joined_and_lost_members_count_within_three_seconds() -> None:
    async def main(world: World) -> None:
        members = Members(world)
        await members.prepare()
        await members.join("a")
        await members.settle("a")
        await world.client("p").run(members.produce)
        await world.sleep(10)
        await members.join("b")
        await members.settle("a", "b")
        assert sorted(members.owned().values()) == [1] * QUEUES
        await world.sleep(10)
        await members.join("c")
        await members.settle("a", "b", "c")
        await world.sleep(10)
        members.leave["b"].set()
        await world.sleep(0.5)  # it stops by itself
        await members.settle("a", "c")
        await world.sleep(10)
        await members.kill("a")
        await members.settle("c")
        await world.sleep(5)
        await world.clients["p"].kill()
        await members.heard_all()
        assert len(members.sent) > 150
        heard = [m.body_bytes for _, m in members.heard]
        # What was consumed between the last commit and the kill is all that may come twice.
        assert len(heard) - len(set(heard)) <= 40

    run_world(1, main)


def test_brokers_that_restart_one_after_the_other_move_no_queue() -> None:
    async def main(world: World) -> None:
        members = Members(world)
        await members.prepare()
        for name in ("a", "b", "c"):
            await members.join(name)
        await members.settle("a", "b", "c")
        await world.sleep(5)
        before = members.changes()
        for node in list(world.brokers.values()):
            await node.stop()
            await world.sleep(2)
            await node.start()
            await world.sleep(15)
        assert members.changes() == before
        await members.settle("a", "b", "c", within_s=0.1)

    run_world(4, main)


def test_broadcasting_members_keep_their_offsets_over_a_restart() -> None:
    async def main(world: World) -> None:
        config = PushConfig(
            consume_from=FROM_FIRST,
            message_model=MessageModel.BROADCASTING,
            offset_folder="/offsets",
        )
        members = Members(world, config)
        await members.prepare()
        await members.join("a")
        await members.join("b")
        await world.client("p").run(members.produce)
        await world.sleep(20)
        await world.clients["p"].kill()
        await world.sleep(2)
        for name in ("a", "b"):
            heard = [m.body_bytes for who, m in members.heard if who == name]
            assert sorted(heard) == sorted(members.sent)
        members.leave["a"].set()
        await world.sleep(8)
        count = len(members.heard)
        await members.kill("b")
        await world.clients["a"].start()
        await world.clients["b"].start()
        await world.sleep(20)
        # Nothing again for the one that stopped; for the other what came since its last write.
        again = members.heard[count:]
        assert {who for who, _ in again} <= {"b"}
        assert len(again) <= 40

    run_world(7, main)
