"""The part of one queue's history that shows a violation: times and offsets around witnesses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from jepsen_like.checkers.verdict import Violation
from jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome

ORDER_OPERATIONS_MAX: Final = 160
"""Operations drawn around the witnesses; with more of them the two that matter are hard to find."""

ORDER_QUEUES_MAX: Final = 4
"""Queues that get a picture of their own; one bug shows in many, and is the same in each."""


class Says(StrEnum):
    """What an operation states of its offsets."""

    SENT = "send acknowledged at"
    FOUND = "read found"
    END = "read saw the end at"


@dataclass(frozen=True, slots=True)
class Mark:
    """One operation in the picture.

    Attributes:
        op: The operation.
        says: What it states of its offsets.
        low: First offset it speaks of.
        high: Last one.
        is_witness: It is one of those that prove the violation.
    """

    op: Operation
    says: Says
    low: int
    high: int
    is_witness: bool


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """What to draw of one queue.

    Attributes:
        queue: ``topic/queue``.
        violation: The first one of that queue.
        marks: The nearest operations to its witnesses, in order of their calls.
        unanswered: Sends to it whose outcome is unknown, in order of their calls.
    """

    queue: str
    violation: Violation
    marks: tuple[Mark, ...]
    unanswered: tuple[Operation, ...] = ()


def orders_of(operations: Sequence[Operation], violations: Iterable[Violation]) -> list[QueueOrder]:
    """Return the queues to draw: those that violations name and that have a history."""
    first: dict[str, Violation] = {}
    for violation in violations:
        if violation.operations:
            first.setdefault(violation.subject, violation)
    of_queue: dict[str, list[Operation]] = {subject: [] for subject in first}
    chosen = {tuple(subject.rsplit("/", 1)): subject for subject in first if "/" in subject}
    for op in operations:
        subject = chosen.get((op.topic, str(op.queue)))
        if subject is not None and op.f in (F.SEND, F.PULL, F.MAX_OFFSET):
            of_queue[subject].append(op)
    found = [
        QueueOrder(
            subject,
            violation,
            _nearest(of_queue[subject], violation),
            tuple(op for op in of_queue[subject] if _is_unanswered(op)),
        )
        for subject, violation in first.items()
    ]
    return [order for order in found if any(mark.is_witness for mark in order.marks)][
        :ORDER_QUEUES_MAX
    ]


def _is_unanswered(op: Operation) -> bool:
    return op.f == F.SEND and op.outcome == Outcome.INFO


def _nearest(operations: Sequence[Operation], violation: Violation) -> tuple[Mark, ...]:
    witnesses = set(violation.operations)
    marks = [
        Mark(op, *statement, op.op_id in witnesses)
        for op in operations
        if (statement := _statement(op)) is not None
    ]
    times = [stamp for mark in marks if mark.is_witness for stamp in ends_of(mark.op)]

    def distance(mark: Mark) -> tuple[bool, int]:
        begin, end = ends_of(mark.op)
        near = min((max(begin - at, at - end, 0) for at in times), default=0)
        return (not mark.is_witness, near)

    kept = sorted(marks, key=distance)[:ORDER_OPERATIONS_MAX]
    return tuple(sorted(kept, key=lambda mark: mark.op.call_ns))


def ends_of(op: Operation) -> tuple[int, int]:
    """Return call and return; the call twice when it never returned."""
    return op.call_ns, op.call_ns if op.ret_ns == NEVER else op.ret_ns


def _statement(op: Operation) -> tuple[Says, int, int] | None:
    """Return what *op* states and of which offsets; None: nothing that can be drawn."""
    if op.outcome != Outcome.OK:
        return None
    if op.f == F.SEND:
        return None if op.off == NOTHING else (Says.SENT, op.off, op.off)
    if op.f == F.PULL and op.values:
        return (Says.FOUND, op.off, op.off + len(op.values) - 1)
    return None if op.max_off == NOTHING else (Says.END, op.max_off, op.max_off)
