"""The data source that Spark knows as ``dledger``.

Its parts run in Python processes that Spark starts: planning in one, each task in one, a stream in
one that stays. Each opens a client of its own; nothing is shared but what is pickled here.

Data folders are read without a broker: what is committed, up to the commit mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from dledger.client.core.message_ext import MessageExt
from dledger.commitlog.derive import derive
from dledger.commitlog.errors import CorruptEntryError
from dledger.commitlog.segment import BLANK_BYTES, encode_blank
from dledger.spark_jobs.audit.folder import (
    Before,
    ReplicaFolder,
    Side,
    Whole,
    open_folder,
    whole_at,
)
from dledger.spark_jobs.datasource.network import BatchWriter, StreamWriter, TopicReader
from dledger.spark_jobs.datasource.options import (
    COLUMNS,
    LATEST,
    Bounds,
    OptionError,
    Options,
    QueueRange,
    advance,
    between,
    chosen,
    cut,
    parse_options,
)


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """One segment of one folder, up to the commit mark as it was when the read began."""

    folder: str
    base: int
    end: int


def parts_of(options: Options, bounds: Bounds) -> list[SegmentPart]:
    """Return the segments that may hold something wanted.

    Raises NotAFolderError: a path is no data folder.
    """
    found = []
    for name in options.path.split(","):
        folder = open_folder(Path(name.strip()))
        size = folder.log_format.segment_bytes
        parts = [
            SegmentPart(str(folder.root), base, min(base + size, folder.due))
            for base in folder.segments
            if base + size > folder.anchor.position and base < folder.due
        ]
        times = [_first_time_ms(folder, part.base) for part in parts]
        for number, part in enumerate(parts):
            until = times[number + 1] if number + 1 < len(times) else None
            if until is not None and until < bounds.from_ms:
                continue
            if (begin := times[number]) is not None and begin >= bounds.until_ms:
                continue
            found.append(part)
    return found


def _first_time_ms(folder: ReplicaFolder, base: int) -> int | None:
    side = Side(folder, base, folder.segment(base), folder.anchor.position, folder.due)
    whole = whole_at(side, base, None)
    return None if whole is None else whole.header.store_time_ms


def read_part(part: SegmentPart, options: Options, bounds: Bounds) -> Iterator[list[MessageExt]]:
    """Yield the messages of a segment that are wanted, entry by entry, in log order.

    Raises CorruptEntryError: a byte of it is wrong; names the place.
    """
    folder = open_folder(Path(part.folder))
    side = Side(folder, part.base, folder.segment(part.base), part.base, part.end)
    at = part.base
    before: Before | None = None
    while at < part.end:
        whole = whole_at(side, at, before)
        if whole is None:
            remaining = part.base + len(side.view) - at
            if side.bytes_at(at, BLANK_BYTES) == encode_blank(remaining):
                return
            raise CorruptEntryError(
                f"{folder.segment_path(part.base)}: no whole entry at byte {at - part.base}; "
                "compare the replicas with dledger audit"
            )
        header = whole.header
        before = Before(header.index, header.term, header.chain, header.store_time_ms)
        at = header.end_position
        if header.record_count and bounds.from_ms <= header.store_time_ms < bounds.until_ms:
            messages = list(_wanted(whole, folder.name, options, bounds))
            if messages:
                yield messages


def _wanted(whole: Whole, broker: str, options: Options, bounds: Bounds) -> Iterator[MessageExt]:
    derived = derive(whole.frame, whole.header)
    for topic, queue_id, where in derived.groups:
        queue = QueueRange(topic, broker, queue_id, 0, 0)
        if (options.topics and topic not in options.topics) or not bounds.has(queue):
            continue
        offsets, starts = derived.queue_offset[where], derived.starts[where]
        rows = np.flatnonzero((offsets >= bounds.first_offset) & (offsets < bounds.end_offset))
        for row in rows.tolist():
            yield MessageExt(whole.frame, int(starts[row]), broker)


BATCH_ROWS = 8192
"""Rows of one record batch read from segments: entries are often small."""


class DledgerSource(DataSource):
    """``spark.read.format("dledger")`` and its relatives; options: docs/how-to/spark.md."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "dledger"

    def schema(self) -> str:
        """Return the columns asked for."""
        return parse_options(self.options).schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        options = parse_options(self.options)
        return NarrowingReader(options) if options.filter_pushdown else BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the reader of a stream."""
        options = parse_options(self.options)
        if options.path:
            raise OptionError("a stream reads from brokers: give namesrv in place of path")
        return StreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Return what sends the rows of a batch."""
        if overwrite:
            raise OptionError("messages can be added and not replaced: use mode append")
        return BatchWriter(parse_options(self.options, use="write"), tuple(schema.names))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        """Return what sends the rows of a stream."""
        if overwrite:
            raise OptionError("messages can be added and not replaced: use output mode append")
        return StreamWriter(parse_options(self.options, use="write"), tuple(schema.names))


