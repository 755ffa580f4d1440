"""A history of any length, written queue by queue and block by block: memory does not grow.

Anomalies are planted in a block: the smallest change that shows one of the names of the checkers.
A planter returns the operations that a checker has to name. One that edits the end of a queue is
given its last block; any other may be given one from the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dledger.commitlog.errors import ConfigError
from dledger.jepsen_like.checkers import consumer_offsets, queue_log, total_queue
from dledger.jepsen_like.history.columns import (
    NODES,
    OBS,
    OPS,
    events_table,
    nodes_table,
    table_of,
)
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Outcome, ReplicaRead
from dledger.jepsen_like.history.parquet import (
    COMPRESSION,
    FOLDER,
    SUMMARY,
    Ingested,
    write_summary,
)
from dledger.spark_jobs.generate.queue_stream import I64, STEP_NS, Block, QueueStream

_TRIES: Final = 4_096
"""Places tried before it is reported that there is none."""
_WINDOW_NS: Final = 200_000
"""Time looked at around a place, beside what overlaps it."""


class CannotPlantError(ConfigError):
    """The history is too short for this anomaly, or the name is none."""


class Planter(NamedTuple):
    """How one kind is planted.

    Attributes:
        checker: The one that has to report it.
        act: Changes a block and returns the op ids of the witnesses; empty: a replica's own rows.
        at_end: It needs the last block of the queue.
    """

    checker: str
    act: Callable[[Block, np.random.Generator], tuple[int, ...]]
    at_end: bool = False


def _pick(rng: np.random.Generator, places: I64, what: str) -> int:
    if not len(places):
        raise CannotPlantError(f"a block holds no {what}: generate more --ops for each queue")
    return int(places[rng.integers(len(places))])


class _Proof(NamedTuple):
    at_ns: int
    op_id: int
    is_send: bool


def _first_present(block: Block, off: int, near: slice, *besides: int) -> _Proof:
    """Return the earliest proof among some rows that the queue had reached *off*."""
    f, outcome, at, count, max_off, ret_ns, op_id = (
        block.ops[name][near]
        for name in ("f", "outcome", "off", "cnt", "max_off", "ret_ns", "op_id")
    )
    ends = np.where(f == F.SEND, at + 1, max_off)
    ends = np.where(count > 0, np.maximum(ends, at + count), ends)
    of_queue = np.isin(f, (F.SEND, F.PULL, F.MAX_OFFSET)) & (outcome == Outcome.OK)
    rows = np.flatnonzero(of_queue & (ends > off) & ~np.isin(op_id, besides))
    if not len(rows):
        return _Proof(NEVER, NOTHING, is_send=False)
    first = int(rows[np.argmin(ret_ns[rows])])
    return _Proof(int(ret_ns[first]), int(op_id[first]), bool(f[first] == F.SEND))


def _around(block: Block, row: int) -> slice:
    """Return the rows that may overlap *row*, or what overlaps those, and some more."""
    span_ns = 4 * int((block.at_ns - block.ops["call_ns"]).max()) + _WINDOW_NS
    ends = np.searchsorted(block.at_ns, (block.at_ns[row] - span_ns, block.at_ns[row] + span_ns))
    return slice(int(ends[0]), int(ends[1]))


def _miss(*, after_send: bool) -> Callable[[Block, np.random.Generator], tuple[int, ...]]:
    """A read of the end misses what one send, or one other read, had just shown."""

    def act(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
        ops = block.ops
        reads = block.rows(F.MAX_OFFSET)
        for _ in range(_TRIES):
            read = _pick(rng, reads[len(reads) // 4 :], "read of the end")
            op_id, call_ns, near = (
                int(ops["op_id"][read]),
                ops["call_ns"][read],
                _around(block, read),
            )
            begin = np.searchsorted(block.at_ns, (2 * call_ns - block.at_ns[read], call_ns))
            low, high = (int(length) for length in block.length[begin])
            off = int(rng.integers(max(low - 10, block.first_off), high + 1))
            first = _first_present(block, off, near, op_id)
            again = _first_present(block, off, near, op_id, first.op_id)
            if first.is_send == after_send and first.at_ns < call_ns <= again.at_ns:
                ops["max_off"][read] = off
                return op_id, first.op_id
        raise CannotPlantError("no read is late enough: generate more --ops or fewer --clients")

    return act


def _send_late(*, after_send: bool) -> Callable[[Block, np.random.Generator], tuple[int, ...]]:
    """A send is called only when something from its offset on was known."""

    def act(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
        ops = block.ops
        sends = block.rows(F.SEND)
        for _ in range(_TRIES):
            send = _pick(rng, sends[len(sends) // 4 : len(sends) * 3 // 4], "send")
            op_id, off, near = int(ops["op_id"][send]), int(ops["off"][send]), _around(block, send)
            first = _first_present(block, off, near, op_id)
            again = _first_present(block, off, near, op_id, first.op_id)
            if first.is_send == after_send and first.at_ns < again.at_ns < NEVER:
                ops["call_ns"][send], ops["ret_ns"][send] = first.at_ns + 1, first.at_ns + 2
                return op_id, first.op_id
        raise CannotPlantError("no send is overtaken: generate more --ops")

    return act


def _range_differs(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
    """A pull found something else than everybody else."""
    pulls = block.rows(F.PULL)
    pull = _pick(rng, pulls[block.ops["range_hash"][pulls] != 0], "pull")
    block.ops["range_hash"][pull] ^= 1 + int(rng.integers(1 << 40))
    return (int(block.ops["op_id"][pull]),)


def _see(block: Block, value: int) -> int:
    """Let a last pull find *value* where the queue ends."""
    off = int(block.length[-1])
    op_id = block.append(F.PULL, off=off, cnt=1)
    for name, reported in (("op_id", op_id), ("off", off), ("value", value)):
        block.obs[name] = np.append(block.obs[name], reported)
    return op_id


def _duplicate(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
    send = _pick(rng, block.rows(F.SEND), "send")
    return (_see(block, int(block.ops["value"][send])),)


def _aborted(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
    send = _pick(rng, block.rows(F.SEND, outcome=Outcome.FAIL), "failed send")
    return int(block.ops["op_id"][send]), _see(block, int(block.ops["value"][send]))


def _phantom(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
    return (_see(block, NEVER - int(rng.integers(1 << 20))),)


def _of_no_send(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
    far = int(block.ops["op_id"].max()) * 2 + int(rng.integers(1 << 20)) + 1
    return (block.append(F.MAX_OFFSET, max_off=far),)


def _self_contradiction(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
    pulls = block.rows(F.PULL)
    pull = _pick(rng, pulls[block.ops["cnt"][pulls] > 0], "pull that found something")
    block.ops["max_off"][pull] = block.ops["off"][pull] + block.ops["cnt"][pull] - 1
    return (int(block.ops["op_id"][pull]),)


def _min_went_back(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
    reads = block.rows(F.MIN_OFFSET)
    first = _pick(rng, reads[: len(reads) // 2], "two reads of the first offset")
    calls = block.ops["call_ns"][reads]
    if not (calls > block.ops["ret_ns"][first]).any():
        raise CannotPlantError("no later read of the first offset: generate more --ops")
    block.ops["min_off"][first] = 1
    return (int(block.ops["op_id"][first]),)


def _lost(block: Block, _rng: np.random.Generator) -> tuple[int, ...]:
    """A last acknowledged message that the final read lacks."""
    value = 1 + int(block.ops["value"].max())
    return (block.append(F.SEND, off=int(block.length[-1]), value=value),)


def _fetched(block: Block, rng: np.random.Generator, off: int) -> tuple[int, ...]:
    fetch = _pick(rng, block.rows(F.FETCH_COMMIT), "read of a committed offset")
    block.ops["off"][fetch] = off
    return (int(block.ops["op_id"][fetch]),)


def _unread_commits(block: Block) -> I64:
    commits, read = block.rows(F.COMMIT), block.ops["off"][block.rows(F.FETCH_COMMIT)]
    return commits[~np.isin(block.ops["off"][commits], read)]


def _never_committed(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
    return _fetched(block, rng, int(block.ops["op_id"].max()) * 2 + 7)


def _aborted_commit(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
    commit = _pick(rng, _unread_commits(block), "commit that was not read")
    block.ops["outcome"][commit] = Outcome.FAIL
    witness = int(block.ops["op_id"][commit])
    return (witness, *_fetched(block, rng, int(block.ops["off"][commit])))


def _before_commit(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
    commits, fetches = block.rows(F.COMMIT), block.rows(F.FETCH_COMMIT)
    early = fetches[: len(fetches) // 4]
    fetch = _pick(rng, early, "early read of a committed offset")
    later = commits[block.ops["call_ns"][commits] > block.ops["ret_ns"][fetch]]
    commit = _pick(rng, later, "later commit")
    block.ops["off"][fetch] = block.ops["off"][commit]
    return int(block.ops["op_id"][commit]), int(block.ops["op_id"][fetch])


def _committed_back(block: Block, rng: np.random.Generator) -> tuple[int, ...]:
    """A late read of a commit that a whole other commit has overwritten."""
    ops = block.ops
    commits, fetches = block.rows(F.COMMIT), block.rows(F.FETCH_COMMIT)
    fetch = _pick(rng, fetches[len(fetches) // 2 :], "late read of a committed offset")
    old = _pick(rng, commits[: len(commits) // 8], "early commit")
    between = (ops["call_ns"][commits] > ops["ret_ns"][old]) & (
        ops["ret_ns"][commits] < ops["call_ns"][fetch]
    )
    if not between.any():
        raise CannotPlantError("no commit lies between: generate more --ops")
    ops["off"][fetch] = ops["off"][old]
    return (int(ops["op_id"][fetch]),)


PLANTERS: Final[dict[str, Planter]] = {
    queue_log.STALE_READ: Planter(queue_log.NAME, _miss(after_send=True)),
    queue_log.NON_MONOTONIC: Planter(queue_log.NAME, _miss(after_send=False)),
    queue_log.SEND_INVERTED: Planter(queue_log.NAME, _send_late(after_send=True)),
    queue_log.FROM_THE_FUTURE: Planter(queue_log.NAME, _send_late(after_send=False)),
    queue_log.INCONSISTENT_OFFSETS: Planter(queue_log.NAME, _range_differs),
    queue_log.DUPLICATE: Planter(queue_log.NAME, _duplicate, at_end=True),
    queue_log.ABORTED_READ: Planter(queue_log.NAME, _aborted, at_end=True),
    queue_log.PHANTOM: Planter(queue_log.NAME, _phantom, at_end=True),
    queue_log.OF_NO_SEND: Planter(queue_log.NAME, _of_no_send, at_end=True),
    queue_log.SELF_CONTRADICTION: Planter(queue_log.NAME, _self_contradiction),
    queue_log.MIN_WENT_BACK: Planter(queue_log.NAME, _min_went_back),
    total_queue.LOST: Planter(total_queue.NAME, _lost, at_end=True),
    consumer_offsets.NEVER_COMMITTED: Planter(consumer_offsets.NAME, _never_committed),
    consumer_offsets.ABORTED_COMMIT: Planter(consumer_offsets.NAME, _aborted_commit),
    consumer_offsets.BEFORE_COMMIT: Planter(consumer_offsets.NAME, _before_commit),
    consumer_offsets.WENT_BACK: Planter(consumer_offsets.NAME, _committed_back),
}


def planter_named(name: str) -> tuple[str, Planter]:
    """Return the kind with this name, dashes for blanks allowed, and its planter.

    Raises CannotPlantError: there is none.
    """
    kinds = {_dashed(kind): kind for kind in PLANTERS}
    kind = kinds.get(_dashed(name))
    if kind is None:
        raise CannotPlantError(f"no planter of {name!r}; there are {', '.join(sorted(kinds))}")
    return kind, PLANTERS[kind]


def _dashed(name: str) -> str:
    return name.replace(" ", "-")


BLOCK_OPS: Final = 1 << 19
"""Operations made and written at once; about 150 MB while they are made."""
TOPIC: Final = "orders"
GROUP: Final = "readers"
REPLICA: Final = "n0"
"""The replica whose queues are in `obs` in the end."""


class Shape(msgspec.Struct, frozen=True):
    """What is to be made. Equal shapes give equal files.

    Attributes:
        clients: How many are at work at once.
        plant: Name of an anomaly, or nothing.
    """

    ops: int
    clients: int = 10
    queues: int = 4
    seed: int = 1
    plant: str = ""
    block_ops: int = BLOCK_OPS


class Generated(msgspec.Struct):
    """What was made; *checker* has to find the anomaly *plant* by naming *witnesses*."""

    ops: int = 0
    obs: int = 0
    plant: str = ""
    checker: str = ""
    witnesses: tuple[int, ...] = ()


def generate(
    shape: Shape, into: Path, on_progress: Callable[[int], object] = lambda _: None
) -> Generated:
    """Write the tables of *shape* below *into*, and return what was made.

    Raises:
        ConfigError: *shape* makes no sense, or its anomaly does not fit in.
        OSError: A file cannot be written.
    """
    if min(shape.ops, shape.clients, shape.queues) < 1 or shape.ops < shape.queues:
        raise ConfigError("--ops, --clients and --queues are one at least, and --ops per queue too")
    folder = into / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)
    made = _Writer(shape, folder).write(on_progress)
    write_summary(
        folder,
        Ingested(
            run_id=run_id(shape),
            seed=shape.seed,
            records=made.ops + shape.queues,
            ops=made.ops,
            reads=shape.queues,
            obs=made.obs,
        ),
    )
    (into / "generated.json").write_bytes(
        msgspec.json.format(msgspec.json.encode({"shape": shape, "made": made})) + b"\n"
    )
    return made


def run_id(shape: Shape) -> str:
    """Return the name of the run that *shape* makes."""
    return f"generated-{shape.ops}-{shape.clients}-{shape.queues}-{shape.seed}"


class _Writer:
    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.folder = folder
        self.made = Generated()
        self.run_id = run_id(shape)
        self.victim = int(np.random.default_rng([shape.seed, 1 << 30]).integers(shape.queues))

    def write(self, on_progress: Callable[[int], object]) -> Generated:
        reads: list[tuple[int, int]] = []
        settings: dict[str, Any] = {"compression": COMPRESSION, "write_page_checksum": True}
        with (
            pq.ParquetWriter(self.folder / "ops.parquet", OPS, **settings) as ops,
            pq.ParquetWriter(self.folder / "obs.parquet", OBS, **settings) as obs,
        ):
            for stream in streams(self.shape):
                length = 0
                middle = self.shape.ops // self.shape.queues // 2
                done = 0
                for block in stream.blocks():
                    done += len(block.at_ns)
                    self._plant(block, is_middle=done > middle >= done - len(block.at_ns))
                    ops.write_table(self._ops(block))
                    obs.write_table(self._obs(block))
                    self.made.ops += len(block.at_ns)
                    self.made.obs += len(block.log) + len(block.obs["off"])
                    length += len(block.log)
                    on_progress(self.made.ops)
                reads.append((stream.queue, length))
        self._rest(reads)
        if self.shape.plant and not self.made.plant:
            raise CannotPlantError(f"{self.shape.plant} found no place")
        return self.made

    def _plant(self, block: Block, *, is_middle: bool) -> None:
        if not self.shape.plant or block.queue != self.victim:
            return
        kind, planter = planter_named(self.shape.plant)
        if block.is_last if planter.at_end else is_middle:
            rng = np.random.default_rng([self.shape.seed, 1 << 31])
            self.made.witnesses = planter.act(block, rng)
            self.made.plant, self.made.checker = kind, planter.checker

    def _ops(self, block: Block) -> Any:
        size = len(block.at_ns)
        nothing, zero = np.full(size, NOTHING, np.int64), np.zeros(size, np.int64)
        groups = np.isin(block.ops["f"], (F.COMMIT, F.FETCH_COMMIT))
        columns: dict[str, Any] = {
            "run_id": self.run_id, "topic": TOPIC, "err": "", "node": nothing,
            "queue": np.full(size, block.queue, np.int64), "parent_op_id": block.ops["op_id"],
            "group": _two_words("", GROUP, groups), "token": nothing, "due_ns": nothing,
            "txn": nothing, "decision": nothing, "status": nothing, "level": zero, **block.ops,
        }  # fmt: skip
        return table_of(OPS, columns)

    def _obs(self, block: Block) -> Any:
        """What pulls of the block found, and what the final read finds of its messages."""
        pulled, kept = len(block.obs["off"]), len(block.log)
        offs = block.first_off + np.arange(kept, dtype=np.int64)
        columns: dict[str, Any] = {
            "run_id": self.run_id,
            "topic": TOPIC,
            "op_id": np.concatenate((block.obs["op_id"], np.full(kept, NOTHING, np.int64))),
            "replica": _two_words("", REPLICA, np.arange(pulled + kept) >= pulled),
            "queue": np.full(pulled + kept, block.queue, np.int64),
            "off": np.concatenate((block.obs["off"], offs)),
            "value": np.concatenate((block.obs["value"], block.log)),
        }
        return table_of(OBS, columns)

    def _rest(self, reads: list[tuple[int, int]]) -> None:
        per_queue = -(-self.shape.ops // self.shape.queues)
        turns = -(-self.shape.queues // self.shape.clients)
        at_ns = (per_queue + 1_000) * 2 * STEP_NS * (turns + 1)
        heads = [ReplicaRead(at_ns, REPLICA, TOPIC, queue, 0, ()) for queue, _ in reads]
        nodes = nodes_table(self.run_id, (), heads)
        lengths = pa.array([length for _, length in reads], pa.int64())
        nodes = nodes.set_column(NODES.get_field_index("cnt"), NODES.field("cnt"), lengths)
        pq.write_table(nodes, self.folder / "nodes.parquet", compression=COMPRESSION)
        pq.write_table(events_table(self.run_id, ()), self.folder / "events.parquet")


def _two_words(no: str, yes: str, which: Any) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array(which.astype(np.int32)), pa.array([no, yes]))


def streams(shape: Shape) -> list[QueueStream]:
    """Return the queues of *shape*."""
    per_queue, rest = divmod(shape.ops, shape.queues)
    block_ops = max(shape.block_ops, shape.clients)
    stride = max(shape.clients, shape.queues)
    first_op_id = 0
    every: list[QueueStream] = []
    for queue in range(shape.queues):
        ops = per_queue + (queue < rest)
        if shape.clients >= shape.queues:
            share = [shape.clients * at // shape.queues for at in (queue, queue + 1)]
            clients, begin_ns = range(*share), 0
        else:
            clients = range(queue, queue + 1)
            begin_ns = queue // shape.clients * (per_queue + 1_000) * 2 * STEP_NS
        every.append(
            QueueStream(queue, shape.seed, ops, clients, stride, first_op_id, begin_ns, block_ops)
        )
        first_op_id += ops + 1  # one more may be planted
    return every
