"""Every check over one source, whichever engine that is: the same verdicts, the same digest.

The log of each queue, the multiset algebra and the replicas are judged in columns. The other
promises are judged by the row-wise checkers of `jepsen_like`, over the rows that they look at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from jepsen_like.checkers import (
    batches,
    consumer_offsets,
    delayed,
    filters,
    half_messages,
    locks,
    polls,
    producer_order,
    queue_log,
    replicas,
    retries,
    total_queue,
    transactions,
)
from jepsen_like.checkers.half_messages import SYSTEM_TOPICS, transactions_of
from jepsen_like.checkers.verdict import Verdict, Violation, checked, judge
from jepsen_like.history.columns import EVENTS, OPS, NodeKind, history_of, operations_of, table_of
from jepsen_like.history.operation import (
    NOTHING,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    ReplicaState,
    RunHeader,
)
from spark_jobs.checks import given_back
from spark_jobs.checks.filtered import PULLS, check_filtered
from spark_jobs.checks.home import Home, add_up, replica_violations, total_verdict
from spark_jobs.checks.late_reads import READS, latest_before
from spark_jobs.checks.producer_lines import Lines
from spark_jobs.checks.queue_facts import OBS_COLUMNS, OPS_COLUMNS
from spark_jobs.checks.queue_log import table_to_numpy, verdict_of
from spark_jobs.checks.queue_witness import Wanted, name_violations, wanted_by
from spark_jobs.checks.registers import check_offsets
from spark_jobs.checks.source import Queue, QueueReport, Replicas, Source, Want

ROWS_MAX: Final = 3_000_000
"""Rows that a check which cannot be split may want; about 3 GB as objects."""
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
    )
)
REST: Final = Want(
    among=(("f", ROW_WISE),),
    other_than=(("token", NOTHING), ("due_ns", NOTHING), ("group", "")),
)
"""All that the row-wise checkers look at, but for what pulls found."""
SHARED: Final = Want(other_than=(("parent_op_id", "op_id"),))
"""Rows that are not their own logical operation: later attempts, messages of a batch."""
GIVEN_BACK: Final = Want((("f", given_back.OPERATIONS),))
"""What consumers gave back, and what was found of it."""
SENDS: Final = Want((("f", (int(F.SEND),)),))


class Settings(msgspec.Struct, frozen=True):
    """What the run promised; see `jepsen_like.checkers.all_checks`."""

    clock_error_ns: int = 0
    lease_ns: int = locks.LEASE_NS
    check_interval_ns: int = transactions.CHECK_INTERVAL_NS
    checks_max: int = transactions.CHECKS_MAX
    immunity_ns: int = 0
    late_max_ns: int | None = None
    idempotent: bool = False
    rows_max: int = ROWS_MAX


def check_source(
    source: Source, settings: Settings | None = None, tell: Callable[[str], object] = lambda _: None
) -> list[Verdict]:
    """Return one verdict per checker, as `check_everything` does over rows.

    Args:
        tell: Told what is looked at now.
    """
    return _Check(source, settings or Settings(), tell).run()


def digest_of(verdicts: Iterable[Verdict]) -> str:
    """Return a hash of everything that was found; equal for every engine and every split."""
    told = [
        {
            "checker": verdict.checker,
            "validity": verdict.validity,
            "counts": dict(sorted(verdict.counts.items())),
            "violations": sorted(
                [v.name, v.subject, v.detail, list(v.operations), v.at_ns]
                for v in verdict.violations
            ),
        }
        for verdict in sorted(verdicts, key=lambda verdict: verdict.checker)
    ]
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()


class _Check:
    def __init__(self, source: Source, settings: Settings, tell: Callable[[str], object]) -> None:
        self.source = source
        self.settings = settings
        self.tell = tell
        rows = source.nodes().to_pylist()
        reads = [row for row in rows if row["kind"] == NodeKind.READ]
        self.heads = [
            ReplicaRead(row["at_ns"], row["node"], row["topic"], row["queue"], row["min_off"], ())
            for row in reads
        ]
        self.messages = sum(row["cnt"] for row in reads)
        self.states = [
            ReplicaState(
                row["at_ns"], row["node"], row["applied_index"], row["chain"] % (1 << 64),
                row["tables"],
            )
            for row in rows
            if row["kind"] == NodeKind.STATE
        ]  # fmt: skip
        self.replicas = replicas_of(self.heads)
        self.settled = bool(self.heads)
        self.offsets = OPS.empty_table()

    def run(self) -> list[Verdict]:
        """Judge everything; a check that breaks is unknown and says why."""
        self.source.prepare((REST, SHARED, GIVEN_BACK, PULLS))
        self.tell("operations")
        rest = self._rest()
        if isinstance(rest, Verdict):
            return [rest]
        appends: dict[Queue, tuple[Operation, ...]] = {}
        for one in transactions_of(rest).values():
            op = one.as_append()
            if op is not None and op.topic and op.queue != NOTHING:
                appends[op.topic, op.queue] = (*appends.get((op.topic, op.queue), ()), op)
        self.tell("queues")
        reports = sorted(self.source.queues(appends, self.replicas), key=lambda r: r.key)
        verdicts = [
            checked(queue_log.NAME, lambda: self._queue_log(reports, appends)),
            checked(consumer_offsets.NAME, lambda: check_offsets(self.offsets)),
            checked(delayed.NAME, lambda: self._delayed(rest)),
            checked(replicas.NAME, lambda: self._replicas(reports)),
            *self._where_there_are_any(rest),
        ]
        if self.settings.idempotent:
            verdicts.append(checked(producer_order.NAME, self._producer_order))
        if self.settled:
            verdicts.append(checked(total_queue.NAME, lambda: self._total(reports, appends)))
        return verdicts

    def _rest(self) -> list[Operation] | Verdict:
        """Return all rows that the row-wise checkers look at, but for what pulls found.

        Commits and reads of offsets are looked at in columns, unless somebody polled; what was
        given back always is.
        """
        result: list[Operation] = []

        def read() -> Verdict:
            rows = self.source.ops(REST, self.settings.rows_max)
            f = rows.column("f").to_numpy()
            of_offsets = (f == F.COMMIT) | (f == F.FETCH_COMMIT)
            self.offsets = rows.filter(pa.array(of_offsets))
            plain = np.isin(f, given_back.OPERATIONS)
            if not (f == F.PULL).any():
                plain |= of_offsets & (rows.column("token").to_numpy() == NOTHING)
            rows = rows.filter(pa.array(~plain))
            result.extend(operations_of(rows, self.source.obs(Want(), 0)))
            return Verdict("rows", "valid")

        said = checked("rows", read)
        return result if said.is_valid else said

    # -- queues ----------------------------------------------------------------------------

    def _queue_log(
        self, reports: list[QueueReport], appends: dict[Queue, tuple[Operation, ...]]
    ) -> Verdict:
        judged = [
            report
            for report in reports
            if report.topic not in SYSTEM_TOPICS and (report.judged.rows or report.key in appends)
        ]
        found: list[Violation] = []
        for report in judged:
            if not report.judged.is_valid:
                self.tell(f"witnesses in {report.topic}/{report.queue}")
                found += self._named(report, appends.get(report.key, ()))
        return verdict_of((report.judged for report in judged), found)

    def _named(self, report: QueueReport, appends: tuple[Operation, ...]) -> list[Violation]:
        ops, obs = self._rows(report.key, wanted_by(report.judged))
        subject = f"{report.topic}/{report.queue}"
        return name_violations(
            report.judged,
            table_to_numpy(ops, OPS_COLUMNS),
            table_to_numpy(obs, OBS_COLUMNS),
            subject,
            appends,
        )

    def _rows(self, queue: Queue, wanted: Wanted) -> tuple[Any, Any]:
        among = (
            ("off", wanted.offs),
            ("value", wanted.values),
            ("op_id", wanted.op_ids),
            ("call_ns", wanted.calls),
            ("ret_ns", wanted.rets),
        )
        rows_max = self.settings.rows_max
        ops = self.source.ops(Want(among, queue=queue), rows_max)
        obs = self.source.obs(Want((("value", wanted.values),), queue=queue), rows_max)
        return ops, obs

    def _total(
        self, reports: list[QueueReport], appends: dict[Queue, tuple[Operation, ...]]
    ) -> Verdict:
        algebra = add_up((report.key, report.home) for report in reports)
        values = tuple(sorted({v for named in algebra.named.values() for v in named}))
        sends: dict[int, Operation] = {}
        if values:
            rows = self.source.ops(Want((("value", values),)), self.settings.rows_max)
            for op in operations_of(rows, self.source.obs(Want(), 0)):
                if op.f == F.SEND:
                    sends[op.value] = op
            sends |= {op.value: op for ops in appends.values() for op in ops}
        chosen = self.replicas.names[self.replicas.chosen]
        return total_verdict(algebra, sends, chosen)

    def _replicas(self, reports: list[QueueReport]) -> Verdict:
        history = History(RunHeader(""), replica_states=self.states, replica_reads=self.heads)
        known = replicas.check_history(history, settled=self.settled)
        at_ns = {(head.node, head.topic, head.queue): head.at_ns for head in self.heads}
        found = list(known.violations)
        homes = [(r.key, r.home) for r in reports if r.home.lost or r.home.differ]
        found += replica_violations(homes, self.replicas.names, at_ns, self._acked_at(homes))
        counts = {**known.counts, "messages": self.messages}
        return judge(replicas.NAME, found, counts, looked_at=len(self.heads) + len(self.states))

    def _acked_at(self, homes: list[tuple[Queue, Home]]) -> dict[tuple[str, int, int], Operation]:
        acked: dict[tuple[str, int, int], Operation] = {}
        for queue, home in homes:
            values = tuple(value for _, value, _, _ in home.lost)
            rows = self.source.ops(Want((("value", values),), queue=queue), self.settings.rows_max)
            for op in operations_of(rows, self.source.obs(Want(), 0)):
                if op.f == F.SEND and op.outcome == Outcome.OK:
                    acked[*queue, op.value] = op
        return acked

    # -- row by row ------------------------------------------------------------------------

    def _delayed(self, rest: list[Operation]) -> Verdict:
        settings = self.settings
        sends = [op for op in rest if op.f == F.SEND and op.due_ns != NOTHING]
        history = self._sighted([*sends, *_of(rest, F.RECALL)], {op.value for op in sends})
        if settings.late_max_ns is not None:
            history.operations += self._late_reads(history)
        return delayed.check_history(
            history,
            clock_error_ns=settings.clock_error_ns,
            drained=self.settled,
            late_max_ns=settings.late_max_ns,
        )

    def _late_reads(self, history: History) -> list[Operation]:
        """Return the reads that prove most of the places where delayed messages were seen."""
        places: dict[Queue, set[int]] = {}
        for op in _of(history.operations, F.PULL):
            places.setdefault((op.topic, op.queue), set()).add(op.off)
        for read in history.replica_reads:
            if read.values:
                places.setdefault((read.topic, read.queue), set()).add(read.min_off)
        reads: list[Operation] = []
        for queue, offs in sorted(places.items()):
            self.tell(f"reads of {queue[0]}/{queue[1]}")
            rows = self.source.ops(Want((("f", READS),), queue=queue), self.settings.rows_max)
            reads += latest_before(rows, offs)
        return reads

    def _where_there_are_any(self, rest: list[Operation]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        settings = self.settings
        batched = self._batched()
        if batched is None or batches.batches_of(batched):
            verdicts.append(checked(batches.NAME, self._batches))
        if polls.polls_of(rest):
            verdicts.append(checked(polls.NAME, lambda: polls.check_history(rest)))
        verdicts += self._given_back()
        if self.settled:
            verdicts += self._filtered()
        if any(op.f in locks.OPERATIONS for op in rest):
            verdicts.append(
                checked(
                    locks.NAME,
                    lambda: locks.check_history(
                        rest, lease_ns=settings.lease_ns, clock_error_ns=settings.clock_error_ns
                    ),
                )
            )
        if any(op.f in half_messages.OPERATIONS for op in rest):
            verdicts.append(checked(transactions.NAME, lambda: self._transactions(rest)))
        return verdicts

    def _given_back(self) -> list[Verdict]:
        """Return what is said of messages given back; nothing where there are none."""
        nothing = Verdict(retries.NAME, "valid")

        def judged() -> Verdict:
            rows = self.source.ops(GIVEN_BACK, self.settings.rows_max)
            if not rows.num_rows:
                return nothing
            return given_back.check_given_back(rows, drained=self.settled)

        said = checked(retries.NAME, judged)
        return [] if said is nothing else [said]

    def _filtered(self) -> list[Verdict]:
        """Return what is said of pulls with an expression; nothing where there are none."""
        nothing = Verdict(filters.NAME, "valid")
        rows_max = self.settings.rows_max
        said = checked(filters.NAME, lambda: check_filtered(self.source, rows_max) or nothing)
        return [] if said is nothing else [said]

    def _producer_order(self) -> Verdict:
        rows_max = self.settings.rows_max
        self.tell("the order of producers")
        lines = Lines(self.source.ops(SENDS, rows_max))
        return lines.check(self.source.obs(Want((("value", lines.open_values()),)), rows_max))

    def _batched(self) -> list[Operation] | None:
        """Return sends that share their logical operation; None if they are too many."""
        try:
            ops = self.source.ops(SHARED, self.settings.rows_max)
            shared = operations_of(ops, self.source.obs(Want(), 0))
            parents = tuple(sorted({op.parent_op_id for op in shared}))
            if not parents:
                return []
            ops = self.source.ops(Want((("parent_op_id", parents),)), self.settings.rows_max)
            return operations_of(ops, self.source.obs(Want(), 0))
        except Exception as error:  # noqa: BLE001  # the check itself says what is wrong
            self.tell(str(error))
            return None

    def _batches(self) -> Verdict:
        """Judge over everything: a batch concerns all that was seen of its queue."""
        rows_max = self.settings.rows_max
        everything = Want(other_than=(("op_id", NOTHING - 1),))
        tables = (self.source.ops(everything, rows_max), self.source.obs(everything, rows_max))
        history = history_of(*tables, table_of(EVENTS, {}), self.source.nodes())
        return batches.check_history(history)

    def _transactions(self, rest: list[Operation]) -> Verdict:
        rows = _of(rest, *half_messages.OPERATIONS)
        values = set(transactions_of(rows))
        settings = self.settings
        return transactions.check_history(
            self._sighted(rows, values),
            drained=self.settled,
            check_interval_ns=settings.check_interval_ns,
            checks_max=settings.checks_max,
            immunity_ns=max(settings.immunity_ns - settings.clock_error_ns, 0),
        )

    def _sighted(self, rows: list[Operation], values: set[int]) -> History:
        """Return a history of *rows* and of every look at one of *values*, each on its own."""
        history = History(RunHeader(""), list(rows), replica_reads=list(self.heads))
        if not values:
            return history
        rows_max = self.settings.rows_max
        want = Want((("value", tuple(sorted(values))),))
        looks = self.source.obs(want, rows_max).to_pylist()
        ids = tuple(sorted({look["op_id"] for look in looks} - {NOTHING}))
        pulls = self.source.ops(Want((("op_id", ids),)), rows_max)
        by_id = {op.op_id: op for op in operations_of(pulls, self.source.obs(Want(), 0))}
        at_ns = {(head.node, head.topic, head.queue): head.at_ns for head in self.heads}
        looks.sort(key=lambda look: (look["op_id"], look["replica"], look["queue"], look["off"]))
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


def _of(rows: Iterable[Operation], *fs: F) -> list[Operation]:
    return [op for op in rows if op.f in fs]


def replicas_of(heads: list[ReplicaRead]) -> Replicas:
    """Return which replicas were read, from the heads of the reads."""
    names = tuple(sorted({head.node for head in heads}))
    number = {name: at for at, name in enumerate(names)}
    begins: dict[Queue, tuple[tuple[int, int], ...]] = {}
    for head in heads:
        key = (head.topic, head.queue)
        begins[key] = (*begins.get(key, ()), (number[head.node], head.min_off))
    return Replicas(names, begins, number[heads[0].node] if heads else NOTHING)
