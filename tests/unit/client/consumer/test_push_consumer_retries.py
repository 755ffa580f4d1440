"""Push consumer whose listeners fail, take long, or are plain functions."""

from collections.abc import Sequence

import pytest
import trio
import trio.testing

from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, ConsumeStatus, DeliveredMessage
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import ConfigError
from dledger.commitlog.record import decode_record
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from tests.harness.fake_nodes import fixed
from tests.unit.client.consumer.consuming import QUEUE, Heard, committed, send
from tests.unit.client.fake_cluster import World

FIRST = PushConfig(consume_from=FROM_FIRST)


async def test_a_failed_message_comes_back_with_its_topic_and_a_count(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    heard.answer = lambda message, _: (
        ConsumeStatus.RECONSUME_LATER if message.reconsume_times < 2 else None
    )
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST) as consumer:
        await producer.send_to(QUEUE, Message("T", b"hard", tags="A", keys="k"))
        await heard.wait_for(3)
        await trio.sleep(1)
        counts = consumer.counts
    assert [m.topic for m in heard.messages] == ["T", "T", "T"]
    assert [m.reconsume_times for m in heard.messages] == [0, 1, 2]
    assert {m.tags for m in heard.messages} == {"A"}
    assert [m.message_queue.topic for m in heard.messages] == ["T", "%RETRY%c", "%RETRY%c"]
    assert (counts["failed"], counts["consumed"], counts["sent_back"]) == (2, 1, 2)
    (asked, again) = [s for s in world.seen if s.code == RequestCode.CONSUMER_SEND_MSG_BACK]
    assert asked.command.ext == {
        "offset": "0",
        "group": "c",
        "delayLevel": "0",
        "originMsgId": heard.messages[0].message_id,
        "originTopic": "T",
        "unitMode": "false",
        "maxReconsumeTimes": "16",
    }
    assert int(again.command.ext["offset"]) > 0
    assert world.group.committed["c", "%RETRY%c", 0] == 2


async def test_listener_error_counts_as_failed_and_others_go_on(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:

    def answer(message: DeliveredMessage, _: ConsumeContext) -> None:
        if message.body_bytes == b"1" and not message.reconsume_times:
            raise ValueError("cannot cope")

    heard.answer = answer
    await send(producer, 4)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST):
        await heard.wait_for(5)
    assert sorted(heard.bodies) == [b"0", b"1", b"1", b"2", b"3"]
    assert committed(world.group) == dict.fromkeys(range(4), 1)


def refusing(world: World) -> Heard:
    """Return a listener that asks for each message again, whose brokers take none back."""
    heard = Heard()
    heard.answer = lambda message, _: (
        None if message.reconsume_times else ConsumeStatus.RECONSUME_LATER
    )
    world.group.on(RequestCode.CONSUMER_SEND_MSG_BACK, fixed(1, "look message by offset failed"))
    return heard


async def test_message_that_is_not_taken_back_goes_to_the_retry_topic(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    heard, group = refusing(world), world.group
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST) as consumer:
        await producer.send_to(QUEUE, Message("T", b"hard", properties={"own": "x"}))
        await heard.wait_for(2)
        await trio.sleep(1)
        assert consumer.counts["sent_to_retry_topic"] == 1
    original, copy = heard.messages
    (stored,) = [decode_record(r).property_map for r in group.queue("%RETRY%c", 0)]
    assert stored["RETRY_TOPIC"] == "T"
    assert stored["UNIQ_KEY"] == original.message_id == copy.message_id
    assert stored["ORIGIN_MESSAGE_ID"] == original.offset_message_id
    assert (stored["DELAY"], stored["own"]) == ("3", "x")
    assert (copy.topic, copy.reconsume_times) == ("T", 1)
    (sent,) = [
        s.command.ext
        for s in world.seen
        if s.code == RequestCode.SEND_MESSAGE_V2 and s.command.ext["b"] == "%RETRY%c"
    ]
    assert (sent["j"], sent["l"], sent["e"]) == ("1", "16", "-1")


async def test_message_that_cannot_go_back_is_tried_in_place(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    heard, group = refusing(world), world.group
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST) as consumer:
        await producer.send_to(QUEUE, Message("T", b"hard"))
        group.intercept(fixed(ResponseCode.NO_PERMISSION, "no"))
        await heard.wait_for(1)
        await trio.sleep(1)
        assert (consumer.counts["kept"], committed(group).get(0, 0)) == (1, 0)
        await heard.wait_for(2)
    assert heard.at[1] - heard.at[0] == pytest.approx(5, abs=0.1)
    assert [m.message_queue for m in heard.messages] == [QUEUE, QUEUE]
    assert committed(group)[0] == 1


