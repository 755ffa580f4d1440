"""Every guarantee judged row by row, without the columns: the verdict that the kernel must give."""

from __future__ import annotations

from functools import partial

from dledger.jepsen_like.checkers import (
    batches,
    consumer_offsets,
    contents,
    delayed,
    filters,
    lifetimes,
    locks,
    polls,
    pop,
    retention,
    retries,
    steps,
    transactions,
)
from dledger.jepsen_like.checkers.availability import NAME as AVAILABILITY
from dledger.jepsen_like.checkers.fault_record import ELECTION_NS, record_of, with_late_effect
from dledger.jepsen_like.checkers.final_reads import READER
from dledger.jepsen_like.checkers.verdict import Verdict, checked
from dledger.jepsen_like.history.operation import NOTHING, F, History, Outcome
from tests.oracles import (
    availability,
    final_reads,
    producer_order,
    queue_log,
    replicas,
    total_queue,
)
from tests.oracles import retention as retention_by_offsets
from tests.oracles.holes import holes_of


def check_row_wise(
    history: History,
    *,
    settled: bool = True,
    clock_error_ns: int = 0,
    lease_ns: int = locks.LEASE_NS,
    check_interval_ns: int = transactions.CHECK_INTERVAL_NS,
    checks_max: int = transactions.CHECKS_MAX,
    immunity_ns: int = 0,
    late_max_ns: int | None = None,
    idempotent: bool = False,
    election_ns: int = ELECTION_NS,
    late_quiet_max_ns: int | None = None,
    keeps: retention.Keeps | None = None,
    late_effect_ns: int = 0,
) -> list[Verdict]:
    """Return one verdict per checker; arguments as of `dledger.jepsen_like.checkers.all_checks`."""
    if late_effect_ns:
        history = with_late_effect(history, late_effect_ns)
    operations = history.operations
    verdicts = [
        checked(queue_log.NAME, lambda: queue_log.check_history(operations)),
        checked(consumer_offsets.NAME, lambda: consumer_offsets.check_history(operations)),
        checked(
            delayed.NAME,
            lambda: delayed.check_history(
                history,
                clock_error_ns=clock_error_ns,
                drained=settled,
                late_max_ns=late_max_ns,
                late_quiet_max_ns=late_quiet_max_ns,
                record=record_of(history.events, election_ns),
                holes=partial(holes_of, history),
            ),
        ),
        checked(
            replicas.NAME,
            lambda: replicas.check_history(history, settled=settled),
        ),
    ]
    if keeps is not None and (history.floors or history.replica_reads):
        verdicts.append(
            checked(retention.NAME, lambda: retention_by_offsets.check_history(history, keeps))
        )
    if batches.batches_of(operations):
        verdicts.append(checked(batches.NAME, lambda: batches.check_history(history)))
    if polls.polls_of(operations):
        verdicts.append(checked(polls.NAME, lambda: polls.check_history(operations)))
    if any(op.f in retries.OPERATIONS for op in operations):
        verdicts.append(
            checked(
                retries.NAME,
                lambda: retries.check_history(
                    operations, drained=settled, clock_error_ns=clock_error_ns
                ),
            )
        )
    if any(op.f in pop.OPERATIONS for op in operations):
        verdicts.append(
            checked(
                pop.NAME,
                lambda: pop.check_history(
                    operations,
                    clock_error_ns=clock_error_ns,
                    seen=_places(history),
                    record=record_of(history.events, election_ns),
                ),
            )
        )
    if any(op.f in steps.OPERATIONS for op in operations):
        verdicts.append(checked(steps.NAME, lambda: steps.check_history(operations)))
    if any(op.f in lifetimes.OPERATIONS for op in operations):
        verdicts.append(
            checked(
                lifetimes.NAME,
                lambda: lifetimes.check_history(
                    operations, clock_error_ns=clock_error_ns, drained=settled
                ),
            )
        )
    if any(op.f in locks.OPERATIONS for op in operations):
        verdicts.append(
            checked(
                locks.NAME,
                lambda: locks.check_history(
                    operations, lease_ns=lease_ns, clock_error_ns=clock_error_ns
                ),
            )
        )
    if any(op.f in transactions.OPERATIONS for op in operations):
        verdicts.append(
            checked(
                transactions.NAME,
                lambda: transactions.check_history(
                    history,
                    drained=settled,
                    check_interval_ns=check_interval_ns,
                    checks_max=checks_max,
                    immunity_ns=immunity_ns,
                    clock_error_ns=clock_error_ns,
                    holes=partial(holes_of, history),
                ),
            )
        )
    if settled and any(op.f == F.FILTERED for op in operations):
        verdicts.append(checked(filters.NAME, lambda: filters.check_history(history)))
    if idempotent:
        verdicts.append(checked(producer_order.NAME, lambda: producer_order.check_history(history)))
    nothing = Verdict(AVAILABILITY, "valid")
    answers = checked(
        AVAILABILITY,
        lambda: availability.check_history(history, election_ns=election_ns) or nothing,
    )
    if answers is not nothing:
        verdicts.append(answers)
    last = None if not settled else final_reads.check_history(history)
    if last is not None:
        verdicts.append(last)
    compared = sum(op.cnt for op in operations if op.group == READER and op.outcome == Outcome.OK)
    if compared or contents.altered(operations):
        verdicts.append(checked(contents.NAME, lambda: contents.check(operations, compared)))
    if settled:
        verdicts.append(checked(total_queue.NAME, lambda: total_queue.check_history(history)))
    return verdicts


def _places(history: History) -> dict[int, set[tuple[str, int, int]]]:
    """Return where acknowledged sends, pulls and replicas show each value."""
    places: dict[int, set[tuple[str, int, int]]] = {}
    for op in history.operations:
        if op.f == F.SEND and op.outcome == Outcome.OK and op.off != NOTHING:
            places.setdefault(op.value, set()).add((op.topic, op.queue, op.off))
        for at, value in enumerate(op.values):
            places.setdefault(value, set()).add((op.topic, op.queue, op.off + at))
    for read in history.replica_reads:
        for at, value in enumerate(read.values):
            places.setdefault(value, set()).add((read.topic, read.queue, read.min_off + at))
    return places
