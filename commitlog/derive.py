"""What a committed entry means for the derived files: queue units and index keys of its records.

`derive` works on columns and costs next to nothing for records without tags and keys;
`derive_plain` decodes record by record and defines what `derive` must return.

Spec: docs/reference/formats.md, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from dledger.commitlog.entry import KIND_RECORDS, EntryHeader, record_sizes, record_starts
from dledger.commitlog.errors import CorruptEntryError, CorruptRecordError
from dledger.commitlog.java_hash import index_key_hash, raw_tags_code, topic_prefix_hash
from dledger.commitlog.properties import (
    KEY_SEPARATOR,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_UNIQ_KEY,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    get_property,
)
from dledger.commitlog.queue_unit import UNIT_DTYPE, Units, index_hashes, java_hash_matrix
from dledger.commitlog.record import (
    SYS_FLAG_PREPARED,
    SYS_FLAG_ROLLBACK,
    SYS_FLAG_TRANSACTION_MASK,
    decode_record,
)
from dledger.commitlog.record_columns import RecordColumns, gather_bytes, record_columns

DEFAULT_DELAY_MS: Final[Mapping[int, int]] = {
    level: seconds * 1000
    for level, seconds in enumerate(
        [1, 5, 10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200], start=1
    )
}
"""Delay level → milliseconds, as RocketMQ ships them."""

UNKNOWN_LEVEL_DELAY_MS: Final = 1000
"""For a level that is not in the table, as RocketMQ does it."""

_PLAIN_RECORDS: Final = 8
"""Up to here decoding record by record is cheaper than starting numpy (measured)."""

_TIME_DIGITS: Final = 19
"""This number of digits may be more than 64 bits hold, and are no time."""

_UNIQ_KEY_BYTES: Final = 32
"""Length of a UNIQ_KEY made on an IPv4 host: the shape worth a fast path."""

_TAGS: Final = PROPERTY_TAGS.encode()
_KEYS: Final = PROPERTY_KEYS.encode()
_UNIQ_KEY: Final = PROPERTY_UNIQ_KEY.encode()
_TIMER_OUT_MS: Final = PROPERTY_TIMER_OUT_MS.encode()
_UNIQ_KEY_HEAD: Final = _UNIQ_KEY + b"\x01"
_UNIQ_KEY_COLUMN: Final = np.frombuffer(_UNIQ_KEY_HEAD, np.uint8)

Where = slice | npt.NDArray[np.int64]


class QueueGroup(NamedTuple):
    """Records of one queue inside an entry: a slice, or row numbers where they are scattered."""

    topic: str
    queue_id: int
    where: Where


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """Columns over all records of an entry, in record order.

    Attributes:
        starts: Where each record begins, bytes from the begin of the frame.
        units: The consume queue unit of each record; meaningless where no group holds the record.
        groups: Queues touched, in the order of their first record, with the records that get a
            unit there. Prepared and rolled-back records are in none.
        key_hashes: One hash per index key, in record order, UNIQ_KEY before KEYS.
        key_phy_offsets: Beside each hash, the record it belongs to.
    """

    starts: npt.NDArray[np.int64]
    queue_offset: npt.NDArray[np.int64]
    phy_offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int32]
    tags_code: npt.NDArray[np.int64]
    store_time_ms: npt.NDArray[np.int64]
    queue_id: npt.NDArray[np.int32]
    sys_flag: npt.NDArray[np.int32]
    units: Units
    groups: list[QueueGroup]
    key_hashes: npt.NDArray[np.int32]
    key_phy_offsets: npt.NDArray[np.int64]


class _Keys(NamedTuple):
    hashes: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]


def derive(
    frame: Buffer, header: EntryHeader, *, delay_ms: Mapping[int, int] = DEFAULT_DELAY_MS
) -> Derived:
    """Return units and index keys of an entry's records; body checksums are not looked at.

    Raises CorruptEntryError: the size table or a record is damaged.
    """
    if header.record_count <= _PLAIN_RECORDS:
        return derive_plain(frame, header, delay_ms=delay_ms)
    return derive_bulk(frame, header, delay_ms=delay_ms)


def derive_plain(
    frame: Buffer, header: EntryHeader, *, delay_ms: Mapping[int, int] = DEFAULT_DELAY_MS
) -> Derived:
    """Do what `derive` does, record by record; the reference for it."""
    view = memoryview(frame).cast("B")
    sizes = record_sizes(view, header).tolist()
    *starts, end = accumulate(sizes, initial=header.body_start)
    if header.kind == KIND_RECORDS and not (sizes and end == len(view)):
        raise _corrupt(header, "record sizes do not add up")
    records = []
    for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        try:
            record = decode_record(view[start : start + size], check_crc=False)
        except CorruptRecordError as error:
            raise _corrupt(header, f"record {i}: {error}") from error
        if record.size != size:
            raise _corrupt(header, f"record {i} has another size in its table")
        records.append(record)

    codes: list[int] = []
    rows_of: dict[tuple[str, int], list[int]] = {}
    hashes: list[int] = []
    key_rows: list[int] = []
    for row, record in enumerate(records):
        properties = record.properties
        if record.topic == SCHEDULE_TOPIC:
            delay = delay_ms.get(record.queue_id + 1, UNKNOWN_LEVEL_DELAY_MS)
            codes.append(record.store_timestamp_ms + delay)
        elif record.topic == TIMER_TOPIC:
            codes.append(_timer_code(get_property(properties, _TIMER_OUT_MS)))
        else:
            tags = get_property(properties, _TAGS)
            codes.append(raw_tags_code(tags) if tags else 0)
        transaction = record.sys_flag & SYS_FLAG_TRANSACTION_MASK
        if transaction not in (SYS_FLAG_PREPARED, SYS_FLAG_ROLLBACK):
            rows_of.setdefault((record.topic, record.queue_id), []).append(row)
        if transaction != SYS_FLAG_ROLLBACK:
            for key in _index_keys(properties):
                hashes.append(index_key_hash(record.topic, key))
                key_rows.append(row)
    return _derived(
        starts=np.array(starts, np.int64),
        queue_offset=np.array([record.queue_offset for record in records], np.int64),
        phy_offset=np.array([record.phy_offset for record in records], np.int64),
        size=np.array([record.size for record in records], np.int32),
        codes=np.array(codes, np.int64),
        store_time_ms=np.array([record.store_timestamp_ms for record in records], np.int64),
        queue_id=np.array([record.queue_id for record in records], np.int32),
        sys_flag=np.array([record.sys_flag for record in records], np.uint32).view(np.int32),
        groups=[QueueGroup(*queue, _where(rows)) for queue, rows in rows_of.items()],
        keys=_Keys(np.array(hashes, np.int32), np.array(key_rows, np.int64)),
    )


def derive_bulk(
    frame: Buffer, header: EntryHeader, *, delay_ms: Mapping[int, int] = DEFAULT_DELAY_MS
) -> Derived:
    """Do what `derive` does, on columns whatever the number of records."""
    view = memoryview(frame).cast("B")
    if header.kind != KIND_RECORDS:
        return derive_plain(view, header)
    starts = _checked_starts(view, header)
    sizes = record_sizes(view, header).astype(np.int64)
    return _derive_columns(view, starts, sizes, header, delay_ms)


def derive_together(
    frames: Buffer,
    headers: Sequence[EntryHeader],
    *,
    delay_ms: Mapping[int, int] = DEFAULT_DELAY_MS,
) -> Derived:
    """Return what `derive` returns, for all records of entries that follow each other.

    Args:
        frames: The entries, whole and back to back, each verified when it was appended.
        headers: Theirs, in order, at least one; all of kind `KIND_RECORDS`.
    Raises:
        CorruptEntryError: A size table or a record is damaged.
    """
    view = memoryview(frames).cast("B")
    starts, sizes = [], []
    begin = 0
    for header in headers:
        frame = view[begin : begin + header.size]
        starts.append(_checked_starts(frame, header) + begin)
        sizes.append(record_sizes(frame, header))
        begin += header.size
    return _derive_columns(
        view, np.concatenate(starts), np.concatenate(sizes).astype(np.int64), headers[0], delay_ms
    )


def _derive_columns(
    view: memoryview,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    header: EntryHeader,
    delay_ms: Mapping[int, int],
) -> Derived:
    try:
        columns = record_columns(view, starts, sizes)
    except CorruptRecordError as error:
        raise _corrupt(header, str(error)) from error
    topics, topic_of = _topics(view, columns, header)
    queue_id = columns.head["queue_id"].astype(np.int32)
    transaction = columns.sys_flag & SYS_FLAG_TRANSACTION_MASK
    has_unit = (transaction != SYS_FLAG_PREPARED) & (transaction != SYS_FLAG_ROLLBACK)
    properties = _Properties(view, columns)

    codes = np.zeros(len(starts), np.int64)
    for row, tags in properties.values(_TAGS):
        codes[row] = raw_tags_code(tags)
    if SCHEDULE_TOPIC in topics:
        scheduled = np.flatnonzero(topic_of == topics.index(SCHEDULE_TOPIC))
        levels = (queue_id[scheduled].astype(np.int64) + 1).tolist()
        delays = [delay_ms.get(level, UNKNOWN_LEVEL_DELAY_MS) for level in levels]
        codes[scheduled] = columns.store_time_ms[scheduled] + np.array(delays, np.int64)
    if TIMER_TOPIC in topics:
        timers = topic_of == topics.index(TIMER_TOPIC)
        codes[timers] = 0
        for row, due in properties.values(_TIMER_OUT_MS):
            if timers[row]:
                codes[row] = _timer_code(due)

    return _derived(
        starts=starts,
        queue_offset=columns.head["queue_offset"].astype(np.int64),
        phy_offset=columns.head["phy_offset"].astype(np.int64),
        size=sizes.astype(np.int32),
        codes=codes,
        store_time_ms=columns.store_time_ms,
        queue_id=queue_id,
        sys_flag=columns.sys_flag,
        groups=_groups(topics, topic_of, queue_id, has_unit),
        keys=_keys(topics, topic_of, properties, transaction != SYS_FLAG_ROLLBACK),
    )


def _timer_code(due: bytes | None) -> int:
    return int(due) if due is not None and due.isdigit() and len(due) < _TIME_DIGITS else 0


class _Properties:
    """The properties of all records in one piece, to search them in one go."""

    __slots__ = ("_blob", "_bounds", "_ends", "columns", "view")

    def __init__(self, view: memoryview, columns: RecordColumns) -> None:
        self.view = view
        self.columns = columns
        lengths = columns.properties_bytes
        self._bounds: list[int] | None = None
        self._ends = np.cumsum(lengths)
        # State records have none; they stand between messages that often have equally much.
        longest = int(lengths.max())
        full = lengths == longest
        if (full | (lengths == 0)).all():
            self._blob = gather_bytes(view, columns.properties_start[full], longest).tobytes()
        else:
            starts = columns.properties_start.tolist()
            ends = (columns.properties_start + lengths).tolist()
            self._blob = b"".join([view[a:b] for a, b in zip(starts, ends, strict=True)])

    def count(self, pattern: bytes) -> int:
        return self._blob.count(pattern)

    def rows_with(self, pattern: bytes) -> npt.NDArray[np.int64]:
        """Return the records in which *pattern* may begin, each once, in order."""
        hits: list[int] = []
        find = self._blob.find
        at = find(pattern)
        while at >= 0:
            hits.append(at)
            at = find(pattern, at + 1)
        if not hits:
            return np.empty(0, np.int64)
        return np.unique(np.searchsorted(self._ends, np.array(hits, np.int64), side="right"))

    def values(self, key: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield row and value for each record that has property *key*."""
        rows = self.rows_with(key + b"\x01").tolist()
        if rows and self._bounds is None:
            self._bounds = [0, *self._ends.tolist()]
        bounds = self._bounds or []
        blob = self._blob
        for row in rows:
            value = get_property(blob[bounds[row] : bounds[row + 1]], key)
            if value is not None:
                yield row, value


