"""A history as four Arrow tables: operations, what they saw, events, nodes. Pure.

`ops` has one row per attempt; `obs` one per message that a pull or a final read of a replica found.
Integers and strings only, and `NOTHING` where a row has no value: columns reach numpy without a
copy. A pull whose messages have no rows in `obs` has their number in `cnt` and their `hash_range`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum, unique
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger.commitlog.errors import MQError
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Decision,
    Event,
    F,
    FloorMove,
    History,
    Level,
    Operation,
    Outcome,
    ReplicaRead,
    ReplicaState,
    RunHeader,
    Sample,
)

_WORD: Final = pa.dictionary(pa.int32(), pa.string())


def _schema(**columns: Any) -> Any:
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


OPS: Final = _schema(
    run_id=_WORD, op_id=pa.int64(), parent_op_id=pa.int64(), process=pa.int32(), node=pa.int16(),
    f=pa.int8(), outcome=pa.int8(), call_ns=pa.int64(), ret_ns=pa.int64(), topic=_WORD,
    queue=pa.int32(), off=pa.int64(), cnt=pa.int32(), max_off=pa.int64(), min_off=pa.int64(),
    value=pa.int64(), range_hash=pa.int64(), group=_WORD, token=pa.int64(), due_ns=pa.int64(),
    txn=pa.int64(), decision=pa.int8(), status=pa.int16(), err=_WORD, level=pa.int8(),
)  # fmt: skip
OBS: Final = _schema(
    run_id=_WORD, op_id=pa.int64(), replica=_WORD, topic=_WORD, queue=pa.int32(), off=pa.int64(),
    value=pa.int64(),
)  # fmt: skip
EVENTS: Final = _schema(
    run_id=_WORD, at_ns=pa.int64(), end_ns=pa.int64(), kind=_WORD, target=_WORD, node=_WORD,
    detail=pa.string(),
)  # fmt: skip
NODES: Final = _schema(
    run_id=_WORD, at_ns=pa.int64(), node=_WORD, kind=pa.int8(), role=_WORD, term=pa.int64(),
    applied_index=pa.int64(), commit_index=pa.int64(), last_index=pa.int64(), chain=pa.int64(),
    tables=pa.string(), topic=_WORD, queue=pa.int32(), min_off=pa.int64(), cnt=pa.int64(),
)  # fmt: skip

SCHEMAS: Final[dict[str, Any]] = {"ops": OPS, "obs": OBS, "events": EVENTS, "nodes": NODES}
"""By the name of the table."""

OP_FIELDS: Final = tuple(name for name in OPS.names if name != "run_id")


@unique
class NodeKind(IntEnum):
    """What a row of `nodes` is about."""

    STATE = 0
    """How far a replica was when the run was over, by checksum."""
    READ = 1
    """A queue was read from a replica: from `min_off` on, `cnt` messages, which are in `obs`."""
    SAMPLE = 2
    """What a broker reported of itself while the run went on."""
    FLOOR = 3
    """Retention let a log begin later, by the entry `applied_index`; of a queue with the first
    offset that is kept in `min_off`. `tables` has what else is known, as JSON."""


class RowOutOfRangeError(MQError):
    """A row holds what no history can: its sentence names the field."""


_RANGES: Final[dict[str, tuple[int, int]]] = {
    "f": (0, len(F) - 1),
    "outcome": (0, len(Outcome) - 1),
    "level": (0, len(Level) - 1),
    **{
        field.name: (-(1 << (field.type.bit_width - 1)), (1 << (field.type.bit_width - 1)) - 1)
        for field in OPS
        if pa.types.is_integer(field.type) and field.name not in ("f", "outcome", "level")
    },
    "decision": (NOTHING, max(Decision)),
    "cnt": (0, (1 << 31) - 1),
    "queue": (NOTHING, (1 << 31) - 1),
}


_OF_OFFSETS: Final = (F.SEND, F.PULL, F.MAX_OFFSET, F.MIN_OFFSET)
"""What the log of a queue is judged by: the offset behind it has a number, too."""


def check_operation(op: Operation) -> None:
    """See that *op* fits the columns and does not contradict itself.

    Raises RowOutOfRangeError: it does not.
    """
    for name, (low, high) in _RANGES.items():
        given = getattr(op, name)
        if not low <= given <= high:
            raise RowOutOfRangeError(f"{name} is {given}, beyond {low} … {high}")
    if op.ret_ns < op.call_ns:
        raise RowOutOfRangeError(f"it returned at {op.ret_ns}, before its call at {op.call_ns}")
    if op.f in _OF_OFFSETS and op.off > NEVER - max(op.cnt, 1):
        raise RowOutOfRangeError(f"its offset {op.off} is beyond all that a queue can have")
    if op.values and len(op.values) != op.cnt:
        raise RowOutOfRangeError(f"it found {len(op.values)} values and counts {op.cnt}")
    _check_words("values", op.values)


def mistake_in(columns: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return what is wrong with rows of `ops`, as `check_operation` has it; empty: nothing.

    *columns*: `f`, `outcome`, `level`, `decision`, `cnt`, `queue`, `off`, `call_ns` and `ret_ns` of
    the rows.
    """
    for name in ("f", "outcome", "level", "decision"):
        low, high = _RANGES[name]
        column = columns[name]
        if len(column) and not low <= column.min() <= column.max() <= high:
            number = column[(column < low) | (column > high)][0]
            return f"holds a row whose {name} is {number}, which this version does not know"
    for name in ("cnt", "queue"):
        few = columns[name] < _RANGES[name][0]
        if few.any():
            return f"holds {np.count_nonzero(few)} rows whose {name} is negative"
    early = columns["ret_ns"] < columns["call_ns"]
    if early.any():
        return f"holds {np.count_nonzero(early)} rows that return before their call"
    off = columns["off"]
    far = np.flatnonzero(off > NEVER - np.maximum(columns["cnt"].astype(np.int64), 1))
    far = far[np.isin(columns["f"][far], _OF_OFFSETS)]
    if len(far):
        return f"holds a row whose offset, {off[far[0]]}, is beyond all that a queue can have"
    return ""


