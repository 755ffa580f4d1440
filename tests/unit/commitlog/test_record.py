import zlib

import pytest

from dledger.commitlog.errors import CorruptRecordError, LocalProtocolError
from dledger.commitlog.record import (
    MAGIC_V1,
    MAGIC_V2,
    STORED_MS_BYTES,
    Layout,
    RecordTemplate,
    body_crc,
    decode_record,
    encode_record,
    iter_records,
    pack_host,
    record_properties,
    stored_ms_of,
    unpack_host,
)

GOLDEN = bytes.fromhex(
    "00000077"  # totalSize 119
    "daa320a7"  # magic
    "7036e992"  # bodyCRC
    "00000003"  # queueId
    "00000007"  # flag
    "0000000000000011"  # queueOffset
    "0000000000000400"  # physicalOffset
    "00000301"  # sysFlag
    "000001a1f7e7b337"  # bornTimestamp
    "0a00000100001f90"  # bornHost 10.0.0.1:8080
    "000001a1f7e7b338"  # storeTimestamp
    "7f00000100002a9f"  # storeHost 127.0.0.1:10911
    "00000002"  # reconsumeTimes
    "0000000000000005"  # preparedTransactionOffset
    "00000006"
    + b"hello0".hex()
    + "02"
    + b"T1".hex()
    + "0014"
    + b"TAGS\x01TagA\x02K\x01vvvvvvv\x02".hex()
)


def golden(**changes: object) -> bytes:
    arguments: dict[str, object] = {
        "topic": "T1", "queue_id": 3, "body": b"hello0",
        "properties": b"TAGS\x01TagA\x02K\x01vvvvvvv\x02", "flag": 7, "sys_flag": 0x301,
        "born_timestamp_ms": 0x1A1F7E7B337,
        "born_host": pack_host("10.0.0.1", 8080),
        "reconsume_times": 2, "prepared_transaction_offset": 5, "queue_offset": 17,
        "phy_offset": 1024, "store_timestamp_ms": 0x1A1F7E7B338,
        "store_host": pack_host("127.0.0.1", 10911),
    }  # fmt: skip
    return encode_record(**(arguments | changes))  # type: ignore[arg-type]  # names and values of the test's own


def test_a_record_has_the_golden_bytes() -> None:
    assert golden() == GOLDEN


def test_the_measured_record_has_its_size_and_checksum() -> None:
    record = encode_record(topic="T1", queue_id=0, body=b"hello0", properties=b"p" * 114)
    assert len(record) == 213
    assert record[:12].hex() == "000000d5" + "daa320a7" + "7036e992"
    assert body_crc(b"hello0") == 0x7036E992


def test_a_body_checksum_never_has_its_highest_bit() -> None:
    body = next(b"%d" % i for i in range(100) if zlib.crc32(b"%d" % i) >> 31)
    assert body_crc(body) == zlib.crc32(body) - 2**31
    assert decode_record(golden(body=body)).body == body
    assert body_crc(b"") == 0


@pytest.mark.parametrize(
    ("length", "magic", "length_field"),
    [(127, MAGIC_V1, b"\x7f"), (128, MAGIC_V2, b"\x00\x80"), (32767, MAGIC_V2, b"\x7f\xff")],
)
def test_topic_over_127_bytes_makes_version_2(length: int, magic: int, length_field: bytes) -> None:
    raw = golden(topic="t" * length)
    assert raw[94 : 94 + len(length_field)] == length_field
    record = decode_record(raw)
    assert (record.magic, record.topic) == (magic, "t" * length)


@pytest.mark.parametrize(
    ("born", "store", "flags"),
    [("1.2.3.4", "::1", 0x321), ("2001:db8::7", "5.6.7.8", 0x311), ("2001:db8::7", "::1", 0x331)],
)
def test_ipv6_hosts_move_what_follows_and_set_their_flags(
    born: str, store: str, flags: int
) -> None:
    raw = golden(born_host=pack_host(born, 1), store_host=pack_host(store, 2), reconsume_times=9)
    record, layout = decode_record(raw), Layout.at(b"before" + raw, 6)
    assert len(raw) == len(GOLDEN) + 12 * (flags >> 4 & 3).bit_count()
    assert (record.sys_flag, record.born_host, record.store_host) == (flags, (born, 1), (store, 2))
    assert stored_ms_of(raw[:STORED_MS_BYTES]) == record.store_timestamp_ms == 0x1A1F7E7B338
    assert unpack_host(raw[layout.store_host : layout.reconsume_times]) == (store, 2)
    assert raw[layout.reconsume_times : layout.reconsume_times + 4] == bytes((0, 0, 0, 9))
    assert raw[layout.body : layout.body + len(record.body)] == record.body


