"""Times to live: what has expired is not delivered any more, and nothing else is passed over.

A `PERISHABLE` row sends *value* with a time to live of *cnt* ms, 0: none. A `LIVING` row is a read:
*status* names which (`Read`). One of what has not expired passed the offsets from *off* to
*max_off*; one of all, at the end, knows nothing of times. Each message that a read found has a row
of its own, which names the read in *txn*.

The time begins when the message is stored: not before its send was called, and not after the send
was answered, or the message was seen. So a read that was called too late for a message must not
have it, and one that had ended before its time was over must. What lies between proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, unique
from typing import Final

from jepsen_like.checkers.verdict import Verdict, Violation, judge
from jepsen_like.history.operation import NOTHING, F, Operation, Outcome

NAME: Final = "lifetimes"

EXPIRED: Final = "expired message delivered"
PASSED: Final = "living message passed over"
LOST: Final = "acknowledged perishable message lost"
TWICE: Final = "perishable message stored twice"
STRANGER: Final = "perishable message never sent"
REFUSED: Final = "refused perishable message stored"

OPERATIONS: Final = frozenset({F.PERISHABLE, F.LIVING})
REPORTED_MAX: Final = 8
MS: Final = 1_000_000


@unique
class Read(IntEnum):
    """What a row of a read is."""

    LIVING = 0
    """A read of what has not expired."""
    ALL = 1
    """A read of everything, when the run is over; *cnt* is 1 where it began at the beginning."""
    MESSAGE = 2
    """A message that the read *txn* found."""


_Place = tuple[str, int, int]


def check_history(
    operations: Iterable[Operation], *, clock_error_ns: int = 0, drained: bool = True
) -> Verdict:
    """Return the verdict over all messages with a time to live, and those sent beside them.

    Args:
        clock_error_ns: How far brokers' dates may be apart, and from the history's clock.
        drained: The run ended with a read of everything.
    """
    rows = sorted((op for op in operations if op.f in OPERATIONS), key=lambda op: op.op_id)
    sends = {op.value: op for op in rows if op.f == F.PERISHABLE}
    reads = [op for op in rows if op.f == F.LIVING and op.status != Read.MESSAGE]
    reads = [op for op in reads if op.outcome == Outcome.OK]
    found: dict[int, list[Operation]] = {op.op_id: [] for op in reads}
    places: dict[int, dict[_Place, Operation]] = {}
    stored_ns = {op.value: op.ret_ns for op in sends.values() if op.outcome == Outcome.OK}
    violations: list[Violation] = []
    for op in rows:
        if op.f != F.LIVING or op.status != Read.MESSAGE or op.txn not in found:
            continue
        found[op.txn].append(op)
        places.setdefault(op.value, {}).setdefault((op.topic, op.queue, op.off), op)
        stored_ns[op.value] = min(stored_ns.get(op.value, op.ret_ns), op.ret_ns)
    at: dict[_Place, int] = {}
    for value, where in sorted(places.items()):
        at |= dict.fromkeys(where, value)
        violations += _stored(sends.get(value), list(where.values()))
    judged = 0
    for read in reads:
        if read.status == Read.LIVING:
            judged += read.max_off - read.off
            violations += _expired(read, found[read.op_id], sends, stored_ns, clock_error_ns)
            violations += _passed(read, found[read.op_id], sends, at, clock_error_ns)
    ends = [op for op in reads if op.status == Read.ALL]
    if drained and ends and all(op.cnt for op in ends):
        there = {op.value for end in ends for op in found[end.op_id]}
        queues = {(op.topic, op.queue) for op in ends}
        violations += [
            _violation(LOST, op, f"value {op.value} was acknowledged, and is not there")
            for op in sends.values()
            if op.outcome == Outcome.OK and op.value not in there and (op.topic, op.queue) in queues
        ]
    violations.sort(key=lambda violation: (violation.at_ns, violation.operations, violation.name))
    counts = {
        "sends": len(sends),
        "reads": sum(op.status == Read.LIVING for op in reads),
        "seen": len(places),
        "judged": judged,
    }
    return judge(NAME, violations[:REPORTED_MAX], counts, looked_at=judged)


def _stored(send: Operation | None, seen: list[Operation]) -> list[Violation]:
    first = seen[0]
    if send is None:
        return [_violation(STRANGER, first, f"value {first.value} was sent by no client")]
    text = f"value {send.value} is at {first.queue}@{first.off}"
    if send.outcome == Outcome.FAIL:
        return [_violation(REFUSED, first, text, send)]
    if len(seen) > 1:
        return [_violation(TWICE, seen[1], f"{text} and {seen[1].queue}@{seen[1].off}", first)]
    return []


def _expired(
    read: Operation,
    found: list[Operation],
    sends: dict[int, Operation],
    stored_ns: dict[int, int],
    error_ns: int,
) -> list[Violation]:
    violations = []
    for op in found:
        send = sends.get(op.value)
        if send is None or not send.cnt:
            continue
        late_ns = read.call_ns - stored_ns[op.value] - send.cnt * MS - error_ns
        if late_ns > 0:
            text = f"value {op.value} came {late_ns / 1e6:.1f} ms after its {send.cnt} ms"
            violations.append(_violation(EXPIRED, read, text, send))
    return violations


def _passed(
    read: Operation,
    found: list[Operation],
    sends: dict[int, Operation],
    at: dict[_Place, int],
    error_ns: int,
) -> list[Violation]:
    violations = []
    there = {op.off for op in found}
    for off in range(read.off, read.max_off):
        value = at.get((read.topic, read.queue, off), NOTHING)
        send = sends.get(value)
        if off in there or send is None:
            continue
        left_ns = send.call_ns + send.cnt * MS - error_ns - read.ret_ns
        if not send.cnt or left_ns > 0:
            text = f"value {value} at {off} is not among what was found"
            if send.cnt:
                text += f", {left_ns / 1e6:.1f} ms before its {send.cnt} ms were over"
            violations.append(_violation(PASSED, read, text, send))
    return violations


def _violation(name: str, op: Operation, text: str, other: Operation | None = None) -> Violation:
    ids = (op.op_id,) if other is None else (op.op_id, other.op_id)
    return Violation(name, f"{op.topic}/{op.queue}", text, ids, at_ns=op.call_ns)
