"""Messages looked up, and dead letters given back."""

from __future__ import annotations

import zlib

import pytest

from dledger.client.admin.admin import Admin
from dledger.client.admin.messages import resend_copy
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import DamagedAnswerError, MessageIllegalError, RequestFailedError
from dledger.client.core.message import MAX_BODY_BYTES, Message, encode_message_properties
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.commitlog.properties import decode_properties, encode_properties
from dledger.commitlog.record import decode_record, encode_record
from dledger.remoting.protocol.bodies import (
    ConsumeStats,
    OffsetWrapper,
    QueryConsumeQueueResponseBody,
)
from dledger.remoting.protocol.bodies import MessageQueue as WireQueue
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from tests.harness.fake_nodes import fixed
from tests.unit.client.fake_cluster import Group, World

QUEUE = MessageQueue("T", "g", 0)


def all_records(group: Group) -> bytes:
    """Answer as RocketMQ does: with everything that has the same hash."""
    return b"".join(group.by_position.values())


async def test_other_keys_of_the_same_hash_are_left_out(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    for keys in ("Aa x", "BB", "x Aa", "AaBB"):
        await producer.send_to(QUEUE, Message("T", keys.encode(), keys=keys))
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(body=all_records(world.group)))
    admin = Admin(client)
    found = await admin.query_messages("T", "Aa", begin_ms=5, end_ms=9)
    assert [message.body_bytes for message in found] == [b"Aa x", b"x Aa"]
    assert [message.broker_name for message in found] == ["g", "g"]
    (asked,) = [s.command.ext for s in world.seen if s.code == RequestCode.QUERY_MESSAGE]
    assert (asked["key"], asked["topic"], asked["maxNum"]) == ("Aa", "T", "64")
    assert (asked["beginTimestamp"], asked["endTimestamp"]) == ("5", "9")
    newest = await admin.query_messages("T", "Aa", max_messages=1)
    assert [message.body_bytes for message in newest] == [b"x Aa"]


async def test_a_message_is_found_by_its_id(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    sent = [await producer.send_to(QUEUE, Message("T", b"%d" % i)) for i in range(3)]
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(body=all_records(world.group)))
    (found,) = await Admin(client).query_unique_key("T", sent[1].message_id)
    assert found.body_bytes == b"1"
    (asked,) = [s.command.ext for s in world.seen if s.code == RequestCode.QUERY_MESSAGE]
    assert asked["_UNIQUE_KEY_QUERY"] in (True, "true")


async def test_nothing_found_is_an_empty_list(world: World, client: ClientInstance) -> None:
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(ResponseCode.QUERY_NOT_FOUND, "no"))
    assert await Admin(client).query_messages("T", "k") == []


async def test_a_refusal_is_an_error(world: World, client: ClientInstance) -> None:
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(ResponseCode.NO_PERMISSION, "no"))
    with pytest.raises(RequestFailedError, match="messages of T with key k on g"):
        await Admin(client).query_messages("T", "k")


async def test_a_damaged_answer_is_an_error(world: World, client: ClientInstance) -> None:
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(body=b"x" * 200))
    with pytest.raises(DamagedAnswerError, match="are damaged"):
        await Admin(client).query_messages("T", "k")


async def test_a_groups_progress_comes_by_queue(world: World, client: ClientInstance) -> None:
    table = {WireQueue("T", "g", 0): OffsetWrapper(broker_offset=5, consumer_offset=3)}
    body = ConsumeStats(offset_table=table).encode()
    world.group.on(RequestCode.GET_CONSUME_STATS, fixed(body=body))
    stats = await Admin(client).consume_stats("c", "T")
    assert list(stats) == [QUEUE]
    assert (stats[QUEUE].broker_offset, stats[QUEUE].consumer_offset) == (5, 3)