def _keys(
    topics: Sequence[str],
    topic_of: npt.NDArray[np.int64],
    properties: _Properties,
    indexed: npt.NDArray[np.bool_],
) -> _Keys:
    hashes, rows = _usual_uniq_keys(topics, topic_of, properties)
    slow_hashes: list[int] = []
    slow_rows: list[int] = []

    # Every occurrence accounted for by the fast path: no record has a second or an odd one.
    if properties.count(_UNIQ_KEY_HEAD) != len(rows):
        hashes, rows = hashes[:0], rows[:0]
        for row, value in properties.values(_UNIQ_KEY):
            slow_hashes.append(
                index_key_hash(topics[topic_of[row]], value.decode("utf-8", "replace"))
            )
            slow_rows.append(row)
    for row, value in properties.values(_KEYS):
        topic = topics[topic_of[row]]
        for key in _split_keys(value):
            slow_hashes.append(index_key_hash(topic, key))
            slow_rows.append(row)

    if slow_rows:
        hashes = np.concatenate([hashes, np.array(slow_hashes, np.int32)])
        rows = np.concatenate([rows, np.array(slow_rows, np.int64)])
        order = np.argsort(rows, kind="stable")
        hashes, rows = hashes[order], rows[order]
    if not indexed.all():
        kept = indexed[rows]
        hashes, rows = hashes[kept], rows[kept]
    return _Keys(hashes, rows)


