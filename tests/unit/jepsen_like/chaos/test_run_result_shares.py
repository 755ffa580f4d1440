"""Which workload an operation belongs to."""

from __future__ import annotations

from jepsen_like.chaos.run_result import LOCKERS, by_workload
from jepsen_like.history.operation import NOTHING, F, Level, Operation, Outcome
from jepsen_like.workloads.lockers import GROUP


def row(op_id: int, f: F, **fields: object) -> Operation:
    op = Operation(op_id, op_id, 1, NOTHING, f, Outcome.OK, 10, 20)
    for name, value in fields.items():
        setattr(op, name, value)
    return op


def test_each_operation_counts_for_one_workload() -> None:
    second_ns = 1_000_000_000
    rows = [
        row(0, F.SEND),
        row(1, F.SEND),
        row(2, F.SEND, parent_op_id=1),
        row(3, F.SEND, due_ns=10 + second_ns),
        row(4, F.SEND, due_ns=11 + second_ns),
        row(5, F.RECALL, due_ns=11 + second_ns),
        row(6, F.PULL, cnt=3),
        row(7, F.PULL, cnt=1, level=Level.LOCAL),
        row(8, F.COMMIT, group="consumers-1"),
        row(9, F.COMMIT, group=LOCKERS, token=4),
        row(10, F.LOCK, group=LOCKERS),
        row(11, F.HALF),
        row(12, F.RETURNED),
        row(13, F.FILTERED),
    ]
    shares = by_workload(rows, levels_ms=(1_000,), idempotent=True)
    assert shares == {
        "idempotent": 1,
        "batches": 2,
        "delayed": 1,
        "timers": 2,
        "queue-log": 1,
        "push": 1,
        "offsets": 1,
        "locks": 2,
        "transactions": 1,
        "retries": 1,
        "filters": 1,
    }
    assert by_workload(rows[:1], levels_ms=(), idempotent=False) == {"queue-log": 1}


def test_lockers_are_known_by_their_group() -> None:
    assert GROUP == LOCKERS
