"""Delayed messages: never early, not too late, exactly once into their queue, none lost.

A message that was recalled is never delivered; a recall with an unknown outcome leaves both open,
and one that is refused, because the message was delivered, is refused after its time only.

Early: an answer with the message returned before it was due, counted from the call of its send.
Late: a read was called too long after it was due, counted from the return of its send, and found
the queue to end before the place the message was given in the end. Both can only be too mild. Two
bounds: for all the time that passed, and for the part in which nothing was wrong by the record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Final

import numpy as np

from dledger.jepsen_like.checkers.fault_record import FaultRecord
from dledger.jepsen_like.checkers.retention import HolesOf, Missing, Queue, lost_of
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge, violation_of
from dledger.jepsen_like.history.columns import OBS, chosen, operations_of
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    F,
    History,
    Level,
    Operation,
    Outcome,
    sightings,
)

NAME: Final = "delayed"

EARLY: Final = "delivered early"
LATE: Final = "delivered late"
TWICE: Final = "delivered twice"
NOT_DELIVERED: Final = "delayed message lost"
ABORTED: Final = "aborted delayed message"
RECALLED: Final = "recalled message delivered"
TOO_LATE_EARLY: Final = "recall refused before its time"
DELIVERED_ERROR = "AlreadyDeliveredError"
"""What a recall ends with that comes too late."""

READS: Final = (int(F.PULL), int(F.MAX_OFFSET))
"""Operations that prove where a queue ended."""

_Place = tuple[str, int, int]
_Seen = tuple[int, _Place, int]
"""When a pull with the message returned, where it stood, and the pull."""


def check_history(
    history: History,
    *,
    clock_error_ns: int = 0,
    drained: bool = True,
    late_max_ns: int | None = None,
    late_quiet_max_ns: int | None = None,
    record: FaultRecord | None = None,
    holes: HolesOf | None = None,
) -> Verdict:
    """Return the verdict over the delayed sends of a history.

    Args:
        drained: The run ended with everything due and delivered, so what is missing is lost.
        late_max_ns: How late a message may come, time without a leader included; None: any.
        late_quiet_max_ns: How much of that time may have been quiet by *record*; None: any.
        record: Of the faults of the run; None: there is none, and that bound is not judged.
        holes: Of a queue that retention has cut; None: such a queue proves nothing.
    """
    sends = {op.value: op for op in history.operations if op.f == F.SEND and op.due_ns != NOTHING}
    recalls = [op for op in history.operations if op.f == F.RECALL and op.value in sends]
    found: list[Violation] = []
    places: dict[int, dict[_Place, int]] = {}
    first_seen: dict[int, _Seen] = {}
    for value, place, at_ns, op_id in sightings(history):
        if value in sends:
            places.setdefault(value, {}).setdefault(place, op_id)
            if op_id != NOTHING and (value not in first_seen or at_ns < first_seen[value][0]):
                first_seen[value] = (at_ns, place, op_id)
    found += _early(sends, first_seen, clock_error_ns)
    bounds = [NEVER, NEVER]
    if late_max_ns is not None:
        bounds[0] = late_max_ns + clock_error_ns
    if late_quiet_max_ns is not None and record is not None:
        bounds[1] = late_quiet_max_ns + clock_error_ns
    if min(bounds) < NEVER:
        found += _late(sends, places, history.operations, bounds[0], bounds[1], record)
    found += _twice_or_aborted(sends, places)
    found += _recalled(recalls, places, clock_error_ns)
    if drained:
        recalled = {op.value for op in recalls if op.outcome != Outcome.FAIL}
        missing: dict[Queue, list[Missing]] = {}
        for op in sends.values():
            if op.outcome == Outcome.OK and op.value not in places and op.value not in recalled:
                one = Missing(op.value, op.due_ns - clock_error_ns)
                missing.setdefault((op.topic, op.queue), []).append(one)
        lost = lost_of(missing, history.replica_reads, holes)
        for op in (op for value, op in sends.items() if value in lost):
            text = f"value {op.value} was acknowledged and never delivered"
            found.append(violation_of(NOT_DELIVERED, op.place, text, op))
    acked = sum(op.outcome == Outcome.OK for op in sends.values())
    late = [first_seen[value][0] - op.due_ns for value, op in sends.items() if value in first_seen]
    counts = {
        "sends": len(sends),
        "acknowledged": acked,
        "seen": len(places),
        "unknown_seen": sum(sends[value].outcome == Outcome.INFO for value in places),
        "recalled": sum(op.outcome == Outcome.OK for op in recalls),
        "late_ms_max": max(late, default=0) // 1_000_000,
    }
    return judge(NAME, found, counts, looked_at=acked + counts["unknown_seen"])


def _early(
    sends: dict[int, Operation], first_seen: dict[int, _Seen], clock_error_ns: int
) -> list[Violation]:
    found: list[Violation] = []
    for value, (at_ns, (topic, queue, _), op_id) in first_seen.items():
        send = sends[value]
        if at_ns < send.due_ns - clock_error_ns:
            text = f"value {value} came {(send.due_ns - at_ns) / 1e6:.1f} ms before it was due"
            pair = (send.op_id, op_id)
            found.append(Violation(EARLY, f"{topic}/{queue}", text, pair, at_ns=at_ns))
    return found


def _late(
    sends: dict[int, Operation],
    places: dict[int, dict[_Place, int]],
    operations: Iterable[Operation],
    late_max_ns: int,
    late_quiet_max_ns: int,
    record: FaultRecord | None,
) -> list[Violation]:
    ends: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for op in operations:
        is_read = op.f in (F.PULL, F.MAX_OFFSET) and op.outcome == Outcome.OK
        if is_read and op.max_off != NOTHING and op.level == Level.LINEARIZABLE:
            ends.setdefault((op.topic, op.queue), []).append((op.max_off, op.call_ns, op.op_id))
    # Of all reads that saw a queue end there or before, the one that was called last.
    last: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for queue, rows in ends.items():
        rows.sort()
        last[queue] = list(accumulate(((call, op_id) for _, call, op_id in rows), max))
    found: list[Violation] = []
    for value, where in places.items():
        send, (topic, queue_id, off) = sends[value], min(where)
        rows = ends.get((topic, queue_id), [])
        at = bisect_right(rows, off, key=lambda row: row[0])
        if send.outcome != Outcome.OK or at == 0:
            continue
        call_ns, op_id = last[topic, queue_id][at - 1]
        due_ns = send.ret_ns + send.due_ns - send.call_ns
        late_ns = call_ns - due_ns
        quiet_ns = record.quiet_ns(due_ns, call_ns) if record is not None and late_ns > 0 else 0
        if late_ns > late_max_ns or quiet_ns > late_quiet_max_ns:
            text = f"value {value} was not there {late_ns / 1e6:.1f} ms after it was due"
            if late_ns <= late_max_ns:
                text += f", and nothing was wrong for {quiet_ns / 1e6:.1f} ms of them"
            pair = (send.op_id, op_id)
            found.append(Violation(LATE, f"{topic}/{queue_id}", text, pair, at_ns=call_ns))
    return found


def _twice_or_aborted(
    sends: dict[int, Operation], places: dict[int, dict[_Place, int]]
) -> list[Violation]:
    found: list[Violation] = []
    for value, where in places.items():
        send = sends[value]
        witnesses = (send.op_id, *(op_id for op_id in where.values() if op_id != NOTHING))[:3]
        if len(where) > 1:
            shown = ", ".join(f"{topic}/{queue}@{off}" for topic, queue, off in sorted(where))
            found.append(Violation(TWICE, send.place, f"value {value} is at {shown}", witnesses))
        if send.outcome == Outcome.FAIL:
            text = f"value {value} was delivered, but its send certainly failed"
            found.append(Violation(ABORTED, send.place, text, witnesses))
    return found


def _recalled(
    recalls: Iterable[Operation], places: dict[int, dict[_Place, int]], clock_error_ns: int
) -> list[Violation]:
    found: list[Violation] = []
    for op in recalls:
        if op.outcome == Outcome.OK and op.value in places:
            seen = [op_id for op_id in places[op.value].values() if op_id != NOTHING]
            text, ids = f"value {op.value} was recalled, and delivered", (op.op_id, *seen)[:3]
            found.append(Violation(RECALLED, op.place, text, ids, at_ns=op.ret_ns))
        is_refused = op.outcome == Outcome.FAIL and op.err == DELIVERED_ERROR
        if is_refused and op.ret_ns < op.due_ns - clock_error_ns:
            text = f"value {op.value} was called delivered before it was due"
            found.append(violation_of(TOO_LATE_EARLY, op.place, text, op))
    return found


def latest_before(rows: Any, offs: Iterable[int]) -> list[Operation]:
    """Return, of reads that saw a queue end at an offset or before, the one called last.

    Args:
        rows: A table of reads of one queue.
        offs: The offsets; what no read proves of one is left out.
    """
    columns = {
        name: rows.column(name).to_numpy()
        for name in ("op_id", "outcome", "level", "call_ns", "max_off")
    }
    proves = np.flatnonzero(
        (columns["outcome"] == Outcome.OK)
        & (columns["level"] == Level.LINEARIZABLE)
        & (columns["max_off"] != NOTHING)
    )
    op_id, call, end = (columns[name][proves] for name in ("op_id", "call_ns", "max_off"))
    order = np.argsort(end, kind="stable")
    by_call = np.lexsort((op_id, call))
    rank = np.empty(len(proves), dtype=np.int64)
    rank[by_call] = np.arange(len(proves))
    last = np.maximum.accumulate(rank[order])
    wanted = np.unique(np.fromiter(offs, np.int64))
    place = np.searchsorted(end[order], wanted, side="right")
    found = np.unique(proves[by_call[last[place[place > 0] - 1]]])
    return operations_of(chosen(rows, found), OBS.empty_table())
