"""Tables as DataFrames, which Spark's JVM reads from any address of Hadoop, and what tasks answer.

Decoding in the JVM and handing rows on to Python costs several times what `splits` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from dledger.jepsen_like.checkers.kernel.source import Queue, TooManyRowsError, Want
from dledger.jepsen_like.checkers.kernel.tables import Batch
from dledger.jepsen_like.checkers.verdict import BadInputError
from dledger.jepsen_like.history.columns import OPS, SCHEMAS
from dledger.spark_jobs.engines.splits import WANTED_SCHEMA, Act, wanted_rows
from dledger.spark_jobs.tables import AGAIN, Tables, check_batch, checked_nodes, keep_memory

_BAD = re.compile(r"BadInputError: (.+)")


def arrow_of(place: str, rows: DataFrame, rows_max: int = 0) -> Any:
    """Return rows as an Arrow table.

    Args:
        rows_max: More rows than this do not fit into the results of a job.

    Raises:
        BadInputError: A task met input that gives no verdict, or Spark cannot read the tables.
        TooManyRowsError: The result is larger than this process takes.
    """
    try:
        return rows.toArrow()
    except Exception as error:  # what Spark raises has many types, of which a JVM's are no API
        text = str(error)
        bad = _BAD.search(text)
        if bad:
            raise BadInputError(bad[1].strip()) from error
        if "spark.driver.maxResultSize" in text:
            raise TooManyRowsError(rows_max) from error
        first = next((line.strip() for line in text.splitlines() if line.strip()), "no reason")
        raise BadInputError(
            f"Spark ended without an answer while it read {place} ({first[:200]}): see its log, or "
            "check with --engine local"
        ) from error


CONDITIONS_MAX: Final = 16
"""Wants that Spark filters by: its planner is slow with long conditions, and ends at very long."""


class FrameTables(Tables):
    """The tables at an address that Spark opens, and no library of this process."""

    def __init__(self, spark: SparkSession, place: str) -> None:
        self._spark, self.place = spark, place.rstrip("/")
        self.frames: dict[str, DataFrame] = {}

    def frame(self, table: str) -> DataFrame:
        """Return a table. Raises BadInputError: it is missing, or is no Parquet."""
        if table not in self.frames:
            try:
                self.frames[table] = self._spark.read.parquet(self.name(table))
            except AnalysisException as error:
                raise BadInputError(f"{self.name(table)} is missing: {AGAIN}") from error
        return self.frames[table]

    def read(self, file: str) -> bytes | None:
        """Return the bytes of a small file; None: it is not there."""
        try:
            rows = self._spark.read.format("binaryFile").load(f"{self.place}/{file}")
        except AnalysisException:
            return None
        found = arrow_of(self.place, rows.select("content")).column("content").to_pylist()
        return bytes(found[0]) if found else None

    def footer(self, _table: str) -> None:
        """Return nothing: Spark alone opens the address, and shows no footer."""

    def footers(self, table: str) -> Iterator[tuple[Any, int]]:
        """Yield columns and number of rows of a table; see `Tables.footers`."""
        frame = self.frame(table)
        counted = arrow_of(self.name(table), frame.groupBy().count())
        schema = pa.schema([(f.name, _kind(f.dataType.typeName())) for f in frame.schema])
        yield schema, counted.column("count").to_pylist()[0]

    def nodes(self) -> Any:
        """Return the table `nodes`."""
        return checked_nodes(self.name("nodes"), arrow_of(self.name("nodes"), self.frame("nodes")))

    def events(self) -> Any:
        """Return the table `events`."""
        table = arrow_of(self.name("events"), self.frame("events"))
        check_batch(self.name("events"), table)
        return table

    def each(
        self,
        columns: Mapping[str, tuple[str, ...]],
        act: Act,
        schema: str,
        queue: Queue | None = None,
    ) -> DataFrame:
        """Return what *act* yields of all partitions; see `SplitTables.each`."""
        found = []
        for table, names in columns.items():
            rows = self.frame(table)
            if queue is not None:
                rows = rows.where(_is_of(queue))
            found.append(
                rows.select(*names).mapInArrow(_task(table, self.name(table), act), schema)
            )
        return reduce(DataFrame.unionByName, found)

    def may_have(self, _table: str, _want: Want) -> bool:
        """Return true: there are no statistics to look at."""
        return True

    def wanted(self, table: str, wants: tuple[Want, ...]) -> DataFrame:
        """Return the rows of each want; see `SplitTables.wanted`."""
        schema, name = SCHEMAS[table], self.name(table)

        def task(found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in found:
                rows = _checked(name, batch, table)
                for number, want in enumerate(wants):
                    mask = Batch(rows, {}, schema).meets(want)
                    if mask.any():
                        kept = pa.Table.from_batches([rows.filter(pa.array(mask))])
                        yield wanted_rows(number, kept)

        rows = self.frame(table)
        if len(wants) <= CONDITIONS_MAX:
            terms = [term for want in wants if (term := _condition(want)) is not None]
            rows = rows.where(reduce(or_, terms) if terms else sf.lit(False))
        return rows.select(*schema.names).mapInArrow(task, WANTED_SCHEMA)


def _task(table: str, name: str, act: Act) -> Any:
    def task(found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        keep_memory()
        return act((table, Batch(_checked(name, b, table), {}, SCHEMAS[table])) for b in found)

    return task


def _checked(name: str, batch: pa.RecordBatch, table: str) -> pa.RecordBatch:
    check_batch(name, batch)
    return _with_words(batch, table)


def _with_words(batch: pa.RecordBatch, table: str) -> pa.RecordBatch:
    """Return *batch* with its words in dictionaries, as the kernel reads them."""
    fields = [SCHEMAS[table].field(name) for name in batch.schema.names]
    columns = [
        column.cast(pa.string()).dictionary_encode()
        if pa.types.is_dictionary(field.type)
        else column
        for field, column in zip(fields, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


_KINDS = {
    "byte": pa.int8(), "short": pa.int16(), "integer": pa.int32(), "long": pa.int64(),
    "string": pa.string(),
}  # fmt: skip


def _kind(name: str) -> Any:
    return _KINDS.get(name, pa.null())


def _is_of(queue: Queue) -> Column:
    return (sf.col("topic") == queue[0]) & (sf.col("queue") == queue[1])


def _condition(want: Want) -> Column | None:
    terms: list[Column] = [
        sf.col(name).isin([value if isinstance(value, str) else int(value) for value in values])
        for name, values in want.among
        if values
    ]
    for name, value in want.other_than:
        is_column = isinstance(value, str) and value in OPS.names
        terms.append(sf.col(name) != (sf.col(str(value)) if is_column else sf.lit(value)))
    if not terms:
        return None
    found = reduce(or_, terms)
    return found if want.queue is None else found & _is_of(want.queue)
