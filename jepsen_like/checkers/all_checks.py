"""The one list of checks, and all of them over one source: the same verdicts, the same digest.

A source is an engine over tables, or the rows of a history in memory. The log of each queue, the
multiset algebra, replicas and committed offsets are judged in columns; the other guarantees row by
row, over the rows that they look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from dledger.jepsen_like.checkers import (
    availability,
    batches,
    consumer_offsets,
    contents,
    delayed,
    filters,
    final_reads,
    lifetimes,
    locks,
    polls,
    pop,
    producer_order,
    queue_log,
    replicas,
    retention,
    retries,
    steps,
    total_queue,
    transactions,
    waits,
)
from dledger.jepsen_like.checkers.fault_record import (
    ELECTION_NS,
    FaultRecord,
    with_late_effect,
    with_stalls,
)
from dledger.jepsen_like.checkers.kernel.facts import OBS_COLUMNS, OPS_COLUMNS
from dledger.jepsen_like.checkers.kernel.home import Home
from dledger.jepsen_like.checkers.kernel.source import Queue, QueueReport, Source, Want
from dledger.jepsen_like.checkers.kernel.tables import MemorySource, table_to_numpy
from dledger.jepsen_like.checkers.run_rows import REST, RunRows
from dledger.jepsen_like.checkers.transactions import SYSTEM_TOPICS, transactions_of
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, checked, judge
from dledger.jepsen_like.history.columns import EVENTS, floors_of, history_of
from dledger.jepsen_like.history.operation import NOTHING, F, History, Level, Operation, Outcome

ROWS_MAX: Final = 3_000_000
"""Rows that a check which cannot be split may want; about 3 GB as objects."""
SHARED: Final = Want(other_than=(("parent_op_id", "op_id"),))
"""Rows that are not their own logical operation: later attempts, messages of a batch."""
EVERYTHING: Final = Want(other_than=(("op_id", NOTHING - 1),))
ALTERED: Final = Want((("err", contents.ALTERED),))
"""Reads with a message that differs from what was sent, of any outcome."""
OF_ANY_MEMBER: Final = Want((("level", (int(Level.LOCAL),)),))
"""Answers that asked no majority: all but the first offsets kept that they name proves nothing."""
SENDS: Final = Want((("f", (int(F.SEND),)),))
_NO_EVENTS: Final = EVENTS.empty_table()


class Settings(msgspec.Struct, frozen=True):
    """What the run guarantees.

    Attributes:
        settled: Faults were over, everything was drained and every replica read; None: if a replica
            was read.
        clock_error_ns: How far a broker's clock may have been ahead.
        lease_ns: How long brokers let the lock of a queue last.
        check_interval_ns: How long after the decision of a transaction a check may still arrive.
        checks_max: How often a producer may be asked about one transaction.
        immunity_ns: For how long a half message is not asked about.
        late_max_ns: How late a delayed message may come, time without a leader included; None: as
            late as it likes.
        idempotent: Producers are idempotent: what each sends stays in order.
        election_ns: The longest election timeout of the group.
        late_quiet_max_ns: How much of the time that a delayed message is late may have been quiet,
            by the record of faults; None: all of it.
        keeps: What brokers keep; None: it is not known, and what is removed is not judged.
        rows_max: Rows that a check which cannot be split may want.
        late_effect_ns: How long after its answer a write may be lost to a fault, see
            `with_late_effect`; only a history in memory is judged so.
    """

    settled: bool | None = None
    clock_error_ns: int = 0
    lease_ns: int = locks.LEASE_NS
    check_interval_ns: int = transactions.CHECK_INTERVAL_NS
    checks_max: int = transactions.CHECKS_MAX
    immunity_ns: int = 0
    late_max_ns: int | None = None
    idempotent: bool = False
    election_ns: int = ELECTION_NS
    late_quiet_max_ns: int | None = None
    keeps: retention.Keeps | None = None
    rows_max: int = ROWS_MAX
    late_effect_ns: int = 0


SETTLED: Final = Settings(settled=True)


def check_everything(history: History, settings: Settings = SETTLED) -> list[Verdict]:
    """Return one verdict per checker over a history in memory.

    A history with a number that no column can hold is unknown, with that reason.
    """
    late_effect_ns = settings.late_effect_ns
    if late_effect_ns:
        history = with_late_effect(history, late_effect_ns)
        settings = msgspec.structs.replace(settings, late_effect_ns=0)
    try:
        source = MemorySource(history)
    except (OverflowError, ValueError, TypeError) as error:
        return [Verdict("rows", "unknown", reason=f"{type(error).__name__}: {error}")]
    verdicts = check_source(source, settings)
    if late_effect_ns:  # what became unknown here was answered
        verdicts = [verdict for verdict in verdicts if verdict.checker != availability.NAME]
    return verdicts


def check_source(
    source: Source,
    settings: Settings | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> list[Verdict]:
    """Return one verdict per checker.

    A checker of operations that a history does not have gives no verdict: nothing is guaranteed.
    """
    if settings is not None and settings.late_effect_ns:
        reason = "acknowledgements before their effect are judged where the run was played"
        return [Verdict("rows", "unknown", reason=reason)]
    return _Check(source, settings or Settings(), progress).run()


class _Check:
    def __init__(
        self, source: Source, settings: Settings, progress: Callable[[str], object]
    ) -> None:
        self.source = source
        self.settings = settings
        self.progress = progress
        self.rows = RunRows(
            source,
            settled=settings.settled,
            election_ns=settings.election_ns,
            rows_max=settings.rows_max,
            progress=progress,
        )

    def run(self) -> list[Verdict]:
        """Judge everything; a check that breaks is unknown, with its reason."""
        wants = (REST, SHARED, OF_ANY_MEMBER, filters.PULLS, ALTERED)
        self.source.prepare(wants, replicas=self.rows.replicas)
        self.progress("operations")
        read = checked("rows", self.rows.read)
        if not read.is_valid:
            return [read]
        self.rows.note_appends()
        self.progress("queues")
        judged = checked("queues", self.rows.judge_queues)
        if not judged.is_valid:
            return [judged]
        verdicts = (_verdict(name, check, self) for name, check in CHECKS.items())
        return [verdict for verdict in verdicts if verdict is not None]

    # -- in columns ------------------------------------------------------------------------

    def queue_log(self) -> Verdict:
        judged = [
            report
            for report in self.rows.reports
            if report.topic not in SYSTEM_TOPICS
            and (report.judged.rows or report.key in self.rows.appends)
        ]
        wrong = [report for report in judged if not report.judged.is_valid]
        found: list[Violation] = []
        if wrong:
            self.progress(f"witnesses in {len(wrong)} queues")
            wants = [_witnesses(report) for report in wrong]
            self.source.prepare(tuple(ops for ops, _ in wants), tuple(obs for _, obs in wants))
            for report, (ops, obs) in zip(wrong, wants, strict=True):
                found += self._named(report, ops, obs)
        return queue_log.verdict_of((report.judged for report in judged), found)

    def _named(self, report: QueueReport, of_ops: Want, of_obs: Want) -> list[Violation]:
        rows_max = self.settings.rows_max
        ops, obs = self.source.ops(of_ops, rows_max), self.source.obs(of_obs, rows_max)
        return queue_log.name_violations(
            report.judged,
            table_to_numpy(ops, OPS_COLUMNS),
            table_to_numpy(obs, OBS_COLUMNS),
            f"{report.topic}/{report.queue}",
            self.rows.appends.get(report.key, ()),
        )

    def consumer_offsets(self) -> Verdict:
        return consumer_offsets.check_table(self.rows.offsets)

    def total_queue(self) -> Verdict | None:
        if not self.rows.settled:
            return None
        if not self.rows.heads:
            return judge(total_queue.NAME, (), {}, looked_at=0)
        algebra = total_queue.add_up((report.key, report.home) for report in self.rows.reports)
        values = tuple(sorted({v for named in algebra.named.values() for v in named}))
        sends: dict[int, Operation] = {}
        if values:
            rows = [op for op in self.rows.ops(Want((("value", values),))) if op.f == F.SEND]
            # Of several attempts the one with most information counts.
            rows.sort(key=lambda op: (total_queue.KNOWN.index(op.outcome), op.op_id))
            sends = {op.value: op for op in rows}
            sends |= {op.value: op for ops in self.rows.appends.values() for op in ops}
        return total_queue.total_verdict(
            algebra, sends, self.rows.replicas.names[self.rows.replicas.chosen]
        )

    def replicas_(self) -> Verdict:
        found = replicas.check_heads(self.rows.states, self.rows.heads, settled=self.rows.settled)
        at_ns = {(head.node, head.topic, head.queue): head.at_ns for head in self.rows.heads}
        homes = [(r.key, r.home) for r in self.rows.reports if r.home.lost or r.home.differ]
        acked = self._acked_at(homes)
        found += replicas.held_violations(homes, self.rows.replicas.names, at_ns, acked)
        if self.rows.settled:
            found += replicas.check_ends(self.rows.states, self.rows.ends, found)
        return replicas.verdict_of(found, self.rows.states, self.rows.heads, self.rows.messages)

    def retention(self) -> Verdict | None:
        keeps, moves = self.settings.keeps, floors_of(self.source.nodes())
        if keeps is None or not (moves or self.rows.heads):
            return None
        named = [
            retention.Named(*report.key, *report.judged.first_kept)
            for report in self.rows.reports
            if report.judged.first_kept[0]
        ]
        named = retention.greatest((*named, *retention.named_by(self.rows.ops(OF_ANY_MEMBER))))
        return retention.check_floors(moves, self.rows.heads, keeps, named)

    def _acked_at(self, homes: list[tuple[Queue, Home]]) -> dict[tuple[str, int, int], Operation]:
        acked: dict[tuple[str, int, int], Operation] = {}
        for queue, home in homes:
            values = tuple(value for _, value, _, _ in home.lost)
            for op in self.rows.ops(Want((("value", values),), queue=queue)):
                if op.f == F.SEND and op.outcome == Outcome.OK:
                    acked[*queue, op.value] = op
        return acked

    def of_kind(self, checker: Any) -> Verdict | None:
        """Judge rows by themselves; *checker*: a module with a `check_history` for these."""
        rows = _of(self.rows.rest, *checker.OPERATIONS)
        if not rows:
            return None
        error_ns, settled = self.settings.clock_error_ns, self.rows.settled
        verdict: Verdict = checker.check_history(rows, drained=settled, clock_error_ns=error_ns)
        return verdict

    def filters(self) -> Verdict | None:
        if not self.rows.settled:
            return None
        return filters.check_source(self.source, self.settings.rows_max)

    def producer_order(self) -> Verdict | None:
        if not self.settings.idempotent:
            return None
        rows_max = self.settings.rows_max
        self.progress("the order of producers")
        lines = producer_order.Lines(self.source.ops(SENDS, rows_max))
        return lines.check(self.source.obs(Want((("value", lines.open_values()),)), rows_max))

    def availability(self) -> Verdict | None:
        if self.rows.record is None:
            return None
        rows = self.source.ops(EVERYTHING, self.settings.rows_max)
        return availability.check_table(rows, self.rows.record)

    def final_reads(self) -> Verdict | None:
        reads = final_reads.rows_of(self.rows.rest)
        if not self.rows.settled or not reads:
            return None
        begins: dict[Queue, int] = {}
        for head in self.rows.heads:
            key = (head.topic, head.queue)
            begins[key] = max(begins.get(key, 0), head.min_off)
        return final_reads.check(reads, self.rows.offsets, begins, self.rows.filled)

    # -- row by row ------------------------------------------------------------------------

    def delayed(self) -> Verdict:
        settings = self.settings
        sends = [op for op in self.rows.rest if op.f == F.SEND and op.due_ns != NOTHING]
        rows = [*sends, *_of(self.rows.rest, F.RECALL)]
        history = self.rows.sighted(rows, {op.value for op in sends})
        is_bounded = settings.late_quiet_max_ns is not None and self.rows.record is not None
        if is_bounded or settings.late_max_ns is not None:
            history.operations += self._late_reads(history)
        return delayed.check_history(
            history,
            clock_error_ns=settings.clock_error_ns,
            drained=self.rows.settled,
            late_max_ns=settings.late_max_ns,
            late_quiet_max_ns=settings.late_quiet_max_ns,
            record=self._record_with_stalls(),
            holes=self.rows.holes,
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
            self.progress(f"reads of {queue[0]}/{queue[1]}")
            rows = self.source.ops(
                Want((("f", delayed.READS),), queue=queue), self.settings.rows_max
            )
            reads += delayed.latest_before(rows, offs)
        return reads

    def contents(self) -> Verdict | None:
        compared = sum(op.cnt for op in final_reads.rows_of(self.rows.rest))
        rows = self.rows.ops(ALTERED)
        return contents.check(rows, compared) if rows or compared else None

    def batches(self) -> Verdict | None:
        """Judge over everything: a batch concerns all that was seen of its queue."""
        shared = self.rows.ops(SHARED)
        parents = tuple(sorted({op.parent_op_id for op in shared}))
        if not parents or not batches.batches_of(self.rows.ops(Want((("parent_op_id", parents),)))):
            return None
        rows_max = self.settings.rows_max
        tables = (self.source.ops(EVERYTHING, rows_max), self.source.obs(EVERYTHING, rows_max))
        history = history_of(*tables, _NO_EVENTS, self.source.nodes())
        return batches.check_history(history)

    def polls(self) -> Verdict | None:
        every = polls.polls_of(self.rows.rest)
        if not every:
            return None
        record = self._record_with_stalls()
        if record is None:
            return polls.check_history(self.rows.rest)
        in_vain = waits.poll_violations(every, self._sends_of, record)
        return polls.check_history(self.rows.rest, in_vain)

    def _record_with_stalls(self) -> FaultRecord | None:
        """Return the record for laws that demand an answer within seconds."""
        if self.rows.record is None:
            return None
        return with_stalls(self.rows.record, self.source.ops(SENDS, self.settings.rows_max))

    def _sends_of(self, queue: Queue) -> Any:
        sends = Want((("f", (int(F.SEND),)),), queue=queue)
        return self.source.ops(sends, self.settings.rows_max)

    def locks(self) -> Verdict | None:
        if not any(op.f in locks.OPERATIONS for op in self.rows.rest):
            return None
        settings = self.settings
        return locks.check_history(
            self.rows.rest, lease_ns=settings.lease_ns, clock_error_ns=settings.clock_error_ns
        )

    def pop(self) -> Verdict | None:
        if not any(op.f in pop.OPERATIONS for op in self.rows.rest):
            return None
        seen = self.rows.places(pop.received_values(self.rows.rest))
        return pop.check_history(
            self.rows.rest,
            clock_error_ns=self.settings.clock_error_ns,
            seen=seen,
            record=self._record_with_stalls(),
        )

    def steps(self) -> Verdict | None:
        rows = _of(self.rows.rest, *steps.OPERATIONS)
        return steps.check_history(rows) if rows else None

    def transactions(self) -> Verdict | None:
        rows = _of(self.rows.rest, *transactions.OPERATIONS)
        if not rows:
            return None
        settings = self.settings
        return transactions.check_history(
            self.rows.sighted(rows, set(transactions_of(rows))),
            drained=self.rows.settled,
            check_interval_ns=settings.check_interval_ns,
            checks_max=settings.checks_max,
            immunity_ns=settings.immunity_ns,
            clock_error_ns=settings.clock_error_ns,
            holes=self.rows.holes,
        )


CHECKS: Final[dict[str, Callable[[_Check], Verdict | None]]] = {
    queue_log.NAME: _Check.queue_log,
    consumer_offsets.NAME: _Check.consumer_offsets,
    delayed.NAME: _Check.delayed,
    replicas.NAME: _Check.replicas_,
    retention.NAME: _Check.retention,
    batches.NAME: _Check.batches,
    polls.NAME: _Check.polls,
    retries.NAME: lambda run: run.of_kind(retries),
    locks.NAME: _Check.locks,
    pop.NAME: _Check.pop,
    steps.NAME: _Check.steps,
    lifetimes.NAME: lambda run: run.of_kind(lifetimes),
    transactions.NAME: _Check.transactions,
    filters.NAME: _Check.filters,
    producer_order.NAME: _Check.producer_order,
    availability.NAME: _Check.availability,
    final_reads.NAME: _Check.final_reads,
    contents.NAME: _Check.contents,
    total_queue.NAME: _Check.total_queue,
}
"""Every check of a history, by the name of its checker. None: nothing of its kind is guaranteed.

A push group leaves a record of its own, beside the history; see `push_group`.
"""


def _witnesses(report: QueueReport) -> tuple[Want, Want]:
    """Return the rows of `ops` and of `obs` that name what is wrong with a queue."""
    wanted = queue_log.wanted_by(report.judged)
    among = (
        ("off", wanted.offs),
        ("value", wanted.values),
        ("op_id", wanted.op_ids),
        ("call_ns", wanted.calls),
        ("ret_ns", wanted.rets),
    )
    key = report.key
    return Want(among, queue=key), Want((("value", wanted.values),), queue=key)


def _verdict(name: str, check: Callable[[_Check], Verdict | None], run: _Check) -> Verdict | None:
    nothing = Verdict(name, "valid")
    verdict = checked(name, lambda: check(run) or nothing)
    return None if verdict is nothing else verdict


def _of(rows: Iterable[Operation], *fs: F) -> list[Operation]:
    return [op for op in rows if op.f in fs]
