"""Offsets removed before any row named their message, one by one; the send that fits, by search."""

from __future__ import annotations

from collections.abc import Sequence

from dledger.jepsen_like.checkers.retention import Hole, Missing
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    F,
    History,
    Level,
    Outcome,
)


def holes_of(history: History, queue: tuple[str, int]) -> list[Hole]:
    """Return the holes of a queue."""
    begins = [read.min_off for read in history.replica_reads if (read.topic, read.queue) == queue]
    rows = [
        op
        for op in history.operations
        if (op.topic, op.queue) == queue and op.outcome == Outcome.OK
    ]
    sends = [op for op in rows if op.f == F.SEND and op.due_ns == NOTHING]
    pulls = [op for op in rows if op.f == F.PULL]
    reads = [op for op in rows if op.f in (F.PULL, F.MAX_OFFSET) and op.max_off != NOTHING]
    found: list[Hole] = []
    for off in range(min(begins, default=0)):
        if any(op.off == off for op in sends):
            continue
        if any(op.off <= off < op.off + len(op.values) for op in pulls):
            continue
        past = [op.ret_ns for op in sends if op.off > off]
        past += [op.ret_ns for op in pulls if op.values and op.off + len(op.values) > off]
        past += [op.ret_ns for op in reads if op.max_off > off]
        short = [op.call_ns for op in reads if op.max_off <= off and op.level == Level.LINEARIZABLE]
        found.append(Hole(max(short, default=-NEVER), min(past, default=NEVER)))
    return found


def most_placed(missing: Sequence[Missing], holes: Sequence[Hole]) -> int:
    """Return how many messages find a hole at most, by paths that make one more fit."""
    fits = [
        [
            place
            for place, hole in enumerate(holes)
            if one.after_ns <= hole.before_ns and hole.after_ns <= one.before_ns
        ]
        for one in missing
    ]
    owner: dict[int, int] = {}

    def place_one(number: int, tried: set[int]) -> bool:
        for place in fits[number]:
            if place not in tried:
                tried.add(place)
                if place not in owner or place_one(owner[place], tried):
                    owner[place] = number
                    return True
        return False

    return sum(place_one(number, set()) for number in range(len(missing)))
