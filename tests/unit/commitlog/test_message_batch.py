""""""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.commitlog import record_batch
from dledger.commitlog.entry import Run
from dledger.commitlog.errors import CorruptRecordError, LocalProtocolError
from dledger.commitlog.record import encode_record, pack_host
from dledger.commitlog.record_batch import (
    BatchItem,
    decode_batch,
    encode_batch,
    verify_record_layout,
)
from tests.harness.extent import examples

GOLDEN = bytes.fromhex("0000001d00000000000000000000000700000003") + (
    b"abc" + b"\x00\x04" + b"k\x01v\x02"
)


def test_an_item_has_the_golden_bytes() -> None:
    assert encode_batch([BatchItem(b"abc", b"k\x01v\x02", 7)]) == GOLDEN
    assert decode_batch(GOLDEN * 2) == [BatchItem(b"abc", b"k\x01v\x02", 7)] * 2


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (GOLDEN + GOLDEN[:10], "item 1 .* cut short"),
        (GOLDEN[:-1], "item 0 .* claims 29 bytes, there are 28"),
        (GOLDEN[:16] + b"\xff\xff\xff\xff" + GOLDEN[20:], "item 0 .* body"),
        (GOLDEN[:23] + b"\x00\x03" + GOLDEN[25:], "item 0 .* properties"),
    ],
)
def test_a_damaged_item_is_named(body: bytes, reason: str) -> None:
    with pytest.raises(CorruptRecordError, match=reason):
        decode_batch(body)


def test_too_long_properties_are_the_callers_error() -> None:
    with pytest.raises(LocalProtocolError):
        encode_batch([BatchItem(b"abc", b"p" * 32768)])


GOOD = encode_record(topic="T1", queue_id=2, body=b"hello0", properties=b"k\x01v", sys_flag=0x301)


def verify(*records: bytes, runs: list[Run] | None = None, max_body_bytes: int = 100) -> None:
    sizes = np.array([len(record) for record in records], np.uint32)
    verify_record_layout(
        b"".join(records),
        sizes,
        runs or [Run("T1", 2, len(records))],
        max_body_bytes=max_body_bytes,
    )


def patched(offset: int, value: bytes) -> bytes:
    return GOOD[:offset] + value + GOOD[offset + len(value) :]


def test_what_the_broker_writes_itself_may_hold_anything() -> None:
    verify(patched(20, b"\xff" * 16), patched(40, b"\xff" * 32))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (patched(4, b"\xda\xa3\x20\xa8"), "magic"),
        (patched(0, struct.pack(">i", len(GOOD) - 1)), "another size"),
        (patched(8, b"\0\0\0\0"), "checksum"),
        (patched(12, b"\0\0\0\x03"), "another queue"),
        (patched(36, b"\0\0\0\x04"), "system flags"),
        (patched(36, b"\0\0\0\x08"), "system flags"),
        (patched(36, b"\0\0\0\x40"), "system flags"),
        (patched(36, b"\0\0\0\x80"), "system flags"),
        (patched(36, b"\x80\0\0\x00"), "system flags"),
        (patched(72, b"\0\0\0\x01"), "consumed before"),
        (patched(76, b"\0" * 7 + b"\x01"), "half message"),
        (patched(84, b"\0\0\0\x07"), "does not fit|do not end"),
        (patched(84, b"\xff\xff\xff\xff"), "body that does not fit"),
        (patched(94, b"\x03"), "do not end|does not fit"),
        (patched(95, b"T2"), "another topic"),
        (patched(97, b"\xff\xff"), "properties"),
        (encode_record(topic="T1", queue_id=2, body=b"", properties=b""), "no body"),
        (encode_record(topic="T1", queue_id=2, body=b"b" * 101, properties=b""), "over 100"),
        (encode_record(topic="t" * 128, queue_id=2, body=b"b", properties=b""), "version 1"),
        (encode_record(topic="T11", queue_id=2, body=b"b", properties=b""), "another topic"),
        (
            encode_record(
                topic="T1", queue_id=2, body=b"b", properties=b"", born_host=pack_host("::1", 1)
            ),
            "system flags",
        ),
        (GOOD[:90], "record 1 .* too short"),
    ],
)
def test_a_record_a_client_may_not_send_is_named(record: bytes, reason: str) -> None:
    with pytest.raises(CorruptRecordError, match=reason) as raised:
        verify(GOOD, record, GOOD)
    assert "record 1 " in str(raised.value)


def test_a_wrong_topic_is_named_among_several_topics() -> None:
    with pytest.raises(CorruptRecordError, match=r"record 2 .* another topic"):
        verify(GOOD, GOOD, GOOD, runs=[Run("T1", 2, 2), Run("T2", 2, 1)])


@pytest.mark.parametrize(
    "runs",
    [
        [Run("T1", 2, 1)],
        [Run("T1", 2, 3)],
        [Run("T1", 2, 3), Run("T1", 2, -1)],
        [Run("T1", 2, 2), Run("T1", 2, 0)],
        [Run("", 2, 2)],
        [Run("t" * 128, 2, 2)],
        [Run("\ud800", 2, 2)],
        [Run("T1", 2**40, 2)],
        [Run("T1", -1, 2)],
    ],
)
def test_runs_that_cannot_be_right_are_refused(runs: list[Run]) -> None:
    with pytest.raises(CorruptRecordError):
        verify(GOOD, GOOD, runs=runs)


@pytest.mark.parametrize("sizes", [[], [len(GOOD)], [len(GOOD), len(GOOD) + 1], [2 * len(GOOD), 0]])
def test_sizes_that_do_not_fit_the_bytes_are_refused(sizes: list[int]) -> None:
    with pytest.raises(CorruptRecordError):
        verify_record_layout(GOOD * 2, np.array(sizes, np.uint32), [Run("T1", 2, 2)])


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=3))
def test_few_records_are_judged_as_many_are(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(GOOD)
    for at, value in changes:
        damaged[at] = value
    verdicts = []
    for count in (1, record_batch.PLAIN_RECORDS + 1):
        try:
            verify(*[bytes(damaged)] * count)
            verdicts.append(True)
        except CorruptRecordError:
            verdicts.append(False)
    assert verdicts[0] == verdicts[1]
