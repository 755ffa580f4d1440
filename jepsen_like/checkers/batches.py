"""Batches: their messages stand together, in order, and appear at one instant.

A batch is one request: two rows `SEND` or more of one logical operation, called and returned at the
same instants. It is one entry of the log, so its messages have consecutive offsets, in its order,
and no read sees the queue end within it; times alone cannot show that.

Where a batch stands is known as soon as one of its messages is: acknowledged, pulled or on a
replica. A value of another send on one of its offsets, or one of its own elsewhere, breaks it up. A
batch with unknown outcome is whole or not there at all. Delayed messages are no batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import NOTHING, F, History, Level, Operation, Outcome

NAME: Final = "batches"

TORN: Final = "batch partly visible"
SCATTERED: Final = "batch not consecutive"

_Queue = tuple[str, int]
_Sighting = tuple[int, int, int]
"""Offset, value, op id; `NOTHING` for a replica."""


def batches_of(operations: Iterable[Operation]) -> list[list[Operation]]:
    """Return the batches of a history that may have been stored, each in its order."""
    groups: dict[tuple[int, int, int, int], list[Operation]] = {}
    for op in operations:
        if op.f == F.SEND and op.due_ns == NOTHING and op.outcome != Outcome.FAIL:
            key = (op.parent_op_id, op.call_ns, op.ret_ns, op.outcome)
            groups.setdefault(key, []).append(op)
    return [sorted(rows, key=lambda op: op.op_id) for rows in groups.values() if len(rows) > 1]


def check_history(history: History) -> Verdict:
    """Return the verdict over the batches of a history."""
    batches = batches_of(history.operations)
    wanted = {(rows[0].topic, rows[0].queue) for rows in batches}
    sightings = _sightings(history, wanted)
    place_of = {
        queue: {value: (off, who) for off, value, who in reversed(seen)}
        for queue, seen in sightings.items()
    }
    value_at: dict[_Queue, dict[int, dict[int, int]]] = {}
    for queue, seen in sightings.items():
        for off, value, who in seen:
            value_at.setdefault(queue, {}).setdefault(off, {}).setdefault(value, who)
    ends = _ends(history, wanted)
    found: list[Violation] = []
    for rows in batches:
        queue = (rows[0].topic, rows[0].queue)
        base = _base(rows, place_of.get(queue, {}))
        if base is None:
            continue
        problem = _scattered(rows, base, place_of.get(queue, {}), value_at.get(queue, {}))
        problem = problem or _torn(rows, base, ends.get(queue, []))
        found += [] if problem is None else [problem]
    counts = {"batches": len(batches), "messages": sum(map(len, batches))}
    return judge(NAME, found, counts, looked_at=len(batches))


def _sightings(history: History, wanted: set[_Queue]) -> dict[_Queue, list[_Sighting]]:
    seen: dict[_Queue, list[_Sighting]] = {queue: [] for queue in wanted}
    for op in history.operations:
        queue = (op.topic, op.queue)
        if op.outcome != Outcome.OK or queue not in wanted:
            continue
        if op.f == F.SEND and op.off != NOTHING:
            seen[queue].append((op.off, op.value, op.op_id))
        elif op.f == F.PULL:
            seen[queue] += [(op.off + at, value, op.op_id) for at, value in enumerate(op.values)]
    for read in history.replica_reads:
        if (read.topic, read.queue) in wanted:
            seen[read.topic, read.queue] += [
                (read.min_off + at, value, NOTHING) for at, value in enumerate(read.values)
            ]
    return seen


def _ends(history: History, wanted: set[_Queue]) -> dict[_Queue, list[tuple[int, int]]]:
    """Return where reads saw each queue end, sorted, and the operation."""
    ends: dict[_Queue, list[tuple[int, int]]] = {}
    for op in history.operations:
        is_end = op.f in (F.PULL, F.MAX_OFFSET) and op.outcome == Outcome.OK
        if is_end and op.max_off != NOTHING and op.level == Level.LINEARIZABLE:
            ends.setdefault((op.topic, op.queue), []).append((op.max_off, op.op_id))
    for read in history.replica_reads:
        end = read.min_off + len(read.values)
        ends.setdefault((read.topic, read.queue), []).append((end, NOTHING))
    return {queue: sorted(rows) for queue, rows in ends.items() if queue in wanted}


def _base(rows: list[Operation], place_of: dict[int, tuple[int, int]]) -> int | None:
    """Return the offset of the first message, as the first one seen proves it."""
    for index, op in enumerate(rows):
        if op.value in place_of:
            return place_of[op.value][0] - index
    return None


def _scattered(
    rows: list[Operation],
    base: int,
    place_of: dict[int, tuple[int, int]],
    value_at: dict[int, dict[int, int]],
) -> Violation | None:
    first = next(op for op in rows if op.value in place_of)
    for index, op in enumerate(rows):
        off, who = place_of.get(op.value, (base + index, NOTHING))
        text = f"value {op.value} of the batch at offset {base} is at {off}"
        if off == base + index:
            others = {v: w for v, w in value_at.get(off, {}).items() if v != op.value}
            if not others:
                continue
            who = next(iter(others.values()))
            text = f"offset {off} of the batch at offset {base} holds value {next(iter(others))}"
        witnesses = tuple(dict.fromkeys(i for i in (first.op_id, who) if i != NOTHING))
        return Violation(SCATTERED, op.place, text, witnesses, at_ns=rows[0].call_ns)
    return None


def _torn(rows: list[Operation], base: int, ends: list[tuple[int, int]]) -> Violation | None:
    """The first end beyond the batch's first message must not be before its last."""
    at = bisect_right(ends, base, key=lambda end: end[0])
    if at == len(ends) or ends[at][0] >= base + len(rows):
        return None
    end, who = ends[at]
    text = f"the batch at offsets {base} … {base + len(rows) - 1} was there up to {end - 1} only"
    witnesses = (rows[0].op_id,) if who == NOTHING else (rows[0].op_id, who)
    return Violation(
        TORN, f"{rows[0].topic}/{rows[0].queue}", text, witnesses, at_ns=rows[0].call_ns
    )
