"""Messages received one by one (POP): one consumer at a time, never after the acknowledgement.

Every message that a `RECEIVE` found is a row of its own, a *delivery*: `cnt` is its attempt, `txn`
its receipt, `status` the invisible time in ms. `ACK` and `CHANGE_TIME` name the receipt they used;
the latter has the new one in `min_off`. A row without an offset states that its group has received
everything of the queue from *min_off* to *max_off*.

A delivery lasts until its call + invisible time at least, less by as much as brokers' clocks may be
apart. A later attempt must not have returned before that; a change of the time moves that end, and
one of unknown outcome perhaps. Receives of unknown outcome hand messages out that no row has:
attempts may be missing, but never come twice, and never go back.

Effects decide, not calls: receives that wait at once overlap always. A receipt that was accepted,
and a later attempt, contradict each other in either order. In order, the next message is not handed
out alone before the one ahead is acknowledged, or its last attempt over.

A message is that of its queue: where sends, pulls or replicas show its value, one of them shows it
at the offset at which it was handed out.

How messages end, and which receipts count, is in `pop_ends`; what receives that last are given, in
`waits`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Final

from dledger.jepsen_like.checkers import pop_ends, waits
from dledger.jepsen_like.checkers.fault_record import FaultRecord
from dledger.jepsen_like.checkers.pop_ends import (
    MS_NS,
    Message,
    deliveries_of,
    message_of,
    violation_of,
)
from dledger.jepsen_like.checkers.verdict import REPORTED_MAX, Verdict, Violation, judge
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome

NAME: Final = "pop"

TWICE: Final = "message handed out twice as one attempt"
EARLY: Final = "message handed out again before its time"
AGAIN: Final = "acknowledged message handed out again"
OLD_RECEIPT: Final = pop_ends.OLD_RECEIPT
WENT_BACK: Final = "attempts went back"
OUT_OF_ORDER: Final = "message handed out before the one ahead of it"
LOST: Final = "message never handed out"
OTHER: Final = "another message at its place"

IN_ORDER_SUFFIX: Final = waits.IN_ORDER_SUFFIX
OPERATIONS: Final = frozenset({F.RECEIVE, F.ACK, F.CHANGE_TIME, F.GIVEN_UP})

Seen = Mapping[int, Collection[tuple[str, int, int]]]
"""Value: the places, as topic, queue and offset, that others show it at."""


@dataclass(slots=True)
class _Delivery:
    """A message handed out; *end_ns*: until when it is out at least."""

    op: Operation
    changes: list[Operation] = field(default_factory=list)
    end_ns: int = 0


class _Deliveries:
    """All deliveries of a history.

    Attributes:
        every: By message, in the order of attempts.
        of_receipt: By message and receipt; a change of the time gives another one.
    """

    def __init__(
        self, rows: Iterable[Operation], changes: list[Operation], clock_error_ns: int
    ) -> None:
        self.every: dict[Message, list[_Delivery]] = {}
        self.of_receipt: dict[tuple[Message, int], _Delivery] = {}
        for op in rows:
            self.every.setdefault(message_of(op), []).append(_Delivery(op))
        for message, deliveries in self.every.items():
            deliveries.sort(key=lambda one: (one.op.cnt, one.op.call_ns))
            self.of_receipt.update({(message, one.op.txn): one for one in deliveries})
        for op in sorted(changes, key=lambda change: change.call_ns):
            known = self.of_receipt.get((message_of(op), op.txn))
            if known is not None:
                known.changes.append(op)
                if op.outcome == Outcome.OK:
                    self.of_receipt[message_of(op), op.min_off] = known
        for deliveries in self.every.values():
            _end(deliveries, clock_error_ns)

    def violations(self, used: list[Operation]) -> Iterator[Violation]:
        """Yield what attempts and *used* receipts contradict."""
        uses: dict[Message, list[Operation]] = {}
        for op in used:
            uses.setdefault(message_of(op), []).append(op)
        for message, deliveries in self.every.items():
            for first, second in pairwise(deliveries):
                pair = (first.op, second.op)
                if first.op.cnt == second.op.cnt:
                    yield violation_of(TWICE, message, *pair)
                elif second.op.ret_ns < first.op.call_ns:
                    yield violation_of(WENT_BACK, message, second.op, first.op)
                elif second.op.ret_ns < first.end_ns:
                    yield violation_of(EARLY, message, *pair)
                if first.op.value != second.op.value:
                    yield violation_of(OTHER, message, *pair)
            for use in uses.get(message, ()):
                known = self.of_receipt.get((message, use.txn))
                for op in (one.op for one in deliveries):
                    is_later = known is not None and op.cnt > known.op.cnt
                    if is_later and op.ret_ns < use.call_ns:
                        yield violation_of(OLD_RECEIPT, message, op, use)
                    elif use.f == F.ACK and (is_later or use.ret_ns < op.call_ns):
                        yield violation_of(AGAIN, message, use, op)

    def out_of_order(self, acks: Iterable[Operation]) -> Iterator[Violation]:
        """Compare deliveries of neighbours in groups that receive in order.

        The later one comes when the other is acknowledged or the time of its last attempt is over,
        or one answer holds both.
        """
        acked_ns: dict[Message, int] = {}
        for op in acks:
            message = message_of(op)
            acked_ns[message] = min(acked_ns.get(message, NEVER), op.call_ns)
        in_order = sorted(message for message in self.every if message[0].endswith(IN_ORDER_SUFFIX))
        for ahead, later in pairwise(in_order):
            if ahead[:3] != later[:3]:
                continue
            last = self.every[ahead][-1]
            until_ns = min(acked_ns.get(ahead, NEVER), last.end_ns)
            answers = {(one.op.process, one.op.call_ns) for one in self.every[ahead]}
            for one in self.every[later]:
                is_alone = (one.op.process, one.op.call_ns) not in answers
                if one.op.ret_ns < until_ns and is_alone:
                    yield violation_of(OUT_OF_ORDER, later, last.op, one.op)
                    break


def _end(deliveries: list[_Delivery], clock_error_ns: int) -> None:
    """Note until when each lasts; a receive that waited begins when the attempt before is over."""
    before_cnt, end_ns = NEVER, 0
    for one in deliveries:
        op = one.op
        begin_ns = max(op.call_ns, end_ns) if op.cnt > before_cnt else op.call_ns
        end_ns = begin_ns + op.status * MS_NS
        for change in one.changes:
            moved_ns = change.call_ns + change.status * MS_NS
            end_ns = moved_ns if change.outcome == Outcome.OK else min(end_ns, moved_ns)
        before_cnt, one.end_ns = op.cnt, max(op.call_ns, end_ns - clock_error_ns)


def check_history(
    operations: Iterable[Operation],
    *,
    clock_error_ns: int = 0,
    seen: Seen | None = None,
    record: FaultRecord | None = None,
) -> Verdict:
    """Return the verdict over all that groups received.

    *seen*: where others show the values; None: it is not known.
    """
    rows = [op for op in operations if op.f in OPERATIONS]
    received = deliveries_of(rows)
    heads = [
        op for op in rows if op.f == F.RECEIVE and op.outcome == Outcome.OK and op.off == NOTHING
    ]
    acks = [op for op in rows if op.f == F.ACK and op.outcome != Outcome.FAIL]
    changes = [op for op in rows if op.f == F.CHANGE_TIME and op.outcome != Outcome.FAIL]
    acked = [op for op in acks if op.outcome == Outcome.OK]
    used = acked + [op for op in changes if op.outcome == Outcome.OK]
    deliveries = _Deliveries(received, changes, clock_error_ns)
    found = [*deliveries.violations(used), *deliveries.out_of_order(acks)]
    found += pop_ends.violations(rows, clock_error_ns=clock_error_ns)
    found += _misplaced(received, seen or {})
    if record is not None:
        found += waits.receive_violations(rows, record, clock_error_ns=clock_error_ns)
    there = {message_of(op) for op in (*received, *acked, *changes)}
    found += _lost(heads, there, pop_ends.given_up_unseen(rows))
    counts = {
        "received": len(received),
        "again": sum(op.cnt > 1 for op in received),
        "acknowledged": len(acked),
        "changed": len(changes),
        "refused": sum(op.f == F.ACK and op.outcome == Outcome.FAIL for op in rows),
        "given_up": sum(op.f == F.GIVEN_UP for op in rows),
    }
    return judge(NAME, found, counts, looked_at=len(received))


def received_values(operations: Iterable[Operation]) -> tuple[int, ...]:
    """Return the values that were handed out, sorted."""
    return tuple(sorted({op.value for op in deliveries_of(operations)}))


def _misplaced(received: Iterable[Operation], seen: Seen) -> Iterator[Violation]:
    for op in received:
        places = seen.get(op.value)
        if places and (op.topic, op.queue, op.off) not in places:
            yield violation_of(OTHER, message_of(op), op)


def _lost(
    heads: Iterable[Operation], messages: Iterable[Message], unseen: dict[str, int]
) -> Iterator[Violation]:
    """Find messages that no consumer got; *unseen* of a group were given up and in no answer."""
    there: dict[tuple[str, str, int], set[int]] = {}
    for group, topic, queue, off in messages:
        there.setdefault((group, topic, queue), set()).add(off)
    for head in heads:
        received = there.get((head.group, head.topic, head.queue), set())
        allowed = unseen.get(head.group, 0)
        every = (off for off in range(head.min_off, head.max_off) if off not in received)
        missing = list(islice(every, allowed + REPORTED_MAX))  # a wrong end may be far away
        if len(missing) > allowed:
            for off in missing[:REPORTED_MAX]:
                place = (head.group, head.topic, head.queue, off)
                yield violation_of(LOST, place, head)