def check_replica_read(read: ReplicaRead) -> None:
    """See that *read* fits the columns. Raises RowOutOfRangeError: it does not."""
    if not -(1 << 31) <= read.queue < 1 << 31:
        raise RowOutOfRangeError(f"queue is {read.queue}")
    _check_words("min_off", (read.min_off, read.at_ns))
    _check_words("values", read.values)


def check_numbers(row: Event | ReplicaState | FloorMove) -> None:
    """See that the numbers of *row* fit the columns; a chain has 64 bits without a sign.

    Raises RowOutOfRangeError: they do not.
    """
    if isinstance(row, Event):
        _check_words("at_ns", (row.at_ns, row.end_ns))
    elif isinstance(row, FloorMove):
        if not -(1 << 31) <= row.queue < 1 << 31:
            raise RowOutOfRangeError(f"queue is {row.queue}")
        _check_words("at_ns", (row.at_ns, row.index, row.min_off))
        _check_words("position", (getattr(row, name) for name in _FloorRest.__struct_fields__[1:]))
    else:
        _check_words("at_ns", (row.at_ns, row.applied_index))
        if not 0 <= row.chain < 1 << 64:
            raise RowOutOfRangeError(f"chain is {row.chain}, no 64 bits")


class _FloorRest(msgspec.Struct, forbid_unknown_fields=True):
    """What `NODES` has no columns for."""

    cause: str
    position: int
    end_position: int
    newest_ms: int
    stored_ms: int
    keep_bytes: int
    keep_ms: int


def _check_words(name: str, words: Iterable[int]) -> None:
    for word in words:
        if not -NEVER <= word <= NEVER:
            raise RowOutOfRangeError(f"{name} holds {word}, beyond 64 bits")


def table_of(schema: Any, columns: dict[str, Any]) -> Any:
    """Return a table of *schema* from lists or arrays; words may be given as one string."""
    size = max((len(c) for c in columns.values() if not isinstance(c, str)), default=0)
    arrays = [
        _words(columns.get(field.name, ()), size)
        if field.type == _WORD
        else pa.array(columns.get(field.name, ()), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _words(given: str | Sequence[str], size: int) -> Any:
    if isinstance(given, str):
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(size, np.int32)), pa.array([given]))
    if isinstance(given, pa.DictionaryArray):
        return given
    return pa.array(given, pa.string()).dictionary_encode()


def ops_table(run_id: str, operations: Sequence[Operation]) -> Any:
    """Return `ops`, in the order of the rows."""
    columns = zip(*map(msgspec.structs.astuple, operations), strict=True)
    by_name: dict[str, Any] = dict(zip(Operation.__struct_fields__, columns, strict=False))
    by_name.pop("values", None)
    return table_of(OPS, {**by_name, "run_id": run_id})


