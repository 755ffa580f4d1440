"""The engine without a JVM: pyarrow reads, numpy judges, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from jepsen_like.history.columns import OBS, OPS
from jepsen_like.history.operation import Operation
from jepsen_like.history.parquet import read_summary
from spark_jobs.checks.queue_facts import (
    OBS_COLUMNS,
    OPS_COLUMNS,
    QUEUE_OPERATIONS,
    Columns,
    Flags,
    QueueFacts,
    distinct,
)
from spark_jobs.checks.queue_log import spares_of
from spark_jobs.checks.queue_task import report_of
from spark_jobs.checks.source import Queue, QueueReport, Replicas, TooManyRowsError, Want
from spark_jobs.engines.batches import Batch, constants

BATCH_ROWS: Final = 1 << 17
"""Rows decoded at once: the memory of one batch is used again for the next but two."""
JUDGES: Final = 2
"""Queues judged at once: numpy lets others run meanwhile, and each has some memory of its own."""
READ_AHEAD: Final = 2
"""Batches decoded ahead."""
_SCAN: Final[dict[str, Any]] = {
    "batch_size": BATCH_ROWS,
    "batch_readahead": READ_AHEAD,
    "fragment_readahead": 1,
    # A row group that is fetched whole takes new memory for each; files are on this machine.
    "fragment_scan_options": ds.ParquetFragmentScanOptions(pre_buffer=False),
}
_LOW: Final = 0xFFFFFFFF


class LocalSource:
    """The tables in a folder.

    Args:
        parquet: The folder.
        on_rows: Told how many rows of `ops` are judged.

    Raises:
        NoHistoryError: It is not whole.
    """

    def __init__(self, parquet: Path, on_rows: Callable[[int], object] = lambda _: None) -> None:
        read_summary(parquet)
        self._parquet = parquet
        self._ops = ds.dataset(parquet / "ops.parquet", schema=OPS)
        self._obs = ds.dataset(parquet / "obs.parquet", schema=OBS)
        self._on_rows = on_rows
        self._wants: tuple[Want, ...] = ()
        self._met: dict[Want, list[Any]] = {}
        self._facts: dict[Queue, QueueFacts] | None = None

    def prepare(self, wants: tuple[Want, ...]) -> None:
        """Collect these rows in the one scan of `ops`."""
        self._wants = wants

    def nodes(self) -> Any:
        """Return the table `nodes`."""
        return pq.read_table(self._parquet / "nodes.parquet")

    def ops(self, want: Want, rows_max: int) -> Any:
        """Return rows of `ops`."""
        if want not in self._wants:
            return _rows(self._ops, want, rows_max)
        self._scan()
        met = self._met[want]
        if sum(batch.num_rows for batch in met) > rows_max:
            raise TooManyRowsError(rows_max)
        return pa.Table.from_batches(met, OPS).unify_dictionaries()

    def obs(self, want: Want, rows_max: int) -> Any:
        """Return rows of `obs`."""
        return _rows(self._obs, want, rows_max)

    def queues(
        self, appends: Mapping[Queue, tuple[Operation, ...]], replicas: Replicas
    ) -> list[QueueReport]:
        """Judge every queue; all facts of all queues are in memory until then."""
        every = self._scan()
        self._facts = None  # they are used up
        same = constants(self._obs)
        names = [name for name in ("topic", "queue", *OBS_COLUMNS) if name not in same]
        for batch in self._obs.to_batches(columns=names, **_SCAN):
            for queue, rows in split(Batch(batch, same, OBS), OBS_COLUMNS, replicas):
                if queue[1] >= 0:
                    every.setdefault(queue, QueueFacts()).add_obs(rows)
        for queue, added in appends.items():
            every.setdefault(queue, QueueFacts()).add_spares(spares_of(added))
        with ThreadPoolExecutor(JUDGES) as pool:
            reports = pool.map(
                lambda queue: report_of(queue, every.pop(queue), replicas), sorted(every)
            )
            return list(reports)

    def _scan(self) -> dict[Queue, QueueFacts]:
        """Read `ops` once: facts of queues, and rows that were announced."""
        if self._facts is not None:
            return self._facts
        self._facts, self._met = {}, {want: [] for want in self._wants}
        done = 0
        same = constants(self._ops)
        names = [name for name in OPS.names if name not in same]
        for batch in self._ops.to_batches(columns=names, **_SCAN):
            table = Batch(batch, same, OPS)
            for want, met in self._met.items():
                rows = np.flatnonzero(_meets(table, want))
                if len(rows):
                    met.append(table.rows(rows))
            for queue, columns in split(table, OPS_COLUMNS):
                if queue[0] and queue[1] >= 0:
                    self._add(queue, columns)
            done += batch.num_rows
            self._on_rows(done)
        return self._facts

    def _add(self, queue: Queue, columns: Columns) -> None:
        assert self._facts is not None
        if queue in self._facts or (columns["f"] <= max(QUEUE_OPERATIONS)).any():
            self._facts.setdefault(queue, QueueFacts()).add_ops(columns)


def _meets(batch: Batch, want: Want) -> Flags:
    """Return which rows of a batch are wanted."""
    met = np.zeros(batch.num_rows, dtype=np.bool_)
    for name, values in want.among:
        met |= np.isin(batch.numbers(name), values)
    for name, value in want.other_than:
        if isinstance(value, str) and value in OPS.names:
            met |= batch.numbers(name) != batch.numbers(value)
        elif name in batch.same:
            met |= batch.same[name] != value
        elif isinstance(value, str):
            words, codes = batch.words(name)
            met |= np.array([word != value for word in words], np.bool_)[codes]
        else:
            met |= batch.numbers(name) != value
    return met


def split(
    batch: Batch, names: tuple[str, ...], replicas: Replicas | None = None
) -> Iterator[tuple[Queue, Columns]]:
    """Yield the rows of each queue of a batch, as numpy."""
    if not batch.num_rows:
        return
    words, codes = batch.words("topic")
    queues = batch.numbers("queue")
    columns = {
        name: _numbers(*batch.words(name), replicas) if name == "replica" else batch.numbers(name)
        for name in names
    }
    if codes[0] == codes.min() == codes.max() and queues[0] == queues.min() == queues.max():
        yield (words[int(codes[0])], int(queues[0])), columns
        return
    keys = codes.astype(np.int64) << 32 | (queues.astype(np.int64) & _LOW)
    for key in distinct(keys):
        rows = np.flatnonzero(keys == key)
        queue = (words[key >> 32], int(queues[rows[0]]))
        yield queue, {name: column[rows] for name, column in columns.items()}


def _numbers(words: list[str], codes: Any, replicas: Replicas | None) -> Any:
    """Return each replica as its number."""
    names = () if replicas is None else replicas.names
    known = {name: number for number, name in enumerate(names)}
    told = np.array([known.get(word, -1) for word in words], dtype=np.int64)
    return told[codes] if len(told) else np.zeros(len(codes), dtype=np.int64)


def _rows(table: Any, want: Want, rows_max: int) -> Any:
    terms = [
        pc.field(name).isin(pa.array(values, table.schema.field(name).type))
        for name, values in want.among
        if values
    ]
    for name, value in want.other_than:
        other = pc.field(value) if isinstance(value, str) and value in OPS.names else value
        terms.append(pc.field(name) != other)
    if not terms:
        return table.schema.empty_table()
    wanted = reduce(or_, terms)
    if want.queue is not None:
        topic, queue = want.queue
        wanted = (pc.field("topic") == topic) & (pc.field("queue") == queue) & wanted
    batches = []
    rows = 0
    for batch in table.to_batches(filter=wanted, batch_size=BATCH_ROWS, batch_readahead=READ_AHEAD):
        rows += batch.num_rows
        if rows > rows_max:
            raise TooManyRowsError(rows_max)
        batches.append(batch)
    return pa.Table.from_batches(batches, table.schema).unify_dictionaries()
