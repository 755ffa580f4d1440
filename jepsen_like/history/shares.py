"""Which workload each operation of a history belongs to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from jepsen_like.history.operation import NOTHING, F, Level, Operation

_OF: Final = {
    F.MAX_OFFSET: "queue-log",
    F.MIN_OFFSET: "queue-log",
    F.COMMIT: "offsets",
    F.FETCH_COMMIT: "offsets",
    F.LOCK: "locks",
    F.UNLOCK: "locks",
    F.HALF: "transactions",
    F.END_TRANSACTION: "transactions",
    F.CHECK: "transactions",
    F.RECALL: "timers",
    F.SEND_BACK: "retries",
    F.RETURNED: "retries",
    F.FILTERED: "filters",
}
LOCKERS: Final = "lockers"
"""The consumer group that commits under locks."""


def by_workload(
    operations: Sequence[Operation], *, levels_ms: Collection[int], idempotent: bool
) -> Counter[str]:
    """Return how many operations each workload had.

    Args:
        levels_ms: Delays of the levels; another delay is a timer's.
        idempotent: Producers were; then plain sends and batches are theirs.
    """
    shared = {op.parent_op_id for op in operations if op.parent_op_id != op.op_id}
    levels_ns = {ms * 1_000_000 for ms in levels_ms}
    return Counter(_names(operations, shared, levels_ns, idempotent))


def _names(
    operations: Iterable[Operation], shared: set[int], levels_ns: set[int], idempotent: bool
) -> Iterable[str]:
    for op in operations:
        if op.f == F.SEND:
            if op.due_ns != NOTHING:
                yield "delayed" if op.due_ns - op.call_ns in levels_ns else "timers"
            elif op.parent_op_id in shared:
                yield "batches"
            else:
                yield "idempotent" if idempotent else "queue-log"
        elif op.f == F.PULL:
            # Members of a push group leave a row for each message, as of a read that may be old.
            yield "push" if op.level == Level.LOCAL and op.cnt == 1 else "queue-log"
        elif op.group == LOCKERS:
            yield "locks"
        elif op.f in _OF:
            yield _OF[F(op.f)]
