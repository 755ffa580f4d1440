from __future__ import annotations

import pytest

from commitlog.errors import CorruptRecordError, LocalProtocolError
from commitlog.message_batch import BatchItem, decode_batch, encode_batch

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
