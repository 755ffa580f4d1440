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

from dledger.cli.local_cluster import LocalCluster, lay_out
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.errors import ClientError, UnknownOutcomeError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from tests.harness.cluster_questions import create_topic
from tests.harness.eventually import eventually, look_until
from tests.harness.leader_kill import kill_leaders, read_all
from tests.harness.local_settings import SMALL_FILES
from tests.harness.module_cluster import running
from tests.harness.shipped_files import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("idempotent")]

KILLS = 6
SENDERS = 24
QUEUES = 4
GUIDE = ROOT / "docs" / "concepts" / "idempotent-producer.md"


@dataclass
class SendRecord:
    """What senders were answered: key to queue and offset; keys whose fate they never learnt."""

    stored: dict[str, tuple[int, int]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    delayed: set[str] = field(default_factory=set)
    stop: trio.Event = field(default_factory=trio.Event)


async def send_singles(producer: Producer, number: int, reported: SendRecord) -> None:
    queue = MessageQueue("kills", producer_group_of(producer), number % QUEUES)
    sent = 0
    while not reported.stop.is_set():
        key = f"{number}-{sent:06d}"
        sent += 1
        try:
            result = await producer.send_to(queue, Message("kills", key.encode()))
        except UnknownOutcomeError:
            reported.unknown.append(key)
        else:
            reported.stored[key] = (result.message_queue.queue_id, result.queue_offset)


def producer_group_of(producer: Producer) -> str:
    topic = producer._topics.known("kills")
    assert topic is not None
    queue = topic.queues[0]
    return queue.broker_name


async def send_batches(producer: Producer, reported: SendRecord) -> None:
    sent = 0
    while not reported.stop.is_set():
        keys = [f"batch-{sent:06d}-{place}" for place in range(5)]
        sent += 1
        messages = [Message("kills", key.encode()) for key in keys]
        try:
            results = await producer.send_batch(messages)
        except UnknownOutcomeError:
            reported.unknown += keys
        else:
            for key, result in zip(keys, results, strict=True):
                reported.stored[key] = (result.message_queue.queue_id, result.queue_offset)


async def send_delayed(producer: Producer, reported: SendRecord) -> None:
    sent = 0
    while not reported.stop.is_set():
        key = f"delayed-{sent}"
        sent += 1
        try:
            await producer.send(Message("delayed", key.encode(), delay_level=1))
        except UnknownOutcomeError:
            reported.unknown.append(key)
        else:
            reported.delayed.add(key)
        await trio.sleep(0.01)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("idempotent")
    with running(lay_out(folder, settings=SMALL_FILES)) as cluster:
        yield cluster


async def test_killed_leaders_make_no_duplicates_and_no_unknown_sends(
    cluster: LocalCluster,
) -> None:
    reported = SendRecord()
    namesrvs = [cluster.namesrv_address]
    await create_topic(namesrvs, "kills", queues=QUEUES)
    await create_topic(namesrvs, "delayed", queues=QUEUES)
    config = ProducerConfig(send_timeout_s=60)
    async with connect(namesrvs) as client:
        async with Producer(client, "p", config) as producer, trio.open_nursery() as nursery:
            await producer.send(Message("kills", b"first"))
            for number in range(SENDERS):
                nursery.start_soon(send_singles, producer, number, reported)
            nursery.start_soon(send_batches, producer, reported)
            nursery.start_soon(send_delayed, producer, reported)
            await kill_leaders(cluster, [], KILLS, led_s=0.5, down_s=0.2)
            reported.stop.set()
        await trio.sleep(3.0)  # the last delayed ones become due, and those delivered twice
        delayed = await look_until(
            lambda: read_all(client, "delayed"),
            lambda found: reported.delayed <= {bytes(m.body).decode() for m in found.values()},
        )
        stored = await read_all(client, "kills")
    bodies = {place: bytes(message.body).decode() for place, message in stored.items()}
    assert [key for key, count in Counter(bodies.values()).items() if count > 1] == []
    assert [key for key, place in reported.stored.items() if bodies.get(place) != key] == []
    deliveries = Counter(bytes(message.body).decode() for message in delayed.values())
    assert [key for key in reported.delayed if deliveries[key] != 1] == []
    assert max(deliveries.values()) == 1
    # A minute is longer than every fail-over: no send ended as unknown.
    assert reported.unknown == []
    assert len(bodies) == len(reported.stored) + 1
    assert producer.counters.retries >= KILLS, "nothing was repeated: the test shows nothing"
    assert reported.stored
    for number in range(SENDERS):
        mine = sorted(key for key in reported.stored if key.startswith(f"{number}-"))
        assert [reported.stored[key] for key in mine] == sorted(
            reported.stored[key] for key in mine
        )


async def put_in(producer: Producer, stop: trio.Event, sent: list[bytes]) -> None:
    while not stop.is_set():
        body = b"%d" % len(sent)
        await producer.send(Message("steps-in", body))
        sent.append(body)


async def take_steps(
    cluster: LocalCluster, stop: trio.Event, stored: list[bytes], ends: Counter[str]
) -> None:
    """Work on both queues in each step, until both are empty after *stop*."""
    async with (
        connect([cluster.namesrv_address]) as client,
        PullConsumer(client, "steppers") as consumer,
    ):
        queues = await consumer.fetch_message_queues("steps-in")
        while True:
            try:
                was_last, bodies, commits = stop.is_set(), list[bytes](), {}
                for queue in queues:
                    offset = await consumer.committed_offset(queue) or 0
                    result = await consumer.pull(queue, offset, timeout_s=0)
                    bodies += [bytes(message.body) for message in result.messages]
                    commits[queue] = offset + len(result.messages)
                if not bodies and was_last:
                    return
                async with consumer.transaction(timeout_s=3) as step:
                    for body in bodies:
                        step.send(Message("steps-out", body))
                    for queue, offset in commits.items():
                        step.commit(queue, offset)
                stored += bodies
                ends["stored"] += 1
            except ClientError as error:
                ends[type(error).__name__] += 1


async def test_killed_leaders_make_no_step_twice(cluster: LocalCluster) -> None:
    namesrvs = [cluster.namesrv_address]
    for topic in ("steps-in", "steps-out"):
        await create_topic(namesrvs, topic, queues=2)
    stop, sent = trio.Event(), list[bytes]()
    stored, ends = list[bytes](), Counter[str]()

    async def one_more(end: str) -> None:
        before = ends[end]

        async def there_is() -> bool:
            return ends[end] > before

        await eventually(f"a step ends as {end}", there_is)

    async with connect(namesrvs) as client:
        config = ProducerConfig(send_timeout_s=60)
        async with Producer(client, "step-inputs", config) as producer, trio.open_nursery() as all_:
            for _ in range(3):
                all_.start_soon(take_steps, cluster, stop, stored, ends)
            all_.start_soon(put_in, producer, stop, sent)
            # Steps are taken all the time: some are on their way at each kill.
            for _ in range(4):
                await one_more("stored")
                await kill_leaders(cluster, [], 1, led_s=0, down_s=0.2)
            await one_more("stored")
            await one_more("StepOvertakenError")
            stop.set()
        found = await read_all(client, "steps-out")
    print(f"{len(sent)} messages, {dict(ends)}")
    worked = Counter(bytes(message.body) for message in found.values())
    assert [body for body in sent if worked[body] != 1] == []
    assert worked.total() >= len(sent) > 0
    assert max(worked.values()) == 1
    assert len(set(stored)) == len(stored)


async def test_the_example_of_the_guide_runs(cluster: LocalCluster, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    program = tmp_path / "example.py"
    program.write_text(example.replace("127.0.0.1:9876", cluster.namesrv_address))
    await create_topic([cluster.namesrv_address], "orders", queues=2)
    done = await trio.run_process([sys.executable, str(program)], capture_stdout=True, cwd=ROOT)
    queue_id, offset = done.stdout.split()
    assert int(queue_id) in (0, 1)
    assert int(offset) == 0
