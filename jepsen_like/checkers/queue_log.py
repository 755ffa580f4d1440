"""Is the history of one queue that of one growing list? Exact, in linear time.

A send that returns offset o appends the o-th element; a read finds offsets present or absent. For
each offset, `lo` is the latest time at which its append had certainly not happened, `hi` the
earliest at which it certainly had. With values agreeing and offsets dense, the history is
linearizable iff no offset i ≤ j has lo[i] > hi[j]: one scatter each, one running max, one running
min. A failure names the two operations that prove it.

Unknown sends: one that a read found is bound to that offset. The others may fill offsets that no
known send occupies; taking both in order minimises every bound, so it is optimal.
A half message counts as a send that happened between the first call of a commit and the first
acknowledgement of one; see `half_messages`. Queues that the broker writes by itself are left out.
Equal stamps overlap, so the comparison is strict.

Spec: the argument is written out in docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from jepsen_like.checkers.half_messages import SYSTEM_TOPICS, transactions_of
from jepsen_like.checkers.verdict import Verdict, Violation, judge
from jepsen_like.history.operation import NEVER, NOTHING, F, Level, Operation, Outcome

NAME: Final = "queue_log"
REPORTED_MAX: Final = 8
"""Violations reported per kind and queue; one bug makes thousands."""

SEND_INVERTED: Final = "send order inverted"
STALE_READ: Final = "stale read"
NON_MONOTONIC: Final = "non-monotonic read"
FROM_THE_FUTURE: Final = "read from the future"
INCONSISTENT_OFFSETS: Final = "inconsistent offsets"
DUPLICATE: Final = "duplicate"
ABORTED_READ: Final = "aborted read"
PHANTOM: Final = "phantom value"
BY_NOBODY: Final = "slot written by nobody"
SELF_CONTRADICTION: Final = "read contradicts itself"
MIN_WENT_BACK: Final = "min offset went back"

_MINUS: Final = -(1 << 63)
I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class QueueColumns:
    """The operations on one queue as columns; what the kernel works on.

    Sends: `send_off` is `NOTHING` for an unknown offset and `send_ret` `NEVER` for an unknown
    outcome; `send_failed` marks certain failures. Reads: `found_off`/`found_count` say which
    offsets were found (count 0: none), `end` is the offset proved to be the length of the list at
    some instant of the read, or `NOTHING`. `seen_*` has one row per message found: which read,
    where, which value; a read that proves no times (a follower's) has rows here only.
    """

    send_id: I64
    send_call: I64
    send_ret: I64
    send_off: I64
    send_value: I64
    send_failed: npt.NDArray[np.bool_]
    read_id: I64
    read_call: I64
    read_ret: I64
    found_off: I64
    found_count: I64
    end: I64
    seen_id: I64
    seen_off: I64
    seen_value: I64


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
    reads: list[tuple[int, int, int, int, int, int]] = []
    seen: list[tuple[int, int, int]] = []
    for op in operations:
        if op.f == F.SEND:
            if op.outcome == Outcome.OK and op.off != NOTHING:
                row = (op.op_id, op.call_ns, op.ret_ns, op.off, op.value, False)
            else:
                failed = op.outcome == Outcome.FAIL
                row = (op.op_id, op.call_ns, NEVER, NOTHING, op.value, failed)
            sends.append(row)
        elif op.f == F.END_TRANSACTION:
            failed = op.outcome == Outcome.FAIL
            sends.append((op.op_id, op.call_ns, op.ret_ns, NOTHING, op.value, failed))
        elif op.f in (F.PULL, F.MAX_OFFSET) and op.outcome == Outcome.OK:
            count = len(op.values) if op.f == F.PULL else 0
            for place, value in enumerate(op.values):
                seen.append((op.op_id, op.off + place, value))
            if op.level == Level.LINEARIZABLE:
                reads.append((op.op_id, op.call_ns, op.ret_ns, op.off, count, op.max_off))
    send = np.array(sends, dtype=np.int64).reshape(-1, 6)
    read = np.array(reads, dtype=np.int64).reshape(-1, 6)
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
        reads += len(columns.read_id)
        facts += int(np.count_nonzero(columns.send_off != NOTHING)) + len(columns.read_id)
        violations += check_queue(columns, f"{topic}/{queue_id}")
        violations += _check_min_offsets(rows, f"{topic}/{queue_id}")
    counts = {"queues": len(by_queue), "sends": sends, "reads": reads}
    return judge(NAME, violations, counts, looked_at=facts)


_QUEUE_OPERATIONS = frozenset({F.SEND, F.PULL, F.MAX_OFFSET, F.MIN_OFFSET})


def check_reads(columns: QueueColumns, subject: str) -> list[Violation]:
    """Return reads with a found offset at or beyond the read's own end; a negative offset."""
    last = columns.found_off + columns.found_count
    wrong = (columns.end != NOTHING) & (columns.found_count > 0) & (last > columns.end)
    wrong |= (columns.found_count > 0) & (columns.found_off < 0)
    wrong |= columns.end < NOTHING
    return [
        Violation(
            SELF_CONTRADICTION,
            subject,
            f"found offsets {columns.found_off[at]} … {last[at] - 1} and says the queue ends at "
            f"{columns.end[at]}",
            (int(columns.read_id[at]),),
            at_ns=int(columns.read_ret[at]),
        )
        for at in np.flatnonzero(wrong)[:REPORTED_MAX].tolist()
    ]


def check_values(columns: QueueColumns, subject: str) -> list[Violation]:
    """Return contradictions: an offset has one value, a value one offset, for sends and reads."""
    acked = columns.send_off != NOTHING
    off = np.concatenate((columns.send_off[acked], columns.seen_off))
    value = np.concatenate((columns.send_value[acked], columns.seen_value))
    who = np.concatenate((columns.send_id[acked], columns.seen_id))
    found = [
        Violation(
            INCONSISTENT_OFFSETS,
            subject,
            f"offset {off[a]} holds value {value[a]} and value {value[b]}",
            (int(who[a]), int(who[b])),
        )
        for a, b in _disagreements(off, value)
    ]
    found += [
        Violation(
            DUPLICATE,
            subject,
            f"value {value[a]} is at offset {off[a]} and at offset {off[b]}",
            (int(who[a]), int(who[b])),
        )
        for a, b in _disagreements(value, off)
    ]
    order = np.argsort(columns.send_value, kind="stable")
    sent = columns.send_value[order]
    place = np.searchsorted(sent, columns.seen_value)
    known = np.zeros(len(columns.seen_value), dtype=np.bool_)
    inside = place < len(sent)
    known[inside] = sent[place[inside]] == columns.seen_value[inside]
    found += [
        Violation(
            PHANTOM,
            subject,
            f"offset {columns.seen_off[at]} holds value {columns.seen_value[at]}, which nobody "
            "sent to this queue",
            (int(columns.seen_id[at]),),
        )
        for at in _first_of_each(columns.seen_value, ~known)
    ]
    aborted = known.copy()
    aborted[known] = columns.send_failed[order[place[known]]]
    found += [
        Violation(
            ABORTED_READ,
            subject,
            f"offset {columns.seen_off[at]} holds value {columns.seen_value[at]}, whose send "
            "certainly failed",
            (int(columns.send_id[order[place[at]]]), int(columns.seen_id[at])),
        )
        for at in _first_of_each(columns.seen_value, aborted)
    ]
    return found


def _disagreements(key: I64, value: I64) -> list[tuple[int, int]]:
    """Return pairs of rows with equal key and different values."""
    order = np.lexsort((value, key))
    same_key = key[order[1:]] == key[order[:-1]]
    bad = np.flatnonzero(same_key & (value[order[1:]] != value[order[:-1]]))
    return [(int(order[at]), int(order[at + 1])) for at in bad[:REPORTED_MAX].tolist()]


def _first_of_each(value: I64, wanted: npt.NDArray[np.bool_]) -> list[int]:
    """Return the first row of each distinct value among the *wanted* ones."""
    rows = np.flatnonzero(wanted)
    _, first = np.unique(value[rows], return_index=True)
    places: list[int] = rows[np.sort(first)][:REPORTED_MAX].tolist()
    return places


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

    filled = np.zeros(length, dtype=np.bool_)
    filled[send_off[bound]] = True
    gaps = np.flatnonzero(~filled)
    spare = np.flatnonzero(unbound)
    spare = spare[np.argsort(columns.send_call[spare], kind="stable")][: len(gaps)]
    np.maximum.at(lo, gaps, columns.send_call[spare])

    earliest = np.maximum.accumulate(lo)
    latest = np.minimum.accumulate(hi[::-1])[::-1]
    bad = np.flatnonzero(earliest > latest)
    found: list[Violation] = []
    filler = dict(zip(gaps.tolist(), spare.tolist(), strict=True))
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
    return found


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
    low_send = np.flatnonzero((send_off == i) & (columns.send_call == lo))
    low_is_send = len(low_send) > 0 or (i in filler and int(columns.send_call[filler[i]]) == lo)
    if len(low_send):
        low = int(columns.send_id[low_send[0]])
    elif low_is_send:
        low = int(columns.send_id[filler[i]])
    else:
        missed = np.flatnonzero((columns.end == i) & (columns.read_call == lo))
        low = int(columns.read_id[missed[0]])
    high_send = np.flatnonzero((send_off == j) & (columns.send_ret == hi))
    if len(high_send):
        high = int(columns.send_id[high_send[0]])
    else:
        last = columns.found_off + columns.found_count - 1
        hit = (columns.found_count > 0) & (last == j) | (columns.end == j + 1)
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
        (columns.end, columns.found_off + columns.found_count, columns.send_off + 1)
    )
    ids = np.concatenate((columns.read_id, columns.read_id, columns.send_id))
    who = int(ids[int(np.argmax(ends))]) if len(ends) else NOTHING
    return [
        Violation(
            BY_NOBODY,
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
