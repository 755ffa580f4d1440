"""Push consumer against a cluster in memory: what it gets, and from where."""

from collections.abc import Awaitable, Sequence

import pytest
import trio
import trio.testing

from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeStatus
from dledger.client.consumer.offsets import FROM_FIRST, ConsumeFrom
from dledger.client.consumer.process_queue import FlowLimits
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientClosedError
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import ConfigError
from dledger.remoting.handling import Answered, Handled
from dledger.remoting.protocol.bodies import (
    ConsumeFromWhere,
    ConsumerIdList,
    HeartbeatData,
    MessageModel,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from tests.harness.fake_nodes import Seen, fixed
from tests.unit.client.consumer.consuming import QUEUE, Heard, committed, owned, send, settled
from tests.unit.client.fake_cluster import Broker, World

FIRST = PushConfig(consume_from=FROM_FIRST)


async def test_push_consumer_gets_and_commits_earlier_and_later_sends(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    before = await send(producer, 10)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST):
        await heard.wait_for(10)
        after = await send(producer, 10, first=10)
        await heard.wait_for(20)
        assert max(heard.at) - trio.current_time() < 0.1
    assert sorted(heard.bodies) == sorted([*before, *after])
    assert committed(world.group) == dict.fromkeys(range(4), 5)
    heartbeats = [s for s in world.seen if s.code == RequestCode.HEART_BEAT]
    assert {s.node for s in heartbeats} == {b.address for b in world.group.brokers}
    (data,) = HeartbeatData.decode(heartbeats[-1].command.body).consumer_data_set
    assert (data.group_name, data.consume_type) == ("c", "CONSUME_PASSIVELY")
    assert [s.topic for s in data.subscription_data_set] == ["T", "%RETRY%c"]
    assert not any(broker.consumers["c"] for broker in world.group.brokers)


async def test_push_consumers_share_queues_and_take_over_at_once(world: World) -> None:
    first, second = Heard(), Heard()
    async with (
        world.client() as one,
        world.client() as two,
        Producer(one, "p") as producer,
        PushConsumer(one, "c", first, {"T": "*"}, FIRST) as consumer,
    ):
        await settled(consumer, within_s=1)
        async with PushConsumer(two, "c", second, {"T": "*"}, FIRST) as other:
            await settled(consumer, other, within_s=1)
            await send(producer, 20)
            await first.wait_for(10)
            await second.wait_for(10)
            assert sorted(first.bodies + second.bodies, key=int) == [b"%d" % i for i in range(20)]
        await settled(consumer, within_s=1)
        await send(producer, 20, first=20)
        await first.wait_for(30)
        assert sorted(first.bodies[10:], key=int) == [b"%d" % i for i in range(20, 40)]


async def test_without_a_word_from_brokers_the_timer_finds_out(world: World) -> None:
    async with (
        world.client() as one,
        world.client() as two,
        PushConsumer(one, "c", Heard(), {"T": "*"}) as consumer,
    ):
        world.group.notifies = False
        await trio.sleep(5)
        async with PushConsumer(two, "c", Heard(), {"T": "*"}) as other:
            assert 2 < await settled(consumer, other, within_s=25) <= 21


async def test_rebalance_ignores_a_broker_that_knows_no_member_yet(world: World) -> None:
    async with (
        world.client() as one,
        world.client() as two,
        PushConsumer(one, "c", Heard(), {"T": "*"}) as consumer,
        PushConsumer(two, "c", Heard(), {"T": "*"}) as other,
    ):
        await settled(consumer, other)
        before = owned(consumer, other), consumer.counts["rebalance_changes"]
        for broker in world.group.brokers[:1]:
            broker.consumers.clear()
        for _ in range(50):
            await trio.sleep(1)
            assert (owned(consumer, other), consumer.counts["rebalance_changes"]) == before
        assert consumer.counts["rebalances"] > 2


async def test_a_killed_leader_costs_no_message_and_moves_no_queue(
    world: World, heard: Heard
) -> None:
    async with (
        world.client() as one,
        world.client() as two,
        Producer(one, "p") as producer,
        PushConsumer(one, "c", heard, {"T": "*"}, FIRST) as consumer,
        PushConsumer(two, "c", heard, {"T": "*"}, FIRST) as other,
    ):
        await settled(consumer, other)
        bodies = await send(producer, 20)
        await heard.wait_for(20)
        before = owned(consumer, other), consumer.counts["rebalance_changes"]
        await world.group.brokers[0].kill()
        world.group.elect(1)
        bodies += await send(producer, 20, first=20)
        await heard.wait_for(40, within_s=5)
        await trio.sleep(40)
        assert sorted(heard.bodies) == sorted(bodies)
        assert (owned(consumer, other), consumer.counts["rebalance_changes"]) == before


async def test_a_slow_listener_holds_the_reader_back(
    client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    heard.delay_s = 10
    config = PushConfig(
        consume_from=FROM_FIRST,
        consume_tasks=3,
        pull_batch_size=4,
        flow_limits=FlowLimits(max_messages=8),
    )
    await send(producer, 100, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, config) as consumer:
        await trio.sleep(9)
        (messages,) = [o.messages for o in consumer._owned if o.queue == QUEUE]
        assert messages is not None
        assert (len(messages), messages.next_offset, heard.most_running) == (8, 8, 3)
        await heard.wait_for(100, within_s=500)
    assert sorted(heard.bodies, key=int) == [b"%d" % i for i in range(100)]


async def test_where_a_new_group_begins(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    timestamp = ConsumeFrom(ConsumeFromWhere.CONSUME_FROM_TIMESTAMP, 12345)
    await send(producer, 3, queues=1)
    for name, begin, bodies in (
        ("first", FROM_FIRST, [b"0", b"1", b"2"]),
        ("last", ConsumeFrom(), []),
        ("timestamp", timestamp, [b"1", b"2"]),  # the brokers of this cluster always say 1
    ):
        heard = Heard()
        config = PushConfig(consume_from=begin)
        async with PushConsumer(client, name, heard, {"T": "*"}, config):
            await trio.sleep(5)
            assert heard.bodies == bodies
            await send(producer, 1, queues=1, first=9)
            await heard.wait_for(len(bodies) + 1)
        world.group.queue("T", 0).pop()
    (asked,) = [
        s
        for s in world.seen
        if s.command.ext.get("timestamp")
        and s.command.ext["topic"] == "T"
        and s.command.ext["queueId"] == "0"
    ]
    assert asked.command.ext["timestamp"] == "12345"


async def test_an_offset_outside_the_queue_is_put_right(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    await send(producer, 2, queues=1)
    world.group.committed["c", "T", 0] = 99
    async with PushConsumer(client, "c", heard, {"T": "*"}):
        await trio.sleep(1)
        await send(producer, 1, queues=1, first=2)
        await heard.wait_for(1)
    assert heard.bodies == [b"2"]
    assert committed(world.group)[0] == 3


async def test_messages_in_hand_outlast_the_loss_of_those_behind(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    """A leader without the end of the queue, as after a power cut without flushes."""
    heard, group = Heard(), world.group
    heard.delay_s = 1.0
    config = PushConfig(consume_from=FROM_FIRST, consume_tasks=1)
    await send(producer, 6, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, config):
        await heard.wait_for(2)
        del group.queue("T", 0)[4:]
        group.elect(1)
        client.leaders.learn("g", group.brokers[1].address, group.term)
        await trio.sleep(20)
    assert set(heard.bodies) >= {b"0", b"1", b"2", b"3"}
    assert committed(group)[0] == 4


async def test_a_stop_lets_listeners_finish_and_leaves_the_rest(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    heard.delay_s = 2
    config = PushConfig(consume_from=FROM_FIRST, consume_tasks=2)
    await send(producer, 10, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, config):
        await heard.wait_for(2)
        began = trio.current_time()
    assert trio.current_time() - began == pytest.approx(2, abs=0.1)
    assert heard.bodies == [b"0", b"1"]
    assert committed(world.group)[0] == 2
    assert world.count(RequestCode.UNREGISTER_CLIENT) == 3


async def test_stop_waits_no_longer_than_its_limit(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    heard.delay_s = 1e6
    await send(producer, 1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST):
        await heard.wait_for(1)
        began = trio.current_time()
    assert trio.current_time() - began == pytest.approx(5, abs=0.1)
    assert committed(world.group).get(0, 0) == 0


async def test_stop_does_not_wait_for_listeners_that_are_cancelled(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    heard.delay_s = 60.0
    await send(producer, 1)
    with trio.move_on_after(2.0):
        began = trio.current_time()
        async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST):
            await trio.sleep_forever()
    assert trio.current_time() - began == pytest.approx(2.0, abs=0.5)
    assert (heard.bodies, heard.running) == ([b"0"], 0)
    assert committed(world.group).get(0, 0) == 0


async def test_suspended_consumer_keeps_its_queues_and_gets_nothing(
    client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST) as consumer:
        await settled(consumer)
        await trio.sleep(1)
        consumer.suspend()
        bodies = await send(producer, 8)
        await trio.sleep(100)
        assert (heard.bodies, owned(consumer)) == ([], [[0, 1, 2, 3]])
        consumer.resume()
        await heard.wait_for(8, within_s=1)
        assert sorted(heard.bodies) == bodies


async def test_broadcasting_gives_all_to_each_and_drops_failures(world: World) -> None:
    heard = [Heard(), Heard()]
    heard[0].answer = lambda *_: ConsumeStatus.RECONSUME_LATER
    config = PushConfig(message_model=MessageModel.BROADCASTING, consume_from=FROM_FIRST)
    async with world.client() as one, world.client() as two, Producer(one, "p") as producer:
        bodies = await send(producer, 8)
        async with (
            PushConsumer(one, "c", heard[0], {"T": "*"}, config) as first,
            PushConsumer(two, "c", heard[1], {"T": "*"}, config) as second,
        ):
            await heard[0].wait_for(8)
            await heard[1].wait_for(8)
            await trio.sleep(30)
            assert owned(first, second) == [[0, 1, 2, 3], [0, 1, 2, 3]]
            assert first.counts["dropped"] == 8
        assert [sorted(h.bodies) for h in heard] == [bodies, bodies]
        assert world.count(RequestCode.CONSUMER_SEND_MSG_BACK) == 0
        assert world.group.committed == {}
        bodies_said = [s.command.body for s in world.seen if s.code == RequestCode.HEART_BEAT]
        data = HeartbeatData.decode(next(b for b in bodies_said if b"BROADCASTING" in bytes(b)))
        assert data.consumer_data_set[0].message_model == "BROADCASTING"
        assert [s.topic for s in data.consumer_data_set[0].subscription_data_set] == ["T"]


async def test_a_topic_may_come_later_and_go_again(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    async with PushConsumer(client, "c", heard, None, FIRST) as consumer:
        await trio.sleep(5)
        assert owned(consumer) == [[]]
        consumer.subscribe("T", "A")
        await settled(consumer, within_s=1)
        await producer.send_to(QUEUE, Message("T", b"x", tags="A"))
        await heard.wait_for(1)
        versions = _versions(world.seen, "T")
        consumer.subscribe("T", "A||B")
        await trio.sleep(1)
        assert _versions(world.seen, "T")[-1] > versions[-1]
        consumer.unsubscribe("T")
        await trio.sleep(2)
        assert owned(consumer) == [[]]
        assert committed(world.group)[0] == 1


def _versions(seen: Sequence[Seen], topic: str) -> list[int]:
    found = []
    for one in seen:
        command = one.command
        if command.code == RequestCode.HEART_BEAT:
            for consumer in HeartbeatData.decode(command.body).consumer_data_set:
                found += [s.sub_version for s in consumer.subscription_data_set if s.topic == topic]
    return found


async def test_push_consumer_finds_a_topic_created_later(
    world: World, client: ClientInstance
) -> None:
    async with PushConsumer(client, "c", Heard(), {"later": "*"}) as consumer:
        await trio.sleep(3)
        world.group.topics["later"] = 2
        await settled(consumer, count=2, within_s=8, topic="later")


async def test_a_refused_pull_is_tried_again_after_a_while(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    await send(producer, 1, queues=1)
    refused: list[float] = []

    def pull(broker: Broker, asked: RemotingCommand) -> Handled:
        if len(refused) < 2 and asked.ext["queueId"] == "0" and asked.ext["topic"] == "T":
            refused.append(trio.current_time())
            return response_to(asked, ResponseCode.SUBSCRIPTION_NOT_EXIST, "not yet")
        return broker._pull(asked)

    world.group.on_each(RequestCode.PULL_MESSAGE, pull)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST):
        await heard.wait_for(1)
        assert heard.at[0] - refused[0] == pytest.approx(6, abs=0.2)


async def test_group_is_once_in_an_instance_that_must_be_open(world: World) -> None:
    client = world.client()
    consumer = PushConsumer(client, "c", Heard(), {"T": "*"})
    with pytest.raises(ClientClosedError):
        await consumer.__aenter__()
    async with client, PushConsumer(client, "c", Heard(), {"T": "*"}):
        with pytest.raises(ConfigError, match="in use"):
            await PushConsumer(client, "c", Heard(), {"T": "*"}).__aenter__()


async def test_what_was_pulled_stays_when_the_queue_now_begins_later(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    """Retention overtakes a slow consumer: it misses what it has not pulled, and no more."""
    heard.delay_s = 10

    def pull(broker: Broker, asked: RemotingCommand) -> Handled:
        is_ours = asked.ext["topic"] == "T" and asked.ext["queueId"] == "0"
        if is_ours and 4 <= int(asked.ext["queueOffset"]) < 8:
            found = {"nextBeginOffset": "8", "minOffset": "8", "maxOffset": "10"}
            ext = {**found, "suggestWhichBrokerId": "0"}
            return response_to(asked, ResponseCode.PULL_OFFSET_MOVED, None, ext)
        return broker._pull(asked)

    world.group.on_each(RequestCode.PULL_MESSAGE, pull)
    await send(producer, 10, queues=1)
    config = PushConfig(consume_from=FROM_FIRST, consume_tasks=1, pull_batch_size=4)
    async with PushConsumer(client, "c", heard, {"T": "*"}, config):
        await heard.wait_for(1)
        await trio.sleep(7)
        assert committed(world.group).get(0, 0) == 0  # the listener has it still
        await heard.wait_for(6)
        assert heard.bodies == [b"0", b"1", b"2", b"3", b"8", b"9"]


async def test_an_answer_without_an_offset_is_asked_for_again(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    world.group.on(RequestCode.QUERY_CONSUMER_OFFSET, response_to)
    await send(producer, 1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST):
        await trio.sleep(10)
        world.group.on_each(RequestCode.QUERY_CONSUMER_OFFSET, Broker._committed)
        await heard.wait_for(1, within_s=3)


async def test_unsubscribed_topic_is_not_read_without_its_tags(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    for number in range(60):
        await producer.send_to(QUEUE, Message("T", b"%d" % number, tags="AB"[number % 2]))
    config = PushConfig(consume_from=FROM_FIRST, pull_batch_size=2)

    async def slow(broker: Broker, asked: RemotingCommand) -> RemotingCommand:
        await trio.sleep(0.5)
        return broker._consumer_list(asked)

    async def pull(broker: Broker, asked: RemotingCommand) -> Answered:
        await trio.sleep(0.1)
        answer = broker._pull(asked)
        return await answer if isinstance(answer, Awaitable) else answer

    world.group.on_each(RequestCode.GET_CONSUMER_LIST_BY_GROUP, slow)
    world.group.on_each(RequestCode.PULL_MESSAGE, pull)
    async with PushConsumer(client, "c", heard, {"T": "A"}, config) as consumer:
        await heard.wait_for(7)
        consumer.subscribe("other")  # a rebalance is under way
        await trio.sleep(0.1)
        consumer.unsubscribe("T")
        await trio.sleep(3)
        assert owned(consumer) == [[]]
        assert {m.tags for m in heard.messages} == {"A"}
        consumer.subscribe("T", "B")
        await heard.wait_for(len(heard.bodies) + 20)
        assert heard.messages[-1].tags == "B"


async def test_members_are_asked_for_once_for_all_topics(world: World) -> None:
    topics = [f"T{number}" for number in range(20)]
    world.group.topics |= dict.fromkeys(topics, 2)
    async with (
        world.client() as client,
        PushConsumer(client, "c", Heard(), dict.fromkeys(topics, "*")) as consumer,
    ):
        await settled(consumer, count=2, topic="T19")
        before = world.count(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
        await consumer._rebalance.rebalance()
        asked = world.count(RequestCode.GET_CONSUMER_LIST_BY_GROUP) - before
    assert asked == len(world.group.brokers)


async def test_consumer_that_no_broker_counts_takes_no_queue(
    world: World, client: ClientInstance
) -> None:
    answer = ConsumerIdList(consumer_id_list=["another"]).encode()
    world.group.on(RequestCode.GET_CONSUMER_LIST_BY_GROUP, fixed(body=answer))
    async with PushConsumer(client, "c", Heard(), {"T": "*"}, FIRST) as consumer:
        await trio.sleep(60)
        assert owned(consumer) == [[]]