async def test_tries_are_limited_and_the_delay_is_the_listeners(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:

    def answer(_: DeliveredMessage, context: ConsumeContext) -> ConsumeStatus:
        context.delay_level_when_next_consume = 5
        return ConsumeStatus.RECONSUME_LATER

    heard.answer = answer
    config = PushConfig(consume_from=FROM_FIRST, max_reconsume_times=2)
    async with PushConsumer(client, "c", heard, {"T": "*"}, config):
        await producer.send_to(QUEUE, Message("T", b"hard"))
        await heard.wait_for(3)
        await trio.sleep(60)
    asked = [s.command.ext for s in world.seen if s.code == RequestCode.CONSUMER_SEND_MSG_BACK]
    assert [(a["delayLevel"], a["maxReconsumeTimes"]) for a in asked] == [("5", "2")] * 3
    assert world.group.bodies("%DLQ%c") == [b"hard"]
    assert len(heard.bodies) == 3


@pytest.mark.parametrize(("delay_level", "tries"), [(0, 3), (-1, 1)])
async def test_send_to_retry_topic_has_tries_of_send_back(
    world: World,
    client: ClientInstance,
    producer: Producer,
    delay_level: int,
    tries: int,
    heard: Heard,
) -> None:

    def answer(_: DeliveredMessage, context: ConsumeContext) -> ConsumeStatus:
        context.delay_level_when_next_consume = delay_level
        return ConsumeStatus.RECONSUME_LATER

    heard.answer = answer
    world.group.on(RequestCode.CONSUMER_SEND_MSG_BACK, fixed(1, "look message by offset failed"))
    config = PushConfig(consume_from=FROM_FIRST, max_reconsume_times=2)
    async with PushConsumer(client, "c", heard, {"T": "*"}, config):
        await producer.send_to(QUEUE, Message("T", b"hard"))
        await heard.wait_for(tries)
        await trio.sleep(60)
    assert [m.reconsume_times for m in heard.messages] == list(range(tries))
    assert world.group.bodies("%DLQ%c") == [b"hard"]


async def test_part_of_a_batch_may_be_acknowledged(
    client: ClientInstance, producer: Producer, heard: Heard
) -> None:

    def answer(message: DeliveredMessage, context: ConsumeContext) -> None:
        if not message.reconsume_times:
            context.ack_index = 1

    heard.answer = answer
    config = PushConfig(consume_from=FROM_FIRST, consume_message_batch_max_size=4)
    await send(producer, 4, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, config):
        await heard.wait_for(6)
    assert heard.bodies == [b"0", b"1", b"2", b"3", b"2", b"3"]
    assert heard.batches[0] == 4


async def test_listener_over_its_timeout_ends_and_message_goes_back(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    heard.delay_s = 1e6
    config = PushConfig(consume_from=FROM_FIRST, max_reconsume_times=0)
    async with PushConsumer(client, "c", heard, {"T": "*"}, config) as consumer:
        await send(producer, 1)
        await heard.wait_for(1)
        await trio.sleep(14.9 * 60)
        assert (heard.running, world.count(RequestCode.CONSUMER_SEND_MSG_BACK)) == (1, 0)
        await trio.sleep(2 * 60)
        assert (heard.running, consumer.counts["expired"]) == (0, 1)
    assert world.group.bodies("%DLQ%c") == [b"0"]
    assert committed(world.group)[0] == 1


async def test_message_that_fails_while_its_queue_leaves_stays(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    heard, group = Heard(), world.group
    heard.delay_s = 0.5
    heard.answer = lambda _message, _context: ConsumeStatus.RECONSUME_LATER
    await send(producer, 2, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST) as consumer:
        await heard.wait_for(1)
    assert consumer.counts["failed"] >= 1
    assert committed(group).get(0, 0) == 0


async def test_a_plain_function_needs_an_executor(client: ClientInstance) -> None:
    with pytest.raises(ConfigError, match="executor"):
        PushConsumer(client, "c", lambda _messages, _context: None, {"T": "*"})


async def test_a_plain_function_runs_in_threads_and_may_take_too_long(world: World) -> None:
    heard: list[bytes] = []

    def listener(messages: Sequence[DeliveredMessage], context: ConsumeContext) -> None:
        heard.extend(message.body_bytes for message in messages)

    client = world.client()
    client.executor = Slow()
    async with client, Producer(client, "p") as producer:
        await send(producer, 3, queues=1)
        async with PushConsumer(
            client,
            "c",
            listener,
            {"T": "*"},
            PushConfig(consume_from=FROM_FIRST, consume_timeout_s=60, max_reconsume_times=0),
        ) as consumer:
            await trio.sleep(70)
            assert consumer.counts["expired"] == 1
            assert world.group.bodies("%DLQ%c") == [b"1"]
    assert sorted(heard) == [b"0", b"1", b"2"]
    assert committed(world.group)[0] == 3
    assert len(client.executor.kinds) == 3


class Slow:
    """An executor whose second work takes two minutes, and cannot be cancelled."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def runs_inline(self, kind: str) -> bool:
        return False

    def run_inline(self, work, *, kind: str):  # type: ignore[no-untyped-def]  # any work, any result
        return work()

    async def run(self, work, *, kind: str):  # type: ignore[no-untyped-def]  # any work, any result
        self.kinds.append(kind)
        if len(self.kinds) == 2:
            with trio.CancelScope(shield=True):
                await trio.sleep(120)
        return work()


async def test_part_that_succeeded_is_committed_while_others_go_back(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:

    def answer(_: DeliveredMessage, context: ConsumeContext) -> None:
        context.ack_index = 1

    async def slow(asked: RemotingCommand) -> RemotingCommand:
        await trio.sleep(4)
        return response_to(asked)

    heard.answer = answer
    world.group.on(RequestCode.CONSUMER_SEND_MSG_BACK, slow)
    config = PushConfig(consume_from=FROM_FIRST, consume_message_batch_max_size=8)
    await send(producer, 8, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, config):
        await heard.wait_for(8)
        await trio.sleep(6)
        assert 2 <= committed(world.group)[0] < 8  # others are to be sent back still
