"""Recalled messages in the checker of delayed ones; one planted anomaly each."""

import pytest

from dledger.jepsen_like.checkers.delayed import (
    DELIVERED_ERROR,
    NOT_DELIVERED,
    RECALLED,
    TOO_LATE_EARLY,
    check_history,
    latest_before,
)
from dledger.jepsen_like.history.columns import ops_table
from dledger.jepsen_like.history.operation import (
    F,
    History,
    Level,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
)
from tests.harness.rows import row


def timer(f: F, outcome: Outcome, call: int, value: int) -> Operation:
    return row(call, f, call, call + 1, outcome=outcome, topic="orders", value=value, due_ns=100)


def names(seen: list[int], *rows: Operation) -> list[str]:
    history = History(RunHeader("r"))
    history.operations = [timer(F.SEND, Outcome.OK, 1, 7), *rows]
    history.replica_reads = [ReplicaRead(500, "n0", "orders", 0, 0, tuple(seen))]
    return [violation.name for violation in check_history(history).violations]


@pytest.mark.parametrize(
    ("outcome", "seen", "found"),
    [
        (Outcome.OK, [], []),
        (Outcome.OK, [7], [RECALLED]),
        (Outcome.INFO, [], []),
        (Outcome.INFO, [7], []),
        (Outcome.FAIL, [7], []),
        (Outcome.FAIL, [], [NOT_DELIVERED]),
    ],
)
def test_recall_removes_its_message_and_no_other(
    outcome: Outcome, seen: list[int], found: list[str]
) -> None:
    assert names(seen, timer(F.RECALL, outcome, 50, 7)) == found


@pytest.mark.parametrize(("call", "found"), [(50, [TOO_LATE_EARLY]), (150, [])])
def test_already_delivered_only_after_its_time(call: int, found: list[str]) -> None:
    late = timer(F.RECALL, Outcome.FAIL, call, 7)
    late.err = DELIVERED_ERROR
    assert names([7], late) == found


def test_only_the_read_that_proves_most_is_taken() -> None:
    def read(op_id: int, call_ns: int, end: int, level: Level = Level.LINEARIZABLE) -> Operation:
        return row(op_id, F.MAX_OFFSET, call_ns, call_ns + 5, max_off=end, level=level)

    rows = [
        read(1, 10, 0),
        read(2, 30, 2),
        read(3, 20, 2),
        read(4, 15, 3),
        read(5, 90, 4),
        read(6, 99, 1, Level.LOCAL),
    ]
    table = ops_table("r", rows)
    assert [op.op_id for op in latest_before(table, [0])] == [1]
    assert [op.op_id for op in latest_before(table, [3, 2, 3])] == [2]
    assert [op.op_id for op in latest_before(table, [0, 3, 9])] == [1, 2, 5]
    assert latest_before(ops_table("r", rows[1:2]), [1]) == []
    assert latest_before(table, []) == []
    assert latest_before(ops_table("r", []), [4]) == []