class BatchReader(DataSourceReader):
    """Reads what is there when the query begins."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        """Return one task for each piece of a queue, or for each segment."""
        options, bounds = self._options, self._bounds
        if options.path:
            return [InputPartition(part) for part in parts_of(options, bounds)]
        with TopicReader(options) as reader:
            ranges = bounds.narrow(chosen(reader.bounds(), options.starting, options.ending))
            ranges = reader.within_times([one for one in ranges if one.begin < one.end], bounds)
        return [InputPartition(one) for one in cut(ranges, options.partition_messages)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the record batches of a task; Spark makes a task of None where there is none."""
        what = partition.value if partition is not None else None
        if isinstance(what, SegmentPart):
            found = read_part(what, self._options, self._bounds)
            yield from (batch_of(rows, self._options.columns) for rows in _joined(found))
        elif what is not None:
            yield from read_range(what, self._options)


class NarrowingReader(BatchReader):
    """A reader that lets the terms of a query narrow what is read."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Take the terms on topic, broker, queue, offset and time; yield what Spark must check."""
        for term in filters:
            column: Sequence[str] = getattr(term, "attribute", ())
            value = getattr(term, "value", None)
            if len(column) != 1 or not self._bounds.take(type(term).__name__, column[0], value):
                yield term


def read_range(one: QueueRange, options: Options) -> Iterator[Any]:
    """Yield the record batches of one piece of a queue."""
    with TopicReader(options) as reader:
        for messages in reader.read(one):
            yield batch_of(messages, options.columns)


def _joined(parts: Iterator[list[MessageExt]]) -> Iterator[list[MessageExt]]:
    rows: list[MessageExt] = []
    for part in parts:
        rows += part
        if len(rows) >= BATCH_ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads on and on. A position is an offset per queue; what lies between two never changes.

    So a batch that is done again has the same rows, and a sink that keeps the numbers of its
    batches has every message exactly once.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._reader: TopicReader | None = None
        self._until: dict[str, int] | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Return where a new query begins."""
        bounds = self._client().bounds()
        starting = self._options.starting
        return {
            one.name: one.end if starting == LATEST else one.begin
            for one in chosen(bounds, starting, LATEST)
        }

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return how much one batch may have."""
        messages = self._options.trigger_messages
        return ReadMaxRows(messages) if messages else ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Return where the next batch ends."""
        latest = self._latest() if self._until is None else self._until
        latest = {**start, **latest}
        if isinstance(limit, ReadMaxRows):
            return advance(start, latest, limit.max_rows)
        return latest

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802
        """Return where the queues end now, for progress reports of the query."""
        return self._latest()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Take note of where the queues end: the query ends there."""
        self._until = self._latest()

    def _latest(self) -> dict[str, int]:
        return {one.name: one.end for one in self._client().bounds()}

    def _client(self) -> TopicReader:
        if self._reader is None:
            self._reader = TopicReader(self._options)
        return self._reader

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return one task for each piece of a queue between two positions."""
        pieces = cut(between(start, end), self._options.partition_messages)
        return [InputPartition(one) for one in pieces]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the record batches of a task."""
        if partition is not None and partition.value is not None:
            yield from read_range(partition.value, self._options)

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing: the position is in the query's checkpoint."""

    def stop(self) -> None:
        """Close the client."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


_TYPES: Final[Mapping[str, Any]] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
    "binary": pa.binary(),
}
"""By the types of `COLUMNS`."""
_VALUES: Final[Mapping[str, Callable[[MessageExt], Any]]] = {
    "topic": lambda message: message.topic,
    "broker": lambda message: message.broker_name,
    "queue_id": lambda message: message.queue_id,
    "queue_offset": lambda message: message.queue_offset,
    "born_timestamp": lambda message: message.born_timestamp_ms * 1000,
    "store_timestamp": lambda message: message.store_timestamp_ms * 1000,
    "message_id": lambda message: message.message_id,
    "keys": lambda message: message.keys,
    "tags": lambda message: message.tags,
    "properties": lambda message: list(message.properties.items()),
    "body": lambda message: message.body_bytes,
}


def batch_of(messages: Iterable[MessageExt], columns: Sequence[str]) -> Any:
    """Return messages as one record batch.

    Raises CorruptRecordError: a record does not fit its checksum, or is compressed in a way that
    this client cannot read.
    """
    rows = list(messages)
    schema = pa.schema([(name, _TYPES[COLUMNS[name]]) for name in columns])
    arrays = [
        pa.array([_VALUES[name](row) for row in rows], kind)
        for name, kind in zip(columns, schema.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def register(spark: Any) -> None:
    """Make ``format("dledger")`` known to *spark*; doing it again is harmless."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(DledgerSource)
