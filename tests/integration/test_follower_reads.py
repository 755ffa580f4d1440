"""Slow readers are sent to a follower; without a quorum what is stored can still be read.

Real processes, sockets, files and signals.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from client.connect import connect
from client.errors import ClientError
from client.message import Message
from client.producer import Producer, ProducerConfig
from client.pull_consumer import PullConsumer
from client.route import MessageQueue
from commitlog.record import iter_records
from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.cli.probe import ask
from dledger.cli.topic_command import create_topic
from remoting.protocol.bodies import KVTable
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand
from tests.harness.local_settings import SMALL_FILES

pytestmark = pytest.mark.slow

EVERYBODY_IS_SLOW: dict[str, object] = {
    **SMALL_FILES,
    "store.access_message_in_memory_max_ratio": 0,
}


async def pull(cluster: LocalCluster, name: str, offset: int) -> RemotingCommand:
    """Ask one member as RocketMQ's clients do."""
    return await ask(
        cluster.brokers[name].address,
        RequestCode.PULL_MESSAGE,
        {
            "consumerGroup": "slow",
            "topic": "T",
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


async def fill(namesrvs: list[str], count: int) -> None:
    await create_topic(namesrvs, "T", queues=1)
    async with connect(namesrvs) as client, Producer(client, "p") as producer:
        for number in range(count):
            await producer.send_to(MessageQueue("T", "broker-a", 0), Message("T", b"%d" % number))


async def test_a_slow_reader_is_sent_to_a_live_follower_and_finds_the_same_there(
    tmp_path: Path,
) -> None:
    async with local_cluster(tmp_path, settings=EVERYBODY_IS_SLOW) as cluster:
        await fill([cluster.namesrv_address], 20)
        leader = await cluster.wait_leader()
        followers = sorted(name for name in cluster.brokers if name != leader)
        for follower in followers:
            await cluster.wait_caught_up(follower)
        first = await pull(cluster, leader, 0)
        assert (first.code, bodies(first)) == (0, [b"0", b"1", b"2", b"3"])
        assert int(first.ext["suggestWhichBrokerId"]) == broker_id(followers[0])
        there = await pull(cluster, followers[0], 0)
        assert (there.code, bytes(there.body)) == (0, bytes(first.body))
        assert int(there.ext["suggestWhichBrokerId"]) == broker_id(followers[0])
        # At its end a follower does not say that there is nothing: the leader is asked next.
        end = await pull(cluster, followers[0], 20)
        assert (end.code, end.ext["suggestWhichBrokerId"]) == (20, "0")
        assert end.ext["nextBeginOffset"] == "20"

        await cluster.kill(followers[0])
        with trio.fail_after(20):
            while True:
                answer = await pull(cluster, leader, 0)
                if int(answer.ext["suggestWhichBrokerId"]) == broker_id(followers[1]):
                    break
                await trio.sleep(0.2)


async def test_our_sdk_follows_the_suggestion(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, settings=EVERYBODY_IS_SLOW) as cluster:
        await fill([cluster.namesrv_address], 40)
        leader = await cluster.wait_leader()
        for follower in cluster.brokers:
            await cluster.wait_caught_up(follower)
        async with (
            connect([cluster.namesrv_address]) as client,
            PullConsumer(client, "slow", follower_reads=True) as consumer,
        ):
            (queue,) = await consumer.fetch_message_queues("T")
            read: list[bytes] = []
            while len(read) < 40:
                result = await consumer.pull(queue, len(read), max_messages=3, timeout_s=0)
                read += [message.body_bytes for message in result.messages]
            assert read == [b"%d" % number for number in range(40)]
        served = {}
        for name, node in cluster.brokers.items():
            answer = await ask(node.address, RequestCode.GET_BROKER_RUNTIME_INFO)
            rates = KVTable.decode(answer.body).table["getTransferredTps"]
            served[name] = float(rates.split()[0]) > 0
        # The first answer is the leader's, all others come from the follower it names.
        suggested = min((name for name in served if name != leader), key=broker_id)
        assert served == {name: name in (leader, suggested) for name in served}


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
            result = await consumer.pull(queue, 0)
            read = [message.body_bytes for message in result.messages]
            assert read == [b"%d" % number for number in range(30)]
            with pytest.raises(ClientError):
                await producer.send_to(MessageQueue("T", "broker-a", 0), Message("T", b"more"))
        offset = await ask(
            cluster.brokers[left].address,
            RequestCode.QUERY_CONSUMER_OFFSET,
            {"consumerGroup": "half", "topic": "T", "queueId": "0"},
        )
        assert (offset.code, offset.ext["offset"]) == (0, "15")
        nobody = await ask(
            cluster.brokers[left].address,
            RequestCode.QUERY_CONSUMER_OFFSET,
            {
                "consumerGroup": "nobody",
                "topic": "T",
                "queueId": "0",
                "setZeroIfNotFound": "false",
            },
        )
        assert nobody.code == 14
