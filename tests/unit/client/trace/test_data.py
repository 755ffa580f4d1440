"""Message trace in RocketMQ's encoding, byte by byte."""

from __future__ import annotations

import pytest

from client.trace.data import TraceBean, TraceContext, TraceType, decode, encode, keys_of

BEAN = TraceBean(
    "ID1", "T", "A", "k1 k2", "10.0.0.1:10911", 26, 0, "OFF1", 2, "ID1", "COMMIT_MESSAGE", False
)
BARE = TraceBean("ID2", "T")


def context(kind: TraceType, *beans: TraceBean) -> TraceContext:
    return TraceContext(kind, 1700000000123, beans, "DefaultRegion", "g", 7, True, "REQ", 4)


GOLDEN = {
    TraceType.PUB: (
        "Pub\x011700000000123\x01DefaultRegion\x01g\x01T\x01ID1\x01A\x01k1 k2\x0110.0.0.1:10911"
        "\x0126\x017\x010\x01OFF1\x01true\x02"
    ),
    TraceType.SUB_BEFORE: (
        "SubBefore\x011700000000123\x01DefaultRegion\x01g\x01REQ\x01ID1\x012\x01k1 k2\x02"
    ),
    TraceType.SUB_AFTER: (
        "SubAfter\x01REQ\x01ID1\x017\x01true\x01k1 k2\x014\x011700000000123\x01g\x02"
    ),
    TraceType.END_TRANSACTION: (
        "EndTransaction\x011700000000123\x01DefaultRegion\x01g\x01T\x01ID1\x01A\x01k1 k2"
        "\x0110.0.0.1:10911\x010\x01ID1\x01COMMIT_MESSAGE\x01false\x02"
    ),
}


@pytest.mark.parametrize("kind", TraceType)
def test_each_record_is_rocketmqs_to_the_byte(kind: TraceType) -> None:
    assert encode(context(kind, BEAN)) == GOLDEN[kind]


@pytest.mark.parametrize("kind", TraceType)
def test_what_is_read_is_written_the_same_again(kind: TraceType) -> None:
    (found,) = decode(GOLDEN[kind])
    assert encode(found) == GOLDEN[kind]
    assert found.trace_type is kind


def test_each_message_of_a_context_has_a_record_of_its_own() -> None:
    text = encode(context(TraceType.SUB_BEFORE, BEAN, BARE))
    assert text == GOLDEN[TraceType.SUB_BEFORE] + (
        "SubBefore\x011700000000123\x01DefaultRegion\x01g\x01REQ\x01ID2\x010\x01null\x02"
    )
    assert [found.beans[0].msg_id for found in decode(text)] == ["ID1", "ID2"]


def test_trace_data_writes_missing_fields_as_java_does() -> None:
    text = encode(TraceContext(TraceType.PUB, 1, (BARE,), "", "g"))
    assert (
        text
        == "Pub\x011\x01null\x01g\x01T\x01ID2\x01null\x01null\x01\x010\x010\x010\x01\x01true\x02"
    )
    (found,) = decode(text)
    assert (found.region_id, found.beans) == ("", (BARE,))


def test_keys_are_ids_and_single_keys_once_each() -> None:
    assert keys_of(context(TraceType.PUB, BEAN, BARE, BEAN)) == ["ID1", "k1", "k2", "ID2"]


def test_older_and_newer_clients_are_read() -> None:
    oldest = "Pub\x015\x01r\x01g\x01T\x01ID\x01A\x01k\x01h\x013\x014\x011\x01true\x02"
    newer = "Pub\x015\x01r\x01g\x01T\x01ID\x01A\x01k\x01h\x013\x014\x011\x01OFF\x01false\x01me\x02"
    after = (
        "SubAfter\x01R\x01ID\x014\x01false\x01k\x02SubAfter\x01R\x01ID\x014\x01true\x01k\x013\x02"
    )
    one, two, three, four = decode(oldest + newer + after)
    assert (one.beans[0].offset_msg_id, one.is_success) == ("", True)
    assert (two.beans[0].offset_msg_id, two.is_success) == ("OFF", False)
    assert (three.time_stamp_ms, three.context_code, three.is_success) == (0, 0, False)
    assert (four.group_name, four.context_code, four.is_success) == ("", 3, True)


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "\x02\x02",
        "Pub\x01x\x02",
        "Pub\x02",
        "Recall\x011\x01r\x02",
        "SubBefore\x01a\x01b\x01\x02",
    ],
)
def test_what_cannot_be_read_is_passed_over(damaged: str) -> None:
    found = list(decode(damaged + "\x02" + GOLDEN[TraceType.SUB_AFTER]))
    assert [context.request_id for context in found] == ["REQ"]
