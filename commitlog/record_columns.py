"""The fields of many records as columns: `commitlog.record.decode_record` for thousands at once.

numpy sees a buffer as one overlapping item per byte; fancy indexing then copies whole fields,
one memcpy each, whatever their alignment.

Spec: docs/reference/formats.md, section 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger.commitlog.errors import CorruptRecordError
from dledger.commitlog.record import (
    BODY_OFFSET,
    HOST_FLAGS,
    LAYOUTS,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_BYTES,
)


def gather(
    buffer: bytes | bytearray | memoryview, offsets: npt.NDArray[np.int64], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Return the fields of type *dtype* that begin at *offsets* (a copy).

    The caller has checked that all of them lie inside *buffer*.
    """
    width = dtype.itemsize
    if not len(offsets) or not width:
        return np.empty(len(offsets), dtype)
    windows: npt.NDArray[np.void] = np.ndarray(
        (len(buffer) - width + 1,), np.dtype((np.void, width)), buffer, strides=(1,)
    )
    return windows[offsets].view(dtype)


def gather_bytes(
    buffer: bytes | bytearray | memoryview, offsets: npt.NDArray[np.int64], width: int
) -> npt.NDArray[np.uint8]:
    """Return *width* bytes from each of *offsets* on, one row each (a copy)."""
    fields = gather(buffer, offsets, np.dtype((np.void, width)))
    return np.frombuffer(fields.tobytes(), np.uint8).reshape(len(offsets), width)


def scatter(buffer: bytearray, offsets: npt.NDArray[np.int64], fields: npt.NDArray[Any]) -> None:
    """Write *fields* (as many as offsets, or one for all) at *offsets* of *buffer*."""
    width = fields.dtype.itemsize
    windows: npt.NDArray[np.void] = np.ndarray(
        (len(buffer) - width + 1,), np.dtype((np.void, width)), buffer, strides=(1,)
    )
    windows[offsets] = fields.view(windows.dtype)


HEAD_DTYPE: Final = np.dtype(
    [
        ("size", ">i4"),
        ("magic", ">u4"),
        ("body_crc", ">u4"),
        ("queue_id", ">i4"),
        ("flag", ">i4"),
        ("queue_offset", ">i8"),
        ("phy_offset", ">i8"),
        ("sys_flag", ">i4"),
        ("born_timestamp_ms", ">i8"),
        ("born_host", "V8"),
        ("store_timestamp_ms", ">i8"),
        ("store_host", "V8"),
        ("reconsume_times", ">i4"),
        ("prepared_transaction_offset", ">i8"),
        ("body_bytes", ">i4"),
    ]
)
"""The first 88 bytes of a record whose hosts are IPv4."""

STORE_TIME_AT: Final = np.zeros(HOST_FLAGS + 1, np.int64)
_BODY_AT: Final = np.zeros(HOST_FLAGS + 1, np.int64)
"""By the flags of a record's hosts, where the field begins."""
for _flags, _layout in LAYOUTS.items():
    STORE_TIME_AT[_flags], _BODY_AT[_flags] = _layout.store_time, _layout.body

_I64: Final = np.dtype(">i8")
_I32: Final = np.dtype(">i4")
_I16: Final = np.dtype(">i2")


@dataclass(frozen=True, slots=True, eq=False)
class RecordColumns:
    """Fields of records, one row a record. Starts are byte offsets in the buffer.

    Fields behind bornHost in `head` hold garbage for records with an IPv6 host; use the columns.
    """

    head: npt.NDArray[Any]
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    sys_flag: npt.NDArray[np.int32]
    store_time_ms: npt.NDArray[np.int64]
    body_start: npt.NDArray[np.int64]
    body_bytes: npt.NDArray[np.int64]
    topic_start: npt.NDArray[np.int64]
    topic_bytes: npt.NDArray[np.int64]
    properties_start: npt.NDArray[np.int64]
    properties_bytes: npt.NDArray[np.int64]


def record_columns(
    buffer: bytes | bytearray | memoryview,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
) -> RecordColumns:
    """Return the columns of the records at *starts*; body checksums are not looked at.

    Args:
        buffer: One byte an item. Records may be of both versions and have hosts of both kinds.
        sizes: Bytes each record has according to the code that cut the buffer.
    Raises:
        CorruptRecordError: A record leaves the buffer, is not one, has another size than *sizes*
            claims, or has lengths that do not add up.
    """
    _refuse(
        (sizes < MIN_RECORD_BYTES) | (starts < 0) | (starts + sizes > len(buffer)),
        "is too short or leaves the buffer",
    )
    ends = starts + sizes
    head = gather(buffer, starts, HEAD_DTYPE)
    magic = head["magic"]
    is_v2 = magic == MAGIC_V2
    _refuse((magic != MAGIC_V1) & ~is_v2, "has a magic that is not a record's")
    _refuse(head["size"] != sizes, "has another size in its table")
    sys_flag = head["sys_flag"].astype(np.int32)

    if (sys_flag & HOST_FLAGS).any():
        body_start = starts + _BODY_AT[sys_flag & HOST_FLAGS]
        _refuse(body_start + 3 > ends, "ends within its hosts")
        store_time_ms = gather(buffer, starts + STORE_TIME_AT[sys_flag & HOST_FLAGS], _I64)
        body_bytes = gather(buffer, body_start - 4, _I32).astype(np.int64)
    else:
        store_time_ms = head["store_timestamp_ms"]
        body_bytes = head["body_bytes"].astype(np.int64)
        body_start = starts + BODY_OFFSET

    topic_length_at = body_start + body_bytes
    topic_start = topic_length_at + 1 + is_v2
    _refuse((body_bytes < 0) | (topic_start + 2 > ends), "has a body that does not fit")
    topic_bytes = np.frombuffer(buffer, np.uint8)[topic_length_at].astype(np.int64)
    if is_v2.any():
        topic_bytes = np.where(is_v2, gather(buffer, topic_length_at, _I16), topic_bytes)
    properties_start = topic_start + topic_bytes + 2
    _refuse((topic_bytes < 0) | (properties_start > ends), "has a topic that does not fit")
    properties_bytes = gather(buffer, properties_start - 2, _I16).astype(np.int64)
    _refuse(
        (properties_bytes < 0) | (properties_start + properties_bytes != ends),
        "has properties that do not end with it",
    )
    return RecordColumns(
        head=head,
        starts=starts,
        sizes=sizes,
        sys_flag=sys_flag,
        store_time_ms=store_time_ms.astype(np.int64),
        body_start=body_start,
        body_bytes=body_bytes,
        topic_start=topic_start,
        topic_bytes=topic_bytes,
        properties_start=properties_start,
        properties_bytes=properties_bytes,
    )


def _refuse(bad: npt.NDArray[np.bool_], what: str) -> None:
    if bad.any():
        raise CorruptRecordError(f"record {int(bad.argmax())} of the batch {what}")