def _usual_uniq_keys(
    topics: Sequence[str], topic_of: npt.NDArray[np.int64], properties: _Properties
) -> _Keys:
    """Hash the keys that stand first in their properties and have 32 ASCII characters."""
    columns = properties.columns
    view = properties.view
    whole = len(_UNIQ_KEY_HEAD) + _UNIQ_KEY_BYTES
    rows = np.flatnonzero(columns.properties_bytes >= whole)
    texts = gather_bytes(view, columns.properties_start[rows], whole)
    usual = (texts[:, : len(_UNIQ_KEY_HEAD)] == _UNIQ_KEY_COLUMN).all(axis=1)
    keys = texts[:, len(_UNIQ_KEY_HEAD) :]
    # ASCII without separators: above \x02, below 128.
    usual &= (keys.min(axis=1, initial=255) > 2) & (keys.max(axis=1, initial=0) < 128)
    longer = columns.properties_bytes[rows] > whole
    # A key at the very end needs no separator; reading one byte back keeps the index in bounds.
    after = columns.properties_start[rows] + whole - ~longer
    usual &= ~longer | (np.frombuffer(view, np.uint8)[after] == 2)
    if not usual.all():
        rows, keys = rows[usual], keys[usual]
    prefixes = np.array([topic_prefix_hash(topic) for topic in topics], np.int32)
    prefix = prefixes[0] if len(topics) == 1 else prefixes[topic_of[rows]]
    return _Keys(index_hashes(java_hash_matrix(keys, prefix)), rows)


