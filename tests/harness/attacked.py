"""A cluster under a light load while someone attacks it, and what holds afterwards."""

import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from dledger.cli.local_cluster import LocalCluster, Node
from dledger.client.connect import connect
from dledger.client.core.message import Message
from dledger.client.core.message_ext import SendResult
from dledger.client.producer.producer import Producer
from tests.harness.eventually import LOOK_S, all_statuses, eventually
from tests.harness.stored_messages import bodies_by_place

FORGED = b"FORGED by a stranger"
TIMES_IDLE_MEMORY = 2
QUIET_SENDS = 300
"""Of a hundred the 99th percentile is all but the longest: one slow flush of the disk."""
PAUSE_S = 0.005
HUNG_S = 300.0
"""An attack takes less than a minute; after this something waits without end."""


def memory_kib(node: Node, kind: str) -> int:
    """Return what a process has in memory: in all, ``VmRSS``, or beside files; 0 at its end."""
    size = re.search(rf"{kind}:\s+(\d+) kB", Path(f"/proc/{node.pid}/status").read_text())
    return int(size[1]) if size else 0


class Load:
    """One client that sends now and then; what was acknowledged, and how long each send took."""

    def __init__(self, producer: Producer, topic: str, nodes: list[Node]) -> None:
        self.acknowledged: list[tuple[bytes, SendResult]] = []
        self._took_s: list[float] = []
        self._producer = producer
        self._topic = topic
        self._nodes = nodes
        self.grown: dict[str, float] = {}
        """How many times its idle memory each process has had at most.

        Pages of log files do not count: they are the machine's cache, which takes them back.
        """

    async def run(self) -> None:
        while True:
            began_s, body = trio.current_time(), b"load %d" % len(self.acknowledged)
            result = await self._producer.send(Message(self._topic, body))
            self._took_s.append(trio.current_time() - began_s)
            self.acknowledged.append((body, result))
            await trio.sleep(PAUSE_S)

    async def watch_memory(self) -> None:
        idle_kib = {node.name: memory_kib(node, "VmRSS") for node in self._nodes}
        own_kib = {node.name: memory_kib(node, "RssAnon") for node in self._nodes}
        while True:
            for node in (each for each in self._nodes if each.running):
                more_kib = memory_kib(node, "RssAnon") - own_kib[node.name]
                times = 1 + more_kib / idle_kib[node.name]
                self.grown[node.name] = max(times, self.grown.get(node.name, 1.0))
            await trio.sleep(LOOK_S)

    async def p99_s(self, sends: int) -> float:
        """Return how long the longest but one in a hundred of the next *sends* take."""
        end = len(self._took_s) + sends

        async def are_sent() -> bool:
            return len(self._took_s) >= end

        await eventually(f"{sends} sends", are_sent, HUNG_S)
        return sorted(self._took_s[end - sends : end])[math.ceil(sends * 0.99) - 1]


@asynccontextmanager
async def attacked(cluster: LocalCluster, topic: str = "load") -> AsyncIterator[Load]:
    """Send while the block runs; then demand that no message is missing or forged.

    The group has its leader still, no process has ended, and none has more than twice its memory.
    """
    before = await all_statuses(cluster)
    async with connect([cluster.namesrv_address]) as client, Producer(client, "load") as producer:
        load = Load(producer, topic, cluster.nodes)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            await load.p99_s(QUIET_SENDS // 3)
            nursery.start_soon(load.watch_memory)
            yield load
            await load.p99_s(1)
            nursery.cancel_scope.cancel()
    stored = await bodies_by_place(cluster.namesrv_address, topic)
    assert not [body for body in stored.values() if FORGED in body]
    for body, result in load.acknowledged:
        assert stored[result.message_queue.queue_id, result.queue_offset] == body
    after = await all_statuses(cluster)
    assert {x["term"] for x in after.values()} == {x["term"] for x in before.values()}
    assert all(set(x["peers"]) < set(cluster.brokers) for x in after.values())
    assert all(node.running for node in cluster.nodes)
    assert all(times <= TIMES_IDLE_MEMORY for times in load.grown.values()), load.grown
