"""What is stored of a message with a time of its own, and what is delivered of it."""

import pytest

from dledger.broker_errors import PropertyUnreadableError
from dledger.commitlog.properties import TIMER_TOPIC
from dledger.commitlog.record import MAX_TOPIC_V1_BYTES, decode_record, encode_record, pack_host
from dledger.services.delayed_message import (
    deliver,
    deliver_at_ms,
    delivered_message,
    due_ms,
    rolled_message,
    timed_properties,
    without_timer,
)
from dledger.services.stored_record import StoredBytes, StoredRecord

NOW_MS = 1_700_000_000_123


@pytest.mark.parametrize(
    ("properties", "asked_ms"),
    [
        (b"KEYS\x01k\x02", None),
        (b"TIMER_DELIVER_MS\x01170\x02", 170),
        (b"TIMER_DELAY_MS\x011500\x02", NOW_MS + 1500),
        (b"TIMER_DELAY_SEC\x012\x02", NOW_MS + 2000),
        (b"TIMER_DELAY_SEC\x01-2\x02", NOW_MS - 2000),
        (
            b"TIMER_DELIVER_MS\x019\x02TIMER_DELAY_MS\x017\x02TIMER_DELAY_SEC\x011\x02",
            NOW_MS + 1000,
        ),
        (b"TIMER_DELIVER_MS\x019\x02TIMER_DELAY_MS\x017\x02", NOW_MS + 7),
        (b"XTIMER_DELAY_MS\x017\x02", None),
    ],
)
def test_which_property_counts(properties: bytes, asked_ms: int | None) -> None:
    assert deliver_at_ms(properties, NOW_MS) == asked_ms


def test_a_time_that_is_no_number_is_none() -> None:
    with pytest.raises(PropertyUnreadableError, match="TIMER_DELAY_SEC is not a number: 'soon'"):
        deliver_at_ms(b"TIMER_DELAY_SEC\x01soon\x02", NOW_MS)


@pytest.mark.parametrize(("asked", "due"), [(2000, 2000), (2001, 3000), (2999, 3000)])
def test_a_message_is_due_at_the_next_whole_second(asked: int, due: int) -> None:
    assert due_ms(asked) == due


def test_the_properties_that_do_not_count_are_cleared() -> None:
    given = b"A\x01b\x02TIMER_DELIVER_MS\x019\x02TIMER_DELAY_MS\x017\x02"
    assert timed_properties(given, "T", 3, 5000) == (
        b"A\x01b\x02TIMER_DELAY_MS\x017\x02REAL_TOPIC\x01T\x02REAL_QID\x013\x02"
        b"TIMER_OUT_MS\x015000\x02"
    )
    assert without_timer(given + b"TIMER_DEL_UNIQKEY\x01K\x02") == b"A\x01b\x02"


@pytest.mark.parametrize("topic", ["T", "x" * MAX_TOPIC_V1_BYTES, "%RETRY%" + "g" * 200])
@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::1"])
def test_what_is_delivered_is_the_message_with_its_properties(topic: str, host: str) -> None:
    properties = timed_properties(b"UNIQ_KEY\x01K\x02", topic, 3, 5000)
    scheduled = encode_record(
        topic=TIMER_TOPIC, queue_id=0, body=b"hello", properties=properties, flag=9, sys_flag=1,
        born_timestamp_ms=123,
        born_host=pack_host(host, 5),
        reconsume_times=2, queue_offset=77, phy_offset=88, store_timestamp_ms=99,
    )  # fmt: skip
    delivery = delivered_message(StoredBytes(memoryview(scheduled)))
    assert (delivery.topic, delivery.queue_id) == (topic, 3)
    made = decode_record(delivery.record)
    plain = decode_record(deliver(StoredRecord(decode_record(scheduled))).record)
    assert (made.topic, made.queue_id, bytes(made.body)) == (topic, 3, b"hello")
    assert (made.flag, made.born_timestamp_ms, made.reconsume_times) == (9, 123, 2)
    assert made.born_host == (host, 5)
    assert made.properties == properties
    assert (made.queue_offset, made.phy_offset) == (0, 0)
    made.store_timestamp_ms = 0
    assert made == plain


def test_a_rolled_message_is_the_same_and_counts_how_often() -> None:
    stored = timed_properties(b"UNIQ_KEY\x01K\x02", "T", 3, 5000)
    record = encode_record(topic=TIMER_TOPIC, queue_id=0, body=b"hello", properties=stored)
    once = rolled_message(StoredRecord(decode_record(record)))
    twice = rolled_message(StoredRecord(decode_record(once.record)))
    assert (twice.topic, twice.queue_id) == (TIMER_TOPIC, 0)
    made = decode_record(twice.record)
    assert bytes(made.body) == b"hello"
    assert made.property_map == {
        "UNIQ_KEY": "K", "REAL_TOPIC": "T", "REAL_QID": "3", "TIMER_OUT_MS": "5000",
        "TIMER_ROLL_TIMES": "2",
    }  # fmt: skip