def _topics(
    view: memoryview, columns: RecordColumns, header: EntryHeader
) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the distinct topics and, for each record, which of them it has."""
    starts, lengths = columns.topic_start, columns.topic_bytes
    topic_of = np.zeros(len(starts), np.int64)
    topics: list[str] = []
    for length in dict.fromkeys(lengths.tolist()):
        rows = np.flatnonzero(lengths == length)
        texts = gather_bytes(view, starts[rows], length)
        if not (texts == texts[0]).all():
            return _mixed_topics(view, columns, header)
        topic_of[rows] = len(topics)
        topics.append(_topic(texts[0].tobytes(), header))
    return topics, topic_of


def _mixed_topics(
    view: memoryview, columns: RecordColumns, header: EntryHeader
) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Do what `_topics` does, record by record."""
    starts, lengths = columns.topic_start, columns.topic_bytes
    number_of: dict[bytes, int] = {}
    topic_of = [
        number_of.setdefault(bytes(view[start:end]), len(number_of))
        for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    ]
    return [_topic(raw, header) for raw in number_of], np.array(topic_of, np.int64)


def _topic(raw: bytes, header: EntryHeader) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _corrupt(header, "a topic is not UTF-8") from error


def _groups(
    topics: Sequence[str],
    topic_of: npt.NDArray[np.int64],
    queue_id: npt.NDArray[np.int32],
    has_unit: npt.NDArray[np.bool_],
) -> list[QueueGroup]:
    rows = np.flatnonzero(has_unit)
    if not len(rows):
        return []
    row_topic, row_queue = topic_of[rows], queue_id[rows]
    changes = np.flatnonzero((row_topic[1:] != row_topic[:-1]) | (row_queue[1:] != row_queue[:-1]))
    firsts = [0, *(changes + 1).tolist()]
    ends = [*firsts[1:], len(rows)]
    runs_of: dict[tuple[str, int], list[int]] = {}
    numbers = rows.tolist()
    for first, end, topic, queue in zip(
        firsts, ends, row_topic[firsts].tolist(), row_queue[firsts].tolist(), strict=True
    ):
        runs_of.setdefault((topics[topic], queue), []).extend(numbers[first:end])
    return [QueueGroup(*queue, _where(found)) for queue, found in runs_of.items()]


