"""Lines of producers in their order, message by message."""

from __future__ import annotations

from collections.abc import Iterator

from dledger.jepsen_like.checkers.producer_order import NAME, REPORTED_MAX, overtaken
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import (
    CLIENT_BITS,
    NOTHING,
    F,
    History,
    Operation,
    Outcome,
)

__all__ = ["NAME", "check_history"]

_Queue = tuple[str, int]


def check_history(history: History) -> Verdict:
    """Return the verdict over every producer and queue of a history."""
    sends = [op for op in history.operations if op.f == F.SEND and op.due_ns == NOTHING]
    places = _places(history)
    lines: dict[tuple[_Queue, int], list[Operation]] = {}
    for op in sends:
        queue = (op.topic, op.queue)
        if op.value in places.get(queue, ()):
            lines.setdefault((queue, op.value >> CLIENT_BITS), []).append(op)
    violations: list[Violation] = []
    stored = 0
    for (queue, _), line in sorted(lines.items()):
        line.sort(key=lambda op: op.value)
        stored += len(line)
        there = places[queue]
        highest = line[0]
        for op in line[1:]:
            if there[op.value] > there[highest.value]:
                highest = op
            elif len(violations) < REPORTED_MAX:
                places_of_both = (there[highest.value], there[op.value])
                violations.append(overtaken(highest, op, places_of_both))
    counts = {"producers": len({producer for _, producer in lines}), "stored": stored}
    return judge(NAME, violations, counts, looked_at=stored)


def _places(history: History) -> dict[_Queue, dict[int, int]]:
    """Return where each value of a queue was acknowledged; seen, where it was not acknowledged.

    Of several places the lowest, so that the order of the rows decides nothing.
    """
    acked: dict[_Queue, dict[int, int]] = {}
    seen: dict[_Queue, dict[int, int]] = {}
    for op in history.operations:
        is_known = op.f == F.SEND and op.outcome == Outcome.OK and op.due_ns == NOTHING
        if is_known and op.off != NOTHING:
            _note(acked.setdefault((op.topic, op.queue), {}), op.value, op.off)
    for queue, offset, value in _sightings(history):
        _note(seen.setdefault(queue, {}), value, offset)
    queues = acked.keys() | seen.keys()
    return {queue: seen.get(queue, {}) | acked.get(queue, {}) for queue in queues}


def _note(places: dict[int, int], value: int, offset: int) -> None:
    places[value] = min(offset, places.get(value, offset))


def _sightings(history: History) -> Iterator[tuple[_Queue, int, int]]:
    for op in history.operations:
        if op.f == F.PULL and op.outcome == Outcome.OK:
            for place, value in enumerate(op.values):
                yield (op.topic, op.queue), op.off + place, value
    for read in history.replica_reads:
        for place, value in enumerate(read.values):
            if value != NOTHING:
                yield (read.topic, read.queue), read.min_off + place, value
