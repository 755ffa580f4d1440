"""The log of each queue judged from rows: one array per bound, no chunks, no second pass.

The argument stands in `jepsen_like/checkers/queue_log.py`, which names what both editions find.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger.jepsen_like.checkers.kernel.facts import I64, REPORTED_MAX
from dledger.jepsen_like.checkers.queue_log import (
    FROM_THE_FUTURE,
    MIN_WENT_BACK,
    NAME,
    NON_MONOTONIC,
    OF_NO_SEND,
    SEND_INVERTED,
    STALE_READ,
    Bound,
    QueueColumns,
    check_reads,
    check_values,
    time_violation,
)
from dledger.jepsen_like.checkers.transactions import SYSTEM_TOPICS, transactions_of
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Level, Operation, Outcome

__all__ = ["NAME", "check_history"]

_MINUS: Final = -(1 << 63)


def columns_of(operations: Iterable[Operation], *, queue: tuple[str, int]) -> QueueColumns:
    """Return the columns of *queue* from rows; rows of other queues are ignored."""
    return _columns(_by_queue(operations).get(queue, ()))


def _by_queue(operations: Iterable[Operation]) -> dict[tuple[str, int], list[Operation]]:
    """Return the rows of each queue; of a transaction, the append it may have led to."""
    rows = list(operations)
    appends = (one.as_append() for one in transactions_of(rows).values())
    by_queue: dict[tuple[str, int], list[Operation]] = {}
    for op in (*(op for op in rows if op.f in _QUEUE_OPERATIONS), *appends):
        if op is not None and op.topic and op.queue != NOTHING and op.topic not in SYSTEM_TOPICS:
            by_queue.setdefault((op.topic, op.queue), []).append(op)
    return by_queue


def _columns(operations: Iterable[Operation]) -> QueueColumns:
    sends: list[tuple[int, int, int, int, int, bool]] = []
    reads: list[tuple[int, int, int, int, int, int, int]] = []
    seen: list[tuple[int, int, int]] = []
    for op in operations:
        if op.f == F.SEND:
            if op.outcome == Outcome.OK and op.off != NOTHING:
                row = (op.op_id, op.call_ns, op.ret_ns, op.off, op.value, False)
            else:
                failed = op.outcome == Outcome.FAIL
                is_there = op.outcome == Outcome.OK and op.due_ns == NOTHING
                ret_ns = op.ret_ns if is_there else NEVER
                row = (op.op_id, op.call_ns, ret_ns, NOTHING, op.value, failed)
            sends.append(row)
        elif op.f == F.END_TRANSACTION:
            failed = op.outcome == Outcome.FAIL
            sends.append((op.op_id, op.call_ns, op.ret_ns, NOTHING, op.value, failed))
        elif op.f in (F.PULL, F.MAX_OFFSET, F.MIN_OFFSET) and op.outcome == Outcome.OK:
            count = len(op.values) if op.f == F.PULL else 0
            for place, value in enumerate(op.values):
                seen.append((op.op_id, op.off + place, value))
            if op.level == Level.LINEARIZABLE:
                bounds = (op.off, count, op.max_off, op.min_off)
                reads.append((op.op_id, op.call_ns, op.ret_ns, *bounds))
    send = np.array(sends, dtype=np.int64).reshape(-1, 6)
    read = np.array(reads, dtype=np.int64).reshape(-1, 7)
    look = np.array(seen, dtype=np.int64).reshape(-1, 3)
    return QueueColumns(
        send_id=send[:, 0],
        send_call=send[:, 1],
        send_ret=send[:, 2],
        send_off=send[:, 3],
        send_value=send[:, 4],
        send_failed=send[:, 5].astype(np.bool_),
        read_id=read[:, 0],
        read_call=read[:, 1],
        read_ret=read[:, 2],
        found_off=read[:, 3],
        found_count=read[:, 4],
        end=read[:, 5],
        low=read[:, 6],
        seen_id=look[:, 0],
        seen_off=look[:, 1],
        seen_value=look[:, 2],
    )


def check_queue(columns: QueueColumns, subject: str = "") -> list[Violation]:
    """Return the violations of one queue; empty means linearizable.

    Values first: when they disagree, times would only blame innocent operations, so the list then
    has the disagreements alone.
    """
    found = [*check_reads(columns, subject), *check_values(columns, subject)]
    if found:
        return found
    return _check_times(columns, subject)


def check_history(operations: Iterable[Operation]) -> Verdict:
    """Return the verdict over every queue of a history: linearizability is local to a queue."""
    by_queue = _by_queue(operations)
    violations: list[Violation] = []
    facts = sends = reads = 0
    for (topic, queue_id), rows in sorted(by_queue.items()):
        columns = _columns(rows)
        sends += len(columns.send_id)
        its = sum(_is_read(op) for op in rows)
        reads += its
        facts += int(np.count_nonzero(columns.send_off != NOTHING)) + its
        violations += check_queue(columns, f"{topic}/{queue_id}")
        violations += _check_min_offsets(rows, f"{topic}/{queue_id}")
    counts = {"queues": len(by_queue), "sends": sends, "reads": reads}
    return judge(NAME, violations, counts, looked_at=facts)


def _is_read(op: Operation) -> bool:
    is_current = op.outcome == Outcome.OK and op.level == Level.LINEARIZABLE
    return is_current and op.f in (F.PULL, F.MAX_OFFSET)


_QUEUE_OPERATIONS = frozenset({F.SEND, F.PULL, F.MAX_OFFSET, F.MIN_OFFSET})


def _bind(columns: QueueColumns) -> tuple[I64, npt.NDArray[np.bool_]]:
    """Return the offset of each send, reads taken into account, and which are still unbound."""
    off = columns.send_off.copy()
    if len(columns.seen_value) and len(off):
        values, first = np.unique(columns.seen_value, return_index=True)
        place = np.minimum(np.searchsorted(values, columns.send_value), len(values) - 1)
        hit = (values[place] == columns.send_value) & (off == NOTHING) & ~columns.send_failed
        off[hit] = columns.seen_off[first[place[hit]]]
    return off, (off == NOTHING) & ~columns.send_failed


def _check_times(columns: QueueColumns, subject: str) -> list[Violation]:
    send_off, unbound = _bind(columns)
    bound = send_off != NOTHING
    reads_found = columns.found_count > 0
    reads_end = columns.end != NOTHING
    length = 0
    for offsets in (
        send_off[bound] + 1,
        columns.seen_off + 1,
        (columns.found_off + columns.found_count)[reads_found],
        columns.end[reads_end],
        columns.low,
    ):
        if len(offsets):
            length = max(length, int(offsets.max()))
    attempts = int(np.count_nonzero(bound)) + int(np.count_nonzero(unbound))
    if length > attempts:
        return _nobody(columns, send_off, attempts, length, subject)

    lo = np.full(length + 1, _MINUS, dtype=np.int64)
    hi = np.full(length + 1, NEVER, dtype=np.int64)
    np.maximum.at(lo, send_off[bound], columns.send_call[bound])
    np.minimum.at(hi, send_off[bound], columns.send_ret[bound])
    # Of a range found only its last offset matters: the suffix minimum carries it down.
    last_found = (columns.found_off + columns.found_count - 1)[reads_found]
    np.minimum.at(hi, last_found, columns.read_ret[reads_found])
    np.maximum.at(lo, columns.end[reads_end], columns.read_call[reads_end])
    not_empty = columns.end > 0
    np.minimum.at(hi, columns.end[not_empty] - 1, columns.read_ret[not_empty])
    is_cut = columns.low > 0
    np.minimum.at(hi, columns.low[is_cut] - 1, columns.read_ret[is_cut])

    filled = np.zeros(length, dtype=np.bool_)
    filled[send_off[bound]] = True
    gaps = np.flatnonzero(~filled)
    spare = np.flatnonzero(unbound)
    spare = spare[np.argsort(columns.send_call[spare], kind="stable")]
    if len(gaps) > len(spare):
        filled_by = length - len(gaps) + len(spare)
        return _nobody(columns, send_off, filled_by, length, subject)
    absent: list[int] = []
    if (columns.send_ret[spare] != NEVER).any():
        spare, absent = _fill(columns, spare, gaps, lo, hi)
    spare = spare[: len(gaps)]
    np.maximum.at(lo, gaps, columns.send_call[spare])

    earliest = np.maximum.accumulate(lo)
    latest = np.minimum.accumulate(hi[::-1])[::-1]
    bad = np.flatnonzero(earliest > latest)
    found: list[Violation] = []
    filler = dict(zip(gaps.tolist(), spare.tolist(), strict=False))
    explained = NOTHING
    for at in bad.tolist():
        if at <= explained:
            continue
        i = int(np.argmax(lo[: at + 1]))
        j = at + int(np.argmin(hi[at:]))
        found.append(_witness(columns, send_off, filler, i, j, int(lo[i]), int(hi[j]), subject))
        explained = j
        if len(found) == REPORTED_MAX:
            break
    i = int(np.argmax(lo))
    is_late = [at for at in absent if columns.send_ret[at] < lo[i]]
    for at in sorted(is_late, key=lambda at: (columns.send_ret[at], columns.send_id[at])):
        if len(found) < REPORTED_MAX:
            low, low_is_send = _low_of(columns, send_off, filler, i, int(lo[i]))
            lower = Bound(int(lo[i]), i, low, low_is_send)
            upper = Bound(int(columns.send_ret[at]), length, int(columns.send_id[at]), True)
            found.append(time_violation(subject, lower, upper))
    return found


def _fill(columns: QueueColumns, spare: I64, gaps: I64, lo: I64, hi: I64) -> tuple[I64, list[int]]:
    """Return which send fills each gap, and acknowledged ones that none was left for, or too late.

    Of those that were called before a gap must have been filled the one that returned first.
    """
    earliest = np.maximum.accumulate(lo)
    latest = np.minimum.accumulate(hi[::-1])[::-1]
    left, chosen, absent = spare.tolist(), list[int](), list[int]()
    reached = _MINUS
    for gap in gaps.tolist():
        ready = [at for at in left if columns.send_call[at] <= latest[gap]] or left[:1]
        best = min(ready, key=lambda at: (columns.send_ret[at], columns.send_call[at], at))
        left.remove(best)
        chosen.append(best)
        reached = max(reached, int(earliest[gap]), int(columns.send_call[best]))
        if columns.send_ret[best] < reached:
            absent.append(best)
    absent += [at for at in left if columns.send_ret[at] != NEVER]
    return np.array(chosen, dtype=np.int64), absent


def _low_of(
    columns: QueueColumns, send_off: I64, filler: dict[int, int], i: int, lo: int
) -> tuple[int, bool]:
    """Return the operation that set lo[i], and whether it is a send."""
    low_send = np.flatnonzero((send_off == i) & (columns.send_call == lo))
    if len(low_send):
        return int(columns.send_id[low_send[0]]), True
    if i in filler and int(columns.send_call[filler[i]]) == lo:
        return int(columns.send_id[filler[i]]), True
    missed = np.flatnonzero((columns.end == i) & (columns.read_call == lo))
    return int(columns.read_id[missed[0]]), False


def _witness(
    columns: QueueColumns,
    send_off: I64,
    filler: dict[int, int],
    i: int,
    j: int,
    lo: int,
    hi: int,
    subject: str,
) -> Violation:
    """Name the two operations that set lo[i] and hi[j], and with them the anomaly."""
    low, low_is_send = _low_of(columns, send_off, filler, i, lo)
    high_send = np.flatnonzero((send_off == j) & (columns.send_ret == hi))
    if len(high_send):
        high = int(columns.send_id[high_send[0]])
    else:
        last = columns.found_off + columns.found_count - 1
        hit = (columns.found_count > 0) & (last == j) | (columns.end == j + 1)
        hit |= columns.low == j + 1
        high = int(columns.read_id[np.flatnonzero(hit & (columns.read_ret == hi))[0]])
    high_is_send = len(high_send) > 0
    low_text = f"the send of offset {i} was called" if low_is_send else f"a read missed offset {i}"
    high_text = (
        f"the send of offset {j} had returned" if high_is_send else f"a read had found offset {j}"
    )
    name = {
        (True, True): SEND_INVERTED,
        (False, True): STALE_READ,
        (False, False): NON_MONOTONIC,
        (True, False): FROM_THE_FUTURE,
    }[low_is_send, high_is_send]
    late_us = (lo - hi) / 1000
    return Violation(
        name, subject, f"{low_text} {late_us:,.1f} µs after {high_text}", (low, high), at_ns=lo
    )


def _nobody(
    columns: QueueColumns, send_off: I64, attempts: int, length: int, subject: str
) -> list[Violation]:
    """The queue is longer than there were sends that may have succeeded."""
    ends = np.concatenate(
        (columns.end, columns.found_off + columns.found_count, columns.send_off + 1, columns.low)
    )
    ids = np.concatenate((columns.read_id, columns.read_id, columns.send_id, columns.read_id))
    who = int(ids[int(np.argmax(ends))]) if len(ends) else NOTHING
    return [
        Violation(
            OF_NO_SEND,
            subject,
            f"the queue has {length} messages, but only {attempts} sends can have succeeded",
            () if who == NOTHING else (who,),
        )
    ]


def _check_min_offsets(operations: Iterable[Operation], subject: str) -> list[Violation]:
    """The first offset kept never goes back in real time."""
    facts = sorted(
        (op.ret_ns, op.call_ns, op.min_off, op.op_id)
        for op in operations
        if op.outcome == Outcome.OK and op.min_off != NOTHING and op.level == Level.LINEARIZABLE
    )
    calls = sorted((call, low, op_id) for _, call, low, op_id in facts)
    found: list[Violation] = []
    best, best_id, at = NOTHING, NOTHING, 0
    for call, low, op_id in calls:
        while at < len(facts) and facts[at][0] < call:
            if facts[at][2] > best:
                best, best_id = facts[at][2], facts[at][3]
            at += 1
        if low < best and len(found) < REPORTED_MAX:
            found.append(
                Violation(
                    MIN_WENT_BACK,
                    subject,
                    f"the first offset kept was {best} and is {low} for a later read",
                    (best_id, op_id),
                    at_ns=call,
                )
            )
    return found
