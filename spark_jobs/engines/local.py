"""The engine without a JVM: pyarrow reads, numpy judges, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import or_
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger.jepsen_like.checkers.kernel.source import (
    Queue,
    QueueReport,
    Replicas,
    TooManyRowsError,
    Want,
)
from dledger.jepsen_like.checkers.kernel.tables import Batch, Gathered
from dledger.jepsen_like.history.columns import OBS, OPS
from dledger.jepsen_like.history.operation import Operation
from dledger.jepsen_like.history.parquet import read_summary
from dledger.jepsen_like.history.sums import added, sum_rows
from dledger.spark_jobs.tables import CHECKED, SCAN, Tables, batches, check_rows, check_sum

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
    "fragment_scan_options": SCAN,
}
WORD_MAX: Final = 48
"""Characters of a word whose statistics are believed: some writers cut longer ones."""


class LocalSource:
    """The tables in a folder.

    Args:
        on_rows: Called with the number of rows of `ops` that are judged.
        sums: Of the tables at an address, as `Ingested` has them; of a folder they are its own.

    Raises:
        NoHistoryError: It is not whole.
    """

    def __init__(
        self,
        parquet: Path | Tables,
        on_rows: Callable[[int], object] = lambda _: None,
        sums: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if isinstance(parquet, Path):
            sums = read_summary(parquet).sums
            parquet = Tables(parquet)
        self._tables, self._sums = parquet, sums
        self._ops, self._obs = parquet.dataset("ops"), parquet.dataset("obs")
        self._on_rows = on_rows
        self._wants: tuple[Want, ...] = ()
        self._met: dict[Want, list[Any]] | None = None
        self._gathered: Gathered | None = None

    def prepare(
        self,
        ops: tuple[Want, ...],
        obs: tuple[Want, ...] = (),
        replicas: Replicas | None = None,
    ) -> None:
        """Collect these rows in the one scan of `ops`, if it is to come."""
        if self._met is None:
            self._wants = ops

    def nodes(self) -> Any:
        """Return the table `nodes`."""
        return self._tables.nodes()

    def events(self) -> Any:
        """Return the table `events`."""
        return self._tables.events()

    def ops(self, want: Want, rows_max: int) -> Any:
        """Return rows of `ops`."""
        if want not in self._wants:
            return _rows(self._tables.name("ops"), self._ops, want, rows_max)
        if self._met is None:
            self._scan()
        met = (self._met or {})[want]
        if sum(batch.num_rows for batch in met) > rows_max:
            raise TooManyRowsError(rows_max)
        return pa.Table.from_batches(met, OPS).unify_dictionaries()

    def obs(self, want: Want, rows_max: int) -> Any:
        """Return rows of `obs`."""
        return _rows(self._tables.name("obs"), self._obs, want, rows_max)

    def queues(
        self, appends: Mapping[Queue, tuple[Operation, ...]], replicas: Replicas
    ) -> list[QueueReport]:
        """Judge every queue; all facts of all queues are in memory until then.

        Raises BadInputError: a table cannot be read, or has other rows than it was written with.
        """
        gathered = self._scan()
        self._gathered = None  # its facts are used up
        same = constants(self._obs)
        names = [name for name in OBS.names if name not in same]
        total = 0
        name = self._tables.name("obs")
        for read in batches(name, self._obs.to_batches(columns=names, **_SCAN)):
            batch = Batch(read, same, OBS)
            total += sum_rows("obs", batch)
            gathered.add_obs(batch, replicas)
        check_sum(name, added((total,)), self._sums.get("obs"))
        with ThreadPoolExecutor(JUDGES) as pool:
            return gathered.reports(appends, replicas, pool.map)

    def _scan(self) -> Gathered:
        """Read `ops` once: facts of queues, and rows that were announced."""
        if self._gathered is not None:
            return self._gathered
        every: dict[Want, list[Any]] = {want: [] for want in self._wants}
        self._gathered, self._met = Gathered(), every
        done = total = 0
        same = constants(self._ops)
        names = [name for name in OPS.names if name not in same]
        name = self._tables.name("ops")
        for read in batches(name, self._ops.to_batches(columns=names, **_SCAN)):
            batch = Batch(read, same, OPS)
            check_rows(name, {column: batch.numbers(column) for column in CHECKED})
            for want, met in every.items():
                rows = np.flatnonzero(batch.meets(want))
                if len(rows):
                    met.append(batch.rows(rows))
            self._gathered.add_ops(batch)
            total += sum_rows("ops", batch)
            done += batch.num_rows
            self._on_rows(done)
        check_sum(name, added((total,)), self._sums.get("ops"))
        return self._gathered


def constants(dataset: Any) -> dict[str, int | str]:
    """Return columns that have one value in all files, by the statistics of the files."""
    same: dict[str, int | str] | None = None
    for fragment in dataset.get_fragments():
        metadata = fragment.metadata
        for group in range(metadata.num_row_groups):
            here = of_group(metadata.row_group(group))
            if same is None:
                same = here
            else:
                same = {name: value for name, value in same.items() if here.get(name) == value}
    same = same or {}
    # An engine counts the rows of a batch: something is left to read.
    return {name: value for name, value in same.items() if name != "op_id"}


def of_group(group: Any) -> dict[str, int | str]:
    """Return columns that have one value in a row group, by its statistics."""
    found: dict[str, int | str] = {}
    for at in range(group.num_columns):
        column = group.column(at)
        statistics = column.statistics
        if (
            statistics is None
            or not statistics.has_min_max
            or statistics.null_count
            or statistics.min != statistics.max
        ):
            continue
        value = statistics.min
        if isinstance(value, int) or (isinstance(value, str) and len(value) <= WORD_MAX):
            found[column.path_in_schema] = value
    return found


def condition(want: Want, schema: Any) -> Any:
    """Return a want as a condition of pyarrow's; None: it wants nothing."""
    terms = [_is_among(column, values, schema) for column, values in want.among if values]
    for column, value in want.other_than:
        other = pc.field(value) if isinstance(value, str) and value in OPS.names else value
        terms.append(pc.field(column) != other)
    if not terms:
        return None
    wanted = reduce(or_, terms)
    if want.queue is not None:
        topic, queue = want.queue
        wanted = (pc.field("topic") == topic) & (pc.field("queue") == queue) & wanted
    return wanted


def _is_among(column: str, values: tuple[int, ...] | tuple[str, ...], schema: Any) -> Any:
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        return reduce(or_, (pc.field(column) == word for word in values))
    return pc.field(column).isin(pa.array(values, kind))


def _rows(name: str, table: Any, want: Want, rows_max: int) -> Any:
    wanted = condition(want, table.schema)
    if wanted is None:
        return table.schema.empty_table()
    met = []
    rows = 0
    found = table.to_batches(filter=wanted, batch_size=BATCH_ROWS, batch_readahead=READ_AHEAD)
    for batch in batches(name, found):
        rows += batch.num_rows
        if rows > rows_max:
            raise TooManyRowsError(rows_max)
        met.append(batch)
    return pa.Table.from_batches(met, table.schema).unify_dictionaries()
