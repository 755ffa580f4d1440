"""Batches that clients send: in record layout, checked before their bytes enter the log, and short.

An item of RocketMQ's short layout: totalSize i32 · magic i32 0 · crc i32 0 · flag i32 · body i32
length + bytes · properties i16 length + bytes.

Spec: docs/reference/formats.md, section 1.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from dledger.commitlog.entry import Run
from dledger.commitlog.errors import CorruptRecordError, LocalProtocolError
from dledger.commitlog.properties import MAX_PROPERTIES_BYTES
from dledger.commitlog.record import (
    BODY_CRC_MASK,
    MAGIC_V1,
    MAGIC_V2,
    MAX_TOPIC_V1_BYTES,
    MIN_RECORD_BYTES,
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_COMPRESSION_TYPE_MASK,
)
from dledger.commitlog.record_columns import RecordColumns, gather_bytes, record_columns

MAX_BODY_BYTES: Final = 4 * 1024 * 1024
"""RocketMQ's maxMessageSize by default; the broker passes its own setting."""

MAX_QUEUE_ID: Final = 0x7FFFFFFF
"""The record's field is a signed 32-bit integer."""

PLAIN_RECORDS: Final = 72
"""Up to here looking at each record is cheaper than starting numpy (measured)."""

# Total size, magic, body CRC, queue id, system flags, reconsume times, prepared offset, body bytes.
_PLAIN_HEAD: Final = struct.Struct(">iIIi20xi32xiqi")

ACCEPTED_SYS_FLAGS: Final = SYS_FLAG_COMPRESSED | SYS_FLAG_COMPRESSION_TYPE_MASK
"""Only compression is the client's to say: hosts and transactions are the broker's business."""


