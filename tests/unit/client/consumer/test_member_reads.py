"""Reads from any member that has the messages, against a cluster in memory."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from client.consumer.pull_consumer import PullConsumer
from client.core.errors import BrokerUnreachableError, OffsetIllegalError
from client.core.message import Message
from client.core.message_ext import PullStatus
from client.core.route import MessageQueue
from client.producer.producer import Producer
from remoting.processor import Handled
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand
from tests.unit.client.fake_cluster import Broker, World, open_world

QUEUE = MessageQueue("T", "g", 0)
PULLS = (RequestCode.PULL_MESSAGE, RequestCode.BULK_PULL)


def pulls(broker: Broker) -> int:
    return sum(broker.count(code) for code in PULLS)


def let_followers_serve(world: World, *, suggested: int = 0) -> None:
    """Let every member answer pulls with what there is; of "nothing" only the leader speaks."""
    for broker in world.groups["g"].brokers:

        def pull(asked: RemotingCommand, broker: Broker = broker) -> Handled:
            group = broker.group
            leader, group.leader = group.leader, broker.address
            answer = Broker._pull(broker, asked)
            group.leader = leader
            assert isinstance(answer, RemotingCommand), "a member was made to wait"
            if answer.code == 19 and not broker.leads:
                return broker._not_leader(asked)
            answer.ext["suggestWhichBrokerId"] = str(suggested)
            return answer

        for code in PULLS:
            broker.processors._processors.pop(code)
            broker.on(code, pull)


async def put(world: World, *bodies: bytes) -> None:
    async with world.client() as client, Producer(client, "p") as producer:
        for body in bodies:
            await producer.send_to(QUEUE, Message("T", body))


async def test_the_suggested_follower_is_asked_next(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        await put(world, b"0", b"1", b"2")
        let_followers_serve(world, suggested=2)
        leader, _, suggested = world.groups["g"].brokers
        async with (
            world.client() as client,
            PullConsumer(client, "c", follower_reads=True) as consumer,
        ):
            got = []
            for offset in range(3):
                result = await consumer.pull(QUEUE, offset, max_messages=1)
                got += [m.body_bytes for m in result.messages]
        assert got == [b"0", b"1", b"2"]
        assert (pulls(leader), pulls(suggested)) == (1, 2)


async def test_a_suggested_follower_that_is_gone_costs_one_look_elsewhere(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        await put(world, b"0", b"1", b"2")
        let_followers_serve(world, suggested=2)
        async with (
            world.client() as client,
            PullConsumer(client, "c", follower_reads=True) as consumer,
        ):
            await consumer.pull(QUEUE, 0, max_messages=1)
            await world.groups["g"].brokers[2].kill()
            result = await consumer.pull(QUEUE, 1, max_messages=1)
        assert [m.body_bytes for m in result.messages] == [b"1"]
        assert pulls(world.groups["g"].brokers[0]) == 2


async def test_stored_messages_are_read_while_nobody_leads(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        await put(world, b"0", b"1")
        let_followers_serve(world)
        group = world.groups["g"]
        group.leader = None
        group.register()
        await group.brokers[0].kill()
        async with (
            world.client() as client,
            PullConsumer(client, "c", follower_reads=True) as consumer,
        ):
            result = await consumer.pull(QUEUE, 0)
            assert [m.body_bytes for m in result.messages] == [b"0", b"1"]
            with pytest.raises(BrokerUnreachableError):
                await consumer.pull(QUEUE, 2, timeout_s=0)


async def test_a_member_without_the_messages_is_not_the_last_one_asked(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        await put(world, b"0", b"1")
        let_followers_serve(world)
        group = world.groups["g"]
        behind = group.brokers[0]
        group.leader = None
        group.register()

        def nothing(asked: RemotingCommand) -> Handled:
            return behind._not_leader(asked)

        for code in PULLS:
            behind.processors._processors.pop(code)
            behind.on(code, nothing)
        async with (
            world.client() as client,
            PullConsumer(client, "c", follower_reads=True) as consumer,
        ):
            result = await consumer.pull(QUEUE, 0)
        assert [m.body_bytes for m in result.messages] == [b"0", b"1"]
        assert pulls(behind) == 1


async def test_without_follower_reads_only_the_leader_is_asked(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        await put(world, b"0", b"1")
        let_followers_serve(world, suggested=2)
        async with world.client() as client, PullConsumer(client, "c") as consumer:
            for offset in range(2):
                await consumer.pull(QUEUE, offset, max_messages=1)
        assert [pulls(broker) for broker in world.groups["g"].brokers] == [2, 0, 0]


async def test_that_there_is_nothing_is_heard_from_the_leader(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        await put(world, b"0")
        let_followers_serve(world)
        async with (
            world.client() as client,
            PullConsumer(client, "c", follower_reads=True) as consumer,
        ):
            result = await consumer.pull(QUEUE, 1, timeout_s=0)
            assert result.status is PullStatus.NO_NEW_MESSAGE
            with pytest.raises(OffsetIllegalError):
                await consumer.pull(QUEUE, 5, timeout_s=0)
        assert [pulls(broker) > 0 for broker in world.groups["g"].brokers] == [True, False, False]
