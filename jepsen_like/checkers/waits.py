"""A poll that waits is answered when a message comes; a receive that lasts is given what is free.

A poll of a subscribed consumer that finds nothing is held until there is something, or its time is
over. One that was answered a second or more after a send to its queue, to the offset it asks for or
behind it, had been acknowledged, and that had lasted so long beside that message, waited in vain,
whatever it found in the end.

A message of POP is free from the end of a delivery until the receive that is given its next attempt
is called: its next attempt is known, so nothing else can have held it. A receive of the same group
that was answered before that, and that had lasted for `LATE_NS` beside the free message, waited in
vain: it had to be given it at once, whatever it was given in the end. So did the receive that is
given it, where it lasts as long beside it.

That is demanded where, by the record of faults, nothing was wrong, and no send was slow, and not of
groups that receive in order, whose messages wait for those ahead of them. A program may stand still
for a moment: one of a hundred that last so long is allowed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from dledger.jepsen_like.checkers.fault_record import FaultRecord
from dledger.jepsen_like.checkers.pop_ends import MS_NS, Message, message_of
from dledger.jepsen_like.checkers.verdict import Violation, violation_of
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome

POLL_IN_VAIN: Final = "poll waited in vain"
RECEIVE_IN_VAIN: Final = "receive waited in vain"

LATE_NS: Final = 1_000_000_000
"""How long a poll or a receive that is held may take to notice a message."""
IN_VAIN_LEAST: Final = 2
ALLOWED_PER_CENT: Final = 1

Queue = tuple[str, int]


def poll_violations(
    polls: Iterable[Operation], sends_of: Callable[[Queue], Any], record: FaultRecord
) -> list[Violation]:
    """Return polls that waited in vain, if there are more than a few."""
    lasted: dict[Queue, list[Operation]] = {}
    for op in polls:
        if op.ret_ns >= op.call_ns + LATE_NS:
            lasted.setdefault((op.topic, op.queue), []).append(op)
    found: list[Violation] = []
    for queue, rows in sorted(lasted.items()):
        sends = _Acknowledged(sends_of(queue))
        for op in rows:
            is_quiet = record.quiet_ns(op.call_ns, op.ret_ns) == op.ret_ns - op.call_ns
            send = sends.behind(op.off, op.ret_ns - LATE_NS) if is_quiet else None
            if send is not None:
                found.append(_poll_in_vain(send, op))
    return more_than_a_few(found, sum(map(len, lasted.values())))


def more_than_a_few(found: list[Violation], lasted: int) -> list[Violation]:
    """Return those that waited in vain, unless they are few of those that lasted."""
    if len(found) < IN_VAIN_LEAST or 100 * len(found) <= ALLOWED_PER_CENT * lasted:
        return []
    return found


class _Acknowledged:
    """The sends to a queue that were acknowledged with their place, in order of their answers."""

    def __init__(self, rows: Any) -> None:
        columns = {
            name: rows.column(name).to_numpy() for name in ("op_id", "outcome", "off", "ret_ns")
        }
        # The offset of a delayed message is that of another topic.
        is_plain = rows.column("due_ns").to_numpy() == NOTHING
        is_placed = (columns["outcome"] == Outcome.OK) & (columns["off"] != NOTHING) & is_plain
        at = np.flatnonzero(is_placed)
        at = at[np.argsort(columns["ret_ns"][at], kind="stable")]
        self._op_id, self._off = columns["op_id"][at], columns["off"][at]
        self._ret_ns = columns["ret_ns"][at]
        self._furthest = np.maximum.accumulate(self._off)

    def behind(self, off: int, until_ns: int) -> int | None:
        """Return the first send to *off* or behind it that was answered by *until_ns*."""
        count = int(np.searchsorted(self._ret_ns, until_ns, side="right"))
        at = int(np.searchsorted(self._furthest[:count], off))
        return int(self._op_id[at]) if at < count else None


def _poll_in_vain(send: int, op: Operation) -> Violation:
    text = (
        f"p{op.process} polled at {op.off} for {(op.ret_ns - op.call_ns) / 1e9:.1f} s, though a "
        "message there or behind had been acknowledged for a second or more when it was answered"
    )
    return Violation(POLL_IN_VAIN, op.slot, text, (send, op.op_id), at_ns=op.ret_ns)


# -- receives by POP ----------------------------------------------------------------------------

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


def receive_violations(
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
            found.append(_receive_in_vain(one, op))
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


def _receive_in_vain(one: _Free, op: Operation) -> Violation:
    message = one.before
    free_s, lasted_s = (op.ret_ns - one.from_ns) / 1e9, (op.ret_ns - op.call_ns) / 1e9
    text = (
        f"offset {message.off} of queue {message.queue} was free for {free_s:.1f} s when a receive "
        f"that had lasted for {lasted_s:.1f} s came back"
    )
    return violation_of(RECEIVE_IN_VAIN, f"{op.group}@{op.topic}", text, message, op)
