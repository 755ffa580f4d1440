"""A log of many small messages: brokers stay small while it grows, and start fast on it.

The log is made once for the module, through the SDK's batches, by three real brokers, and once
more by one broker alone, whose start is over when it serves as leader.
"""

import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, Node, lay_out, local_cluster, status_of
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from tests.harness.cluster_questions import create_topic
from tests.harness.eventually import all_statuses, wait_logged
from tests.harness.extent import EXTENT

# The limit is for a hang: that many sends take as long as the machine takes.
pytestmark = [pytest.mark.slow, pytest.mark.hunt]

MESSAGES = 2_000_000
"""Memory grows over the first half of them: caches get full."""
MESSAGES_ALONE = 400_000 * EXTENT
"""As many with the extent of a hunt."""
BATCH = 200
SENDERS = 8
SAMPLES = 20
ANONYMOUS_BYTES_MAX = 300 << 20
FLAT_BYTES = 16 << 20
"""What the second half may add: allocator noise, and no more than eight bytes a message."""
EMPTY_STARTS = 4
"""A start reads no more of a long log than of an empty one: as many starts of an empty broker,
measured in the same test on the same machine, are noise."""
UNCHECKED = 200_000
"""Sent just before a SIGKILL, in less than one checkpoint interval."""
SETTINGS: dict[str, object] = {"store.mapped_file_size_commit_log": 256 << 20}


@dataclass
class LongLog:
    """The folder of a stopped cluster, and what was measured while its log grew."""

    folder: Path
    brokers: int
    anonymous: dict[str, list[int]] = field(default_factory=dict)
    """Broker to its bytes after each twentieth of the messages, and after all were read."""
    exit_codes: list[int | None] = field(default_factory=list)

    def cluster(self) -> LocalCluster:
        """Return the cluster on this folder, not started."""
        return lay_out(self.folder, brokers=self.brokers, settings=SETTINGS)


def anonymous_bytes(pid: int | None) -> int:
    """Return the resident memory of a process that is not page cache."""
    found = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            found += int(line.split()[1]) * 1024
    return found


def sample(cluster: LocalCluster, log: LongLog) -> None:
    for name, node in cluster.brokers.items():
        log.anonymous.setdefault(name, []).append(anonymous_bytes(node.pid))


