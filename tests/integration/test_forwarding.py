"""Members that do not lead carry requests of RocketMQ's clients to the one that does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from dledger import forwarding
from dledger.commitlog.message_id import decode_offset_message_id
from dledger.remoting.calls import Call
from dledger.remoting.client import RemotingClient
from dledger.remoting.protocol.bodies import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumeType,
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageModel,
    MessageQueue,
    ProducerData,
    SubscriptionData,
)
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.tcp import TcpNetwork
from dledger.testing import EmbeddedCluster, drain, embedded_cluster

TOPIC = "Orders"


def old(code: int, ext: dict[str, str], body: bytes = b"") -> RemotingCommand:
    """Return a request of RocketMQ's Java client."""
    command = request(code, ext, body)
    command.language = "JAVA"
    return command


def send(number: int) -> RemotingCommand:
    """Return a send as RocketMQ's Java client writes it."""
    return old(
        RequestCode.SEND_MESSAGE_V2,
        {
            "a": "orders", "b": TOPIC, "c": "TBW102", "d": "4", "e": "0", "f": "0",
            "g": "1700000000000", "h": "0", "i": f"UNIQ_KEY\x01key{number}\x02", "j": "0",
            "k": "false", "m": "false",
        },
        b"%d" % number,
    )  # fmt: skip


@asynccontextmanager
async def old_client() -> AsyncIterator[RemotingClient]:
    """A client that goes where it is sent."""
    async with trio.open_nursery() as nursery:
        client = RemotingClient(nursery, TcpNetwork())
        yield client
        client.close()
        nursery.cancel_scope.cancel()


def address_of(cluster: EmbeddedCluster, name: str) -> str:
    return cluster.broker(name).group.node.settings.client_address


async def test_sends_to_a_follower_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "LEADER_WITHIN_S", 60.0)  # a busy machine elects for longer
    async with embedded_cluster(topics={TOPIC: 1}) as cluster, old_client() as client:
        first = await cluster.leader()
        follower = next(name for name in cluster.brokers if name != first)
        connection = await client.connection(address_of(cluster, follower))
        codes: dict[int, int] = {}
        ended = trio.Event()

        def note(number: int, call: Call) -> None:
            codes[number] = call.result("", 0).code
            if len(codes) == 300:
                ended.set()

        for number in range(300):
            connection.start(send(number), partial(note, number))
            if number == 100:
                await cluster.kill(first)
                await cluster.start(first)
            elif number == 200:
                while not codes:
                    await trio.sleep(0.001)
                await cluster.broker(await cluster.leader()).group.transfer_leadership(first)
            await trio.sleep(0.002)
        with trio.fail_after(60):
            await ended.wait()
        assert set(codes.values()) == {0}
        async with cluster.client() as reader:
            bodies = [int(bytes(message.body)) for message in await drain(reader, TOPIC)]
        assert sorted(bodies) == [*range(300)]


async def test_requests_of_a_consumer_reach_the_leader() -> None:
    async with embedded_cluster(topics={TOPIC: 1}) as cluster, old_client() as client:
        leader = await cluster.leader()
        follower = next(name for name in cluster.brokers if name != leader)
        consumer = {"consumerGroup": "readers", "topic": TOPIC}
        place = {**consumer, "queueId": "0"}
        subscription = SubscriptionData(TOPIC, "*", sub_version=1)
        heartbeat = HeartbeatData(
            "c1",
            consumer_data_set=[
                ConsumerData(
                    "readers",
                    ConsumeType.CONSUME_PASSIVELY,
                    MessageModel.CLUSTERING,
                    ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
                    [subscription],
                )
            ],
        )

        async def ask(
            code: int, ext: dict[str, str], body: bytes = b"", *, to: str = follower
        ) -> RemotingCommand:
            answered = await client.invoke(address_of(cluster, to), old(code, ext, body), 30)
            assert answered.code == 0, answered
            return answered

        for name in cluster.brokers:
            await ask(RequestCode.HEART_BEAT, {}, heartbeat.encode(), to=name)
        pull = {
            **place, "queueOffset": "0", "maxMsgNums": "32", "sysFlag": "2",
            "commitOffset": "0", "suspendTimeoutMillis": "20000", "subVersion": "1",
        }  # fmt: skip
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, RequestCode.PULL_MESSAGE, pull)
            await trio.sleep(0.1)
            sent = await ask(RequestCode.SEND_MESSAGE_V2, send(0).ext, b"0")
        listed = await ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "readers"})
        assert bytes(listed.body) == b'{"consumerIdList":["c1"]}'
        queue = MessageQueue(TOPIC, "broker-a", 0)
        lock = LockBatchRequestBody("readers", "c1", mq_set=[queue])
        locked = await ask(RequestCode.LOCK_BATCH_MQ, {}, lock.encode())
        assert LockBatchResponseBody.decode(locked.body).lock_ok_mq_set == [queue]
        commit = old(RequestCode.UPDATE_CONSUMER_OFFSET, {**place, "commitOffset": "1"})
        await client.invoke_oneway(address_of(cluster, follower), commit)
        read = await ask(RequestCode.QUERY_CONSUMER_OFFSET, place)
        assert read.ext["offset"] == "1"
        _, _, position = decode_offset_message_id(sent.ext["msgId"])
        back = {
            "offset": str(position),
            "group": "readers",
            "delayLevel": "0",
            "originTopic": TOPIC,
        }
        await ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)


async def test_member_that_stops_serves_old_clients_until_they_left() -> None:
    settings = {"server.drain_timeout_ms": 600_000}
    async with (
        embedded_cluster(topics={TOPIC: 1}, settings=settings) as cluster,
        old_client() as client,
    ):
        stopped = await cluster.leader()
        address = address_of(cluster, stopped)
        beat = old(
            RequestCode.HEART_BEAT,
            {},
            HeartbeatData("c1", producer_data_set=[ProducerData("orders")]).encode(),
        )
        assert (await client.invoke(address, beat, 30)).code == 0
        has_ended = trio.Event()

        async def stop() -> None:
            await cluster.stop(stopped)
            has_ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            answers = []
            for number in range(50):
                answers.append((await client.invoke(address, send(number), 30)).code)
                await trio.sleep(0.02)
            assert answers == [0] * 50
            assert await cluster.leader(other_than=stopped) != stopped
            assert not has_ended.is_set()
            client.disconnect(address)
            with trio.fail_after(60):
                await has_ended.wait()
        async with cluster.client() as reader:
            stored = [bytes(message.body) for message in await drain(reader, TOPIC)]
        assert stored == [b"%d" % number for number in range(50)]
