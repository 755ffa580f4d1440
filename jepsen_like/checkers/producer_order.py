"""An idempotent producer's messages stand in each queue in the order in which it sent them.

Also those whose outcome it never learnt: once a later send is stored, an earlier one that is still
on its way is refused. Only for histories in which a producer sends one message (or batch) after
the other under values of its own that grow, and is never taken for another one: the upper bits of
a value name the producer. Delayed messages come when they are due and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from jepsen_like.checkers.verdict import Verdict, Violation, judge
from jepsen_like.history.operation import CLIENT_BITS, NOTHING, F, History, Operation, Outcome

NAME: Final = "producer_order"

OVERTAKEN: Final = "a later send overtook an earlier one"
REPORTED_MAX: Final = 8
"""Violations reported; one bug makes many."""

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


def overtaken(highest: Operation, op: Operation, places: tuple[int, int]) -> Violation:
    """Return that *op* stands before *highest*, which was sent before it.

    Args:
        places: Their offsets.
    """
    return Violation(
        OVERTAKEN,
        f"{op.topic}/{op.queue}",
        f"producer {op.value >> CLIENT_BITS} sent value {highest.value} before value {op.value}, "
        f"and they stand at {places[0]} and {places[1]}",
        (highest.op_id, op.op_id),
        at_ns=op.call_ns,
    )


def _places(history: History) -> dict[_Queue, dict[int, int]]:
    """Return where each value of a queue was acknowledged, or seen where nobody was told.

    Of several places the lowest, so that the order of the rows decides nothing.
    """
    acked: dict[_Queue, dict[int, int]] = {}
    seen: dict[_Queue, dict[int, int]] = {}
    for op in history.operations:
        is_told = op.f == F.SEND and op.outcome == Outcome.OK and op.due_ns == NOTHING
        if is_told and op.off != NOTHING:
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