def obs_table(run_id: str, operations: Iterable[Operation], reads: Iterable[ReplicaRead]) -> Any:
    """Return `obs`: what pulls found that had an answer, then what the final reads found."""
    columns: dict[str, list[Any]] = {name: [] for name in OBS.names if name != "run_id"}
    rows: list[tuple[int, str, str, int, int, tuple[int, ...]]] = [
        (op.op_id, "", op.topic, op.queue, op.off, op.values)
        for op in operations
        if op.values and op.outcome == Outcome.OK
    ]
    rows += [(NOTHING, r.node, r.topic, r.queue, r.min_off, r.values) for r in reads]
    for op_id, replica, topic, queue, off, values in rows:
        count = len(values)
        columns["op_id"] += [op_id] * count
        columns["replica"] += [replica] * count
        columns["topic"] += [topic] * count
        columns["queue"] += [queue] * count
        columns["off"] += range(off, off + count)
        columns["value"] += values
    return table_of(OBS, {"run_id": run_id, **columns})


def events_table(run_id: str, events: Sequence[Event]) -> Any:
    """Return `events`, in the order of the rows."""
    return _table_of_rows(EVENTS, run_id, list(map(msgspec.structs.asdict, events)))


def _table_of_rows(schema: Any, run_id: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    names = (name for name in schema.names if name != "run_id")
    return table_of(schema, {"run_id": run_id, **{n: [row[n] for row in rows] for n in names}})


_NODE_BLANK: Final[dict[str, Any]] = {
    "role": "", "term": NOTHING, "applied_index": NOTHING, "commit_index": NOTHING,
    "last_index": NOTHING, "chain": 0, "tables": "", "topic": "", "queue": NOTHING,
    "min_off": NOTHING, "cnt": NOTHING,
}  # fmt: skip


def nodes_table(
    run_id: str,
    states: Iterable[ReplicaState],
    reads: Iterable[ReplicaRead],
    samples: Iterable[Sample] = (),
    floors: Iterable[FloorMove] = (),
) -> Any:
    """Return `nodes`: states, final reads, samples (names of fields → what a broker reported),
    floors.
    """
    rows: list[dict[str, Any]] = [
        {
            **msgspec.structs.asdict(state),
            "kind": NodeKind.STATE,
            "chain": state.chain - (1 << 64) if state.chain >> 63 else state.chain,
        }
        for state in states
    ]
    rows += [
        {**msgspec.structs.asdict(read), "kind": NodeKind.READ, "cnt": len(read.values)}
        for read in reads
    ]
    rows += [{**msgspec.structs.asdict(sample), "kind": NodeKind.SAMPLE} for sample in samples]
    for move in floors:
        fields = msgspec.structs.asdict(move)
        rest = {name: fields[name] for name in _FloorRest.__struct_fields__}
        rows.append(
            {
                **fields,
                "kind": NodeKind.FLOOR,
                "applied_index": move.index,
                "tables": msgspec.json.encode(rest).decode(),
            }
        )
    rows = [{**_NODE_BLANK, **row} for row in rows]
    return _table_of_rows(NODES, run_id, rows)


def chosen(rows: Any, which: npt.NDArray[Any]) -> Any:
    """Return rows of a table, by flags or by their numbers."""
    return rows.filter(pa.array(which)) if which.dtype == np.bool_ else rows.take(pa.array(which))


def has_word(column: Any, words: Iterable[str]) -> npt.NDArray[np.bool_]:
    """Return which rows of a column hold one of *words*."""
    column, wanted = column.combine_chunks(), frozenset(words)
    met = [word in wanted for word in column.dictionary.to_pylist()]
    found: npt.NDArray[np.bool_] = np.array([*met, False], np.bool_)[column.indices.to_numpy()]
    return found


def slots_of(rows: Any) -> npt.NDArray[np.int64]:
    """Return a number for each group, topic and queue of rows."""
    slots: npt.NDArray[np.int64] = rows.column("queue").to_numpy().astype(np.int64)
    for name in ("group", "topic"):
        codes = rows.column(name).combine_chunks().indices.to_numpy().astype(np.int64)
        _, slots = np.unique(slots, return_inverse=True)
        slots = slots * (int(codes.max(initial=0)) + 1) + codes
    return slots


def operations_of(ops: Any, obs: Any) -> list[Operation]:
    """Return the rows of `ops`, with what they found by `obs`, in the order of op ids."""
    if not ops.num_rows:
        return []
    columns = [ops.column(name).to_pylist() for name in OP_FIELDS]
    found: dict[int, Operation] = {}
    for given in zip(*columns, strict=True):
        op = Operation(**dict(zip(OP_FIELDS, given, strict=True)))
        found[op.op_id] = op
    if not obs.num_rows:
        return [found[op_id] for op_id in sorted(found)]
    ids, offs, values = (obs.column(name).to_numpy() for name in ("op_id", "off", "value"))
    pulled = np.flatnonzero(ids != NOTHING)
    pulled = pulled[np.lexsort((offs[pulled], ids[pulled]))]
    groups = np.split(pulled, np.flatnonzero(np.diff(ids[pulled])) + 1) if len(pulled) else []
    for group in groups:
        op_id = int(ids[group[0]])
        if op_id in found:
            found[op_id].values = tuple(values[group].tolist())
    return [found[op_id] for op_id in sorted(found)]


def history_of(
    ops: Any, obs: Any, events: Any, nodes: Any, header: RunHeader | None = None
) -> History:
    """Return the rows that the tables were made of."""
    history = History(header or RunHeader(run_id=""), operations_of(ops, obs))
    history.events = events_of(events)
    history.replica_states = states_of(nodes)
    history.replica_reads = replica_reads_of(nodes, obs)
    history.floors = floors_of(nodes)
    return history


def events_of(events: Any) -> list[Event]:
    """Return the rows of `events`."""
    names = [name for name in EVENTS.names if name != "run_id"]
    return [Event(*(row[name] for name in names)) for row in events.to_pylist()]


def states_of(nodes: Any) -> list[ReplicaState]:
    """Return how far replicas were when the run was over."""
    return [
        ReplicaState(
            row["at_ns"], row["node"], row["applied_index"], row["chain"] % (1 << 64), row["tables"]
        )
        for row in chosen(nodes, nodes.column("kind").to_numpy() == NodeKind.STATE).to_pylist()
    ]


def floors_of(nodes: Any) -> list[FloorMove]:
    """Return how logs and queues came to begin later.

    Raises msgspec.MsgspecError: a row holds other fields.
    """
    rows = chosen(nodes, nodes.column("kind").to_numpy() == NodeKind.FLOOR).to_pylist()
    return [
        FloorMove(
            index=row["applied_index"],
            **{name: row[name] for name in ("at_ns", "node", "topic", "queue", "min_off")},
            **msgspec.structs.asdict(msgspec.json.decode(row["tables"], type=_FloorRest)),
        )
        for row in rows
    ]


def replica_reads_of(nodes: Any, obs: Any) -> list[ReplicaRead]:
    """Return the final reads: their heads from `nodes`, their messages from `obs`."""
    ids = obs.column("op_id").to_numpy()
    rows = chosen(obs, ids == NOTHING)
    held: dict[tuple[str, str, int], list[tuple[int, int]]] = {}
    columns = (rows.column(n).to_pylist() for n in ("replica", "topic", "queue", "off", "value"))
    for replica, topic, queue, off, value in zip(*columns, strict=True):
        held.setdefault((replica, topic, queue), []).append((off, value))
    reads: list[ReplicaRead] = []
    for row in nodes.to_pylist():
        if row["kind"] == NodeKind.READ:
            key = (row["node"], row["topic"], row["queue"])
            values = tuple(value for _, value in sorted(held.get(key, ())))
            reads.append(ReplicaRead(row["at_ns"], *key, row["min_off"], values))
    return reads


_U64 = npt.NDArray[np.uint64]


def mix(off: npt.NDArray[np.int64], value: npt.NDArray[np.int64]) -> _U64:
    """Return a word for each (offset, value) that is as good as a random one."""
    word = off.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    word ^= value.view(np.uint64)
    word ^= word >> np.uint64(32)
    word *= np.uint64(0xD6E8FEB86659FD93)
    word ^= word >> np.uint64(32)
    word *= np.uint64(0xD6E8FEB86659FD93)
    word ^= word >> np.uint64(32)
    return word


def hash_range(off: int, values: Sequence[int]) -> int:
    """Return the hash of *values* from *off* on: the sum of their mixed words, modulo 2⁶⁴."""
    offs = np.arange(off, off + len(values), dtype=np.int64)
    total = np.add.reduce(mix(offs, np.asarray(values, dtype=np.int64)), dtype=np.uint64)
    return int(np.uint64(total).view(np.int64))