def verify_record_layout(
    records: Buffer,
    sizes: npt.NDArray[np.uint32],
    runs: Sequence[Run],
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> None:
    """Check that *records* may be sealed into an entry after patching alone.

    What the broker writes itself (offsets, store time, hosts) may hold anything.

    Args:
        records: Records back to back, V1 with IPv4 hosts.
        sizes: Size in bytes of each, as the client gave them.
        runs: Topic, queue and length of each stretch, as the client gave them.
        max_body_bytes: Largest body as stored, compressed or not.
    Raises:
        CorruptRecordError: Naming the first record that is not what it claims, is none the client
            may send, or has a body that does not fit its checksum. Nothing was stored.
    """
    view = memoryview(records).cast("B")
    count = len(sizes)
    if not count or sum(run.count for run in runs) != count or any(r.count <= 0 for r in runs):
        raise CorruptRecordError("runs and sizes of the batch count records differently")
    if count <= PLAIN_RECORDS:
        _verify_plain(view, sizes.tolist(), runs, max_body_bytes)
        return
    wide = sizes.astype(np.int64)
    ends = np.cumsum(wide)
    if int(ends[-1]) != len(view):
        raise CorruptRecordError(
            f"sizes of the batch add up to {int(ends[-1])} bytes, its records have {len(view)}"
        )
    columns = record_columns(view, ends - wide, wide)
    head = columns.head
    _refuse(head["magic"] != MAGIC_V1, "is not version 1")
    _refuse((columns.sys_flag & ~ACCEPTED_SYS_FLAGS) != 0, "has system flags a client may not set")
    _refuse(head["reconsume_times"] != 0, "claims to have been consumed before")
    _refuse(head["prepared_transaction_offset"] != 0, "claims a half message")
    _refuse(columns.body_bytes == 0, "has no body")
    _refuse(columns.body_bytes > max_body_bytes, f"has a body over {max_body_bytes} bytes")
    _verify_runs(view, columns, runs)
    _verify_bodies(view, columns)


def _verify_plain(
    view: memoryview, sizes: list[int], runs: Sequence[Run], max_body_bytes: int
) -> None:
    if sum(sizes) != len(view):
        raise CorruptRecordError(
            f"sizes of the batch add up to {sum(sizes)} bytes, its records have {len(view)}"
        )
    start = number = 0
    for run in runs:
        if not 0 <= run.queue_id <= MAX_QUEUE_ID:
            raise CorruptRecordError("a run of the batch names a queue id that no record can hold")
        topic = _topic_bytes(run.topic)
        for _ in range(run.count):
            size = sizes[number]
            wrong = _wrong(view[start : start + size], size, topic, run.queue_id, max_body_bytes)
            if wrong is not None:
                raise CorruptRecordError(f"record {number} of the batch {wrong}")
            start += size
            number += 1


def _wrong(
    record: memoryview, size: int, topic: bytes, queue_id: int, max_body_bytes: int
) -> str | None:
    """Return what is wrong with one record in the words of the column-wise check, or None."""
    if size < MIN_RECORD_BYTES:
        return "is too short"
    total, magic, body_crc, queue, sys_flag, reconsumed, prepared, body_bytes = (
        _PLAIN_HEAD.unpack_from(record)
    )
    if magic not in (MAGIC_V1, MAGIC_V2):
        return "has a magic that is not a record's"
    if total != size:
        return "has another size in its table"
    if sys_flag & ~ACCEPTED_SYS_FLAGS:
        return "has system flags a client may not set"
    if magic != MAGIC_V1:
        return "is not version 1"
    body_end = _PLAIN_HEAD.size + body_bytes
    if body_bytes < 0 or body_end + 3 > size:
        return "has a body that does not fit"
    properties_start = body_end + 1 + record[body_end] + 2
    if properties_start > size:
        return "has a topic that does not fit"
    properties_bytes = int.from_bytes(record[properties_start - 2 : properties_start], "big")
    if properties_bytes > MAX_PROPERTIES_BYTES or properties_start + properties_bytes != size:
        return "has properties that do not end with it"
    if reconsumed:
        return "claims to have been consumed before"
    if prepared:
        return "claims a half message"
    if not body_bytes:
        return "has no body"
    if body_bytes > max_body_bytes:
        return f"has a body over {max_body_bytes} bytes"
    if queue != queue_id:
        return "has another queue than its run"
    if record[body_end + 1 : properties_start - 2] != topic:
        return "has another topic than its run"
    if zlib.crc32(record[_PLAIN_HEAD.size : body_end]) & BODY_CRC_MASK != body_crc:
        return "has a body that does not fit its checksum"
    return None


def _verify_runs(view: memoryview, columns: RecordColumns, runs: Sequence[Run]) -> None:
    if any(not 0 <= run.queue_id <= MAX_QUEUE_ID for run in runs):
        raise CorruptRecordError("a run of the batch names a queue id that no record can hold")
    queue_ids = np.repeat([run.queue_id for run in runs], [run.count for run in runs])
    _refuse(columns.head["queue_id"] != queue_ids, "has another queue than its run")
    expected = {topic: _topic_bytes(topic) for topic in {run.topic for run in runs}}
    if len(expected) == 1:
        (raw,) = expected.values()
        _refuse(columns.topic_bytes != len(raw), "has another topic than its run")
        topics = gather_bytes(view, columns.topic_start, len(raw))
        differs = (topics != np.frombuffer(raw, np.uint8)).any(axis=1)
        _refuse(differs, "has another topic than its run")
        return
    starts = columns.topic_start.tolist()
    ends = (columns.topic_start + columns.topic_bytes).tolist()
    record = 0
    for run in runs:
        raw = expected[run.topic]
        for _ in range(run.count):
            if view[starts[record] : ends[record]] != raw:
                raise CorruptRecordError(
                    f"record {record} of the batch has another topic than its run"
                )
            record += 1


def _topic_bytes(topic: str) -> bytes:
    try:
        raw = topic.encode()
    except UnicodeEncodeError as error:
        raise CorruptRecordError(
            f"a run of the batch names a topic that is not text: {error}"
        ) from error
    if not 0 < len(raw) <= MAX_TOPIC_V1_BYTES:
        raise CorruptRecordError(
            f"a run of the batch names a topic of {len(raw)} bytes; version 1 takes 1 to "
            f"{MAX_TOPIC_V1_BYTES}"
        )
    return raw


def _verify_bodies(view: memoryview, columns: RecordColumns) -> None:
    crc32 = zlib.crc32
    starts = columns.body_start.tolist()
    ends = (columns.body_start + columns.body_bytes).tolist()
    crcs = [crc32(view[start:end]) for start, end in zip(starts, ends, strict=True)]
    stored = columns.head["body_crc"]
    _refuse(
        np.array(crcs, np.uint32) & np.uint32(BODY_CRC_MASK) != stored,
        "has a body that does not fit its checksum",
    )


def _refuse(bad: npt.NDArray[np.bool_], what: str) -> None:
    if bad.any():
        raise CorruptRecordError(f"record {int(bad.argmax())} of the batch {what}")


# ----------------------------------------------------------------------- RocketMQ's short layout


_ITEM_HEAD: Final = struct.Struct(">iiiii")
_I16: Final = struct.Struct(">h")

MIN_ITEM_BYTES: Final = _ITEM_HEAD.size + _I16.size


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
            parts.append(_ITEM_HEAD.pack(size, 0, 0, item.flag, len(item.body)))
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
        size, _, _, flag, body_bytes = _ITEM_HEAD.unpack_from(view, offset)
        if not MIN_ITEM_BYTES <= size <= available:
            raise CorruptRecordError(
                f"item {len(items)} of the batch claims {size} bytes, there are {available}"
            )
        body_start = offset + _ITEM_HEAD.size
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
