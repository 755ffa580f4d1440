"""Bodies of batches that clients send in RocketMQ's short layout.

An item: totalSize i32 · magic i32 0 · crc i32 0 · flag i32 · body i32 length +
bytes · properties i16 length + bytes.

Spec: docs/reference/formats.md, section 1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from typing_extensions import Buffer

from dledger.commitlog.errors import CorruptRecordError, LocalProtocolError
from dledger.commitlog.properties import MAX_PROPERTIES_BYTES

_HEAD: Final = struct.Struct(">iiiii")
_I16: Final = struct.Struct(">h")

MIN_ITEM_BYTES: Final = _HEAD.size + _I16.size


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One message of a batch. A decoded body is a view that pins the batch's buffer."""

    body: bytes | memoryview
    properties: bytes = b""
    flag: int = 0


def encode_batch(items: Iterable[BatchItem]) -> bytes:
    """Return the body of a batch send.

    Raises LocalProtocolError: properties or the flag of an item are too large for their fields.
    """
    parts: list[Buffer] = []
    for item in items:
        if len(item.properties) > MAX_PROPERTIES_BYTES:
            raise LocalProtocolError(
                f"properties have {len(item.properties)} bytes, at most {MAX_PROPERTIES_BYTES}"
            )
        size = MIN_ITEM_BYTES + len(item.body) + len(item.properties)
        try:
            parts.append(_HEAD.pack(size, 0, 0, item.flag, len(item.body)))
        except struct.error as error:
            raise LocalProtocolError(f"a number does not fit its field: {error}") from error
        parts += (item.body, _I16.pack(len(item.properties)), item.properties)
    return b"".join(parts)


def decode_batch(body: Buffer) -> list[BatchItem]:
    """Return the messages of a batch send, in order.

    Raises CorruptRecordError: an item is cut short or its lengths do not add up; the message names
    it. None of the batch may be stored then.
    """
    view = memoryview(body).cast("B")
    items: list[BatchItem] = []
    offset = 0
    while offset < len(view):
        available = len(view) - offset
        if available < MIN_ITEM_BYTES:
            raise CorruptRecordError(f"item {len(items)} of the batch is cut short")
        size, _, _, flag, body_bytes = _HEAD.unpack_from(view, offset)
        if not MIN_ITEM_BYTES <= size <= available:
            raise CorruptRecordError(
                f"item {len(items)} of the batch claims {size} bytes, there are {available}"
            )
        body_start = offset + _HEAD.size
        body_end = body_start + body_bytes
        end = offset + size
        if body_bytes < 0 or body_end + _I16.size > end:
            raise CorruptRecordError(f"item {len(items)} of the batch has a body that does not fit")
        (properties_bytes,) = _I16.unpack_from(view, body_end)
        properties_start = body_end + _I16.size
        if properties_start + properties_bytes != end:
            raise CorruptRecordError(
                f"item {len(items)} of the batch has properties that do not end with it"
            )
        items.append(BatchItem(view[body_start:body_end], bytes(view[properties_start:end]), flag))
        offset = end
    return items
