"""The Spark engine: facts are gathered where rows are read, shuffled by chunk, and judged there.

The kernel decides; rows of suspects are read again, those of all queues in one pass.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from dledger.jepsen_like.checkers.kernel.chunks import Answer, Ask, spares_in
from dledger.jepsen_like.checkers.kernel.cut import (
    CHUNK_OFFSETS,
    ChunkReport,
    answer_of,
    judge_cut,
    report_of,
)
from dledger.jepsen_like.checkers.kernel.facts import (
    I64,
    OBS_COLUMNS,
    OPS_COLUMNS,
    SUSPECTS_MAX,
    QueueFacts,
)
from dledger.jepsen_like.checkers.kernel.source import (
    Queue,
    QueueReport,
    Replicas,
    TooManyRowsError,
    Want,
)
from dledger.jepsen_like.checkers.kernel.tables import Batch, spares_of
from dledger.jepsen_like.history.columns import OBS, OPS, SCHEMAS
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome
from dledger.jepsen_like.history.sums import added as added_sums
from dledger.spark_jobs.audit.folder import ReplicaFolder, open_folder
from dledger.spark_jobs.audit.work import Done, Work, do
from dledger.spark_jobs.engines.frames import FrameTables, arrow_of
from dledger.spark_jobs.engines.shares import (
    CUT,
    ROWS,
    SUMS,
    CutReport,
    Judge,
    Share,
    Sharer,
    cut_report,
    first_look,
    joined,
    may_repeat,
    number_of,
    rows_key,
)
from dledger.spark_jobs.engines.splits import SplitTables, stream_of
from dledger.spark_jobs.tables import (
    CHECKED,
    Tables,
    UnknownAddressError,
    check_rows,
    check_sum,
    keep_memory,
)

SHARE_SCHEMA: Final = "topic string, queue int, chunk long, facts binary"
REPORT_SCHEMA: Final = "topic string, queue int, kind int, report binary"
VALUES_SCHEMA: Final = "value long, off long"
_KEY: Final = ("topic", "queue", "chunk")
_FACTS: Final = {
    "ops": tuple(dict.fromkeys(("topic", "queue", *OPS_COLUMNS, *CHECKED))),
    "obs": ("topic", "queue", *OBS_COLUMNS),
}
_ALL: Final = {"ops": tuple(OPS.names), "obs": tuple(OBS.names)}
"""The first look sums all columns."""
_HALVES: Final = Want((("f", (int(F.HALF),)),))
_Part = tuple[int, bytes]
"""How many rows, and they as a stream."""
_Report = tuple[str, int, int, bytes]
"""Topic, queue, kind and report."""
SHARES_OF_A_BATCH: Final = 16
"""Facts of chunks that a task hands on at once: 28 MB each at most."""


def open_tables(spark: SparkSession, place: str) -> Tables:
    """Return the folder of tables at an address: as this process opens it, or as Hadoop does."""
    try:
        return Tables(place)
    except UnknownAddressError:
        return FrameTables(spark, place)


class SparkSource:
    """The tables in a folder that every worker can read.

    Args:
        tables: The folder: as `open_tables` returns it, or its path or address.
        sums: Of its tables, as `Ingested` has them; without, what is there is judged.
    """

    def __init__(
        self,
        spark: SparkSession,
        tables: Tables | str,
        sums: Mapping[str, str] = MappingProxyType({}),
        *,
        chunk_offsets: int = CHUNK_OFFSETS,
        rows: int | None = None,
    ) -> None:
        if isinstance(tables, str):
            tables = open_tables(spark, tables)
        self._width, self._sums, self._count = chunk_offsets, sums, rows
        self._rows = tables if isinstance(tables, FrameTables) else SplitTables(spark, tables)
        self._ahead: dict[str, tuple[Want, ...]] = {}
        self._met: dict[tuple[str, Want], list[_Part]] = {}
        self._replicas: Replicas | None = None
        self._reports: list[_Report] | None = None

    def prepare(
        self,
        ops: tuple[Want, ...],
        obs: tuple[Want, ...] = (),
        replicas: Replicas | None = None,
    ) -> None:
        """Say which rows are asked for next: one pass over each table finds them all.

        That pass judges the queues, too, where no transaction can have appended to them: what one
        appended is known from rows that were asked for.
        """
        self._ahead, self._met = {"ops": ops, "obs": obs}, {}
        is_one_pass = replicas is not None and not self._rows.may_have("ops", _HALVES)
        self._replicas = replicas if is_one_pass else None

    def nodes(self) -> Any:
        """Return the table `nodes`."""
        return self._rows.nodes()

    def events(self) -> Any:
        """Return the table `events`."""
        return self._rows.events()

    def ops(self, want: Want, rows_max: int) -> Any:
        """Return rows of `ops`."""
        return self._wanted("ops", want, rows_max)

    def obs(self, want: Want, rows_max: int) -> Any:
        """Return rows of `obs`."""
        return self._wanted("obs", want, rows_max)

    def _wanted(self, table: str, want: Want, rows_max: int) -> Any:
        if not want.other_than and not any(values for _, values in want.among):
            return SCHEMAS[table].empty_table()
        if (table, want) in self._met:
            found = self._met[table, want]
        else:
            ahead = self._ahead.get(table, ())
            wants = ahead if want in ahead else (want,)
            if table == "ops" and want in ahead and self._replicas is not None:
                met = self._first_pass(wants, self._replicas, rows_max)
            else:
                met = self._pass(table, wants, rows_max)
            if want in ahead:
                self._met |= {(table, one): met[number] for number, one in enumerate(wants)}
            found = met[wants.index(want)]
        if sum(count for count, _ in found) > rows_max:
            raise TooManyRowsError(rows_max)
        schema = SCHEMAS[table]
        parts = [pa.ipc.open_stream(rows).read_all().cast(schema) for _, rows in found]
        return pa.concat_tables(parts).unify_dictionaries() if parts else schema.empty_table()

    def _first_pass(
        self, wants: tuple[Want, ...], replicas: Replicas, rows_max: int
    ) -> list[list[_Part]]:
        """Read both tables once: return the rows of each want, and keep the reports of queues."""
        self._replicas, self._reports = None, []
        found: list[list[_Part]] = [[] for _ in wants]
        judge = first_look(replicas, {}, self._count)
        for report in self._judged(judge, replicas, None, wants, rows_max):
            topic, queue, kind, data = report
            if kind == ROWS:
                found[number_of((topic, queue))].append(_part_of(data))
            else:
                self._reports.append(report)
        return found

    def _pass(self, table: str, wants: tuple[Want, ...], rows_max: int) -> list[list[_Part]]:
        """Read a table once, and return the rows of each want as streams."""
        rows = arrow_of(self._rows.name(table), self._rows.wanted(table, wants), rows_max)
        found: list[list[_Part]] = [[] for _ in wants]
        for number, count, stream in zip(
            *(column.to_pylist() for column in rows.columns), strict=True
        ):
            found[number].append((count, stream))
        return found

    def queues(
        self, appends: Mapping[Queue, tuple[Operation, ...]], replicas: Replicas
    ) -> list[QueueReport]:
        """Judge every queue: those in one chunk in its task, the others from their chunks.

        Raises BadInputError: a table cannot be read, or has other rows than it was written with.
        """
        added = {queue: spares_of(ops) for queue, ops in appends.items()}
        whole: list[QueueReport] = []
        cut: dict[Queue, list[CutReport]] = {}
        sums: list[dict[str, int]] = []
        reports, self._reports = self._reports, None
        if reports is None or appends:
            reports = self._judged(first_look(replicas, added, self._count), replicas, None)
        for topic, queue, kind, report in reports:
            if kind == SUMS:
                sums.append(msgspec.msgpack.decode(report, type=dict[str, int]))
            elif kind == CUT:
                cut.setdefault((topic, queue), []).append(
                    msgspec.msgpack.decode(report, type=CutReport)
                )
            else:
                whole.append(msgspec.msgpack.decode(report, type=QueueReport))
        for table in _FACTS:
            total = added_sums(one.get(table, 0) for one in sums)
            check_sum(self._rows.name(table), total, self._sums.get(table))
        for key, chunks in sorted(cut.items()):
            passes = _Passes(self, key, replicas, chunks)
            whole.append(judge_cut(key, passes, added.get(key), replicas))
        met = {report.key for report in whole}
        for key in [key for key in appends if key not in met]:
            facts = QueueFacts()
            facts.add_spares(added[key])
            whole.append(report_of(key, facts, replicas))
        return whole

    def of_queue(self, key: Queue, replicas: Replicas, judge: Judge) -> list[bytes]:
        """Judge the chunks of one queue again."""
        return [report for *_, report in self._judged(judge, replicas, key)]

    def _judged(
        self,
        judge: Judge,
        replicas: Replicas,
        queue: Queue | None,
        wants: tuple[Want, ...] = (),
        rows_max: int = 0,
    ) -> list[_Report]:
        """Return the reports of chunks and the sums; rows of *wants*, too."""
        width, name = self._width, self._rows.name("ops")

        def gather(found: Iterator[tuple[str, Batch]]) -> Iterator[pa.RecordBatch]:
            sharer = Sharer(width, replicas, queue)
            met = _Met(wants)
            for table, batch in found:
                if table == "ops":
                    check_rows(name, {column: batch.numbers(column) for column in CHECKED})
                    met.add(batch)
                sharer.add(table, batch)
                if sharer.is_full:
                    yield from _shared(sharer.take())
            yield from _shared(sharer.take())
            yield from _shared(met.take())
            if queue is None:
                yield from _shared([sharer.sums()])

        def decide(found: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            keep_memory()
            for (topic, number), kind, report in joined(_shares(found), width, judge):
                yield pa.RecordBatch.from_arrays(
                    [
                        pa.array([topic]),
                        pa.array([number], pa.int32()),
                        pa.array([kind], pa.int32()),
                        pa.array([report], pa.binary()),
                    ],
                    names=["topic", "queue", "kind", "report"],
                )

        columns = _ALL if queue is None else _FACTS
        shares = self._rows.each(columns, gather, SHARE_SCHEMA, queue)
        dealt = shares.repartition(*_KEY)
        reports = arrow_of(name, dealt.mapInArrow(decide, REPORT_SCHEMA), rows_max)
        return list(zip(*(column.to_pylist() for column in reports.columns), strict=True))

    def values(self, queue: Queue) -> DataFrame:
        """Return value and acknowledged offset, or null, of the sends that may have succeeded."""

        def sends(found: Iterator[tuple[str, Batch]]) -> Iterator[pa.RecordBatch]:
            for _, batch in found:
                for key, columns in batch.by_queue(_VALUES[2:]):
                    failed = columns["outcome"] == Outcome.FAIL
                    rows = np.flatnonzero((columns["f"] == F.SEND) & ~failed)
                    if key != queue or not len(rows):
                        continue
                    off, value = columns["off"][rows], columns["value"][rows]
                    unknown = (columns["outcome"][rows] != Outcome.OK) | (off == NOTHING)
                    yield pa.RecordBatch.from_arrays(
                        [pa.array(value), pa.array(off, mask=unknown)], names=["value", "off"]
                    )

        return self._rows.each({"ops": _VALUES}, sends, VALUES_SCHEMA, queue)


class _Met:
    """Rows of `ops` that are wanted, of the batches of one task."""

    def __init__(self, wants: tuple[Want, ...]) -> None:
        self._wants = wants
        self._parts: list[list[pa.RecordBatch]] = [[] for _ in wants]
        self._first = 0

    def add(self, batch: Batch) -> None:
        """Add what is wanted of a batch."""
        for want, parts in zip(self._wants, self._parts, strict=True):
            rows = np.flatnonzero(batch.meets(want))
            if len(rows):
                self._first = self._first or int(batch.numbers("op_id")[0])
                parts.append(batch.rows(rows))

    def take(self) -> list[Share]:
        """Return what was met, spread over the tasks that join shares."""
        found = []
        for number, parts in enumerate(self._parts):
            if parts:
                rows = pa.Table.from_batches(parts, OPS).unify_dictionaries().combine_chunks()
                found.append(Share(rows_key(number), self._first, _as_bytes(rows)))
        return found


def _as_bytes(rows: Any) -> bytes:
    return _COUNT.pack(rows.num_rows) + stream_of(rows)


def _part_of(data: bytes) -> _Part:
    return _COUNT.unpack_from(data)[0], data[_COUNT.size :]


_COUNT: Final = struct.Struct("<q")
_VALUES: Final = ("topic", "queue", "f", "outcome", "off", "value")


def _shared(shares: Sequence[Share]) -> Iterator[pa.RecordBatch]:
    for at in range(0, len(shares), SHARES_OF_A_BATCH):
        part = shares[at : at + SHARES_OF_A_BATCH]
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([share.queue[0] for share in part], pa.string()),
                pa.array([share.queue[1] for share in part], pa.int32()),
                pa.array([share.chunk for share in part], pa.int64()),
                pa.array([share.facts for share in part], pa.binary()),
            ],
            names=[*_KEY, "facts"],
        )


def _shares(found: Iterator[pa.RecordBatch]) -> Iterator[Share]:
    for batch in found:
        for topic, queue, chunk, facts in zip(*(c.to_pylist() for c in batch.columns), strict=True):
            yield Share((topic, queue), chunk, facts)


class _Passes:
    """The chunks of one queue; see `cut.Passes`."""

    def __init__(
        self, source: SparkSource, queue: Queue, replicas: Replicas, known: list[CutReport]
    ) -> None:
        self._source, self._queue, self._replicas = source, queue, replicas
        self._known = known

    def first(self, limit: int | None) -> list[ChunkReport]:
        """Return what each chunk knows."""
        if limit is not None:
            queue, replicas = self._queue, self._replicas

            def judge(_: Queue, __: int, facts: QueueFacts, ___: bool) -> tuple[int, Any]:
                return CUT, cut_report(queue, facts, replicas, limit)

            found = self._source.of_queue(queue, replicas, judge)
            self._known = [msgspec.msgpack.decode(one, type=CutReport) for one in found]
        return [one.report for one in self._known]

    def again(self, asks: dict[int, Ask], limit: int | None) -> list[Answer]:
        """Let each chunk answer."""
        replicas = self._replicas

        def judge(_: Queue, __: int, facts: QueueFacts, ___: bool) -> tuple[int, Any]:
            return CUT, answer_of(facts, replicas, asks[facts.begin], limit)

        found = self._source.of_queue(self._queue, replicas, judge)
        return [msgspec.msgpack.decode(one, type=Answer) for one in found]

    def repeated(self, added: I64) -> I64:
        """Compare the counters of all chunks; group the values of all sends where they meet."""
        spares = spares_in([one.report.chunk for one in self._known])
        if not may_repeat([one.counters for one in self._known], spares.value[~spares.failed]):
            return np.zeros(0, dtype=np.int64)
        values = self._source.values(self._queue)
        if len(added):
            more = pa.table({"value": added, "off": pa.nulls(len(added), pa.int64())})
            values = values.unionByName(values.sparkSession.createDataFrame(more))
        places = (sf.min("off"), sf.max("off"), sf.count("*") - sf.count("off"))
        grouped = values.groupBy("value").agg(*places).toDF("value", "low", "high", "spares")
        more_than_one = "spares + if(low is null, 0, if(low = high, 1, 2)) > 1"
        found = grouped.where(more_than_one).orderBy("value").limit(SUSPECTS_MAX + 1)
        words: I64 = arrow_of("the sends of a queue", found.select("value")).column(0).to_numpy()
        return words


WORK_SCHEMA: Final = "number long, done binary"


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
        table = rows.mapInArrow(tasks, WORK_SCHEMA).toArrow()
        found = dict(
            zip(table.column("number").to_pylist(), table.column("done").to_pylist(), strict=True)
        )
        return [msgspec.msgpack.decode(found[number], type=Done) for number in range(len(works))]