async def send_many(cluster: LocalCluster, log: LongLog, messages: int) -> None:
    turns = iter(range(messages // BATCH))
    sent = 0

    async def send(producer: Producer) -> None:
        nonlocal sent
        for turn in turns:
            body = b"%016d" % turn
            await producer.send_batch([Message("small", body) for _ in range(BATCH)])
            sent += BATCH
            if sent % (MESSAGES // SAMPLES) == 0:
                sample(cluster, log)

    async with (
        connect([cluster.namesrv_address]) as client,
        Producer(client, "fill") as producer,
        trio.open_nursery() as nursery,
    ):
        for _ in range(SENDERS):
            nursery.start_soon(send, producer)


async def read_all(cluster: LocalCluster) -> int:
    found = 0
    async with (
        connect([cluster.namesrv_address]) as client,
        PullConsumer(client, "all") as consumer,
    ):
        queues = await consumer.fetch_message_queues("small")
        async for _, result in consumer.drain(queues):
            found += len(result.messages)
    return found


def made(folder: Path, brokers: int, messages: int, *, read: bool) -> LongLog:
    """Fill a new cluster, *read* it back once and stop it cleanly."""
    log = LongLog(folder, brokers)

    async def make() -> None:
        async with local_cluster(folder, brokers=brokers, settings=SETTINGS) as cluster:
            await create_topic([cluster.namesrv_address], "small", queues=4)
            began = time.monotonic()
            await send_many(cluster, log, messages)
            print(f"\n{messages} messages into {brokers}: {time.monotonic() - began:.1f} s")
            for name in cluster.brokers:
                await cluster.wait_caught_up(name)
            if read:
                assert await read_all(cluster) == messages
                sample(cluster, log)
        log.exit_codes = [node.process.returncode for node in cluster.nodes if node.process]

    trio.run(make)
    return log


@pytest.fixture(scope="module")
def three_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LongLog]:
    folder = tmp_path_factory.mktemp("long-on-three")
    yield made(folder, 3, MESSAGES, read=True)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def one_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LongLog]:
    folder = tmp_path_factory.mktemp("long-on-one")
    yield made(folder, 1, MESSAGES_ALONE, read=False)
    shutil.rmtree(folder)


def test_memory_stays_flat_while_many_messages_come(three_brokers: LongLog) -> None:
    for name, samples in three_brokers.anonymous.items():
        print(f"{name}: anonymous MiB " + " ".join(str(size >> 20) for size in samples))
        assert len(samples) == SAMPLES + 1
        assert max(samples) < ANONYMOUS_BYTES_MAX, name
        assert samples[SAMPLES - 1] - samples[SAMPLES // 2 - 1] < FLAT_BYTES, name


async def seconds_to_start(
    cluster: LocalCluster, name: str, wanted: Mapping[str, object]
) -> tuple[float, dict[str, object]]:
    """Start a broker; return the seconds until its status is as wanted, and what it logged."""
    node: Node = cluster.brokers[name]
    logged_before = node.log_path.stat().st_size if node.log_path.exists() else 0
    began = time.monotonic()
    await cluster.start(name)
    with trio.fail_after(60):
        while node.running:
            status = await status_of(node.address, timeout_s=1.0) or {}
            if all(_reached(status.get(key), value) for key, value in wanted.items()):
                took_s = time.monotonic() - began
                return took_s, await wait_logged(node, "broker_started", since=logged_before)
            await trio.sleep(0.01)
    raise AssertionError(node.last_log_lines())


def _reached(value: object, wanted: object) -> bool:
    if isinstance(value, int) and isinstance(wanted, int):
        return value >= wanted
    return value == wanted


async def applied_index(cluster: LocalCluster, name: str) -> int:
    index: int = (await all_statuses(cluster))[name]["applied_index"]
    return index


async def empty_start_s(folder: Path) -> float:
    """Return the seconds until a broker on an empty folder leads, here and now."""
    cluster = lay_out(folder, brokers=1, settings=SETTINGS)
    try:
        await cluster.start("namesrv")
        took_s, _ = await seconds_to_start(cluster, "n0", {"serving": True})
    finally:
        await cluster.stop_all()
    print(f"an empty one: {took_s:.2f} s")
    return took_s


async def test_broker_leads_soon_after_a_clean_stop(one_broker: LongLog, tmp_path: Path) -> None:
    assert one_broker.exit_codes == [0, 0]
    empty_s = await empty_start_s(tmp_path / "empty")
    cluster = one_broker.cluster()
    try:
        took_s, started = await seconds_to_start(cluster, "n0", {"serving": True})
        print(f"clean stop to serving leader, alone: {took_s:.2f} s")
        assert (started["replayed"], started["unclean"]) == (0, False)
        assert took_s < EMPTY_STARTS * empty_s
    finally:
        await cluster.stop_all()


async def test_broker_leads_after_sigkill_sooner_than_the_sends_took(
    one_broker: LongLog, tmp_path: Path
) -> None:
    """It is killed under load, with as much behind its checkpoint as there can be."""
    empty_s = await empty_start_s(tmp_path / "empty")
    cluster = one_broker.cluster()
    try:
        await cluster.start("namesrv")
        await cluster.start("n0")
        await cluster.wait_healthy()
        began = time.monotonic()
        await send_many(cluster, LongLog(one_broker.folder, 1), UNCHECKED)
        sending_s = time.monotonic() - began
        before = await applied_index(cluster, "n0")
        await cluster.kill("n0", signal.SIGKILL)
        wanted = {"serving": True, "applied_index": before}
        took_s, started = await seconds_to_start(cluster, "n0", wanted)
        print(f"SIGKILL to serving leader, alone: {took_s:.2f} s, {started['replayed']} replayed")
        assert started["unclean"]
        assert took_s < EMPTY_STARTS * empty_s + sending_s
        await cluster.wait_healthy()
        assert await read_all(cluster) == MESSAGES_ALONE + UNCHECKED
    finally:
        await cluster.stop_all()


async def test_a_member_of_three_is_back_in_time_after_stop_and_kill(
    three_brokers: LongLog, tmp_path: Path
) -> None:
    assert three_brokers.exit_codes == [0, 0, 0, 0]
    empty_s = await empty_start_s(tmp_path / "empty")
    cluster = three_brokers.cluster()
    try:
        for node in cluster.nodes:
            await cluster.start(node.name)
        leader = await cluster.wait_healthy()
        name = next(other for other in cluster.brokers if other != leader)
        before = await applied_index(cluster, leader)
        assert await cluster.stop(name) == 0
        took_s, started = await seconds_to_start(cluster, name, {"applied_index": before})
        print(f"clean stop to all applied, one of three: {took_s:.2f} s")
        assert (started["replayed"], started["unclean"]) == (0, False)
        assert took_s < EMPTY_STARTS * empty_s
        await cluster.wait_healthy()
        began = time.monotonic()
        await send_many(cluster, LongLog(three_brokers.folder, 3), UNCHECKED)
        sending_s = time.monotonic() - began
        before = await applied_index(cluster, leader)
        await cluster.kill(name, signal.SIGKILL)
        took_s, started = await seconds_to_start(cluster, name, {"applied_index": before})
        print(f"SIGKILL to all applied, one of three: {took_s:.2f} s")
        assert started["unclean"]
        assert took_s < EMPTY_STARTS * empty_s + sending_s
    finally:
        await cluster.stop_all()
