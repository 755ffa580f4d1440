"""A run followed by Structured Streaming: the same watch of each queue, kept as Spark's state.

A source reads whole records off the growing files; a micro-batch goes to the queues it concerns.
The state of a queue is its `QueueWatch` as bytes, so it is as small.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import pandas as pd
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from dledger.jepsen_like.checkers.queue_watch import QueueWatch
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import CorruptHistoryError, Operation
from dledger.spark_jobs.live import INTERVAL_S, Tail, by_queue

FORMAT: Final = "dledger_run"
ROWS_SCHEMA: Final = "topic string, queue int, horizon_ns bigint, row binary"
STATE_SCHEMA: Final = "watch binary"
FOUND_SCHEMA: Final = (
    "topic string, queue int, rows bigint, in_flight bigint, pending bigint, kept bigint, "
    "state_bytes bigint, violations binary"
)


class RunReader(SimpleDataSourceStreamReader):
    """Rows that have ended, as far as they are written. An offset is a place in each file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail = Tail(folder)

    def initialOffset(self) -> dict[str, int]:  # noqa: N802  # Spark's name
        """Return the beginning of all files."""
        return {}

    def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[Any, ...]], dict[str, int]]:
        """Return what came since *start*, and where the next batch begins."""
        if start != self._tail.at:
            self._wind(start)
        batch = self._tail.next()
        rows = [
            (topic, queue, batch.horizon_ns, msgspec.msgpack.encode(op))
            for (topic, queue), ops in sorted(by_queue(batch.ended).items())
            for op in ops
        ]
        return iter(rows), dict(self._tail.at)

    def readBetweenOffsets(  # noqa: N802  # Spark's name
        self, start: dict[str, int], end: dict[str, int]
    ) -> Iterator[tuple[Any, ...]]:
        """Return a batch again, after a failure."""
        self._wind(start)
        found: list[tuple[Any, ...]] = []
        while self._tail.at != end:
            rows, at = self.read(dict(self._tail.at))
            found += rows
            if not rows and at == start:
                break
        return iter(found)

    def _wind(self, start: dict[str, int]) -> None:
        """Read up to *start* again: which operations are open there is nowhere else."""
        self._tail = Tail(self._folder, until(start))
        while self._tail.at != start and any(start.values()):
            before = dict(self._tail.at)
            self._tail.next()
            if self._tail.at == before:
                break
        self._tail.read = None


def until(end: dict[str, int]) -> Callable[[Path, int, int], bytes]:
    """Return what reads files up to a place in each."""

    def read(path: Path, at: int, size: int) -> bytes:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(max(min(size, end.get(path.name, 0) - at), 0))

    return read


class RunSource(DataSource):
    """The format `dledger_run`: option `path` names the folder of a run."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns: the queue, the horizon of the batch, a row."""
        return ROWS_SCHEMA

    def simpleStreamReader(self, schema: Any) -> SimpleDataSourceStreamReader:  # noqa: N802
        """Return what reads the files."""
        return RunReader(Path(self.options["path"]))


def watched(rows: DataFrame) -> DataFrame:
    """Return for each batch and queue what it completed, and how much is kept."""

    def watch(
        key: tuple[Any, ...], parts: Iterator[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        topic, queue = key
        kept = QueueWatch(subject=f"{topic}/{queue}")
        if state.exists:
            kept = msgspec.msgpack.decode(state.get[0], type=QueueWatch)
        ops: list[Operation] = []
        horizons: list[int] = []
        for part in parts:
            ops += [msgspec.msgpack.decode(row, type=Operation) for row in part["row"]]
            horizons += part["horizon_ns"].tolist()
        found = kept.take(ops, min(horizons))
        encoded = msgspec.msgpack.encode(kept)
        state.update((encoded,))
        row = (
            str(topic), int(queue), kept.rows, kept.in_flight, kept.pending, kept.size,
            len(encoded), msgspec.msgpack.encode(found),
        )  # fmt: skip
        yield pd.DataFrame([row], columns=[part.split()[0] for part in FOUND_SCHEMA.split(", ")])

    return rows.groupBy("topic", "queue").applyInPandasWithState(
        watch, FOUND_SCHEMA, STATE_SCHEMA, "append", GroupStateTimeout.NoTimeout
    )


class QueueFound(msgspec.Struct):
    """What a batch found in one queue; counts as in `live.Progress`."""

    batch: int
    topic: str
    queue: int
    rows: int
    in_flight: int
    pending: int
    kept: int
    state_bytes: int
    violations: list[Violation]


def start_following(
    spark: SparkSession,
    folder: Path,
    checkpoint: Path,
    report: Callable[[list[QueueFound]], object],
) -> StreamingQuery:
    """Start to follow the run in *folder*; stop the query to end it."""
    spark.dataSource.register(RunSource)
    rows = spark.readStream.format(FORMAT).option("path", str(folder.resolve())).load()

    def each(batch: DataFrame, number: int) -> None:
        rows = batch.toArrow().to_pylist()
        for row in rows:
            row["violations"] = msgspec.msgpack.decode(row["violations"], type=list[Violation])
        report([QueueFound(number, **row) for row in rows])

    writer = watched(rows).writeStream.outputMode("append").foreachBatch(each)
    return writer.option("checkpointLocation", str(checkpoint)).start()


def follow_with_spark(
    spark: SparkSession,
    folder: Path,
    report: Callable[[list[QueueFound]], object],
    sleep: Callable[[float], object],
    is_over: Callable[[], bool],
) -> None:
    """Follow the run in *folder* until *is_over*; arguments as of `follow.follow`.

    Raises:
        NoHistoryError: There is no history yet.
        CorruptHistoryError: A record is damaged, or a row that this version does not know; or Spark
            cannot go on for another reason, for example a file that cannot be read.
    """
    Tail(folder)
    with TemporaryDirectory(prefix="dledger-follow-") as checkpoint:
        query = start_following(spark, folder, Path(checkpoint), report)
        try:
            while not is_over():
                query.processAllAvailable()
                sleep(INTERVAL_S)
            query.processAllAvailable()
        except PySparkException as error:
            damaged = re.search(r"CorruptHistoryError: (.+)", str(error))
            if damaged:
                raise CorruptHistoryError(damaged[1]) from error
            said = " ".join(str(error).split())[:200]
            raise CorruptHistoryError(f"Spark cannot follow {folder} ({said})") from error
        finally:
            query.stop()
