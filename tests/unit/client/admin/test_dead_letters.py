"""Dead letters that are given back: a copy for the group alone, counted from zero."""

from __future__ import annotations

from client.admin.messages import resend_copy
from client.core.message import encode_message_properties
from client.core.message_ext import MessageExt
from commitlog.properties import decode_properties, encode_properties
from commitlog.record import encode_record


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


def test_the_copy_goes_to_the_groups_retry_topic_with_what_is_the_users() -> None:
    copy = resend_copy(
        letter(
            UNIQ_KEY="K",
            TAGS="A",
            KEYS="k1 k2",
            colour="red",
            RETRY_TOPIC="orders",
            DLQ_ORIGIN_TOPIC="orders",
            DLQ_ORIGIN_MESSAGE_ID="0A",
            ORIGIN_MESSAGE_ID="0A",
            CLUSTER="c",
            WAIT="false",
            TIMER_DELAY_MS="5",
            RECONSUME_TIME="16",
        ),
        "billing",
    )
    assert (copy.topic, copy.body, copy.tags, copy.keys, copy.flag) == (
        "%RETRY%billing", b"order", "A", "k1 k2", 7,
    )  # fmt: skip
    assert copy.properties == {
        "colour": "red",
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": "0A",
    }
    assert not copy.is_delayed
    stored = decode_properties(encode_message_properties(copy, "new"))
    assert (stored["UNIQ_KEY"], stored["TAGS"], stored["KEYS"]) == ("new", "A", "k1 k2")


def test_the_topic_it_came_from_is_named_by_either_property() -> None:
    for found in ({"DLQ_ORIGIN_TOPIC": "orders"}, {"RETRY_TOPIC": "orders"}):
        copy = resend_copy(letter(**found), "g")
        assert copy.properties == {"RETRY_TOPIC": "orders"}
    assert resend_copy(letter(colour="red"), "g").properties == {"colour": "red"}