async def test_units_of_a_queue_come_as_the_broker_has_them(
    world: World, client: ClientInstance
) -> None:
    body = QueryConsumeQueueResponseBody(min_queue_index=1, max_queue_index=9)
    world.group.on(RequestCode.QUERY_CONSUME_QUEUE, fixed(body=body.encode()))
    admin = Admin(client)
    await admin.topic_route("T")
    found = await admin.query_consume_queue(QUEUE, 3, 4, group="c")
    assert (found.min_queue_index, found.max_queue_index) == (1, 9)
    (asked,) = [s.command.ext for s in world.seen if s.code == RequestCode.QUERY_CONSUME_QUEUE]
    assert (asked["index"], asked["count"], asked["consumerGroup"]) == ("3", "4", "c")


async def test_a_search_by_time_has_two_sides(world: World, client: ClientInstance) -> None:
    async with PullConsumer(client, "c") as consumer:
        await consumer.search_offset(QUEUE, 7)
        await consumer.search_offset(QUEUE, 7, upper=True)
        code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
        sides = [s.command.ext.get("boundaryType") for s in world.seen if s.code == code]
        assert sides == [None, "UPPER"]


def letter(**properties: str) -> MessageExt:
    record = encode_record(
        topic="%DLQ%billing",
        queue_id=0,
        body=b"order",
        properties=encode_properties(properties),
        flag=7,
        reconsume_times=17,
    )
    return MessageExt(memoryview(record), 0)


def test_resend_copies_user_properties_to_the_retry_topic() -> None:
    names = {"UNIQ_KEY": "K", "TAGS": "A", "KEYS": "k1 k2", "colour": "red", "CLUSTER": "c"}
    origin = {"RETRY_TOPIC": "orders", "DLQ_ORIGIN_TOPIC": "orders", "DLQ_ORIGIN_MESSAGE_ID": "0A"}
    way = {
        "ORIGIN_MESSAGE_ID": "0A",
        "WAIT": "false",
        "TIMER_DELAY_MS": "5",
        "RECONSUME_TIME": "16",
    }
    copy = resend_copy(letter(**names, **origin, **way), "billing")
    assert (copy.topic, copy.body, copy.tags, copy.keys, copy.flag) == (
        "%RETRY%billing", b"order", "A", "k1 k2", 7,
    )  # fmt: skip
    assert copy.properties == {"colour": "red", "RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "0A"}
    assert not copy.is_delayed
    stored = decode_properties(encode_message_properties(copy, "new"))
    assert (copy.message_id, stored["TAGS"], stored["KEYS"]) == ("K", "A", "k1 k2")


def test_the_topic_it_came_from_is_named_by_either_property() -> None:
    for found in ({"DLQ_ORIGIN_TOPIC": "orders"}, {"RETRY_TOPIC": "orders"}):
        copy = resend_copy(letter(**found), "g")
        assert copy.properties == {"RETRY_TOPIC": "orders"}
    assert resend_copy(letter(colour="red"), "g").properties == {"colour": "red"}


async def test_letter_that_cannot_be_sent_holds_back_no_other(
    world: World, client: ClientInstance
) -> None:
    world.group.topics |= {"%DLQ%c": 1, "%RETRY%c": 1}
    packed = zlib.compress(bytes(MAX_BODY_BYTES + 1))
    for body, sys_flag in ((b"a", 0), (packed, 0x301), (b"no zlib", 0x301), (b"b", 0)):
        record = encode_record(
            topic="%DLQ%c", queue_id=0, body=body, properties=b"", sys_flag=sys_flag
        )
        world.group.store("%DLQ%c", 0, decode_record(record))
    with pytest.raises(MessageIllegalError, match=r"2 dead letters .* 2 were .* offset 1"):
        await Admin(client).resend_dead_letters("c")
    sent = [bytes(decode_record(each).body) for each in world.group.queue("%RETRY%c", 0)]
    assert sent == [b"a", b"b"]
    assert await Admin(client).resend_dead_letters("c") == 0
