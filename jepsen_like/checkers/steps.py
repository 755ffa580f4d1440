"""Exactly-once steps: each message read by step has its output once, and none that was not passed.

A `STEP` leads its group in a queue from offset *off* to *max_off*, and sends one output for each
message from *min_off* on; what is between *off* and *min_off* retention had removed. A step that
read several queues has a row for each, with the first in *txn*. A `STEP_FOUND` is the output that
the step of operation *txn* sent for the message at *off*. One without an offset states that the
group has committed *max_off*; its *cnt* is 1 where outputs were read from their beginning.

Everything is exact: nothing depends on times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from typing import Final

from dledger.jepsen_like.checkers.verdict import (
    REPORTED_MAX,
    Verdict,
    Violation,
    judge,
    violation_of,
)
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome

NAME: Final = "steps"

LOST: Final = "message below the committed offset has no output"
TWICE: Final = "message has its output twice"
AHEAD: Final = "output of a message that is not committed"
IN_PARTS: Final = "step stored in parts"
NOT_STORED: Final = "step answered as stored is not there"
REFUSED: Final = "step answered as not stored is there"
OVERLAP: Final = "two stored steps have messages in common"
STRANGER: Final = "output of no step"

OPERATIONS: Final = frozenset({F.STEP, F.STEP_FOUND})

_Slot = tuple[str, str, int]


def check_history(operations: Iterable[Operation]) -> Verdict:
    """Return the verdict over all steps; without a final read, over what was answered."""
    slots: dict[_Slot, _Judged] = {}
    looked_at = 0
    for op in operations:
        if op.f in OPERATIONS:
            looked_at += op.f == F.STEP
            slot = (op.group, op.topic, op.queue)
            slots.setdefault(slot, _Judged(slot)).take(op)
    found = _in_parts(list(slots.values()))
    for _, judged in sorted(slots.items()):
        found += judged.violations()
    every = [judged for _, judged in sorted(slots.items())]
    counts = {
        "steps": looked_at,
        "stored": sum(judged.stored for judged in every),
        "overtaken": sum(judged.overtaken for judged in every),
        "outputs": sum(len(judged.outputs) for judged in every),
    }
    return judge(NAME, found, counts, looked_at=looked_at)


def _in_parts(every: list[_Judged]) -> list[Violation]:
    """Find steps with outputs of one queue, and none of another one's messages."""
    if not all(judged.head is not None and judged.head.cnt for judged in every if judged.steps):
        return []
    there = {op.txn for judged in every for op in judged.outputs}
    rows: dict[int, list[Operation]] = {}
    for judged in every:
        for op in judged.steps.values():
            if op.txn != NOTHING and op.max_off > op.min_off:
                rows.setdefault(op.txn, []).append(op)
    found = []
    for ops in rows.values():
        stored = [op for op in ops if op.op_id in there]
        missing = [op for op in ops if op.op_id not in there]
        if stored and missing:
            op = missing[0]
            text = f"from {op.off} to {op.max_off}: there is only the output of another queue"
            found.append(violation_of(IN_PARTS, op.slot, text, op, stored[0]))
    return found


