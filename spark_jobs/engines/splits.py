"""The tables as splits: each task of Spark's opens the address itself and reads some row groups.

pyarrow decodes into numpy without a JVM in between, which costs as much as in the local engine.
What only Hadoop opens comes as DataFrames instead, see `frames`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, SparkSession

from dledger.jepsen_like.checkers.kernel.source import Queue, Want
from dledger.jepsen_like.checkers.kernel.tables import Batch
from dledger.jepsen_like.history.columns import SCHEMAS
from dledger.spark_jobs.engines.local import BATCH_ROWS, condition, of_group
from dledger.spark_jobs.tables import SCAN, Tables, batches, check_batch, keep_memory, named

SPLIT_ROWS: Final = 1 << 20
"""Rows of a split: about one second of work."""

Act = Callable[[Iterator[tuple[str, Batch]]], Iterator[pa.RecordBatch]]
"""What a task does with the batches of its split, each with the name of its table."""


class Split(NamedTuple):
    """Row groups of a file."""

    table: str
    path: str
    groups: tuple[int, ...]


class SplitTables:
    """The tables at an address that every worker can open."""

    def __init__(self, spark: SparkSession, tables: Tables) -> None:
        self._spark, self._tables = spark, tables

    def name(self, table: str) -> str:
        """Return the path or address of a table."""
        return self._tables.name(table)

    def nodes(self) -> Any:
        """Return the table `nodes`."""
        return self._tables.nodes()

    def events(self) -> Any:
        """Return the table `events`."""
        return self._tables.events()

    def each(
        self,
        columns: Mapping[str, tuple[str, ...]],
        act: Act,
        schema: str,
        queue: Queue | None = None,
    ) -> DataFrame:
        """Return what *act* yields of all splits.

        Args:
            columns: By table, what is read of it; tables that are not named are left out.
            schema: Of what it yields, as Spark writes it.
            queue: Row groups without this queue are left out; None: all are read.
        """
        splits = self._splits(tuple(columns), None if queue is None else of_queue(queue))
        read = partial(_read, self._tables.place, splits, dict(columns))

        def task(ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            keep_memory()
            return act(read(ids))

        rows = self._spark.range(0, len(splits), 1, max(1, len(splits)))
        return rows.mapInArrow(task, schema)

    def may_have(self, table: str, want: Want) -> bool:
        """Whether a table may have such a row, by the statistics of its files."""
        return bool(self._splits((table,), None, (want,)))

    def wanted(self, table: str, wants: tuple[Want, ...]) -> DataFrame:
        """Return the rows of each want: its number, how many, and they themselves as a stream."""
        splits = self._splits((table,), None, wants)
        place = self._tables.place

        def task(ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            keep_memory()
            yield from _wanted(place, splits, wants, ids)

        rows = self._spark.range(0, len(splits), 1, max(1, len(splits)))
        return rows.mapInArrow(task, WANTED_SCHEMA)

    def _splits(
        self, names: tuple[str, ...], only: Any, wants: tuple[Want, ...] = ()
    ) -> list[Split]:
        found: list[Split] = []
        for name in names:
            with named(self._tables.name(name)):
                for fragment in self._tables.dataset(name).get_fragments():
                    found += _splits_of(name, fragment, only, wants)
        return found


WANTED_SCHEMA: Final = "number int, count long, rows binary"


def of_queue(queue: Queue) -> Any:
    """Return the condition that a row is of a queue."""
    return condition(Want((("queue", (queue[1],)),), queue=queue), SCHEMAS["ops"])


def _splits_of(table: str, fragment: Any, only: Any, wants: tuple[Want, ...]) -> list[Split]:
    groups = {group.id: group.num_rows for group in fragment.row_groups}
    conditions = [only] if only is not None else [condition(w, SCHEMAS[table]) for w in wants]
    if conditions:
        met: set[int] = set()
        for one in conditions:
            if one is not None:
                kept = fragment.subset(filter=one, schema=SCHEMAS[table])
                met |= {group.id for group in kept.row_groups}
        groups = {number: rows for number, rows in groups.items() if number in met}
    found: list[Split] = []
    some: list[int] = []
    rows = 0
    for number, count in groups.items():
        some.append(number)
        rows += count
        if rows >= SPLIT_ROWS:
            found.append(Split(table, fragment.path, tuple(some)))
            some, rows = [], 0
    if some:
        found.append(Split(table, fragment.path, tuple(some)))
    return found


def _fragments(
    place: str, splits: list[Split], ids: Iterator[pa.RecordBatch]
) -> Iterator[tuple[str, str, Any]]:
    """Yield table, its name in sentences and a fragment for each row group."""
    tables = Tables(place)
    for batch in ids:
        for number in batch.column("id").to_pylist():
            table, path, groups = splits[number]
            name = tables.name(table)
            with named(name):
                for group in groups:
                    made = ds.ParquetFileFormat().make_fragment(
                        path, tables.filesystem, row_groups=[group]
                    )
                    yield table, name, made


def _read(
    place: str,
    splits: list[Split],
    columns: dict[str, tuple[str, ...]],
    ids: Iterator[pa.RecordBatch],
) -> Iterator[tuple[str, Batch]]:
    for table, name, fragment in _fragments(place, splits, ids):
        for batch in _batches(table, name, fragment, columns[table]):
            yield table, batch


def _batches(table: str, name: str, fragment: Any, columns: tuple[str, ...]) -> Iterator[Batch]:
    with named(name):
        same = of_group(fragment.metadata.row_group(fragment.row_groups[0].id))
    same = {column: value for column, value in same.items() if column in SCHEMAS[table].names}
    same.pop("op_id", None)  # something is left to read: the number of rows
    read = [column for column in dict.fromkeys((*columns, "op_id")) if column not in same]
    found = fragment.to_batches(
        schema=SCHEMAS[table],
        columns=read,
        batch_size=BATCH_ROWS,
        use_threads=False,
        fragment_scan_options=SCAN,
    )
    for batch in batches(name, found):
        yield Batch(batch, same, SCHEMAS[table])


def _wanted(
    place: str, splits: list[Split], wants: tuple[Want, ...], ids: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Read the columns that wants name, and all columns only of row groups that one meets."""
    met: dict[int, list[Any]] = {}
    for table, name, fragment in _fragments(place, splits, ids):
        schema = SCHEMAS[table]
        asked = tuple(dict.fromkeys(column for want in wants for column in columns_of(want)))
        masks = [
            [batch.meets(want) for want in wants]
            for batch in _batches(table, name, fragment, asked)
        ]
        every = [np.concatenate(column) for column in zip(*masks, strict=True)]
        if not any(mask.any() for mask in every):
            continue
        with named(name):
            rows = fragment.to_table(schema=schema, use_threads=False, fragment_scan_options=SCAN)
        check_batch(name, rows)
        for number, mask in enumerate(every):
            if mask.any():
                met.setdefault(number, []).append(rows.filter(pa.array(mask)))
    for number, parts in met.items():
        rows = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
        yield wanted_rows(number, rows)


def columns_of(want: Want) -> list[str]:
    """Return the columns that tell whether a row is wanted."""
    found = [name for name, _ in (*want.among, *want.other_than)]
    found += [str(value) for _, value in want.other_than if value in SCHEMAS["ops"].names]
    return found + (["topic", "queue"] if want.queue is not None else [])


def wanted_rows(number: int, rows: Any) -> pa.RecordBatch:
    """Return rows of a want as one row of `WANTED_SCHEMA`."""
    return pa.RecordBatch.from_pydict(
        {
            "number": pa.array([number], pa.int32()),
            "count": pa.array([rows.num_rows], pa.int64()),
            "rows": pa.array([stream_of(rows)], pa.binary()),
        }
    )


def stream_of(rows: Any) -> bytes:
    """Return the rows of a table as a stream of Arrow's."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=True)
    with pa.ipc.new_stream(sink, rows.schema, options=options) as stream:
        stream.write_table(rows)
    found: bytes = sink.getvalue().to_pybytes()
    return found