def test_host_flags_follow_the_hosts_given() -> None:
    assert decode_record(golden(sys_flag=0x331)).sys_flag == 0x301


@pytest.mark.parametrize(
    "changes",
    [
        {"properties": b"p" * 32768},
        {"topic": "t" * 32768},
        {"born_host": b"1234"},
        {"queue_id": 2**31},
        {"born_timestamp_ms": 2**63},
    ],
)
def test_what_does_not_fit_a_field_is_the_callers_error(changes: dict[str, object]) -> None:
    with pytest.raises(LocalProtocolError):
        golden(**changes)


def test_records_back_to_back_are_read_in_order() -> None:
    raw = golden() + golden(topic="T2") + golden(topic="t" * 200)
    assert [record.topic for record in iter_records(raw)] == ["T1", "T2", "t" * 200]
    assert [record.phy_offset for record in iter_records(raw)] == [1024, 1024, 1024]


def test_a_cut_record_ends_the_reading_with_an_error() -> None:
    reading = iter_records(golden() + golden()[:-1])
    assert next(reading).topic == "T1"
    with pytest.raises(CorruptRecordError, match="claims"):
        next(reading)


def test_changed_body_is_found_unless_unchecked() -> None:
    raw = bytearray(golden())
    raw[88] ^= 1
    with pytest.raises(CorruptRecordError, match="checksum"):
        decode_record(raw)
    assert decode_record(raw, check_crc=False).body == b"iello0"


def test_the_body_is_a_view_of_the_buffer() -> None:
    buffer = bytearray(golden())
    record = decode_record(buffer)
    buffer[88:94] = b"HELLO0"
    assert record.body == b"HELLO0"


@pytest.mark.parametrize("host", ["broker-a", "1.2.3", "1.2.3.256", "::g", ""])
def test_only_numeric_addresses_are_packed(host: str) -> None:
    with pytest.raises(LocalProtocolError):
        pack_host(host, 1)


def test_an_address_of_another_length_is_refused() -> None:
    with pytest.raises(CorruptRecordError):
        unpack_host(b"12345")


@pytest.mark.parametrize("size", [0, 40, 87, 95, 100, 118])
def test_properties_of_a_cut_record_are_refused(size: int) -> None:
    with pytest.raises(CorruptRecordError):
        record_properties(golden()[:size])


@pytest.mark.parametrize("at", [84, 85, 94, 97])
def test_properties_behind_a_wrong_length_are_refused(at: int) -> None:
    record = bytearray(golden())
    record[at] ^= 0x80
    with pytest.raises(CorruptRecordError):
        record_properties(record)


@pytest.mark.parametrize("topic", ["T", "T" * 127, "T" * 128, "T" * 300, "ü"])
@pytest.mark.parametrize("body", [b"b", b"b" * 5000, memoryview(b"view"), bytearray(b"array")])
@pytest.mark.parametrize(
    ("flag", "sys_flag", "properties"),
    [(0, 0, b""), (-1, 0x301, b"k\x01v\x02"), (7, 0x10 | 0x20, b"p" * 32767)],
)
def test_template_writes_what_encode_record_writes(
    topic: str, body: bytes, flag: int, sys_flag: int, properties: bytes
) -> None:
    written = RecordTemplate(topic, 3).encode(
        body, len(body), properties, flag, sys_flag, 1_700_000_000_123
    )
    assert written == encode_record(
        topic=topic, queue_id=3, body=body, properties=properties, flag=flag, sys_flag=sys_flag,
        born_timestamp_ms=1_700_000_000_123,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("topic", "flag", "properties"),
    [("T", 1 << 31, b""), ("T", 0, b"p" * 32768), ("T" * 32768, 0, b"")],
)
def test_template_refuses_what_encode_record_refuses(
    topic: str, flag: int, properties: bytes
) -> None:
    with pytest.raises(LocalProtocolError):
        RecordTemplate(topic, 3).encode(b"b", 1, properties, flag, 0, 0)
