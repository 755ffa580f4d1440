"""The rows of one run that its checks share: read once, each want within a limit of rows.

Most operations are judged in columns; what stands in `REST` becomes objects here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from dledger.jepsen_like.checkers import retention
from dledger.jepsen_like.checkers.fault_record import record_of
from dledger.jepsen_like.checkers.kernel.source import Queue, QueueReport, Replicas, Source, Want
from dledger.jepsen_like.checkers.replicas import ends_of
from dledger.jepsen_like.checkers.retention import Hole
from dledger.jepsen_like.checkers.transactions import SYSTEM_TOPICS, transactions_of
from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.history.columns import (
    OPS,
    NodeKind,
    chosen,
    events_of,
    operations_of,
    states_of,
)
from dledger.jepsen_like.history.operation import (
    NOTHING,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
)

ROW_WISE: Final = tuple(
    int(f)
    for f in (
        F.COMMIT,
        F.FETCH_COMMIT,
        F.LOCK,
        F.UNLOCK,
        F.HALF,
        F.END_TRANSACTION,
        F.CHECK,
        F.RECALL,
        F.RECEIVE,
        F.ACK,
        F.CHANGE_TIME,
        F.STEP,
        F.STEP_FOUND,
        F.GIVEN_UP,
        F.PERISHABLE,
        F.LIVING,
    )
)
REST: Final = Want(
    among=(("f", ROW_WISE),), other_than=(("token", NOTHING), ("due_ns", NOTHING), ("group", ""))
)
"""All that is judged row by row, but for what pulls found."""


_LOOK: Final = ("op_id", "replica", "topic", "queue", "off")
"""What names a look at a message: their order is the same in every engine."""


class RunRows:
    """The rows of one run, and what its replicas were seen to hold.

    Attributes:
        heads: What replicas were read, without their messages.
        messages: How many messages these reads found.
        ends: One past the last offset of each queue of each replica, as these reads found it.
        filled: Queues of clients of which they found messages.
        states: States of replicas, as they reported them.
        replicas: Which replicas were read, and where each queue began.
        settled: Whether everything was drained and every replica read.
        rest: Operations that are judged row by row, once they are read.
        appends: By queue, what transactions appended to it.
        reports: By queue, in their order, how its log was judged.
    """

    def __init__(
        self,
        source: Source,
        *,
        settled: bool | None,
        election_ns: int,
        rows_max: int,
        progress: Callable[[str], object],
    ) -> None:
        """Read what is there of replicas and of faults; of operations none.

        *settled*: None: it was, if a replica was read.
        """
        self._source = source
        self._rows_max = rows_max
        self._progress = progress
        nodes = source.nodes()
        reads = [row for row in nodes.to_pylist() if row["kind"] == NodeKind.READ]
        self.heads = [
            ReplicaRead(row["at_ns"], row["node"], row["topic"], row["queue"], row["min_off"], ())
            for row in reads
        ]
        self.messages = sum(row["cnt"] for row in reads)
        self.ends = ends_of(
            (row["node"], (row["topic"], row["queue"]), row["min_off"] + row["cnt"])
            for row in reads
        )
        self.filled = frozenset(
            (row["topic"], row["queue"])
            for row in reads
            if row["cnt"] > 0 and row["topic"] not in SYSTEM_TOPICS
        )
        self.states = states_of(nodes)
        self.replicas = replicas_of(self.heads)
        self.record = record_of(events_of(source.events()), election_ns)
        self.settled = bool(self.heads) if settled is None else settled
        self.rest: list[Operation] = []
        self.offsets = OPS.empty_table()
        self.appends: dict[Queue, tuple[Operation, ...]] = {}
        self.reports: list[QueueReport] = []

    def read(self) -> Verdict:
        """Read all rows that are judged row by row, but for what pulls found.

        Commits and reads of offsets are judged in columns, unless a subscribed consumer polled.
        """
        rows = self._source.ops(REST, self._rows_max)
        f = rows.column("f").to_numpy()
        of_offsets = (f == F.COMMIT) | (f == F.FETCH_COMMIT)
        self.offsets = chosen(rows, of_offsets)
        if not (f == F.PULL).any():
            rows = chosen(rows, ~of_offsets | (rows.column("token").to_numpy() != NOTHING))
        self.rest = operations_of(rows, self._source.obs(Want(), 0))
        return Verdict("rows", "valid")

    def note_appends(self) -> None:
        """Note what transactions appended, of the rows that were read."""
        for one in transactions_of(self.rest).values():
            op = one.as_append()
            if op is not None and op.topic and op.queue != NOTHING:
                queue = (op.topic, op.queue)
                self.appends[queue] = (*self.appends.get(queue, ()), op)

    def judge_queues(self) -> Verdict:
        """Have the source judge each queue, with what transactions appended to it."""
        reports = self._source.queues(self.appends, self.replicas)
        self.reports = sorted(reports, key=lambda report: report.key)
        return Verdict("queues", "valid")

    def ops(self, want: Want) -> list[Operation]:
        """Return rows without what they found."""
        rows = self._source.ops(want, self._rows_max)
        return operations_of(rows, self._source.obs(Want(), 0))

    def holes(self, queue: Queue) -> list[Hole]:
        """Return the holes of a queue that retention has cut."""
        rows_max = self._rows_max
        self._progress(f"removed messages of {queue[0]}/{queue[1]}")
        ops = self._source.ops(Want((("f", retention.FILLING),), queue=queue), rows_max)
        obs = self._source.obs(Want(other_than=(("op_id", NOTHING),), queue=queue), rows_max)
        return retention.holes_of(ops, obs, retention.begin_of(self.heads, queue))

    def places(self, values: tuple[int, ...]) -> dict[int, set[tuple[str, int, int]]]:
        """Return where acknowledged sends, pulls and replicas show *values*."""
        places: dict[int, set[tuple[str, int, int]]] = {}
        if not values:
            return places
        want = Want((("value", values),))
        for op in self.ops(want):
            if op.f == F.SEND and op.outcome == Outcome.OK and op.off != NOTHING:
                places.setdefault(op.value, set()).add((op.topic, op.queue, op.off))
        for look in self._source.obs(want, self._rows_max).to_pylist():
            place = (look["topic"], look["queue"], look["off"])
            places.setdefault(look["value"], set()).add(place)
        return places

    def sighted(self, rows: list[Operation], values: set[int]) -> History:
        """Return a history of *rows* and of every look at one of *values*, each on its own."""
        history = History(RunHeader(""), list(rows), replica_reads=list(self.heads))
        if not values:
            return history
        rows_max = self._rows_max
        want = Want((("value", tuple(sorted(values))),))
        looks = self._source.obs(want, rows_max).to_pylist()
        ids = tuple(sorted({look["op_id"] for look in looks} - {NOTHING}))
        by_id = {op.op_id: op for op in self.ops(Want((("op_id", ids),)))}
        at_ns = {(head.node, head.topic, head.queue): head.at_ns for head in self.heads}
        looks.sort(key=lambda look: tuple(look[name] for name in _LOOK))
        for look in looks:
            place = (look["topic"], look["queue"])
            values_seen = (look["value"],)
            if look["op_id"] == NOTHING:
                when = at_ns[(look["replica"], *place)]
                history.replica_reads.append(
                    ReplicaRead(when, look["replica"], *place, look["off"], values_seen)
                )
            elif look["op_id"] in by_id:
                pull = by_id[look["op_id"]]
                history.operations.append(
                    msgspec.structs.replace(pull, off=look["off"], cnt=1, values=values_seen)
                )
        return history


def replicas_of(heads: list[ReplicaRead]) -> Replicas:
    """Return which replicas were read, from the heads of the reads."""
    names = tuple(sorted({head.node for head in heads}))
    number = {name: at for at, name in enumerate(names)}
    begins: dict[Queue, tuple[tuple[int, int], ...]] = {}
    for head in heads:
        key = (head.topic, head.queue)
        begins[key] = (*begins.get(key, ()), (number[head.node], head.min_off))
    return Replicas(names, begins, number[heads[0].node] if heads else NOTHING)
