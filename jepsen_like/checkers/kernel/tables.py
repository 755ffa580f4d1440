"""The edge of the kernel: rows in memory become columns, and batches of columns become facts.

An engine gives batches of both tables to `Gathered`; `MemorySource` is the engine of a history that
is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger.jepsen_like.checkers.kernel.cut import report_of
from dledger.jepsen_like.checkers.kernel.facts import (
    OBS_COLUMNS,
    OPS_COLUMNS,
    QUEUE_OPERATIONS,
    Columns,
    Flags,
    QueueFacts,
    Spares,
    distinct,
)
from dledger.jepsen_like.checkers.kernel.source import (
    Queue,
    QueueReport,
    Replicas,
    TooManyRowsError,
    Want,
)
from dledger.jepsen_like.history.columns import (
    OBS,
    OPS,
    chosen,
    events_table,
    nodes_table,
    obs_table,
    ops_table,
)
from dledger.jepsen_like.history.operation import History, Operation
from dledger.jepsen_like.history.sums import Rows

_LOW: Final = 0xFFFFFFFF
Each = Callable[[Callable[[Queue], QueueReport], Iterable[Queue]], Iterable[QueueReport]]
"""What `map` does; an engine may do it in several threads."""


class Batch(Rows):
    """Rows of a table; *same*: columns of one value, not decoded."""

    def __init__(self, batch: Any, same: Mapping[str, int | str], schema: Any) -> None:
        super().__init__(batch)
        self.same, self._schema = same, schema

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """Return a column; without a copy where it was decoded, without memory where it was not."""
        if name in self.same:
            kind = self._schema.field(name).type.to_pandas_dtype()
            return np.broadcast_to(np.asarray(self.same[name], dtype=kind), self.num_rows)
        return super().numbers(name)

    def words(self, name: str) -> tuple[list[str], npt.NDArray[Any]]:
        """Return the different words of a column, and for each row which one it has."""
        if name in self.same:
            return [str(self.same[name])], np.broadcast_to(np.int32(0), self.num_rows)
        return super().words(name)

    def meets(self, want: Want) -> Flags:
        """Return which rows are wanted."""
        met = np.zeros(self.num_rows, dtype=np.bool_)
        of_queue = None if want.queue is None else self._is_of(want.queue)
        if of_queue is not None and not of_queue.any():
            return met
        for name, values in want.among:
            if values and isinstance(values[0], str):
                met |= self._is_word(name, *map(str, values))
                continue
            numbers = self.numbers(name)
            met |= numbers == values[0] if len(values) == 1 else np.isin(numbers, values)
        for name, value in want.other_than:
            if isinstance(value, str) and value in self._schema.names:
                met |= self.numbers(name) != self.numbers(value)
            elif name in self.same:
                met |= self.same[name] != value
            elif isinstance(value, str):
                met |= ~self._is_word(name, value)
            else:
                met |= self.numbers(name) != value
        return met if of_queue is None else met & of_queue

    def _is_of(self, queue: Queue) -> Flags:
        its: Flags = self._is_word("topic", queue[0]) & (self.numbers("queue") == queue[1])
        return its

    def _is_word(self, name: str, *wanted: str) -> Flags:
        words, codes = self.words(name)
        is_it: Flags = np.array([*(one in wanted for one in words), False], np.bool_)[codes]
        return is_it

    def rows(self, rows: npt.NDArray[np.int64]) -> Any:
        """Return some rows with all columns of the schema."""
        taken = self._batch.take(pa.array(rows))
        columns = [
            self._repeated(field, len(rows))
            if field.name in self.same
            else taken.column(field.name)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _repeated(self, field: Any, count: int) -> Any:
        value = self.same[field.name]
        if pa.types.is_dictionary(field.type):
            codes = pa.array(np.zeros(count, dtype=np.int32))
            return pa.DictionaryArray.from_arrays(codes, pa.array([value]))
        return pa.array(np.full(count, value), field.type)

    def by_queue(
        self, names: tuple[str, ...], replicas: Replicas | None = None
    ) -> Iterator[tuple[Queue, Columns]]:
        """Yield the rows of each queue as numpy; replicas as their numbers."""
        if not self.num_rows:
            return
        words, codes = self.words("topic")
        queues = self.numbers("queue")
        columns = {
            name: _numbers(*self.words(name), replicas) if name == "replica" else self.numbers(name)
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
    numbers = np.array([known.get(word, -1) for word in words], dtype=np.int64)
    return numbers[codes] if len(numbers) else np.zeros(len(codes), dtype=np.int64)


class Gathered:
    """Facts of every queue that clients used, from batches in any order."""

    def __init__(self) -> None:
        self._facts: dict[Queue, QueueFacts] = {}

    def add_ops(self, batch: Batch) -> None:
        """Add rows of `ops`; a queue that no operation on queues names has no facts."""
        for queue, columns in batch.by_queue(OPS_COLUMNS):
            if not queue[0] or queue[1] < 0:
                continue
            if queue in self._facts or (columns["f"] <= max(QUEUE_OPERATIONS)).any():
                self._facts.setdefault(queue, QueueFacts()).add_ops(columns)

    def add_obs(self, batch: Batch, replicas: Replicas) -> None:
        """Add rows of `obs`."""
        for queue, columns in batch.by_queue(OBS_COLUMNS, replicas):
            if queue[1] >= 0:
                self._facts.setdefault(queue, QueueFacts()).add_obs(columns)

    def reports(
        self, appends: Mapping[Queue, tuple[Operation, ...]], replicas: Replicas, each: Each = map
    ) -> list[QueueReport]:
        """Judge every queue; *each* calls the judgement of each. The facts are used up."""
        facts = self._facts
        for queue, added in appends.items():
            facts.setdefault(queue, QueueFacts()).add_spares(spares_of(added))
        return list(each(lambda queue: report_of(queue, facts.pop(queue), replicas), sorted(facts)))


class MemorySource:
    """The rows of a history as a `Source`.

    Raises:
        OverflowError, ValueError, TypeError: The columns do not hold one of its rows.
    """

    def __init__(self, history: History) -> None:
        run_id, reads = history.header.run_id, history.replica_reads
        operations = [_counted(op) for op in history.operations]
        self._events = events_table(run_id, history.events)
        self._nodes = nodes_table(run_id, history.replica_states, reads, floors=history.floors)
        self._ops = ops_table(run_id, operations)
        self._obs = obs_table(run_id, operations, reads)
        for table in (self._events, self._nodes, self._ops, self._obs):
            if any(column.null_count for column in table.columns):
                raise TypeError("a history holds numbers of 64 bits and words, and nothing else")
        self._by_ops = [Batch(batch, {}, OPS) for batch in self._ops.to_batches()]
        self._by_obs = [Batch(batch, {}, OBS) for batch in self._obs.to_batches()]

    def prepare(
        self, ops: tuple[Want, ...], obs: tuple[Want, ...] = (), replicas: Replicas | None = None
    ) -> None:
        """Do nothing: all rows are in memory."""

    def nodes(self) -> Any:
        """Return the table `nodes`."""
        return self._nodes

    def events(self) -> Any:
        """Return the table `events`."""
        return self._events

    def ops(self, want: Want, rows_max: int) -> Any:
        """Return rows of `ops`."""
        return _wanted(self._ops, self._by_ops, want, rows_max)

    def obs(self, want: Want, rows_max: int) -> Any:
        """Return rows of `obs`."""
        return _wanted(self._obs, self._by_obs, want, rows_max)

    def queues(
        self, appends: Mapping[Queue, tuple[Operation, ...]], replicas: Replicas
    ) -> list[QueueReport]:
        """Judge every queue, one after the other."""
        gathered = Gathered()
        for batch in self._by_ops:
            gathered.add_ops(batch)
        for batch in self._by_obs:
            gathered.add_obs(batch, replicas)
        return gathered.reports(appends, replicas)


def _counted(op: Operation) -> Operation:
    """Return *op* with the number of its values: tables count on it, rows in memory may not."""
    if not op.values or op.cnt == len(op.values):
        return op
    return msgspec.structs.replace(op, cnt=len(op.values))


def _wanted(table: Any, batches: Sequence[Batch], want: Want, rows_max: int) -> Any:
    if not batches or not (want.among or want.other_than):
        return table.schema.empty_table()
    met = np.concatenate([batch.meets(want) for batch in batches])
    count = np.count_nonzero(met)
    if count > rows_max:
        raise TooManyRowsError(rows_max)
    return chosen(table, met) if count else table.schema.empty_table()


def table_to_numpy(table: Any, names: Sequence[str]) -> Columns:
    """Return columns of a table."""
    columns = {name: table.column(name) for name in names}
    return {
        name: codes_of(column) if name == "replica" else column.to_numpy()
        for name, column in columns.items()
    }


def codes_of(words: Any) -> npt.NDArray[np.int64]:
    """Return a number for each word of a column: its place among the different ones, sorted."""
    every = np.array(words.to_pylist(), dtype=object)
    return np.unique(every, return_inverse=True)[1].astype(np.int64)


def gather(
    ops: Iterable[Columns], obs: Iterable[Columns], appends: Sequence[Operation] = ()
) -> QueueFacts:
    """Return the facts of one queue, of its rows in any order and cut anywhere.

    *appends*: what transactions appended to it, see `transactions`.
    """
    facts = QueueFacts()
    for batch in ops:
        facts.add_ops(batch)
    for batch in obs:
        facts.add_obs(batch)
    if appends:
        facts.add_spares(spares_of(appends))
    return facts


def spares_of(appends: Sequence[Operation]) -> Spares:
    """Return what transactions appended as sends without an offset."""
    rows = [(op.op_id, op.call_ns, op.ret_ns, op.value, op.outcome) for op in appends]
    numbers = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return Spares(*(numbers[:, at] for at in range(5)))
