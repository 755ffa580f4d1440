"""Polling members of a group, against a cluster in memory on virtual time."""

import pytest
import trio

from dledger.client.consumer.lite_pull_consumer import LitePullConsumer
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.owned_queues import OwnedQueues
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import ConfigError
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from tests.unit.client.consumer.consuming import QUEUE, Heard, committed, send
from tests.unit.client.fake_cluster import World

OTHER = MessageQueue("T", "g", 1)


async def poll(consumer: LitePullConsumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    with trio.fail_after(60):
        while len(found) < count:
            found += [message.body_bytes for message in await consumer.poll()]
    return found


async def test_what_a_poll_returned_is_dealt_with_at_the_next_one(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    await send(producer, 6, queues=1)
    async with LitePullConsumer(client, "c", consume_from=FROM_FIRST) as consumer:
        consumer.subscribe("T")
        first = await consumer.poll(max_messages=2)
        await trio.sleep(6)
        assert [m.body_bytes for m in first] == [b"0", b"1"]
        assert committed(world.group).get(0, 0) == 0
        second = await consumer.poll(max_messages=2)
        await trio.sleep(6)
        assert committed(world.group)[0] == 2
        await consumer.commit()
        assert committed(world.group)[0] == 4
        assert await consumer.committed(QUEUE) == 4
        assert [m.body_bytes for m in second] == [b"2", b"3"]
        assert await poll(consumer, 2) == [b"4", b"5"]
        assert await consumer.poll(1.0) == []
    assert committed(world.group)[0] == 6


async def test_without_auto_commit_only_commit_commits(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    await send(producer, 2, queues=1)
    async with LitePullConsumer(
        client, "c", consume_from=FROM_FIRST, auto_commit=False
    ) as consumer:
        consumer.subscribe("T")
        await poll(consumer, 2)
        await consumer.poll(30)
    assert committed(world.group) == {}


async def test_assign_reads_queues_that_others_read_too(
    client: ClientInstance, producer: Producer
) -> None:
    async with LitePullConsumer(client, "c", consume_from=FROM_FIRST) as consumer:
        await send(producer, 8)
        await consumer.assign([QUEUE, OTHER])
        assert sorted(await poll(consumer, 4)) == [b"0", b"1", b"4", b"5"]
        await consumer.assign([OTHER])
        await send(producer, 4, first=8)
        assert await poll(consumer, 1) == [b"9"]
        assert consumer.queues == {OTHER}
        with pytest.raises(ConfigError, match="one or the other"):
            consumer.subscribe("T")


async def test_seeking_goes_back_and_forth_at_once(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    async with LitePullConsumer(client, "c", consume_from=FROM_FIRST) as consumer:
        await send(producer, 5, queues=1)
        consumer.seek(QUEUE, 3)
        await consumer.assign([QUEUE])
        assert await poll(consumer, 2) == [b"3", b"4"]
        await trio.sleep(1)  # a pull is held at the end
        began = trio.current_time()
        await consumer.seek_to_begin(QUEUE)
        assert await poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]
        assert trio.current_time() - began < 1
        consumer.seek(QUEUE, 1)
        await consumer.seek_to_end(QUEUE)
        assert await consumer.poll(1) == []
        await consumer.commit()
        assert committed(world.group)[0] == 5


async def test_a_paused_queue_is_not_polled(client: ClientInstance, producer: Producer) -> None:
    async with LitePullConsumer(client, "c", consume_from=FROM_FIRST) as consumer:
        await consumer.assign([QUEUE, OTHER])
        consumer.pause([QUEUE])
        await send(producer, 4, queues=2)
        assert await poll(consumer, 2) == [b"1", b"3"]
        assert await consumer.poll(20) == []
        consumer.resume([QUEUE])
        assert await poll(consumer, 2) == [b"0", b"2"]
        await trio.sleep(1)
        consumer.pause([QUEUE])
        await send(producer, 2, queues=2, first=4)
        assert await poll(consumer, 1) == [b"5"]
        assert await consumer.poll(20) == []
        consumer.resume([QUEUE])
        assert await poll(consumer, 1) == [b"4"]


async def test_members_share_queues_also_with_push_consumers(world: World, heard: Heard) -> None:
    async with (
        world.client() as one,
        world.client() as two,
        Producer(one, "p") as producer,
        LitePullConsumer(one, "c", consume_from=FROM_FIRST) as consumer,
    ):
        consumer.subscribe("T")
        async with PushConsumer(two, "c", heard, {"T": "*"}):
            await trio.sleep(2)
            assert len(consumer.queues) == 2
            await send(producer, 8)
            polled = await poll(consumer, 4)
            await heard.wait_for(4)
            assert sorted([*polled, *heard.bodies]) == [b"%d" % i for i in range(8)]
        await trio.sleep(2)
        assert len(consumer.queues) == 4
        consumer.unsubscribe("T")
        await trio.sleep(1)
        assert consumer.queues == frozenset()


async def test_subscribing_first_forbids_to_assign(client: ClientInstance) -> None:
    consumer = LitePullConsumer(client, "c")
    consumer.subscribe("T")
    with pytest.raises(ConfigError, match="one or the other"):
        await consumer.assign([QUEUE])


async def test_seek_counts_while_it_is_asked_where_to_begin(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    await send(producer, 3, queues=1)
    asked = trio.Event()

    async def late(command: RemotingCommand) -> RemotingCommand:
        asked.set()
        await trio.sleep(1)
        return response_to(command, ResponseCode.QUERY_NOT_FOUND, "not found")

    world.group.on(RequestCode.QUERY_CONSUMER_OFFSET, late)
    async with LitePullConsumer(client, "c") as consumer:
        await consumer.assign([QUEUE])
        await asked.wait()
        await consumer.seek_to_begin(QUEUE)
        assert await poll(consumer, 3) == [b"0", b"1", b"2"]
        await consumer.poll(1)
        await consumer.assign([])
        await trio.sleep(5)
        await consumer.assign([QUEUE])
        await trio.sleep(5)
        assert await consumer.poll(1) == []  # the seek of before has been carried out


async def test_queue_that_is_assigned_again_at_once_is_read_again(
    client: ClientInstance, producer: Producer
) -> None:
    async with LitePullConsumer(client, "c", consume_from=FROM_FIRST) as consumer:
        await consumer.assign([QUEUE, OTHER])
        await send(producer, 2, queues=2)
        assert sorted(await poll(consumer, 2)) == [b"0", b"1"]
        assert await consumer.poll(1) == []
        await consumer.assign([QUEUE])
        await consumer.assign([QUEUE, OTHER])
        await trio.sleep(5)
        assert consumer.queues == {QUEUE, OTHER}
        await send(producer, 2, queues=2, first=2)
        assert sorted(await poll(consumer, 2)) == [b"2", b"3"]


async def test_poll_without_time_returns_what_was_read_ahead(
    client: ClientInstance, producer: Producer
) -> None:
    await send(producer, 2, queues=1)
    async with LitePullConsumer(client, "c", consume_from=FROM_FIRST) as consumer:
        consumer.subscribe("T")
        await trio.sleep(5)
        polled = await consumer.poll(0)
        assert [message.body_bytes for message in polled] == [b"0", b"1"]
        assert await consumer.poll(0) == []


async def test_seek_leaves_what_was_polled_of_other_queues(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    async with LitePullConsumer(client, "c", consume_from=FROM_FIRST) as consumer:
        await consumer.assign([QUEUE, OTHER])
        await send(producer, 1, queues=1)
        assert await poll(consumer, 1) == [b"0"]
        consumer.seek(OTHER, 0)
        await trio.sleep(6)  # offsets are committed meanwhile
        assert committed(world.group).get(0, 0) == 0
        await consumer.poll(0)
        await trio.sleep(6)
        assert committed(world.group)[0] == 1


async def test_newer_seek_counts_where_an_older_one_waits(
    client: ClientInstance, producer: Producer
) -> None:
    await send(producer, 5, queues=1)
    async with LitePullConsumer(client, "c", consume_from=FROM_FIRST) as consumer:
        consumer.seek(QUEUE, 1)
        await consumer.assign([QUEUE])
        consumer.seek(QUEUE, 3)
        assert await poll(consumer, 2) == [b"3", b"4"]


async def test_late_rebalance_leaves_what_is_assigned(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    await send(producer, 2, queues=1)
    async with LitePullConsumer(
        client, "c", consume_from=FROM_FIRST, auto_commit=False
    ) as consumer:
        consumer.subscribe("T")
        assert await poll(consumer, 2) == [b"0", b"1"]
        consumer.unsubscribe("T")
        await consumer.assign([QUEUE])  # before the rebalance that takes T away
        consumer.seek(QUEUE, 1)
        await trio.sleep(5)
        assert consumer.queues == {QUEUE}
        assert await poll(consumer, 1) == [b"1"]


async def test_queues_let_go_at_once_cost_one_look(
    world: World, client: ClientInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands a look for each takes minutes."""
    topics = [f"T{number}" for number in range(30)]
    world.group.topics |= dict.fromkeys(topics, 4)
    queues = [MessageQueue(topic, "g", number) for topic in topics for number in range(4)]
    applied: list[str] = []
    apply = OwnedQueues.apply

    async def count(self: OwnedQueues, topic: str, own: frozenset[MessageQueue]) -> None:
        applied.append(topic)
        await apply(self, topic, own)

    monkeypatch.setattr(OwnedQueues, "apply", count)
    async with LitePullConsumer(client, "c", consume_from=FROM_FIRST) as consumer:
        await consumer.assign(queues)
        await trio.sleep(5)
        applied.clear()
        await consumer.assign(queues[:60])
        await consumer.assign(queues)
        await trio.sleep(5)
        assert consumer.queues == set(queues)
        assert len(applied) <= 4 * len(topics)
