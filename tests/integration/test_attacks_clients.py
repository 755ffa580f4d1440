"""Clients that mean harm, on the client ports of three brokers and a NameServer under light load.

Default limits throughout; only the files are smaller. What is compared is measured beside it: the
latency of a client and the memory of a process before and during an attack.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from tests.harness.cluster_questions import create_topic

pytestmark = [pytest.mark.slow, pytest.mark.hunt]

SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": 64 << 20,
    "store.mapped_file_size_consume_queue": 20_000,
    "store.max_hash_slot_num": 10_000,
    "store.max_index_num": 40_000,
}
TIMES_QUIET = 5
TIMES_IDLE_MEMORY = 2
QUIET_SENDS = 300
ATTACKED_SENDS = 300
"""Of a hundred the 99th percentile is all but the longest: one slow flush of the disk."""
PAUSE_S = 0.005
HUNG_S = 300.0
"""It takes less than a minute; after this something waits without end."""


class Load:
    """One client that sends now and then, and how long each send took."""

    def __init__(self, client: ClientInstance, producer: Producer) -> None:
        self.client = client
        self.producer = producer
        self.sent = 0

    async def p99_s(self, sends: int) -> float:
        took = []
        for _ in range(sends):
            began_s = trio.current_time()
            await self.producer.send(Message("t", str(self.sent).encode()))
            took.append(trio.current_time() - began_s)
            self.sent += 1
            await trio.sleep(PAUSE_S)
        return sorted(took)[math.ceil(len(took) * 0.99) - 1]


def memory_kib(pid: int | None) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1])


@asynccontextmanager
async def attack(kind: str, *addresses: str) -> AsyncIterator[Callable[[], dict[str, int]]]:
    """Run an attacker while the block runs; yield its report, complete once it is over."""
    done: dict[str, int] = {}
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "tests.harness.attacker", kind, *addresses], stdin=-1, stdout=-1
    )
    assert process.stdin
    assert process.stdout
    try:
        first = bytearray()
        while b"\n" not in first:
            data = await process.stdout.receive_some()
            assert data, "the attacker ended early"
            first += data
        yield lambda: done
        await process.stdin.aclose()
        rest = bytearray()
        async for data in process.stdout:
            rest += data
        done.update(json.loads(rest.splitlines()[-1]))
        await process.wait()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def new_client_gets_in(cluster: LocalCluster) -> None:
    async with connect([cluster.namesrv_address]) as client, Producer(client, "new") as producer:
        await producer.send(Message("t", b"new"))


async def test_hostile_clients_end_nothing_and_slow_others_little(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, settings=SETTINGS) as cluster:
        leader = cluster.brokers[await cluster.wait_leader()]
        addresses = (leader.address, cluster.namesrv_address)
        pids = {node.name: node.pid for node in cluster.nodes}
        await create_topic([cluster.namesrv_address], "t", queues=4)
        with trio.fail_after(HUNG_S):
            async with (
                connect([cluster.namesrv_address]) as client,
                Producer(client, "load") as producer,
            ):
                load = Load(client, producer)
                await load.p99_s(QUIET_SENDS // 3)
                quiet_s = await load.p99_s(QUIET_SENDS)
                idle = {name: memory_kib(pid) for name, pid in pids.items()}
                found: dict[str, tuple[float, dict[str, float], dict[str, int]]] = {}
                for name in ("half-frames", "idle", "drip", "mutate"):
                    async with attack(name, *addresses) as done:
                        p99_s = await load.p99_s(ATTACKED_SENDS)
                        await new_client_gets_in(cluster)
                        grown = {node: memory_kib(pid) / idle[node] for node, pid in pids.items()}
                    found[name] = (p99_s, grown, done())
                quiet_s = max(quiet_s, await load.p99_s(QUIET_SENDS))
                async with PullConsumer(client, "c") as consumer:
                    queues = await consumer.fetch_message_queues("t")
                    read = [
                        bytes(message.body)
                        async for _, result in consumer.drain(queues)
                        for message in result.messages
                    ]
        assert {node.name: node.pid for node in cluster.nodes if node.running} == pids
        assert sorted(int(body) for body in read if body.isdigit()) == list(range(load.sent))
        assert found["half-frames"][2]["mib"] >= 32
        assert found["idle"][2]["opened"] == 2 * 4_096
        assert found["mutate"][2]["frames"] >= 20_000
        assert found["mutate"][2]["answers"] > 100
        for name, (p99_s, grown, _) in found.items():
            assert max(grown.values()) <= TIMES_IDLE_MEMORY, (name, grown)
            assert p99_s <= TIMES_QUIET * quiet_s, (name, p99_s, quiet_s)
