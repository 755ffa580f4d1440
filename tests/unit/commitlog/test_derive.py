from typing import Any

import numpy as np
import pytest

from dledger.commitlog.derive import DEFAULT_DELAY_MS, Derived, derive
from dledger.commitlog.entry import parse_header, seal_entry, seal_no_op
from dledger.commitlog.errors import CorruptEntryError
from dledger.commitlog.java_hash import index_key_hash, java_hash
from dledger.commitlog.properties import encode_properties
from tests.property.strategies_records import batch_of

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
