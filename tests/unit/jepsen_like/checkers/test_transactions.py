"""Transactions and batches: what unknown outcomes excuse, and what nothing does."""

from typing import Any

import pytest

from dledger.jepsen_like.checkers import batches, queue_log, total_queue, transactions
from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.checkers.transactions import DISCARD_TOPIC
from dledger.jepsen_like.history.operation import (
    NOTHING,
    Decision,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
)
from tests.harness.judged import judged
from tests.harness.rows import row

OK, INFO, FAIL = Outcome


def half(op_id: int, call: int, ret: int, outcome: Outcome = OK) -> Operation:
    return _row(op_id, F.HALF, call, ret, 7 if outcome is OK else NOTHING, outcome=outcome)


def end(
    op_id: int, call: int, ret: int, outcome: Outcome = OK, decision: Decision = Decision.COMMIT
) -> Operation:
    return _row(op_id, F.END_TRANSACTION, call, ret, outcome=outcome, decision=decision)


def check(op_id: int, at: int) -> Operation:
    return _row(op_id, F.CHECK, at, at)


def _row(op_id: int, f: F, call: int, ret: int, txn: int = 7, **fields: Any) -> Operation:
    return row(op_id, f, call, ret, process=op_id, value=100, txn=txn, **fields)


def pull(
    op_id: int, call: int, ret: int, *values: int, topic: str = "t", end: int = -1
) -> Operation:
    fields = {"topic": topic, "off": 0, "cnt": len(values), "max_off": end, "values": values}
    return row(op_id, F.PULL, call, ret, process=op_id, **fields)


def history(*rows: Operation, held: tuple[int, ...] = ()) -> History:
    made = History(RunHeader("by hand"))
    made.operations = list(rows)
    made.replica_reads = [ReplicaRead(10_000_000_000_000, "n0", "t", 0, 0, held)]
    return made


def names(*rows: Operation, held: tuple[int, ...] = ()) -> list[str]:
    verdict = transactions.check_history(history(*rows, held=held))
    return [violation.name for violation in verdict.violations]


def test_an_unknown_commit_may_have_happened_and_may_not() -> None:
    rows = [half(0, 0, 10), end(1, 20, 30, INFO)]
    assert names(*rows) == []
    assert names(*rows, pull(2, 20, 25, 100), held=(100,)) == []
    assert names(*rows, pull(2, 0, 19, 100), held=(100,)) == [transactions.HALF_VISIBLE]


def test_an_unknown_half_may_be_committed_after_a_check() -> None:
    rows = [half(0, 0, 10, INFO), check(1, 50), end(2, 60, 70)]
    assert names(*rows, held=(100,)) == []
    assert names(*rows) == [transactions.COMMIT_LOST]


def test_a_refused_commit_shows_nothing() -> None:
    rows = [half(0, 0, 10), end(1, 20, 30, FAIL)]
    assert names(*rows) == []
    assert names(*rows, held=(100,)) == [transactions.HALF_VISIBLE]


def test_acknowledged_rollback_hides_despite_unknown_commit() -> None:
    rows = [half(0, 0, 10), end(1, 20, 30, INFO), end(2, 20, 40, OK, Decision.ROLLBACK)]
    assert names(*rows) == []
    verdict = transactions.check_history(history(*rows, pull(3, 25, 35, 100)))
    assert [(v.name, v.operations) for v in verdict.violations] == [
        (transactions.ROLLED_BACK_VISIBLE, (2, 3))
    ]


def test_same_decision_twice_ok_other_refused() -> None:
    rows = [half(0, 0, 10), end(1, 20, 30), end(2, 40, 50)]
    assert names(*rows, end(3, 60, 70, FAIL, Decision.ROLLBACK), held=(100,)) == []
    assert names(*rows, end(3, 60, 70, INFO, Decision.ROLLBACK), held=(100,)) == []
    assert names(*rows, end(3, 60, 70, OK, Decision.ROLLBACK), held=(100,)) == [
        transactions.DECIDED_TWICE
    ]


def test_end_with_unknown_decides_nothing() -> None:
    rows = [half(0, 0, 10), end(1, 20, 30, OK, Decision.UNKNOWN)]
    assert names(*rows) == []
    assert names(*rows, held=(100,)) == [transactions.HALF_VISIBLE]


def test_check_may_arrive_one_interval_after_decision() -> None:
    rows = [half(0, 0, 10), end(1, 20, 30)]
    interval = transactions.CHECK_INTERVAL_NS
    assert names(*rows, check(2, 30 + interval), held=(100,)) == []
    assert names(*rows, check(2, 31 + interval), held=(100,)) == [transactions.CHECKED_DECIDED]
    rows[1] = end(1, 20, 30, INFO)
    assert names(*rows, check(2, 31 + interval), held=(100,)) == []


def test_immunity_is_counted_from_the_call_of_the_half() -> None:
    rows = history(half(0, 5, 10), check(1, 54))
    found = transactions.check_history(rows, immunity_ns=50).violations
    assert [violation.operations for violation in found] == [(0, 1)]
    assert transactions.check_history(rows, immunity_ns=49).is_valid


