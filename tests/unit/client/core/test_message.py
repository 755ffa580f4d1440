"""Messages, their records and the compression of bodies."""

import json
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import lz4.frame
import pytest
import zstandard

from dledger.client.core.errors import MessageIllegalError
from dledger.client.core.message import Message, check_body, check_topic, encode_message_properties
from dledger.client.core.message_ext import (
    MAX_DECOMPRESSED_BYTES,
    CompressionType,
    MessageBlock,
    MessageExt,
    check_level,
    compress,
    decompress,
)
from dledger.commitlog.errors import ConfigError, CorruptRecordError
from dledger.commitlog.record import encode_record, pack_host
from dledger.jepsen_like.seeded_rng import rng_stream


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


@pytest.mark.parametrize("topic", ["T", "T" * 200])
def test_block_with_a_bad_bit_is_refused_or_can_be_read(topic: str) -> None:
    """What is refused at once is pulled again; an error later would reach the application."""
    record = bytearray(_record(topic=topic))
    assert MessageBlock(record)[0].topic == topic
    refused = 0
    for bit in range(8 * len(record)):
        record[bit // 8] ^= 1 << bit % 8
        try:
            (message,) = MessageBlock(record)
        except CorruptRecordError:
            refused += 1
        else:
            names = (message.topic, message.tags, message.message_id)
            assert {type(name) for name in names} == {str}
            assert isinstance(message.store_host[0], str)
        record[bit // 8] ^= 1 << bit % 8
    assert refused > 8 * (4 + 4 + 4 + 4 + 1 + 2)  # sizes, checksum and body, whole


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


LZ4, ZSTD, ZLIB = CompressionType.LZ4, CompressionType.ZSTD, CompressionType.ZLIB
TEXT = b"".join(b"line %d\n" % number for number in range(20_000))
MIB = 1 << 20


def test_the_types_are_those_of_rocketmq() -> None:
    assert {kind.name: kind.sys_flag for kind in CompressionType} == {
        "LZ4": 0x101,
        "ZSTD": 0x201,
        "ZLIB": 0x301,
    }


@pytest.mark.parametrize("kind", CompressionType)
@pytest.mark.parametrize(
    "body",
    [b"x", TEXT, bytes(5 * MIB), rng_stream(1).randbytes(300_000)],
    ids=["one byte", "text", "zeros", "noise"],
)
def test_compress_then_decompress_is_the_identity(kind: CompressionType, body: bytes) -> None:
    folded = compress(body, kind, 5)
    # Other bits of the sysFlag say other things.
    assert decompress(folded, kind.sys_flag | 0x3E) == body
    assert decompress(memoryview(folded), kind.sys_flag) == body
    assert compress(memoryview(body), kind, 5) == folded


@pytest.mark.parametrize("kind", [ZSTD, ZLIB])
def test_compress_at_a_higher_level_is_smaller(kind: CompressionType) -> None:
    sizes = [len(compress(TEXT, kind, level)) for level in (1, 9)]
    assert sizes[0] > sizes[1]


def test_lz4_frames_have_blocks_on_their_own() -> None:
    """Java's reader refuses others; FLG is the fifth byte, bit 5 means independent."""
    folded = compress(TEXT * 50, LZ4, 5)
    assert folded[:4] == bytes.fromhex("04224d18")
    assert folded[4] & 0x20
    assert not lz4.frame.get_frame_info(folded)["block_linked"]
    assert len(TEXT * 50) > lz4.frame.get_frame_info(folded)["block_size"]


# Written by hand from the formats: what Java's streams write for b"hello", sizes unsaid.
FOREIGN = {
    "lz4": (bytes.fromhex("04224d18 6070 73 05000080 68656c6c6f 00000000"), 0x101),
    "zstd": (bytes.fromhex("28b52ffd 00 58 290000 68656c6c6f"), 0x201),
    "zlib": (bytes.fromhex("789c cb48cdc9c907 00 062c0215"), 0x301),
    "zlib of old clients": (bytes.fromhex("789c cb48cdc9c907 00 062c0215"), 1),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_decompress_reads_bodies_of_other_clients(name: str) -> None:
    folded, sys_flag = FOREIGN[name]
    assert decompress(folded, sys_flag) == b"hello"


@pytest.mark.parametrize("kind", [4, 5, 6, 7])
def test_decompress_refuses_an_undefined_type(kind: int) -> None:
    with pytest.raises(CorruptRecordError, match=rf"type {kind}; this client reads 1 \(LZ4\)"):
        decompress(b"x", 1 | kind << 8)


@pytest.mark.parametrize("kind", CompressionType)
@pytest.mark.parametrize("body", [b"junk that is no frame", b"\0" * 40])
def test_what_is_no_frame_is_refused(kind: CompressionType, body: bytes) -> None:
    with pytest.raises(CorruptRecordError, match="damaged"):
        decompress(body, kind.sys_flag)


@pytest.mark.parametrize("kind", CompressionType)
def test_a_frame_cut_anywhere_is_refused(kind: CompressionType) -> None:
    folded = compress(TEXT[:2000], kind, 5)
    for end in range(len(folded)):
        with pytest.raises(CorruptRecordError, match=r"cut|damaged"):
            decompress(folded[:end], kind.sys_flag)


@pytest.mark.parametrize("kind", CompressionType)
def test_the_frame_of_another_type_is_refused(kind: CompressionType) -> None:
    for other in CompressionType:
        if other is not kind:
            with pytest.raises(CorruptRecordError, match="damaged"):
                decompress(compress(TEXT, other, 5), kind.sys_flag)


def zstd_bomb_without_its_size(size: int) -> bytes:
    run_of_zeros = (128 << 13 | 1 << 1).to_bytes(3, "little") + b"\0"
    last = (128 << 13 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    return bytes.fromhex("28b52ffd0058") + run_of_zeros * (size // (128 << 10)) + last


BOMBS: dict[str, tuple[Callable[[int], bytes], int]] = {
    "lz4": (lambda size: lz4.frame.compress(bytes(size)), 0x101),
    "zstd with its size": (lambda size: zstandard.ZstdCompressor().compress(bytes(size)), 0x201),
    "zstd that does not": (zstd_bomb_without_its_size, 0x201),
    "zlib": (lambda size: zlib.compress(bytes(size), 1), 0x301),
}


@pytest.mark.parametrize("name", BOMBS)
def test_decompress_refuses_a_body_over_its_limit_by_name(name: str) -> None:
    make, sys_flag = BOMBS[name]
    folded = make(4 * MAX_DECOMPRESSED_BYTES)
    assert len(folded) < 2 * MIB
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError, match="more than 67108864 bytes"):
            decompress(folded, sys_flag)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Parts and the whole they are joined to.
    assert peak < 2 * (MAX_DECOMPRESSED_BYTES + 8 * MIB) + 4 * MIB


@pytest.mark.parametrize("kind", CompressionType)
def test_the_limit_itself_is_no_bomb(kind: CompressionType) -> None:
    folded = compress(TEXT, kind, 5)
    assert decompress(folded, kind.sys_flag, max_bytes=len(TEXT)) == TEXT
    with pytest.raises(CorruptRecordError, match="more than"):
        decompress(folded, kind.sys_flag, max_bytes=len(TEXT) - 1)


def test_levels() -> None:
    for kind, good, bad in ((ZLIB, (0, 9), (-1, 10)), (ZSTD, (1, 22), (0, 23))):
        for level in good:
            check_level(kind, level)
        for level in bad:
            with pytest.raises(ConfigError, match=f"compress_level is {level}; {kind.name} has"):
                check_level(kind, level)
    check_level(LZ4, 100)
    assert len({compress(TEXT, LZ4, level) for level in (0, 100)}) == 1