def _where(rows: list[int]) -> Where:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return np.array(rows, np.int64)


def _index_keys(properties: bytes) -> list[str]:
    keys: list[str] = []
    uniq_key = get_property(properties, _UNIQ_KEY)
    if uniq_key is not None:
        keys.append(uniq_key.decode("utf-8", "replace"))
    value = get_property(properties, _KEYS)
    if value is not None:
        keys += _split_keys(value)
    return keys


def _split_keys(value: bytes) -> list[str]:
    return [key for key in value.decode("utf-8", "replace").split(KEY_SEPARATOR) if key]


def _checked_starts(view: memoryview, header: EntryHeader) -> npt.NDArray[np.int64]:
    starts = record_starts(view, header)
    last = record_sizes(view, header)[-1:].astype(np.int64)
    if not len(starts) or int(starts[-1] + last[0]) != len(view):
        raise _corrupt(header, "record sizes do not add up")
    return starts


def _corrupt(header: EntryHeader, what: str) -> CorruptEntryError:
    return CorruptEntryError(f"entry {header.index}: {what}")


def _derived(
    *,
    starts: npt.NDArray[np.int64],
    queue_offset: npt.NDArray[np.int64],
    phy_offset: npt.NDArray[np.int64],
    size: npt.NDArray[np.int32],
    codes: npt.NDArray[np.int64],
    store_time_ms: npt.NDArray[np.int64],
    queue_id: npt.NDArray[np.int32],
    sys_flag: npt.NDArray[np.int32],
    groups: list[QueueGroup],
    keys: _Keys,
) -> Derived:
    units = np.empty(len(starts), UNIT_DTYPE)
    units["phy_offset"] = phy_offset
    units["size"] = size
    units["tags_code"] = codes
    return Derived(
        starts=starts,
        queue_offset=queue_offset,
        phy_offset=phy_offset,
        size=size,
        tags_code=codes,
        store_time_ms=store_time_ms,
        queue_id=queue_id,
        sys_flag=sys_flag,
        units=units,
        groups=groups,
        key_hashes=keys.hashes,
        key_phy_offsets=phy_offset[keys.rows],
    )
