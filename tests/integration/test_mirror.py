"""A cluster is mirrored under load, through kills of the mirrors and of the target's leader.

What is at both is read by `tests.harness.raw_pull`, which shares no code with client or broker.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, lay_out
from dledger.cli.topic_command import create_topic
from dledger.client.admin.admin import Admin
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.transaction_producer import TransactionProducer
from dledger.commitlog.errors import MQError
from tests.harness.eventually import eventually, look_until
from tests.harness.module_cluster import running
from tests.harness.raw_pull import SEND_BACK, ask, committed, pull_all
from tests.harness.stored_fields import kept_fields

pytestmark = [pytest.mark.slow, pytest.mark.side_by_side]

SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": 4 << 20,
    "store.max_hash_slot_num": 100_000,
    "store.max_index_num": 1_000_000,
    "store.scrub_bytes_per_s": 1 << 20,
}
QUEUES = 3
GROUP = "billing"
TOPICS = {"orders": QUEUES, "bills": 1, "later": 1, "%RETRY%billing": 1}


class MirrorProcess:
    """``dledger mirror`` in a process of its own."""

    def __init__(self, source: LocalCluster, target: LocalCluster, log: Path) -> None:
        self._command = [
            *(sys.executable, "-m", "dledger", "mirror"),
            *("--from", source.namesrv_address, "--to", target.namesrv_address),
        ]
        self._log = log.open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=self._log, stdout=self._log)

    def kill(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, "it ended by itself"
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()


@contextmanager
def mirrors(source: LocalCluster, target: LocalCluster, log: Path) -> Iterator[list[MirrorProcess]]:
    made = [MirrorProcess(source, target, log) for _ in range(2)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def run(*words: str) -> tuple[int, str, str]:
    """Run a command; return its exit status and what it prints to both streams."""
    done = subprocess.run(
        [sys.executable, "-m", "dledger", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout, " ".join(done.stderr.split())


async def committed_at_once(_: object) -> LocalTransactionState:
    return LocalTransactionState.COMMIT


async def send_all_kinds(namesrv: str, first: int, count: int) -> None:
    """Send plain, tagged, large (compressed), delayed and transactional messages."""
    async with (
        connect([namesrv]) as client,
        Producer(client, "p", ProducerConfig(compress_over_bytes=4096)) as producer,
        TransactionProducer(client, "tp", committed_at_once) as transactions,
    ):
        for number in range(first, first + count):
            body = b"message %d" % number + (bytes(6000) if number % 20 == 0 else b"")
            message = Message("orders", body, tags=f"t{number % 3}", keys=f"k{number} all")
            await producer.send(message)
            if number % 50 == 0:
                await producer.send(Message("later", body, delay_level=1))
                await transactions.send_in_transaction(Message("bills", body), committed_at_once)


async def read_some(cluster: LocalCluster) -> None:
    """Consume a part, give one message back to be retried, and commit."""
    leader = await leader_address(cluster)
    async with (
        connect([cluster.namesrv_address]) as client,
        PullConsumer(client, GROUP) as consumer,
    ):
        for queue in await consumer.fetch_message_queues("orders"):
            await consumer.commit_offset(queue, 10 + queue.queue_id)
        (bills,) = await consumer.fetch_message_queues("bills")
        await consumer.commit_offset(bills, await consumer.max_offset(bills))
        message = (await consumer.pull(bills, 3)).messages[0]
        back = {
            "offset": str(message.phy_offset), "group": GROUP, "delayLevel": "1",
            "originMsgId": message.message_id, "originTopic": "bills", "unitMode": "false",
            "maxReconsumeTimes": "3",
        }  # fmt: skip
        header, _ = await trio.to_thread.run_sync(ask, leader, SEND_BACK, back)
        assert header["code"] == 0, header
        await look_until(lambda: retried(cluster), lambda end: end == 1)


async def retried(cluster: LocalCluster) -> int:
    """Return how many messages wait to be retried."""
    return (await ends(cluster)).get((f"%RETRY%{GROUP}", 0), 0)


async def leader_address(cluster: LocalCluster) -> str:
    async with connect([cluster.namesrv_address]) as client:
        info = await Admin(client).cluster_info()
        (group,) = info.broker_addr_table.values()
        return group.broker_addrs[0]


async def ends(cluster: LocalCluster) -> dict[tuple[str, int], int]:
    """Return the end of each queue of the topics that are there."""
    found = {}
    async with connect([cluster.namesrv_address]) as client:
        admin = Admin(client)
        for topic in set(TOPICS) & set(await admin.topic_list()):
            for queue, (_, end) in (await admin.offsets(topic)).items():
                found[topic, queue.queue_id] = end
    return found


async def target_has(cluster: LocalCluster, count: int) -> None:
    async def look() -> int:
        return sum((await ends(cluster)).values())

    await look_until(look, lambda found: found >= count)


def same_bytes(source: str, target: str) -> dict[tuple[str, int], int]:
    """Compare all that both hold by raw pulls; return how many messages each queue has."""
    counts = {}
    for topic, queues in TOPICS.items():
        for queue_id in range(queues):
            here = [kept_fields(one) for one in pull_all(source, topic, queue_id)]
            there = [kept_fields(one) for one in pull_all(target, topic, queue_id)]
            assert here == there, f"{topic} {queue_id}"
            offsets = [struct.unpack_from(">q", one, 20)[0] for one in here]
            assert offsets == list(range(len(here))), f"{topic} {queue_id} has gaps"
            counts[topic, queue_id] = len(here)
    return counts


async def under_kills(source: LocalCluster, target: LocalCluster, tmp_path: Path) -> None:
    await create_topic([source.namesrv_address], "orders", queues=QUEUES)
    await create_topic([source.namesrv_address], "bills", queues=1)
    await create_topic([source.namesrv_address], "later", queues=1)
    log = tmp_path / "mirror.log"
    with mirrors(source, target, log) as (first, second):
        first.start()
        await send_all_kinds(source.namesrv_address, 0, 400)
        await target_has(target, 100)
        first.kill()
        await send_all_kinds(source.namesrv_address, 400, 400)
        first.start()
        second.start()
        await target_has(target, 450)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all_kinds, source.namesrv_address, 800, 400)
            leader = await target.wait_leader()
            await target.kill(leader)
            await target.wait_leader(other_than=leader)
            first.kill()
            await target.start(leader)
            first.start()
        await read_some(source)

        async def is_there() -> bool:
            try:
                return await ends(target) == await ends(source)
            except MQError:
                return False

        await eventually("the target ends where the source does", is_there, 120)


@pytest.mark.timeout(600)
def test_mirror_through_kills_has_the_same_bytes(tmp_path: Path) -> None:
    with (
        running(lay_out(tmp_path / "source", brokers=1, settings=SETTINGS)) as source,
        running(lay_out(tmp_path / "target", brokers=3, settings=SETTINGS)) as target,
    ):
        trio.run(under_kills, source, target, tmp_path)
        where = ("--from", source.namesrv_address, "--to", target.namesrv_address)
        status, _, notes = run("mirror", "--once", "-o", "json", *where)
        assert status == 0, notes
        leaders = trio.run(leader_address, source), trio.run(leader_address, target)
        counts = same_bytes(*leaders)
        assert sum(counts[("orders", number)] for number in range(QUEUES)) == 1200
        assert counts["bills", 0] == counts["later", 0] == 24
        for topic, queues in TOPICS.items():
            for queue_id in range(queues):
                here, there = (committed(one, GROUP, topic, queue_id) for one in leaders)
                assert here == there, f"{topic} {queue_id}"
        assert committed(leaders[1], GROUP, "orders", 2) == 12
        status, text, notes = run("mirror", "verify", "-o", "json", *where)
        assert status == 0, notes
        found = json.loads(text)
        assert found["same"]
        assert {row["compared"] for row in found["queues"] if row["topic"] == "bills"} == {24}
        assert_verify_sees_a_stray_message(target, where)


def assert_verify_sees_a_stray_message(target: LocalCluster, where: tuple[str, ...]) -> None:
    """A producer that sends to the target stops that queue, and no other."""

    async def stray() -> None:
        async with (
            connect([target.namesrv_address]) as client,
            Producer(client, "stray") as producer,
        ):
            await producer.send(Message("bills", zlib.compress(b"stray")))

    trio.run(stray)
    status, text, _ = run("mirror", "verify", "-o", "json", *where)
    rows = {(row["topic"], row["queue"]): row for row in json.loads(text)["queues"]}
    assert status == 1
    assert rows["bills", 0]["verdict"] == "ahead"
    assert rows["orders", 0]["verdict"] == "same"
    status, text, notes = run("mirror", "--once", "-o", "json", *where)
    assert status == 1
    assert "1 queues stopped" in notes
    stopped = {(row["topic"], row["queue"]): row["stopped"] for row in json.loads(text)}
    assert "let nothing but the mirror write to the target" in stopped["bills", 0]
    assert not stopped["orders", 0]
