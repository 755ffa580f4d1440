import struct
import zlib
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from dledger.commitlog.derive import DEFAULT_DELAY_MS, Derived, derive
from dledger.commitlog.entry import (
    ENTRY_HEADER_BYTES,
    KIND_CONFIG,
    KIND_NO_OP,
    KIND_RECORDS,
    RecordBatch,
    Run,
    config_body,
    parse_header,
    record_sizes,
    seal_config,
    seal_entry,
    seal_no_op,
    verify_frame,
)
from dledger.commitlog.errors import CorruptEntryError, InvariantBroken
from dledger.commitlog.java_hash import index_key_hash, java_hash
from dledger.commitlog.properties import encode_properties
from dledger.commitlog.record import encode_record, pack_host
from tests.property.strategies_records import batch_of

STORE_HOST = pack_host("127.0.0.1", 10911)


def batch(*queues: tuple[str, int, int], born_host: bytes | None = None) -> RecordBatch:
    records = [
        encode_record(topic=topic, queue_id=queue_id, body=b"%d" % i, properties=b"")
        for topic, queue_id, count in queues
        for i in range(count)
    ]
    sizes = np.array([len(record) for record in records], np.uint32)
    runs = tuple(Run(*queue) for queue in queues)
    return RecordBatch(b"".join(records), sizes, runs, born_host)


def seal(
    *batches: RecordBatch, queue_offsets: list[int], store_host: bytes = STORE_HOST
) -> bytearray:
    return seal_entry(
        batches,
        queue_offsets,
        index=7,
        term=3,
        position=4096,
        prev_chain=99,
        store_time_ms=1_795_147_871_927,
        store_host=store_host,
    )


def test_a_no_op_has_the_golden_bytes() -> None:
    head = struct.pack(">IIqqqIHHq", 0xD1ED6E01, 72, 1, 0, 0, 0, 0, 1, 0)
    chain = blake2b(bytes(8) + head + bytes(4), digest_size=8).digest()
    head += chain + bytes(8)
    expected = head + struct.pack(">II", zlib.crc32(head + bytes(4)), 0)
    assert seal_no_op(1, 0, 0, 0, 0) == expected
    header = parse_header(expected)
    assert (header.kind, header.record_count, header.size) == (KIND_NO_OP, 0, 72)
    assert header.chain == int.from_bytes(chain, "big")
    verify_frame(expected, header, 0)


def test_header_names_what_was_sealed() -> None:
    frame = seal(batch(("T1", 0, 2)), queue_offsets=[10])
    header = parse_header(b"before" + frame, 6)
    assert (header.index, header.term, header.position) == (7, 3, 4096)
    assert (header.kind, header.record_count, header.size) == (KIND_RECORDS, 2, len(frame))
    assert header.store_time_ms == 1_795_147_871_927
    assert header.body_start == ENTRY_HEADER_BYTES + 8
    assert header.end_position == 4096 + len(frame)


def test_sealing_leaves_the_batch_alone() -> None:
    one = batch(("T1", 0, 30))
    before = bytes(memoryview(one.records))
    seal(one, queue_offsets=[5])
    assert one.records == before


@pytest.mark.parametrize("count", [3, 60])
def test_hosts_of_another_width_are_a_bug_of_the_caller(count: int) -> None:
    with pytest.raises(InvariantBroken, match="store host"):
        seal(batch(("T1", 0, count)), queue_offsets=[0], store_host=bytes(20))
    with pytest.raises(InvariantBroken, match="born host"):
        seal(batch(("T1", 0, count), born_host=bytes(20)), queue_offsets=[0])


@pytest.mark.parametrize(
    ("queue_offsets", "runs", "extra"),
    [
        ([], (Run("T1", 0, 2),), b""),
        ([0], (Run("T1", 0, 3),), b""),
        ([0], (Run("T1", 0, 2),), b"x"),
    ],
)
def test_a_batch_that_contradicts_itself_is_a_bug_of_the_caller(
    queue_offsets: list[int], runs: tuple[Run, ...], extra: bytes
) -> None:
    good = batch(("T1", 0, 2))
    records = bytes(memoryview(good.records)) + extra
    with pytest.raises(InvariantBroken):
        seal(RecordBatch(records, good.sizes, runs), queue_offsets=queue_offsets)


