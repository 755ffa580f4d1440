"""What a last client has read, as sets of offsets and slots."""

from __future__ import annotations

from dledger.jepsen_like.checkers import final_reads
from dledger.jepsen_like.checkers.final_reads import NAME, READER, REPORTED_MAX
from dledger.jepsen_like.checkers.transactions import SYSTEM_TOPICS
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import (
    NOTHING,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
)


def check_history(history: History) -> Verdict | None:
    """Return the verdict; None: no last client has read."""
    done = [op for op in history.operations if op.outcome == Outcome.OK]
    own = [op for op in done if op.group == READER]
    if not own:
        return None
    found: list[Violation] = []
    queues = sorted({(op.topic, op.queue) for op in own})
    for queue in queues:
        rows = [op for op in own if (op.topic, op.queue) == queue]
        last = max(op.process for op in rows)
        rows = [op for op in rows if op.process == last]
        held = [read for read in history.replica_reads if (read.topic, read.queue) == queue]
        found += _skipped(queue, rows, held) or _missing(queue, rows)
    filled = {
        (read.topic, read.queue)
        for read in history.replica_reads
        if read.values and read.topic not in SYSTEM_TOPICS
    }
    unread = [
        queue
        for queue in sorted(filled)
        if not any(
            op.f == F.MAX_OFFSET and op.process == max(o.process for o in own if _of(o) == queue)
            for op in own
            if _of(op) == queue
        )
    ]
    found += [final_reads.not_read(queue) for queue in unread[:REPORTED_MAX]]
    committed: dict[final_reads.Slot, int] = {}
    for op in done:
        slot = (op.group, op.topic, op.queue)
        if op.f == F.COMMIT:
            committed[slot] = min(committed.get(slot, op.op_id), op.op_id)
    readers = {op.process for op in own}
    fetched = {
        (op.group, op.topic, op.queue)
        for op in done
        if op.f == F.FETCH_COMMIT and op.process in readers
    }
    left = sorted(slot for slot in committed if slot not in fetched)
    found += [final_reads.not_asked(slot, committed[slot]) for slot in left[:REPORTED_MAX]]
    counts = {"queues": len(queues), "slots": len(committed)}
    return judge(NAME, found, counts, looked_at=len(queues) + len(committed))


def _of(op: Operation) -> tuple[str, int]:
    return op.topic, op.queue


def _skipped(
    queue: tuple[str, int], rows: list[Operation], held: list[ReplicaRead]
) -> list[Violation]:
    """Return the first offset that all replicas held later, and that comes before all pulls."""
    pulls = sorted((op for op in rows if op.f == F.PULL and op.cnt), key=lambda op: op.off)
    low = min((op.min_off for op in rows if op.min_off != NOTHING), default=0)
    for off in range(low, pulls[0].off if pulls and held else 0):
        if all(off >= read.min_off for read in held):
            return [final_reads.cut_short(queue, off, pulls[0])]
    return []


def _missing(queue: tuple[str, int], rows: list[Operation]) -> list[Violation]:
    """Return the first offset that no pull covers, between its neighbours or before the end."""
    pulls = sorted((op for op in rows if op.f == F.PULL and op.cnt), key=lambda op: op.off)
    there = {off for op in pulls for off in range(op.off, op.off + op.cnt)}
    low = min((op.min_off for op in rows if op.min_off != NOTHING), default=0)
    begin = pulls[0].off if pulls else low
    for off in range(begin, max(there, default=0)):
        if off not in there:
            before = [op for op in pulls if op.off + op.cnt <= off][-1]
            after = next(op for op in pulls if op.off > off)
            return [final_reads.cut_short(queue, off, before, after)]
    for asked in rows:
        reached = max(there, default=low - 1) + 1
        if asked.f == F.MAX_OFFSET and max(reached, low) < asked.max_off:
            return [final_reads.cut_short(queue, max(reached, low), asked, *pulls[-1:])]
    return []
