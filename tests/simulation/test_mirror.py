"""Two mirrors write one queue of a simulated group through fail-overs: it is the source's copy.

The source is in memory; pauses, power cuts and kills of a mirror's machine come in virtual time.
Replicas are compared with a reference replica throughout, the begin of the queue included.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from dledger.client.admin.copies import ClusterCopies
from dledger.client.core.errors import ClientError
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.simulation.node import ClientNode
from dledger.jepsen_like.simulation.world import World, run_world
from dledger.mirror.queue_copy import QueueCopy
from dledger.remoting.protocol.bodies import TopicConfig
from tests.harness.leader_faults import pause_and_cut_leaders
from tests.harness.memory_queues import STORE_HOST_V6, MemoryQueues
from tests.harness.stored_fields import kept_fields

pytestmark = pytest.mark.slow

GROUP = "sim"
HERE = MessageQueue("Orders", "elsewhere", 1)
THERE = MessageQueue("Orders", GROUP, 1)
BEGIN = 1000


class Copies:
    """A source that grows, and how often each mirror stored something."""

    def __init__(self) -> None:
        self.source = MemoryQueues()
        self.source.first[HERE] = BEGIN
        self.stored: dict[str, int] = {}
        self.found: list[bytes] = []
        self.is_over = False

    def produce(self, count: int) -> None:
        for _ in range(count):
            number = self.source.end(HERE)
            host = STORE_HOST_V6 if number % 7 == 0 else b""
            self.source.produce(HERE, b"message %d" % number, store_host=host)

    async def make_topic(self, node: ClientNode) -> None:
        assert node.instance is not None
        cluster = ClusterCopies(node.instance)
        while True:
            with suppress(MQError):
                assert await cluster.broker_names() == [GROUP]
                await cluster.put_topics(
                    GROUP, [TopicConfig("Orders", read_queue_nums=2, write_queue_nums=2)]
                )
                return
            await node.clock.sleep(0.5)

    async def mirror(self, node: ClientNode) -> None:
        """Copy without end, with a source that is always slower than a step."""
        assert node.instance is not None
        cluster, copy = ClusterCopies(node.instance), QueueCopy(HERE, THERE)
        while True:
            with suppress(ClientError):
                await cluster.broker_names()
                await copy.step(self.source, cluster)
                assert not copy.stopped, copy.stopped
            self.stored[node.name] = copy.copied_messages
            if not self.is_over:
                self.produce(3)
            await node.clock.sleep(0.1)

    async def read(self, node: ClientNode) -> None:
        assert node.instance is not None
        cluster = ClusterCopies(node.instance)
        await cluster.broker_names()
        assert await cluster.bounds(THERE) == (BEGIN, self.source.end(HERE))
        offset = BEGIN
        while records := await cluster.read(THERE, offset, 1 << 20):
            self.found.extend(bytes(record) for record in records)
            offset += len(records)


@pytest.mark.parametrize("seed", [3, 4])
def test_mirrors_through_failovers_store_each_once(seed: int) -> None:
    copies = Copies()

    async def main(world: World) -> None:
        await world.wait_for_leader()
        await world.client("maker").run(copies.make_topic)
        await world.sleep(3)
        copies.produce(20)
        for name in ("m0", "m1"):
            await world.client(name).run(copies.mirror)
        await pause_and_cut_leaders(world, calm_s=8)
        world.clients["m0"].kill()
        copies.is_over = True
        await world.sleep(15)
        await world.wait_for_agreement()
        await world.client("reader").run(copies.read)
        await world.sleep(5)

    run_world(seed, main)
    sent = copies.source.records[HERE]
    assert len(sent) > 300
    assert [kept_fields(one) for one in copies.found] == [kept_fields(one) for one in sent]
    assert min(copies.stored.values()) > 0, "one mirror never came first"
