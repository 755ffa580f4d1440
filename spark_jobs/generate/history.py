"""A history of any length, written queue by queue and block by block: memory does not grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from commitlog.errors import ConfigError
from jepsen_like.history.columns import (
    NODES,
    OBS,
    OPS,
    events_table,
    nodes_table,
    table_of,
)
from jepsen_like.history.operation import NOTHING, F, ReplicaRead
from jepsen_like.history.parquet import COMPRESSION, FOLDER, SUMMARY, Ingested, write_summary
from spark_jobs.generate.plant import CannotPlantError, planter_named
from spark_jobs.generate.queue_stream import STEP_NS, Block, QueueStream

BLOCK_OPS: Final = 1 << 19
"""Operations made and written at once; about 150 MB while they are made."""
TOPIC: Final = "orders"
GROUP: Final = "readers"
REPLICA: Final = "n0"
"""The replica whose queues are in `obs` in the end."""


class Shape(msgspec.Struct, frozen=True):
    """What is to be made. Equal shapes give equal files.

    Attributes:
        ops: Operations, over all queues.
        clients: How many are at work at once.
        queues: Queues of the one topic.
        seed: All randomness comes from it.
        plant: Name of an anomaly, or nothing.
        block_ops: See `BLOCK_OPS`.
    """

    ops: int
    clients: int = 10
    queues: int = 4
    seed: int = 1
    plant: str = ""
    block_ops: int = BLOCK_OPS


class Generated(msgspec.Struct):
    """What was made.

    Attributes:
        ops: Rows of `ops`.
        obs: Rows of `obs`.
        plant: Name of the anomaly planted.
        checker: The one that has to find it.
        witnesses: Operations it has to name.
    """

    ops: int = 0
    obs: int = 0
    plant: str = ""
    checker: str = ""
    witnesses: tuple[int, ...] = ()


def generate(
    shape: Shape, into: Path, on_progress: Callable[[int], object] = lambda _: None
) -> Generated:
    """Write the tables of *shape* below *into*, and return what was made.

    Args:
        on_progress: Called with how many operations are written.

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
    """Return the queues of *shape*.

    Clients are shared out; where there are more queues, each has a client of its own, and this many
    are at work as there are to be clients.
    """
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