class _Judged:
    """The steps of one group in one queue."""

    def __init__(self, slot: _Slot) -> None:
        group, topic, queue = slot
        self.subject = f"{group}@{topic}/{queue}"
        self.steps: dict[int, Operation] = {}
        self.outputs: list[Operation] = []
        self.head: Operation | None = None
        self.stored = 0
        self.overtaken = 0

    def take(self, op: Operation) -> None:
        """Take a row of the slot."""
        if op.f == F.STEP:
            self.steps[op.op_id] = op
            self.stored += op.outcome == Outcome.OK
            self.overtaken += op.outcome == Outcome.FAIL
        elif op.outcome == Outcome.OK and op.off == NOTHING:
            self.head = op
        elif op.outcome == Outcome.OK:
            self.outputs.append(op)

    def violations(self) -> list[Violation]:
        """Return what is wrong: at most a few of each kind."""
        found = self._stored_twice()
        if self.head is not None:
            by_offset: dict[int, list[Operation]] = {}
            by_step: dict[int, list[Operation]] = {}
            for op in self.outputs:
                by_offset.setdefault(op.off, []).append(op)
                by_step.setdefault(op.txn, []).append(op)
            found += self._wrong_steps(self.head, by_step)
            found += self._wrong_messages(self.head, by_offset)
        return found

    def _violation(self, name: str, text: str, *rows: Operation) -> Violation:
        return violation_of(name, self.subject, text, *rows)

    def _stored_twice(self) -> list[Violation]:
        there = {op.txn for op in self.outputs}
        stored = [
            op
            for op in self.steps.values()
            if op.max_off > op.off and (op.outcome == Outcome.OK or op.op_id in there)
        ]
        stored.sort(key=lambda op: (op.off, op.max_off, op.op_id))
        found, widest = [], None
        for first, second in pairwise(stored):
            widest = first if widest is None or first.max_off > widest.max_off else widest
            if second.off < widest.max_off:
                text = " and ".join(f"from {op.off} to {op.max_off}" for op in (widest, second))
                found.append(self._violation(OVERLAP, text, widest, second))
        return found

    def _wrong_steps(self, head: Operation, by_step: dict[int, list[Operation]]) -> list[Violation]:
        found = []
        for op_id, outputs in by_step.items():
            step = self.steps.get(op_id)
            if step is None or any(not step.min_off <= op.off < step.max_off for op in outputs):
                text = f"offset {outputs[0].off} names operation {op_id}, which did not send it"
                found.append(self._violation(STRANGER, text, outputs[0]))
        for step in self.steps.values():
            outputs = by_step.get(step.op_id, [])
            there = {op.off for op in outputs}
            every = (off for off in range(step.min_off, step.max_off) if off not in there)
            missing = next(every, NOTHING)  # a wrong end may be far away
            ends = f"from {step.off} to {step.max_off}"
            if step.outcome == Outcome.FAIL and outputs:
                found.append(self._violation(REFUSED, ends, step, outputs[0]))
            elif step.outcome == Outcome.OK and step.max_off > head.max_off:
                text = f"{ends}, and {head.max_off} is committed"
                found.append(self._violation(NOT_STORED, text, step, head))
            elif head.cnt and missing != NOTHING and step.outcome == Outcome.OK and not outputs:
                found.append(self._violation(NOT_STORED, f"{ends}, no output", step))
            elif head.cnt and missing != NOTHING and outputs:
                text = f"{ends}: there is no output of {missing}"
                found.append(self._violation(IN_PARTS, text, step, outputs[0]))
        return found

    def _wrong_messages(
        self, head: Operation, by_offset: dict[int, list[Operation]]
    ) -> list[Violation]:
        found = []
        for off, outputs in sorted(by_offset.items()):
            if len(outputs) > 1:
                found.append(self._violation(TWICE, f"offset {off}", *outputs[:2]))
            if off >= head.max_off:
                text = f"offset {off}, and {head.max_off} is committed"
                found.append(self._violation(AHEAD, text, outputs[0], head))
        if head.cnt:
            for off in islice(self._unexplained(head.max_off, by_offset), REPORTED_MAX):
                text = f"offset {off}, and {head.max_off} is committed"
                found.append(self._violation(LOST, text, head))
        return found

    def _unexplained(self, end: int, by_offset: Mapping[int, object]) -> Iterator[int]:
        """Yield the offsets before *end* without an output that no step skipped."""
        skipped = sorted(
            (step.off, step.min_off)
            for step in self.steps.values()
            if step.outcome != Outcome.FAIL and step.off < step.min_off
        )
        at = 0
        for low, high in (*skipped, (end, end)):
            yield from (off for off in range(at, min(low, end)) if off not in by_offset)
            at = max(at, high)
