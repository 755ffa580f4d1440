"""A queue judged in chunks without an engine: rows routed in batches, tasks called one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from dledger.jepsen_like.checkers.kernel.chunks import Answer, Ask
from dledger.jepsen_like.checkers.kernel.cut import (
    ChunkReport,
    answer_of,
    chunk_report_of,
    judge_cut,
    obs_routes,
    routes,
)
from dledger.jepsen_like.checkers.kernel.facts import I64, Columns, QueueFacts
from dledger.jepsen_like.checkers.kernel.source import Queue, QueueReport, Replicas
from dledger.jepsen_like.checkers.kernel.tables import spares_of
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome


class CutTables:
    """The rows of one queue, in chunks of *width* offsets; batches come in a random order."""

    def __init__(
        self, ops: Columns, obs: Columns, queue: Queue, replicas: Replicas, width: int, seed: int
    ) -> None:
        self.ops, self.obs, self.queue, self.replicas = ops, obs, queue, replicas
        self.width, self.rng = width, random.Random(seed)

    def facts(self) -> list[QueueFacts]:
        every: dict[int, QueueFacts] = {}
        parts = []
        for begin in range(0, len(self.ops["f"]), 50_000):
            batch = {name: column[begin : begin + 50_000] for name, column in self.ops.items()}
            rows, chunks = routes(batch, self.width)
            cuts = np.flatnonzero(np.append(True, chunks[1:] != chunks[:-1]))[: len(rows)]
            for its in np.split(np.arange(len(rows)), cuts[1:]):
                if len(its):
                    columns = {name: column[rows[its]] for name, column in batch.items()}
                    parts.append((int(chunks[its[0]]), columns))
        self.rng.shuffle(parts)
        for chunk, columns in parts:
            every.setdefault(chunk, self.fresh(chunk)).add_ops(columns)
        chunks = obs_routes(self.obs, self.width)
        for chunk in np.unique(chunks).tolist():
            its = np.flatnonzero(chunks == chunk)
            columns = {name: column[its] for name, column in self.obs.items()}
            every.setdefault(chunk, self.fresh(chunk)).add_obs(columns)
        facts = list(every.values())
        self.rng.shuffle(facts)
        return facts

    def fresh(self, chunk: int) -> QueueFacts:
        return QueueFacts(chunk * self.width, self.width)

    def first(self, limit: int | None) -> Sequence[ChunkReport]:
        return [chunk_report_of(self.queue, f, self.replicas, limit) for f in self.facts()]

    def again(self, asks: dict[int, Ask], limit: int | None) -> Sequence[Answer]:
        return [answer_of(f, self.replicas, asks[f.begin], limit) for f in self.facts()]

    def repeated(self, added: I64) -> I64:
        ops = self.ops
        send = ops["f"] == F.SEND
        acked = send & (ops["outcome"] == Outcome.OK) & (ops["off"] != NOTHING)
        pairs = np.unique(np.stack((ops["off"][acked], ops["value"][acked]), axis=1), axis=0)
        unknown = send & ~acked & (ops["outcome"] != Outcome.FAIL)
        values = np.concatenate((pairs[:, 1], ops["value"][unknown], added))
        reported, count = np.unique(values, return_counts=True)
        return reported[count > 1][:65].astype(np.int64)


def judged_in_chunks(
    ops: Columns,
    obs: Columns,
    queue: Queue,
    replicas: Replicas,
    width: int,
    *,
    appends: Sequence[Operation] = (),
    seed: int = 0,
) -> QueueReport:
    """Return what chunks of *width* offsets say together."""
    tables = CutTables(ops, obs, queue, replicas, width, seed)
    return judge_cut(queue, tables, spares_of(appends) if appends else None, replicas)
