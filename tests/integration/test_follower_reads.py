"""Slow readers are sent to a follower; without a quorum what is stored can still be read.

Real processes, sockets, files and signals.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, lay_out, local_cluster
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.record import iter_records
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from tests.harness.cluster_questions import ask, create_topic
from tests.harness.eventually import WITHIN_S, look_until
from tests.harness.local_settings import SMALL_FILES
from tests.harness.module_cluster import heal, running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("follower-reads")]

EVERYBODY_IS_SLOW: dict[str, object] = {
    **SMALL_FILES,
    "store.access_message_in_memory_max_ratio": 0,
}


T = TypeVar("T")

ROUNDS = 5
"""So often is played what wants one leader: on a busy machine any second may elect one."""


async def in_one_term(cluster: LocalCluster, play: Callable[[str], Awaitable[T]]) -> T:
    """Return what *play* returns which is given the leader; play again when another one came to.

    Raises:
        Exception: What *play* raised under one leader.
        AssertionError: No leader stayed for as long as it takes.
    """
    for _ in range(ROUNDS):
        before = await _term(cluster)
        try:
            result = await play(before[0])
        except Exception:
            if await _term(cluster) == before:
                raise
        else:
            if await _term(cluster) == before:
                return result
    raise AssertionError(f"the leader changed {ROUNDS} times")


async def _term(cluster: LocalCluster) -> tuple[str, object]:
    """Return the leader and the term."""
    while True:
        leader = await cluster.wait_leader()
        status = (await cluster.statuses()).get(leader)
        if status is not None and status.get("serving"):
            return leader, status["term"]


async def pull(cluster: LocalCluster, name: str, offset: int, topic: str = "T") -> RemotingCommand:
    """Ask one member as RocketMQ's clients do."""
    return await ask(
        cluster.brokers[name].address,
        RequestCode.PULL_MESSAGE,
        {
            "consumerGroup": "slow",
            "topic": topic,
            "queueId": "0",
            "queueOffset": str(offset),
            "maxMsgNums": "4",
            "sysFlag": "4",
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subscription": "*",
            "subVersion": "0",
        },
    )


def bodies(answer: RemotingCommand) -> list[bytes]:
    return [bytes(record.body) for record in iter_records(bytes(answer.body))]


def broker_id(name: str) -> int:
    return int(name[1:]) + 1


async def fill(namesrvs: list[str], count: int, topic: str = "T") -> None:
    await create_topic(namesrvs, topic, queues=1)
    queue = MessageQueue(topic, "broker-a", 0)
    async with connect(namesrvs) as client, Producer(client, "p") as producer:
        for number in range(count):
            await producer.send_to(queue, Message(topic, b"%d" % number))


def followers_of(cluster: LocalCluster, leader: str) -> list[str]:
    return sorted(name for name in cluster.brokers if name != leader)


async def suggested(
    cluster: LocalCluster, leader: str, follower: str, topic: str = "T"
) -> RemotingCommand:
    """Wait until a slow reader is sent to a follower: a leader has to hear of it first."""
    return await look_until(
        partial(pull, cluster, leader, 0, topic),
        lambda answer: answer.ext.get("suggestWhichBrokerId") == str(broker_id(follower)),
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running(lay_out(tmp_path_factory.mktemp("slow"), settings=EVERYBODY_IS_SLOW)) as cluster:
        yield cluster


@pytest.fixture
async def cluster(shared: LocalCluster) -> AsyncIterator[LocalCluster]:
    """Three brokers that run and take every reader for a slow one."""
    yield shared
    await heal(shared)


async def test_slow_reader_finds_the_same_at_a_follower(cluster: LocalCluster) -> None:
    await fill([cluster.namesrv_address], 20)

    async def play(leader: str) -> str:
        followers = followers_of(cluster, leader)
        for follower in followers:
            await cluster.wait_caught_up(follower)
        first = await suggested(cluster, leader, followers[0])
        assert (first.code, bodies(first)) == (0, [b"0", b"1", b"2", b"3"])
        there = await pull(cluster, followers[0], 0)
        assert (there.code, bytes(there.body)) == (0, bytes(first.body))
        assert int(there.ext["suggestWhichBrokerId"]) == broker_id(followers[0])
        # At its end a follower does not say that there is nothing: the leader is asked next.
        end = await pull(cluster, followers[0], 20)
        assert (end.code, end.ext["suggestWhichBrokerId"]) == (20, "0")
        assert end.ext["nextBeginOffset"] == "20"
        return followers[0]

    killed = await in_one_term(cluster, play)
    await cluster.kill(killed)

    async def play_on(leader: str) -> None:
        (left,) = (name for name in followers_of(cluster, leader) if name != killed)
        await suggested(cluster, leader, left)

    await in_one_term(cluster, play_on)


async def test_without_a_quorum_stored_messages_and_offsets_are_served(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, settings=SMALL_FILES) as cluster:
        namesrvs = [cluster.namesrv_address]
        await fill(namesrvs, 30)
        async with connect(namesrvs) as client, PullConsumer(client, "half") as consumer:
            (queue,) = await consumer.fetch_message_queues("T")
            await consumer.commit_offset(queue, 15)
        leader = await cluster.wait_leader()
        left = next(name for name in cluster.brokers if name != leader)
        await cluster.wait_caught_up(left)
        for name in cluster.brokers:
            if name != left:
                await cluster.kill(name)
        async with (
            connect(namesrvs) as client,
            PullConsumer(client, "other", follower_reads=True) as consumer,
            Producer(client, "p", ProducerConfig(send_timeout_s=2)) as producer,
        ):
            (queue,) = await consumer.fetch_message_queues("T")
            read: list[bytes] = []
            with trio.fail_after(WITHIN_S):
                while len(read) < 30:
                    result = await look_until(partial(consumer.pull, queue, len(read)), bool)
                    read += [message.body_bytes for message in result.messages]
            assert read == [b"%d" % number for number in range(30)]
            with pytest.raises(ClientError):
                await producer.send_to(MessageQueue("T", "broker-a", 0), Message("T", b"more"))
        asked = {"topic": "T", "queueId": "0", "setZeroIfNotFound": "false"}

        def offset_of(group: str) -> Awaitable[RemotingCommand]:
            return ask(
                cluster.brokers[left].address,
                RequestCode.QUERY_CONSUMER_OFFSET,
                {"consumerGroup": group, **asked},
            )

        # It has to find out that no member leads any more.
        offset = await look_until(lambda: offset_of("half"), lambda answer: answer.code == 0)
        assert offset.ext["offset"] == "15"
        await look_until(lambda: offset_of("nobody"), lambda answer: answer.code == 14)
