"""The Spark engine: one task per queue, or per chunk of a long one; the same kernel inside.

Rows of suspects are found by filter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import LongType, StructField, StructType

from jepsen_like.checkers.kernel.chunks import Answer, Ask
from jepsen_like.checkers.kernel.cut import (
    CHUNK_OFFSETS,
    ChunkReport,
    answer_of,
    chunk_report_of,
    judge_cut,
    obs_routes,
    report_of,
    routes,
)
from jepsen_like.checkers.kernel.facts import (
    I64,
    OBS_COLUMNS,
    OPS_COLUMNS,
    SUSPECTS_MAX,
    QueueFacts,
    Spares,
)
from jepsen_like.checkers.kernel.source import Queue, QueueReport, Replicas, TooManyRowsError, Want
from jepsen_like.checkers.kernel.tables import spares_of
from jepsen_like.history.columns import OBS, OPS
from jepsen_like.history.operation import NOTHING, F, Operation, Outcome
from spark_jobs.audit.folder import ReplicaFolder, open_folder
from spark_jobs.audit.work import Done, Work, do
from spark_jobs.tables import Tables

LOOK: Final = 100
"""In the column `f`: the row is one of `obs`."""
_ROWS: Final = ("topic", "queue", *OPS_COLUMNS, "replica")
REPORT_SCHEMA: Final = "topic string, queue int, report binary"
QUEUE_ROWS_MAX: Final = 1 << 25
"""Rows of a queue that one task takes: facts of about 600 MB where half of them are sends."""


def open_tables(spark: SparkSession, place: str) -> Tables:
    """Return the folder of tables at an address."""
    return Tables(place)


class SparkSource:
    """The tables in a folder that every worker can read.

    Args:
        spark: Where the work is done.
        parquet: The folder: a path, or any address Spark knows.
        rows_max: A queue with more rows is cut into chunks, a task for each.
        chunk_offsets: Offsets of a chunk.
    """

    def __init__(
        self,
        spark: SparkSession,
        parquet: str,
        *,
        rows_max: int = QUEUE_ROWS_MAX,
        chunk_offsets: int = CHUNK_OFFSETS,
    ) -> None:
        self._spark = spark
        self._parquet = parquet
        self._rows_max, self._width = rows_max, chunk_offsets
        self.tables = {
            name: spark.read.parquet(f"{parquet}/{name}.parquet") for name in ("ops", "obs")
        }

    def prepare(self, wants: tuple[Want, ...]) -> None:
        """Do nothing: a filter is pushed down into the scan here."""

    def nodes(self) -> Any:
        """Return the table `nodes`."""
        return self._spark.read.parquet(f"{self._parquet}/nodes.parquet").toArrow()

    def events(self) -> Any:
        """Return the table `events`."""
        return self._spark.read.parquet(f"{self._parquet}/events.parquet").toArrow()

    def ops(self, want: Want, rows_max: int) -> Any:
        """Return rows of `ops`."""
        return _rows(self.tables["ops"], OPS, want, rows_max)

    def obs(self, want: Want, rows_max: int) -> Any:
        """Return rows of `obs`."""
        return _rows(self.tables["obs"], OBS, want, rows_max)

    def queues(
        self, appends: Mapping[Queue, tuple[Operation, ...]], replicas: Replicas
    ) -> list[QueueReport]:
        """Judge every queue, each in a task of its own."""
        numbers = {name: number for number, name in enumerate(replicas.names)}
        added = {queue: spares_of(ops) for queue, ops in appends.items()}
        rows = self.of_queues(numbers)
        hot = self._hot(rows)
        found = [
            judge_cut(queue, _SparkPasses(self._of(rows, queue), queue, replicas, self._width, n),
                      added.get(queue), replicas)
            for queue, n in sorted(hot.items())
        ]  # fmt: skip
        if hot:
            rows = rows.where(~reduce(or_, (_is_of(queue) for queue in hot)))
        task = _whole(added, replicas)
        reports = rows.groupBy("topic", "queue").applyInArrow(task, REPORT_SCHEMA).toArrow()
        found += _decoded(reports, QueueReport)
        met = {report.key for report in found}
        for queue in [queue for queue in appends if queue not in met]:
            facts = QueueFacts()
            facts.add_spares(added[queue])
            found.append(report_of(queue, facts, replicas))
        return found

    def _hot(self, rows: DataFrame) -> dict[Queue, int]:
        """Return the queues that are too long for one task, and how many rows they have."""
        counts = rows.groupBy("topic", "queue").count().where(sf.col("count") > self._rows_max)
        return {(topic, queue): count for topic, queue, count in counts.collect()}

    def _of(self, rows: DataFrame, queue: Queue) -> DataFrame:
        return rows.where(_is_of(queue)).select(*_ROWS[2:])

    def of_queues(self, numbers: Mapping[str, int]) -> DataFrame:
        """Return the rows of both tables that concern queues, in one shape."""
        ops, obs = self.tables["ops"], self.tables["obs"]
        used = (sf.col("f") <= 3) & (sf.col("queue") >= 0) & (sf.col("topic") != "")
        left = ops.where(used).withColumn("replica", sf.lit(-1)).select(*_ROWS)
        replica = reduce(
            lambda known, pair: sf.when(sf.col("replica") == pair[0], pair[1]).otherwise(known),
            numbers.items(),
            sf.lit(-1),
        )
        blank = {name: sf.lit(0) for name in OPS_COLUMNS}
        blank |= {"f": sf.lit(LOOK), "op_id": sf.col("op_id"), "off": sf.col("off")}
        blank |= {"value": sf.col("value")}
        types = {field.name: field.dataType for field in ops.schema.fields}
        looks = [blank[name].cast(types[name]).alias(name) for name in OPS_COLUMNS]
        right = obs.where(sf.col("queue") >= 0).select(
            "topic", "queue", *looks, replica.alias("replica")
        )
        return left.unionByName(right)


def _is_of(queue: Queue) -> Column:
    return (sf.col("topic") == queue[0]) & (sf.col("queue") == queue[1])


def _whole(added: Mapping[Queue, Spares], replicas: Replicas) -> Any:
    """Return the task of one queue."""

    def judge(
        key: tuple[pa.Scalar, ...], batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        queue = (str(key[0].as_py()), int(key[1].as_py()))
        facts = QueueFacts()
        for batch in batches:
            _add(facts, batch)
        if queue in added:
            facts.add_spares(added[queue])
        report = msgspec.msgpack.encode(report_of(queue, facts, replicas))
        yield pa.RecordBatch.from_pydict(
            {"topic": [queue[0]], "queue": pa.array([queue[1]], pa.int32()), "report": [report]}
        )

    return judge


def _decoded(reports: pa.Table, kind: Any) -> list[Any]:
    return [
        msgspec.msgpack.decode(report, type=kind) for report in reports.column("report").to_pylist()
    ]


class _SparkPasses:
    """The rows of one queue that is cut; see `queue_cut.Passes`."""

    def __init__(
        self, rows: DataFrame, queue: Queue, replicas: Replicas, width: int, count: int
    ) -> None:
        self._rows, self._queue, self._replicas, self._width = rows, queue, replicas, width
        self._spread = count // width + 1

    def first(self, limit: int | None) -> list[ChunkReport]:
        """Let each chunk say what it knows."""
        queue, replicas = self._queue, self._replicas
        reports = self._tasks(lambda facts: chunk_report_of(queue, facts, replicas, limit))
        return _decoded(reports, ChunkReport)

    def again(self, asks: dict[int, Ask], limit: int | None) -> list[Answer]:
        """Let each chunk answer."""
        replicas = self._replicas
        reports = self._tasks(lambda facts: answer_of(facts, replicas, asks[facts.begin], limit))
        return _decoded(reports, Answer)

    def repeated(self, added: I64) -> I64:
        """Group the values of all sends."""
        sends = self._rows.where(sf.col("f") == int(F.SEND))
        acked = (sf.col("outcome") == int(Outcome.OK)) & (sf.col("off") != NOTHING)
        values = sends.select("value", sf.when(acked, sf.col("off")).alias("off"))
        if len(added):
            more = pa.table({"value": added, "off": pa.nulls(len(added), pa.int64())})
            values = values.unionByName(self._rows.sparkSession.createDataFrame(more))
        places = (sf.min("off"), sf.max("off"), sf.count("*") - sf.count("off"))
        grouped = values.groupBy("value").agg(*places).toDF("value", "low", "high", "spares")
        more_than_one = "spares + if(low is null, 0, if(low = high, 1, 2)) > 1"
        found = grouped.where(more_than_one).orderBy("value").limit(SUSPECTS_MAX + 1)
        words: I64 = found.select("value").toArrow().column(0).to_numpy()
        return words

    def _tasks(self, act: Callable[[QueueFacts], Any]) -> pa.Table:
        width, spread = self._width, self._spread

        def route(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                rows, chunks = _routes(batch, width, spread)
                yield batch.take(pa.array(rows)).append_column("chunk", pa.array(chunks))

        def task(
            key: tuple[pa.Scalar, ...], batches: Iterator[pa.RecordBatch]
        ) -> Iterator[pa.RecordBatch]:
            facts = QueueFacts(int(key[0].as_py()) * width, width)
            for batch in batches:
                _add(facts, batch)
            yield pa.RecordBatch.from_pydict({"report": [msgspec.msgpack.encode(act(facts))]})

        schema = StructType([*self._rows.schema.fields, StructField("chunk", LongType())])
        routed = self._rows.mapInArrow(route, schema)
        return routed.groupBy("chunk").applyInArrow(task, "report binary").toArrow()


def _routes(batch: pa.RecordBatch, width: int, spread: int) -> tuple[I64, I64]:
    """Return rows of both kinds and the chunks they concern."""
    columns = {name: batch.column(name).to_numpy() for name in OPS_COLUMNS}
    look = columns["f"] == LOOK
    ops, obs = np.flatnonzero(~look), np.flatnonzero(look)
    rows, chunks = routes({name: column[ops] for name, column in columns.items()}, width, spread)
    looks = obs_routes({name: columns[name][obs] for name in ("off", "op_id")}, width, spread)
    return np.concatenate((ops[rows], obs)), np.concatenate((chunks, looks))


def _add(facts: QueueFacts, batch: pa.RecordBatch) -> None:
    """Give rows of both kinds to the facts."""
    columns = {name: batch.column(name).to_numpy() for name in (*OPS_COLUMNS, "replica")}
    look = columns["f"] == LOOK
    if not look.any():
        facts.add_ops(columns)
        return
    rows = np.flatnonzero(~look)
    if len(rows):
        facts.add_ops({name: columns[name][rows] for name in OPS_COLUMNS})
    rows = np.flatnonzero(look)
    facts.add_obs({name: columns[name][rows] for name in OBS_COLUMNS})


def _rows(table: DataFrame, schema: Any, want: Want, rows_max: int) -> Any:
    terms: list[Column] = [
        sf.col(name).isin([int(value) for value in values]) for name, values in want.among if values
    ]
    for name, value in want.other_than:
        is_column = isinstance(value, str) and value in OPS.names
        terms.append(sf.col(name) != (sf.col(str(value)) if is_column else sf.lit(value)))
    if not terms:
        return schema.empty_table()
    rows = table.where(reduce(or_, terms))
    if want.queue is not None:
        rows = rows.where((sf.col("topic") == want.queue[0]) & (sf.col("queue") == want.queue[1]))
    found = rows.select(*schema.names).limit(rows_max + 1).toArrow()
    if found.num_rows > rows_max:
        raise TooManyRowsError(rows_max)
    return found.cast(schema)


SCHEMA = "number long, done binary"


class SparkDoer:
    """Does pieces of work in Spark's tasks; every worker must be able to read the folders."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __call__(self, folders: Sequence[ReplicaFolder], works: Sequence[Work]) -> list[Done]:
        """Return the result of each piece of work, in their order."""
        roots = [str(folder.root) for folder in folders]
        marks = [folder.mark for folder in folders]

        def tasks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            opened = [open_folder(Path(root)) for root in roots]
            for folder, mark in zip(opened, marks, strict=True):
                # All tasks look at one commit point, also when a broker goes on meanwhile.
                folder.mark = mark
            for batch in batches:
                numbers = batch.column("id").to_pylist()
                dones = [msgspec.msgpack.encode(do(opened, works[number])) for number in numbers]
                yield pa.RecordBatch.from_pydict(
                    {"number": pa.array(numbers, pa.int64()), "done": dones}
                )

        rows = self._spark.range(0, len(works), 1, max(1, len(works)))
        table = rows.mapInArrow(tasks, SCHEMA).toArrow()
        found = dict(
            zip(table.column("number").to_pylist(), table.column("done").to_pylist(), strict=True)
        )
        return [msgspec.msgpack.decode(found[number], type=Done) for number in range(len(works))]
