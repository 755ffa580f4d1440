"""Lazily decoded messages."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from dledger.client.core.errors import MessageIllegalError
from dledger.client.core.message import Message, check_body, check_topic, encode_message_properties
from dledger.client.core.message_ext import MessageBlock, MessageExt
from dledger.commitlog.errors import CorruptRecordError
from dledger.commitlog.record import encode_record, pack_host


def _record(body: bytes = b"body", **fields: object) -> bytes:
    given: dict[str, object] = {
        "topic": "T",
        "queue_id": 3,
        "body": body,
        "properties": b"UNIQ_KEY\x01ID\x02TAGS\x01A\x02KEYS\x01k1 k2\x02a\x01b\x02",
        "flag": 9,
        "queue_offset": 42,
        "phy_offset": 4242,
        "born_timestamp_ms": 11,
        "store_timestamp_ms": 12,
        "born_host": pack_host("10.0.0.1", 1),
        "store_host": pack_host("10.0.0.2", 10911),
        "reconsume_times": 2,
    }
    return encode_record(**(given | fields))  # type: ignore[arg-type]  # names and values of the test's own


@pytest.mark.parametrize("ipv6", [False, True])
def test_every_field_of_a_message(ipv6: bool) -> None:
    hosts = (
        {"born_host": pack_host("::1", 1), "store_host": pack_host("::2", 10911)} if ipv6 else {}
    )
    raw = b"pad" + _record(**hosts)
    message = MessageExt(memoryview(raw), 3, "g")
    assert message.topic == "T"
    assert bytes(message.body) == message.body_bytes == b"body"
    assert message.queue_id == 3
    assert message.queue_offset == 42
    assert message.phy_offset == 4242
    assert message.flag == 9
    assert message.born_timestamp_ms == 11
    assert message.store_timestamp_ms == 12
    assert message.reconsume_times == 2
    assert message.tags == "A"
    assert message.keys == "k1 k2"
    assert message.message_id == "ID"
    assert message.properties["a"] == "b"
    assert message.size == len(raw) - 3
    assert message.store_host == ("::2" if ipv6 else "10.0.0.2", 10911)
    assert message.born_host == ("::1" if ipv6 else "10.0.0.1", 1)
    assert message.broker_name == "g"
    expected = f"{1 * 2:032X}" if ipv6 else "0A000002"
    assert message.offset_message_id == expected + "00002A9F" + f"{4242:016X}"
    assert "offset 42" in repr(message)


def test_a_message_without_unique_key_is_named_by_its_place() -> None:
    message = MessageExt(memoryview(_record(properties=b"")), 0)
    assert message.message_id == message.offset_message_id
    assert message.tags == ""


def test_the_body_of_a_plain_message_is_a_view() -> None:
    raw = bytearray(_record())
    message = MessageExt(memoryview(raw), 0)
    body = message.body_view
    raw[88] = ord("B")
    assert bytes(body) == b"Body"


@pytest.mark.parametrize("sys_flag", [1, 0x301])
def test_body_of_a_compressed_message_is_decompressed(sys_flag: int) -> None:
    raw = _record(zlib.compress(b"a" * 9999), sys_flag=sys_flag)
    assert MessageExt(memoryview(raw), 0).body == b"a" * 9999


def test_body_that_cannot_be_decompressed_raises_when_read() -> None:
    message = MessageExt(memoryview(_record(b"junk", sys_flag=0x301)), 0)
    assert message.tags == "A"
    with pytest.raises(CorruptRecordError, match="damaged"):
        _ = message.body


def test_a_block_is_a_sequence_of_its_records() -> None:
    records = [_record(b"%d" % i, queue_offset=i) for i in range(5)]
    block = MessageBlock(b"".join(records), "g")
    assert len(block) == 5
    assert [m.body_bytes for m in block] == [b"0", b"1", b"2", b"3", b"4"]
    assert block[-1].queue_offset == 4
    assert [m.queue_offset for m in block[1:3]] == [1, 2]
    assert len(MessageBlock(b"")) == 0


@pytest.mark.parametrize(
    ("offsets", "first", "end"),
    [
        ((5, 6, 6), 5, 8),
        ((5, 7, 6), 5, 8),
        ((4, 5), 5, 8),
        ((5, 6, 8), 5, 8),
        ((5, 6 | 1 << 33), 5, 8),
    ],
)
def test_block_whose_offsets_do_not_rise_is_refused(
    offsets: tuple[int, ...], first: int, end: int
) -> None:
    data = b"".join(_record(queue_offset=offset) for offset in offsets)
    with pytest.raises(CorruptRecordError, match="claims offset"):
        MessageBlock(data, "g", first, end)
    rising = b"".join(_record(queue_offset=offset) for offset in (5, 7))
    assert [m.queue_offset for m in MessageBlock(rising, "g", 5, 8)] == [5, 7]


@pytest.mark.parametrize("ipv6", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_block_refuses_a_body_that_fails_its_checksum(place: int, ipv6: bool) -> None:
    hosts = {"born_host": pack_host("::1", 1)} if ipv6 else {}
    records = [bytearray(_record(b"body-%d" % n, queue_offset=n, **hosts)) for n in range(3)]
    assert [m.body for m in MessageBlock(b"".join(records))] == [b"body-0", b"body-1", b"body-2"]
    at = records[place].index(b"body-")
    for bit in range(8 * len(b"body-0")):
        records[place][at + bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecordError):
            MessageBlock(b"".join(records))
        records[place][at + bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("cut", [1, 50, 100])
def test_a_cut_block_is_refused(cut: int) -> None:
    with pytest.raises(CorruptRecordError):
        MessageBlock((_record() * 2)[:-cut])


def test_properties_begin_with_the_unique_key() -> None:
    message = Message("T", b"x", tags="A", keys=["a", "b"], properties={"p": "q"})
    assert (
        encode_message_properties(message, "ID")
        == b"UNIQ_KEY\x01ID\x02TAGS\x01A\x02KEYS\x01a b\x02p\x01q\x02"
    )
    delayed = Message("T", b"x", delay_level=4)
    assert encode_message_properties(delayed, "ID") == b"UNIQ_KEY\x01ID\x02DELAY\x014\x02"
    with pytest.raises(MessageIllegalError, match="UTF-8"):
        encode_message_properties(Message("T", b"x", tags="\ud800"), "ID")


@pytest.mark.parametrize(
    "given",
    [
        {"properties": {"a": ""}},
        {"properties": {"": "v"}},
        {"properties": {"a": 0}},
        {"properties": {"a": None}},
        {"properties": {"a": 5}},
        {"keys": ["x y"]},
        {"keys": ["", "z"]},
    ],
)
def test_what_a_record_cannot_hold_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(MessageIllegalError, match="empty"):
        encode_message_properties(Message("T", b"x", **given), "ID")


@pytest.mark.parametrize("mark", ["\x01", "\x02"])
def test_a_message_id_holds_no_separator(mark: str) -> None:
    with pytest.raises(MessageIllegalError, match="separator"):
        encode_message_properties(Message("T", b"x", tags="A"), f"id{mark}TAGS")
    with pytest.raises(MessageIllegalError, match="separator"):
        encode_message_properties(Message("T", b"x"), f"id{mark}TAGS")


def test_topic_limits_depend_on_the_prefix() -> None:
    check_topic("%RETRY%" + "g" * 248)
    check_topic("a" * 127)
    with pytest.raises(MessageIllegalError):
        check_topic("%RETRY%" + "g" * 249)


def test_message_to_a_dead_letter_topic_is_refused() -> None:
    with pytest.raises(MessageIllegalError, match="filled by the brokers"):
        check_topic("%DLQ%group")


@pytest.mark.parametrize("level", [-1, 65, 99])
def test_a_delay_level_no_broker_has_is_refused(level: int) -> None:
    with pytest.raises(MessageIllegalError, match=f"delay_level {level}: brokers have at most 64"):
        encode_message_properties(Message("T", b"x", delay_level=level), "ID")


def test_message_with_a_text_body_names_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"bytes, not str: encode it, body=text\.encode\(\)"):
        check_body("text")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(TypeError, match="bytes, not int; nothing was sent"):
        check_body(7)  # type: ignore[arg-type]  # what is refused


def test_a_body_is_bytes_and_its_view_is_no_copy() -> None:
    record = encode_record(topic="T", queue_id=0, body=b'{"a": 1}', properties=b"")
    message = MessageExt(memoryview(record), 0)
    assert json.loads(message.body) == {"a": 1}
    assert type(message.body) is type(message.body_bytes) is bytes
    view = message.body_view
    assert isinstance(view, memoryview)
    assert view.obj is record
    assert bytes(view) == message.body


def test_body_size_is_counted_in_bytes() -> None:
    assert check_body(memoryview(bytes(8)).cast("I")) == 8
