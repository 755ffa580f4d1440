"""The rows of each transaction, put together; what its half message may become in its queue.

The value of the half message names a transaction, since it survives what an offset does not: an
unknown outcome of the half, and a half message that is stored again for a check. A row without
a value is looked up by the offset its half was acknowledged at. Rows that lead nowhere are left
out: they prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from jepsen_like.history.operation import NEVER, NOTHING, Decision, F, Operation, Outcome

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
DONE_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
DISCARD_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
"""Where a half message ends whose producer never decides it."""
SYSTEM_TOPICS: Final = frozenset({HALF_TOPIC, DONE_TOPIC, DISCARD_TOPIC})
"""Queues the broker itself writes: no client's send explains what is in them."""

OPERATIONS: Final = frozenset({F.HALF, F.END_TRANSACTION, F.CHECK})


@dataclass(slots=True)
class Transaction:
    """One half message and its ends.

    Attributes:
        value: Of the half message.
        half: Its row; None when there is none.
        ends: Decisions, in the order of the rows, "unknown" left out.
        checks: The broker's questions, stamped when they reached the producer.
    """

    value: int
    half: Operation | None = None
    ends: list[Operation] = field(default_factory=list)
    checks: list[Operation] = field(default_factory=list)

    def ended(self, decision: Decision, *, only_acknowledged: bool = False) -> list[Operation]:
        """Return the ends with *decision* that may have counted; or that certainly did."""
        return [
            op
            for op in self.ends
            if op.decision == decision
            and (op.outcome == Outcome.OK if only_acknowledged else op.outcome != Outcome.FAIL)
        ]

    def as_append(self) -> Operation | None:
        """Return what a queue sees of it: a send without an offset, as a row of `END_TRANSACTION`.

        It cannot be there before its first commit was called, and is there when the first
        acknowledged commit has returned. None when no client tried to commit it: then
        nothing may be there. A transaction that was certainly not committed is a failed send.
        """
        half = self.half
        if half is None:
            return None
        commits = self.ended(Decision.COMMIT)
        acknowledged = self.ended(Decision.COMMIT, only_acknowledged=True)
        refusals = [] if acknowledged else self.ended(Decision.ROLLBACK, only_acknowledged=True)
        if not commits:
            refusals += [op for op in self.ends if op.decision == Decision.COMMIT]
        if half.outcome == Outcome.FAIL:
            refusals = [half]
        if refusals:
            return _append(refusals[0], half, Outcome.FAIL, refusals[0].call_ns, NEVER)
        if not commits:
            return None
        called = min(op.call_ns for op in commits)
        if not acknowledged:
            first = min(commits, key=lambda op: op.call_ns)
            return _append(first, half, Outcome.INFO, called, NEVER)
        done = min(acknowledged, key=lambda op: op.ret_ns)
        return _append(done, half, Outcome.OK, called, done.ret_ns)


def _append(
    witness: Operation, half: Operation, outcome: Outcome, call_ns: int, ret_ns: int
) -> Operation:
    return Operation(
        witness.op_id, witness.op_id, witness.process, witness.node, F.END_TRANSACTION, outcome,
        call_ns, ret_ns, half.topic, half.queue, NOTHING, value=half.value, txn=half.txn,
    )  # fmt: skip


def transactions_of(operations: Iterable[Operation]) -> dict[int, Transaction]:
    """Return the transactions of a history by the value of their half messages."""
    rows = [op for op in operations if op.f in OPERATIONS]
    every: dict[int, Transaction] = {}
    value_of: dict[int, int] = {}
    for op in rows:
        if op.f == F.HALF:
            every[op.value] = Transaction(op.value, op)
            if op.outcome == Outcome.OK and op.txn != NOTHING:
                value_of.setdefault(op.txn, op.value)
    for op in rows:
        value = op.value if op.value != NOTHING else value_of.get(op.txn)
        if op.f == F.HALF or value is None:
            continue
        known = every.setdefault(value, Transaction(value))
        if op.f == F.CHECK:
            known.checks.append(op)
        elif op.decision != Decision.UNKNOWN:
            known.ends.append(op)
    return every


def sends_of(operations: Iterable[Operation]) -> list[Operation]:
    """Return everything that may have put a value into a queue: sends, and ends as appends."""
    rows = list(operations)
    appends = (one.as_append() for one in transactions_of(rows).values())
    return [op for op in rows if op.f == F.SEND] + [op for op in appends if op is not None]
