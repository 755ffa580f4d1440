"""A receive that lasts is given what becomes free meanwhile.

A message is free from the end of a delivery until the receive that is given its next attempt is
called: its next attempt is known, so nothing else can have held it. A receive of the same group
that was answered before that, and that had lasted for `LATE_NS` beside the free message, waited in
vain: it had to be given it at once, whatever it was given in the end. So did the receive that is
given it, where it lasts as long beside it.

That is demanded where, by the record of faults, nothing was wrong, and no send was slow, and not of
groups that receive in order, whose messages wait for those ahead of them. A program may stand still
for a moment: one of a hundred receives that last so long is allowed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from dledger.jepsen_like.checkers.fault_record import FaultRecord
from dledger.jepsen_like.checkers.poll_waits import LATE_NS, more_than_a_few
from dledger.jepsen_like.checkers.pop_ends import MS_NS, Message, message_of
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome

IN_VAIN: Final = "receive waited in vain"
IN_ORDER_SUFFIX: Final = "-in-order"
"""Ends the names of groups that receive in order."""

_Line = tuple[str, str]
"""Group and topic."""
_Receive = tuple[int, int]  # process and call: each message of an answer is a row


class _Free(NamedTuple):
    """A message that was free from one instant to another, between two deliveries."""

    from_ns: int
    to_ns: int
    before: Operation


class _Spans:
    """Messages that were free, of one line."""

    def __init__(self, spans: Iterable[_Free]) -> None:
        ordered = sorted(spans, key=lambda span: (span.from_ns, span.to_ns))
        self._begins = [span.from_ns for span in ordered]
        self._longest = list(accumulate(ordered, self._later))

    @staticmethod
    def _later(one: _Free, other: _Free) -> _Free:
        return other if other.to_ns > one.to_ns else one

    def there(self, since_ns: int, until_ns: int) -> _Free | None:
        """Return a message that was free at *since_ns* and still at *until_ns*."""
        at = bisect_right(self._begins, since_ns)
        one = self._longest[at - 1] if at else None
        return one if one is not None and one.to_ns >= until_ns else None


def violations(
    rows: Iterable[Operation], record: FaultRecord, *, clock_error_ns: int = 0
) -> list[Violation]:
    """Return receives that waited in vain, if there are more than a few."""
    every = [op for op in rows if not op.group.endswith(IN_ORDER_SUFFIX)]
    free, late = _free(every, clock_error_ns)
    lasted, found = set[_Receive](), list[Violation]()
    for op in every:
        receive = (op.process, op.call_ns)
        is_answered = op.f == F.RECEIVE and op.outcome != Outcome.INFO
        if not is_answered or op.ret_ns < op.call_ns + LATE_NS or receive in lasted:
            continue
        lasted.add(receive)
        spans = free.get((op.group, op.topic))
        one = None if spans is None else spans.there(op.ret_ns - LATE_NS, op.ret_ns)
        one = one or late.get(receive)
        if one is not None and record.quiet_ns(one.from_ns, op.ret_ns) == op.ret_ns - one.from_ns:
            found.append(_violation(one, op))
    return more_than_a_few(found, len(lasted))


def _free(
    rows: list[Operation], clock_error_ns: int
) -> tuple[dict[_Line, _Spans], dict[_Receive, _Free]]:
    """Return when messages were free, by line, and of receives that were given one late which."""
    deliveries: dict[Message, list[Operation]] = {}
    changes: dict[Message, list[Operation]] = {}
    for op in rows:
        message = message_of(op)
        if op.f == F.RECEIVE and op.outcome == Outcome.OK and op.off != NOTHING:
            deliveries.setdefault(message, []).append(op)
        elif op.f == F.CHANGE_TIME and op.outcome != Outcome.FAIL:
            changes.setdefault(message, []).append(op)
    found: dict[_Line, list[_Free]] = {}
    late: dict[_Receive, _Free] = {}
    for message, every in deliveries.items():
        every.sort(key=lambda op: (op.cnt, op.call_ns))
        for first, second in pairwise(every):
            if second.cnt != first.cnt + 1:
                continue  # what no row has may have held it in between
            of_it = [op for op in changes.get(message, ()) if op.call_ns < second.ret_ns]
            if any(op.outcome == Outcome.INFO for op in of_it):
                continue
            ends = [op.ret_ns + op.status * MS_NS for op in (first, *of_it)]
            from_ns = max(ends) + clock_error_ns
            one = _Free(from_ns, second.call_ns, first)
            if from_ns < one.to_ns:
                found.setdefault(message[:2], []).append(one)
            if max(from_ns, one.to_ns) + LATE_NS <= second.ret_ns:
                late.setdefault((second.process, second.call_ns), one)
    return {line: _Spans(spans) for line, spans in found.items()}, late


def _violation(one: _Free, op: Operation) -> Violation:
    message = one.before
    free_s, lasted_s = (op.ret_ns - one.from_ns) / 1e9, (op.ret_ns - op.call_ns) / 1e9
    text = (
        f"offset {message.off} of queue {message.queue} was free for {free_s:.1f} s when a receive "
        f"that had lasted for {lasted_s:.1f} s came back"
    )
    subject = f"{op.group}@{op.topic}"
    return Violation(IN_VAIN, subject, text, (message.op_id, op.op_id), at_ns=op.ret_ns)