def test_an_entry_without_records_is_not_sealed() -> None:
    empty = RecordBatch(b"", np.empty(0, np.uint32), ())
    with pytest.raises(InvariantBroken, match="at least one"):
        seal(empty, queue_offsets=[])


def test_every_changed_bit_of_the_header_is_noticed() -> None:
    frame = bytes(seal(batch(("T1", 0, 1)), queue_offsets=[0]))
    for bit in range(ENTRY_HEADER_BYTES * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptEntryError):
            parse_header(damaged)


def test_a_frame_is_checked_behind_its_header_too() -> None:
    frame = seal(batch(("T1", 0, 2)), queue_offsets=[0])
    header = parse_header(frame)
    verify_frame(frame, header, 99)
    with pytest.raises(CorruptEntryError, match="does not follow"):
        verify_frame(frame, header, 98)
    with pytest.raises(CorruptEntryError, match="bytes"):
        verify_frame(frame[:-1], header, 99)
    frame[-1] ^= 1
    with pytest.raises(CorruptEntryError, match="checksum"):
        verify_frame(frame, header, 99)


def resealed(frame: bytearray) -> bytearray:
    """Give a changed frame checksums that fit, as a faulty writer would."""
    body_crc = zlib.crc32(frame[ENTRY_HEADER_BYTES:])
    struct.pack_into(">I", frame, 56, body_crc)
    chained = struct.pack(">Q", 99) + frame[:48] + struct.pack(">I", body_crc)
    frame[48:56] = blake2b(chained, digest_size=8).digest()
    struct.pack_into(">I", frame, 64, zlib.crc32(frame[68:72], zlib.crc32(frame[:64])))
    return frame


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (36, b"\x00\x07", "kind 7"),
        (38, b"\x00\x02", "format 2"),
        (36, b"\x00\x00", "kind 0 has 2 records"),
        (32, b"\x00\x00\x00\xff", "cannot hold 255 records"),
        (32, b"\x00\x00\x00\x00", "has 0 records"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(offset: int, value: bytes, reason: str) -> None:
    frame = seal(batch(("T1", 0, 2)), queue_offsets=[0])
    frame[offset : offset + len(value)] = value
    with pytest.raises(CorruptEntryError, match=reason):
        parse_header(resealed(frame))


def test_sizes_that_do_not_add_up_are_refused() -> None:
    frame = seal(batch(("T1", 0, 2)), queue_offsets=[0])
    frame[ENTRY_HEADER_BYTES + 3] += 1
    resealed(frame)
    with pytest.raises(CorruptEntryError, match="add up"):
        verify_frame(frame, parse_header(frame), 99)


def test_a_frame_that_ends_in_its_size_table_is_refused() -> None:
    frame = seal(batch(("T1", 0, 2)), queue_offsets=[0])
    with pytest.raises(CorruptEntryError, match="table"):
        record_sizes(frame[: ENTRY_HEADER_BYTES + 7], parse_header(frame))


def test_a_list_of_members_is_an_entry_without_records() -> None:
    frame = seal_config(
        b"members", index=3, term=2, position=144, prev_chain=9, store_time_ms=1_795_147_871_927
    )
    header = parse_header(frame)
    verify_frame(frame, header, 9)
    assert (header.kind, header.record_count, header.size) == (KIND_CONFIG, 0, 72 + 7)
    assert config_body(frame, header) == b"members"
    assert derive(frame, header).groups == []
    broken = bytearray(frame)
    broken[-1] ^= 1
    with pytest.raises(CorruptEntryError, match="does not fit its checksum"):
        verify_frame(broken, header, 9)


STORE_TIME_MS = 1_795_147_871_927

# derive goes record by record up to 8 records and by columns above.
COUNTS = pytest.mark.parametrize("copies", [1, 12])


def entry(arguments: list[dict[str, Any]]) -> bytearray:
    full = [
        {"queue_id": 0, "body": b"hello0", "properties": b"", "topic": "T1"} | one
        for one in arguments
    ]
    batch = batch_of(full)
    return seal_entry(
        [batch],
        [100 * i for i in range(len(batch.runs))],
        index=1,
        term=1,
        position=1000,
        prev_chain=0,
        store_time_ms=STORE_TIME_MS,
        store_host=bytes(8),
    )


def derived(arguments: list[dict[str, Any]]) -> Derived:
    frame = entry(arguments)
    return derive(frame, parse_header(frame))


def properties(**pairs: str) -> dict[str, bytes]:
    return {"properties": encode_properties(pairs)}


@COUNTS
def test_units_point_at_the_records(copies: int) -> None:
    found = derived([{}] * copies)
    assert found.units["size"].tolist() == [99] * copies
    assert found.units["phy_offset"].tolist() == [
        1000 + 72 + 4 * copies + 99 * i for i in range(copies)
    ]
    assert found.units[0].tobytes().hex() == f"{1072 + 4 * copies:016x}00000063{0:016x}"
    assert found.queue_offset.tolist() == list(range(copies))
    assert found.store_time_ms.tolist() == [STORE_TIME_MS] * copies


@COUNTS
def test_tags_are_hashed_as_java_does(copies: int) -> None:
    found = derived([properties(TAGS="TagA"), {}, properties(A="b", TAGS="😀")] * copies)
    assert found.tags_code.tolist() == [2598919, 0, java_hash("😀")] * copies


@COUNTS
def test_schedule_units_hold_the_delivery_time(copies: int) -> None:
    scheduled = {"topic": "SCHEDULE_TOPIC_XXXX", "queue_id": 2} | properties(TAGS="TagA")
    unknown = {"topic": "SCHEDULE_TOPIC_XXXX", "queue_id": 99}
    found = derived([scheduled, {}, unknown] * copies)
    assert found.tags_code.tolist() == [STORE_TIME_MS + 10_000, 0, STORE_TIME_MS + 1000] * copies


def test_the_delay_levels_are_rocketmqs() -> None:
    assert [DEFAULT_DELAY_MS[level] // 1000 for level in range(1, 19)] == (
        [1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200]
    )


@COUNTS
def test_each_queue_has_one_group_in_the_order_it_first_appears(copies: int) -> None:
    found = derived([{"queue_id": 1}, {"queue_id": 0}, {"topic": "T2"}, {"queue_id": 1}] * copies)
    assert [group[:2] for group in found.groups] == [("T1", 1), ("T1", 0), ("T2", 0)]
    rows = [np.arange(4 * copies)[group.where].tolist() for group in found.groups]
    assert rows == [
        sorted([*range(0, 4 * copies, 4), *range(3, 4 * copies, 4)]),
        list(range(1, 4 * copies, 4)),
        list(range(2, 4 * copies, 4)),
    ]


def test_a_queue_in_one_stretch_is_a_slice() -> None:
    found = derived([{}] * 10 + [{"queue_id": 1}] * 10)
    assert [group.where for group in found.groups] == [slice(0, 10), slice(10, 20)]


@COUNTS
def test_derive_skips_prepared_and_rolled_back_records(copies: int) -> None:
    kinds = [
        properties(KEYS=name) | {"sys_flag": flag}
        for name, flag in [("plain", 0), ("prepared", 4), ("committed", 8), ("rolled back", 12)]
    ]
    found = derived(kinds * copies)
    (group,) = found.groups
    rows = np.arange(4 * copies)[group.where].tolist()
    assert rows == sorted([*range(0, 4 * copies, 4), *range(2, 4 * copies, 4)])
    hashes = [index_key_hash("T1", key) for key in ("plain", "prepared", "committed")]
    assert found.key_hashes.tolist() == hashes * copies


@COUNTS
def test_derive_indexes_uniq_key_and_every_key(copies: int) -> None:
    uniq = "7F000001" * 4
    found = derived(
        [properties(UNIQ_KEY=uniq), properties(KEYS="a  b", UNIQ_KEY="short"), {}] * copies
    )
    assert (
        found.key_hashes.tolist()
        == [index_key_hash("T1", key) for key in (uniq, "short", "a", "b")] * copies
    )
    rows = [row for copy in range(copies) for row in (3 * copy, *[3 * copy + 1] * 3)]
    assert found.key_phy_offsets.tolist() == found.phy_offset[rows].tolist()


def test_a_no_op_derives_nothing() -> None:
    frame = seal_no_op(1, 0, 0, 0, 0)
    found = derive(frame, parse_header(frame))
    assert (len(found.units), found.groups, len(found.key_hashes)) == (0, [], 0)


@COUNTS
def test_a_damaged_record_is_named(copies: int) -> None:
    frame = entry([{}] * copies)
    header = parse_header(frame)
    frame[header.body_start + 99 * (copies - 1) + 4] ^= 1
    with pytest.raises(CorruptEntryError, match=rf"entry 1: record {copies - 1}\b"):
        derive(frame, header)