def test_immunity_of_a_half_message_is_its_own() -> None:
    rows = history(half(0, 5, 10), check(1, 54))
    rows.operations[0].due_ns = 55
    found = transactions.check_history(rows, immunity_ns=10).violations
    assert [violation.name for violation in found] == [transactions.CHECKED_EARLY]
    assert transactions.check_history(rows, immunity_ns=10, clock_error_ns=1).is_valid


def test_rows_without_value_found_by_half_offset() -> None:
    rows = [half(0, 0, 10), end(1, 20, 30)]
    rows[1].value = -1
    assert names(*rows, held=(100,)) == []
    assert names(*rows) == [transactions.COMMIT_LOST]
    rows[1].txn = 8  # leads nowhere: whose commit it was cannot be found
    assert names(*rows) == []


def test_what_was_given_up_is_not_lost_and_not_unexpected() -> None:
    asked = [check(1 + at, 50 + at) for at in range(transactions.CHECKS_MAX)]
    there = pull(99, 900, 910, 100, topic=DISCARD_TOPIC)
    made = history(half(0, 0, 10), *asked, there)
    made.replica_reads.append(ReplicaRead(10_000_000_000_000, "n0", DISCARD_TOPIC, 0, 0, (100,)))
    assert transactions.check_history(made).is_valid
    assert not judged(total_queue.NAME, made).violations
    made.operations.remove(there)
    made.replica_reads[-1].values = ()
    assert [v.name for v in transactions.check_history(made).violations] == [transactions.DROPPED]


def test_the_queue_sees_a_commit_between_its_call_and_its_return() -> None:
    rows = [half(0, 0, 10), end(1, 20, 30), pull(2, 40, 50, 100)]
    assert judged(queue_log.NAME, rows).is_valid
    missed = pull(3, 31, 32, end=0)
    stale = judged(queue_log.NAME, [*rows, missed])
    assert [(v.name, v.operations) for v in stale.violations] == [(queue_log.STALE_READ, (3, 1))]
    missed.call_ns = 30
    assert judged(queue_log.NAME, [*rows, missed]).is_valid
    early = judged(queue_log.NAME, [*rows, pull(4, 15, 19, 100)])
    assert [(v.name, v.operations) for v in early.violations] == [
        (queue_log.FROM_THE_FUTURE, (1, 4))
    ]


def test_uncommitted_half_message_explains_no_gap() -> None:
    rows = [half(0, 0, 10), pull(1, 20, 30, end=1)]
    rows[1].off = 1
    assert [v.name for v in judged(queue_log.NAME, rows).violations] == [queue_log.OF_NO_SEND]
    assert judged(queue_log.NAME, [*rows, end(2, 20, 30, INFO)]).is_valid


def test_transactions_no_verdict_without_a_guarantee() -> None:
    send = row(0, F.SEND, 0, 10, off=0, value=100)
    judged = {verdict.checker for verdict in check_everything(history(send, held=(100,)))}
    assert judged == {
        "queue_log", "consumer_offsets", "delayed", "replicas", "total_queue"
    }  # fmt: skip
    judged = {verdict.checker for verdict in check_everything(history(half(0, 0, 10)))}
    assert transactions.NAME in judged


def batch(*outcome_and_offsets: int, outcome: Outcome = OK) -> list[Operation]:
    return [
        row(at, F.SEND, 0, 10, parent_op_id=0, outcome=outcome, off=off, value=100 + at)
        for at, off in enumerate(outcome_and_offsets)
    ]


@pytest.mark.parametrize("outcome", [OK, INFO])
def test_a_batch_is_there_whole_or_not_at_all(outcome: Outcome) -> None:
    rows = batch(*((0, 1) if outcome is OK else (-1, -1)), outcome=outcome)
    whole = history(*rows, held=(100, 101))
    assert batches.check_history(whole).is_valid
    assert batches.check_history(history(*rows, pull(5, 0, 5, end=0), held=(100, 101))).is_valid
    torn = batches.check_history(history(*rows, held=(100,)))
    assert [violation.name for violation in torn.violations] == [batches.TORN]
    within = batches.check_history(history(*rows, pull(5, 0, 5, end=1), held=(100, 101)))
    assert [violation.operations for violation in within.violations] == [(0, 5)]


def test_a_batch_stands_together_and_in_order() -> None:
    unknown = batch(-1, -1, outcome=INFO)
    for held in ((101, 100), (100, 999, 101), (100, 999)):
        verdict = batches.check_history(history(*unknown, held=held))
        assert [violation.name for violation in verdict.violations] == [batches.SCATTERED]
    assert batches.check_history(history(*unknown, held=(999,))).is_valid


def test_attempts_that_follow_each_other_are_no_batch() -> None:
    first, second = batch(-1, 1)
    first.outcome, first.ret_ns, second.call_ns = FAIL, 4, 5
    assert batches.batches_of([first, second]) == []
