"""Leaders are killed under load and every send repeats what got no answer: nothing is doubled.

Real processes, sockets, files and signals. The guide's example runs here, too.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from client.connect import connect
from client.consumer.pull_consumer import PullConsumer
from client.core.client_instance import ClientInstance
from client.core.errors import UnknownOutcomeError
from client.core.message import Message
from client.core.message_ext import MessageExt
from client.core.route import MessageQueue
from client.producer.config import ProducerConfig
from client.producer.producer import Producer
from dledger.cli.local_cluster import LocalCluster, lay_out
from dledger.cli.topic_command import create_topic
from tests.harness.eventually import WITHIN_S, look_until
from tests.harness.module_cluster import running
from tests.harness.shipped_files import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.side_by_side, pytest.mark.xdist_group("idempotent")]

SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": 16 << 20,
    "store.max_hash_slot_num": 100_000,
    "store.max_index_num": 1_000_000,
}
KILLS = 6
SENDERS = 24
QUEUES = 4
GUIDE = ROOT / "docs" / "concepts" / "idempotent-producer.md"


@dataclass
class Told:
    """What senders were told: key to queue and offset; keys whose fate they never learnt."""

    stored: dict[str, tuple[int, int]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    delayed: set[str] = field(default_factory=set)
    stop: trio.Event = field(default_factory=trio.Event)


async def send_singles(producer: Producer, number: int, told: Told) -> None:
    queue = MessageQueue("kills", producer_group_of(producer), number % QUEUES)
    sent = 0
    while not told.stop.is_set():
        key = f"{number}-{sent:06d}"
        sent += 1
        try:
            result = await producer.send_to(queue, Message("kills", key.encode()))
        except UnknownOutcomeError:
            told.unknown.append(key)
        else:
            told.stored[key] = (result.message_queue.queue_id, result.queue_offset)


def producer_group_of(producer: Producer) -> str:
    topic = producer._topics.known("kills")
    assert topic is not None
    queue = topic.queues[0]
    return queue.broker_name


async def send_batches(producer: Producer, told: Told) -> None:
    sent = 0
    while not told.stop.is_set():
        keys = [f"batch-{sent:06d}-{place}" for place in range(5)]
        sent += 1
        messages = [Message("kills", key.encode()) for key in keys]
        try:
            results = await producer.send_batch(messages)
        except UnknownOutcomeError:
            told.unknown += keys
        else:
            for key, result in zip(keys, results, strict=True):
                told.stored[key] = (result.message_queue.queue_id, result.queue_offset)


async def send_delayed(producer: Producer, told: Told) -> None:
    sent = 0
    while not told.stop.is_set():
        key = f"delayed-{sent}"
        sent += 1
        try:
            await producer.send(Message("delayed", key.encode(), delay_level=1))
        except UnknownOutcomeError:
            told.unknown.append(key)
        else:
            told.delayed.add(key)
        await trio.sleep(0.01)


async def kill_leaders(cluster: LocalCluster) -> None:
    for _ in range(KILLS):
        leader = await cluster.wait_leader()
        await trio.sleep(0.5)
        await cluster.kill(leader)
        await cluster.wait_leader(other_than=leader, timeout_s=WITHIN_S)
        await trio.sleep(0.2)
        await cluster.start(leader)
        await cluster.wait_caught_up(leader)


async def read_all(client: ClientInstance, topic: str) -> dict[tuple[int, int], MessageExt]:
    async with PullConsumer(client, "readers") as consumer:
        found = {}
        queues = await consumer.fetch_message_queues(topic)
        async for queue, result in consumer.drain(queues):
            for message in result.messages:
                found[(queue.queue_id, message.queue_offset)] = message
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("idempotent")
    with running(lay_out(folder, settings=SETTINGS)) as cluster:
        yield cluster


async def test_killed_leaders_make_no_duplicates_and_no_unknown_sends(
    cluster: LocalCluster,
) -> None:
    told = Told()
    namesrvs = [cluster.namesrv_address]
    await create_topic(namesrvs, "kills", queues=QUEUES)
    await create_topic(namesrvs, "delayed", queues=QUEUES)
    config = ProducerConfig(send_timeout_s=60)
    async with connect(namesrvs) as client:
        async with Producer(client, "p", config) as producer, trio.open_nursery() as nursery:
            await producer.send(Message("kills", b"first"))
            for number in range(SENDERS):
                nursery.start_soon(send_singles, producer, number, told)
            nursery.start_soon(send_batches, producer, told)
            nursery.start_soon(send_delayed, producer, told)
            await kill_leaders(cluster)
            told.stop.set()
        await trio.sleep(3.0)  # the last delayed ones become due, and those delivered twice
        delayed = await look_until(
            lambda: read_all(client, "delayed"),
            lambda found: told.delayed <= {bytes(m.body).decode() for m in found.values()},
        )
        stored = await read_all(client, "kills")
    bodies = {place: bytes(message.body).decode() for place, message in stored.items()}
    assert [key for key, count in Counter(bodies.values()).items() if count > 1] == []
    assert [key for key, place in told.stored.items() if bodies.get(place) != key] == []
    deliveries = Counter(bytes(message.body).decode() for message in delayed.values())
    assert [key for key in told.delayed if deliveries[key] != 1] == []
    assert max(deliveries.values()) == 1
    # A minute is longer than every fail-over: nobody was left in doubt.
    assert told.unknown == []
    assert len(bodies) == len(told.stored) + 1
    assert producer.counters.retries >= KILLS, "nothing was repeated: the test shows nothing"
    assert len(told.stored) > 1000
    for number in range(SENDERS):
        mine = sorted(key for key in told.stored if key.startswith(f"{number}-"))
        assert [told.stored[key] for key in mine] == sorted(told.stored[key] for key in mine)


async def test_the_example_of_the_guide_runs(cluster: LocalCluster, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    program = tmp_path / "example.py"
    program.write_text(example.replace("127.0.0.1:9876", cluster.namesrv_address))
    await create_topic([cluster.namesrv_address], "orders", queues=2)
    done = await trio.run_process([sys.executable, str(program)], capture_stdout=True, cwd=ROOT)
    queue_id, offset = done.stdout.split()
    assert int(queue_id) in (0, 1)
    assert int(offset) == 0
