"""Half messages byte by byte: how they are stored, committed, asked for and given up."""

from typing import Any

import pytest

from dledger.broker_errors import UnprocessableMessageError
from dledger.commitlog.entry import Run
from dledger.commitlog.record import decode_record, encode_record, pack_host
from dledger.remoting.protocol.topic_names import HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from dledger.services.half_message import (
    MAX_IMMUNITY_S,
    HalfMessage,
    delay_of,
    half_properties,
    is_half,
)
from dledger.services.stored_record import StoredRecord

GIVEN = b"UNIQ_KEY\x01ABC\x02TRAN_MSG\x01true\x02PGROUP\x01pg\x02TAGS\x01A\x02"
STORED = GIVEN + b"REAL_TOPIC\x01T\x02REAL_QID\x012\x02"
HOST = pack_host("10.0.0.1", 5)


def record_of(topic: str, queue_id: int, properties: bytes = STORED, **more: Any) -> bytes:
    """Return the record of the message, as it stands in a queue of *topic*."""
    facts = {"flag": 9, "sys_flag": 0x301, "born_timestamp_ms": 123, "born_host": HOST, **more}
    return encode_record(
        topic=topic, queue_id=queue_id, body=b"body", properties=properties, **facts
    )


PLACE = {
    "queue_offset": 41,
    "phy_offset": 5000,
    "store_timestamp_ms": 456,
    "store_host": pack_host("10.0.0.9", 10911),
}


def stored(properties: bytes = STORED, host: bytes = HOST) -> StoredRecord:
    return StoredRecord(
        decode_record(record_of(HALF_TOPIC, 0, properties, born_host=host, **PLACE))
    )


@pytest.mark.parametrize(
    ("properties", "is_one"),
    [
        (b"TRAN_MSG\x01true\x02", True),
        (b"TRAN_MSG\x01TRUE\x02", True),
        (b"TRAN_MSG\x01false\x02", False),
        (b"XTRAN_MSG\x01true\x02", False),
        (b"A\x01TRAN_MSG\x02", False),
        (b"", False),
    ],
)
def test_property_marks_a_half_message(properties: bytes, is_one: bool) -> None:
    assert is_half(properties) is is_one


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        (b"DELAY\x013\x02", "DELAY"),
        (b"DELAY\x010\x02", None),
        (b"TIMER_DELAY_SEC\x011\x02", "TIMER_DELAY_SEC"),
        (b"TIMER_DELAY_MS\x011\x02", "TIMER_DELAY_MS"),
        (b"TIMER_DELIVER_MS\x011\x02", "TIMER_DELIVER_MS"),
        (b"A\x01DELAY\x02", None),
    ],
)
def test_every_wish_for_a_delay_is_seen(properties: bytes, name: str | None) -> None:
    assert delay_of(properties) == name


def test_it_is_stored_with_its_destination_and_its_group() -> None:
    assert half_properties(GIVEN, "other", "T", 2) == STORED
    assert half_properties(b"A\x01b\x02", "pg", "T", 0) == (
        b"A\x01b\x02PGROUP\x01pg\x02REAL_TOPIC\x01T\x02REAL_QID\x010\x02"
    )


def test_what_stands_in_it_is_read() -> None:
    half = HalfMessage.of(stored())
    assert (half.group, half.topic, half.queue_id) == ("pg", "T", 2)
    assert (half.transaction_id, half.immunity_s) == ("ABC", 0)


@pytest.mark.parametrize(
    ("value", "seconds"), [(b"30", 30), (b"-1", 0), (b"soon", 0), (b"99999999", MAX_IMMUNITY_S)]
)
def test_the_immunity_is_a_number_of_seconds(value: bytes, seconds: int) -> None:
    record = stored(STORED + b"CHECK_IMMUNITY_TIME_IN_SECONDS\x01%b\x02" % value)
    assert HalfMessage.of(record).immunity_s == seconds


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        (b"", "no real topic"),
        (b"REAL_TOPIC\x01T\x02", "no real topic"),
        (b"REAL_TOPIC\x01T\x02REAL_QID\x01-1\x02", "no number of a queue"),
        (b"REAL_TOPIC\x01T\x02REAL_QID\x019999999999\x02", "no number of a queue"),
        (b"REAL_TOPIC\x01RMQ_SYS_DLEDGER_STATE\x02REAL_QID\x010\x02", "a system topic"),
    ],
)
def test_a_record_without_a_destination_is_no_reason_to_stop(added: bytes, reason: str) -> None:
    with pytest.raises(UnprocessableMessageError, match=reason):
        HalfMessage.of(stored(GIVEN + added))


@pytest.mark.parametrize("host", [HOST, pack_host("2001:db8::1", 5)])
def test_what_is_committed_is_the_same_message_in_its_queue(host: bytes) -> None:
    record, run = HalfMessage.of(stored(host=host)).committed(3)
    assert run == Run("T", 3, 1)
    assert record == record_of(
        "T", 3, sys_flag=0x301 | 8, born_host=host, prepared_transaction_offset=5000
    )


def test_what_is_given_up_is_a_copy_for_people() -> None:
    record, run = HalfMessage.of(stored()).given_up()
    assert run == Run(TRANS_CHECK_MAX_TIME_TOPIC, 0, 1)
    assert record == record_of(TRANS_CHECK_MAX_TIME_TOPIC, 0)


def test_a_producer_is_asked_about_the_message_it_sent() -> None:
    asked = STORED + b"TRANSACTION_CHECK_TIMES\x017\x02WAIT\x01false\x02"
    assert HalfMessage.of(stored()).question(7) == record_of("T", 2, asked, **PLACE)
