"""SIGTERM under load: what is in work is answered, nothing is lost, the next start replays nothing.

Real processes.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, Node, local_cluster
from dledger.cli.log_verify import verify_store
from dledger.client.connect import connect
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import MQError
from tests.harness.cluster_questions import create_topic
from tests.harness.eventually import WITHIN_S, wait_logged
from tests.harness.local_settings import SMALL_FILES
from tests.harness.stored_messages import bodies_at

pytestmark = pytest.mark.slow

SENDERS = 32
ENOUGH = 500
"""Acknowledged sends before and after the signal, so that it comes under load."""


@dataclass
class Sends:
    """What the senders were answered."""

    acknowledged: list[bytes] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """Failed sends by outcome."""
    texts: set[str] = field(default_factory=set)
    stop: bool = False

    async def run(self, producer: Producer, number: int) -> None:
        """Send until the stop."""
        sent = 0
        while not self.stop:
            body = b"%d-%d" % (number, sent)
            sent += 1
            try:
                await producer.send(Message("t", body))
            except MQError as error:
                self.refused[error.outcome] += 1
                self.texts.add(str(error))
                await trio.sleep(0.05)
            else:
                self.acknowledged.append(body)

    async def reach(self, count: int) -> None:
        """Wait until *count* sends were acknowledged."""
        with trio.fail_after(WITHIN_S):
            while len(self.acknowledged) < count:
                await trio.sleep(0.01)


@asynccontextmanager
async def sending(cluster: LocalCluster, config: ProducerConfig) -> AsyncIterator[Sends]:
    """Send to a new topic while the block runs, which begins when many were acknowledged."""
    await create_topic([cluster.namesrv_address], "t", queues=4)
    sends = Sends()
    async with (
        connect([cluster.namesrv_address]) as client,
        Producer(client, "p", config) as producer,
        trio.open_nursery() as nursery,
    ):
        for number in range(SENDERS):
            nursery.start_soon(sends.run, producer, number)
        await sends.reach(ENOUGH)
        yield sends
        sends.stop = True


def abort_file(node: Node) -> Path:
    assert node.store_path is not None
    return node.store_path / "abort"


async def second_start(node: Node) -> dict[str, object]:
    return await wait_logged(node, "broker_started", 2)


async def test_sigterm_of_the_leader_fails_no_send(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, settings=SMALL_FILES) as cluster:
        leader = await cluster.wait_leader()
        node = cluster.brokers[leader]
        config = ProducerConfig(send_timeout_s=60)
        async with sending(cluster, config) as sends:
            assert abort_file(node).exists()
            assert await cluster.stop(leader) == 0
            assert not abort_file(node).exists()
            await sends.reach(len(sends.acknowledged) + ENOUGH)
        assert (sends.refused, sends.texts) == (Counter(), set())
        found = Counter(await bodies_at(cluster.namesrv_address, "t"))
        assert [body for body in sends.acknowledged if not found[body]] == []
        await cluster.start(leader)
        await cluster.wait_caught_up(leader, WITHIN_S)
        started = await second_start(node)
        assert (started["replayed"], started["unclean"]) == (0, False)
    for node in cluster.brokers.values():
        assert not abort_file(node).exists()
        assert node.store_path is not None
        assert verify_store(node.store_path).problems == []


async def test_sigterm_of_a_broker_alone_answers_every_send(tmp_path: Path) -> None:
    """No member takes over: a send is acknowledged or not stored. Unknown would be a loss."""
    async with local_cluster(tmp_path, brokers=1, settings=SMALL_FILES) as cluster:
        # Long enough for a disk that is slow: an answer that comes too late is an unknown outcome.
        config = ProducerConfig(send_timeout_s=8, retry_unknown=False)
        async with sending(cluster, config) as sends:
            assert await cluster.stop("n0") == 0
        assert set(sends.refused) <= {"not_stored"}, sends.texts
        await cluster.start("n0")
        await cluster.wait_healthy()
        assert (await second_start(cluster.brokers["n0"]))["replayed"] == 0
        # All that was acknowledged, and nothing that was refused.
        assert Counter(await bodies_at(cluster.namesrv_address, "t")) == Counter(sends.acknowledged)


async def test_kill_leaves_the_abort_file_for_the_next_start(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, brokers=1, settings=SMALL_FILES) as cluster:
        node = cluster.brokers["n0"]
        await cluster.kill("n0", signal.SIGKILL)
        assert abort_file(node).read_text().isdigit()
        await cluster.start("n0")
        await cluster.wait_healthy()
        assert (await second_start(node))["unclean"] is True


async def test_a_second_signal_does_not_wait_and_still_loses_nothing(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, brokers=1, settings=SMALL_FILES) as cluster:
        config = ProducerConfig(send_timeout_s=1.5)
        node = cluster.brokers["n0"]
        async with sending(cluster, config) as sends:
            assert node.process is not None
            node.process.send_signal(signal.SIGTERM)
            await cluster.kill("n0", signal.SIGTERM)
        await cluster.start("n0")
        await cluster.wait_healthy()
        found = Counter(await bodies_at(cluster.namesrv_address, "t"))
        assert [body for body in sends.acknowledged if not found[body]] == []
