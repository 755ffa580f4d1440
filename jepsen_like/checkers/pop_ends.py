"""How messages received one by one end, and which receipts count.

A message is acknowledged once for all, or it is given up: then one copy is in the dead letter topic
of its group. A `GIVEN_UP` is such a copy, *cnt* the times it was handed out. The row that states
that a group has received everything (see `pop`) has in *cnt* how often a message is handed out
before it is given up; 0: the dead letters are not known to be whole.

A receipt counts from its delivery, or from the change of the time that gave it, until another one
takes its place, the message is acknowledged, or its time is over. One that was replaced is refused,
so none is accepted twice where a change of the time is one of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from dledger.jepsen_like.checkers import verdict
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome

OLD_RECEIPT: Final = "old receipt accepted"
GOOD_RECEIPT: Final = "good receipt refused"
GIVEN_UP_TWICE: Final = "message given up twice"
GIVEN_UP_AGAIN: Final = "message given up and handed out again"
GIVEN_UP_ACKED: Final = "acknowledged message given up"
GIVEN_UP_AT: Final = "message given up at another attempt than its last"
NO_END: Final = "message neither acknowledged nor given up"

STALE: Final = "ReceiptStaleError"
"""Error of a receipt that the broker refused."""
MS_NS: Final = 1_000_000

Message = tuple[str, str, int, int]
"""Group, topic, queue and offset."""


def violations(rows: list[Operation], *, clock_error_ns: int = 0) -> list[Violation]:
    """Return what is wrong with receipts and with ends."""
    return [*_replaced(rows), *_refused(rows, clock_error_ns), *_given_up(rows), *_no_end(rows)]


def given_up_unseen(rows: list[Operation]) -> dict[str, int]:
    """Return how many messages of each group were given up that no answer had."""
    seen = {(op.group, op.value) for op in deliveries_of(rows)}
    there = {(op.group, op.value) for op in rows if op.f == F.GIVEN_UP}
    return dict(Counter(group for group, _ in there - seen))


def deliveries_of(rows: Iterable[Operation]) -> list[Operation]:
    """Return the rows in which a message was handed out."""
    return [
        op for op in rows if op.f == F.RECEIVE and op.outcome == Outcome.OK and op.off != NOTHING
    ]


def message_of(op: Operation) -> Message:
    """Return the message that a row is about."""
    return op.group, op.topic, op.queue, op.off


def violation_of(name: str, message: Message, *ops: Operation) -> Violation:
    """Return a violation about a message, with *ops* as its witnesses."""
    group, topic, queue, off = message
    return verdict.violation_of(name, f"{group}@{topic}/{queue}", f"offset {off}", *ops)


def _replaced(rows: list[Operation]) -> list[Violation]:
    """Find receipts that were accepted beside a change of the time that gave another one.

    Before the change an acknowledgement ends them, and another change replaces them.
    """
    uses: dict[tuple[Message, int], list[Operation]] = {}
    for op in rows:
        if op.f in (F.ACK, F.CHANGE_TIME) and op.outcome == Outcome.OK:
            uses.setdefault((message_of(op), op.txn), []).append(op)
    found = []
    for (message, _), every in uses.items():
        changes = [op for op in every if op.f == F.CHANGE_TIME]
        change = min(changes, key=lambda op: op.ret_ns, default=None)
        found += [
            violation_of(OLD_RECEIPT, message, change, op)
            for op in every
            if change is not None and op is not change
        ]
    return found


def _refused(rows: list[Operation], clock_error_ns: int) -> list[Violation]:
    """Find receipts that were refused while they stood."""
    refused = [
        op
        for op in rows
        if op.f in (F.ACK, F.CHANGE_TIME) and op.outcome == Outcome.FAIL and op.err == STALE
    ]
    if not refused:
        return []
    stands: dict[tuple[Message, int], tuple[int, Operation]] = {}
    used: dict[tuple[Message, int], int] = {}
    for op in rows:
        end = op.call_ns + op.status * MS_NS - clock_error_ns
        if op.f == F.RECEIVE and op.outcome == Outcome.OK and op.off != NOTHING:
            stands[message_of(op), op.txn] = (end, op)
        elif op.f == F.CHANGE_TIME and op.outcome == Outcome.OK:
            stands[message_of(op), op.min_off] = (end, op)
        if op.f in (F.ACK, F.CHANGE_TIME) and op.outcome != Outcome.FAIL:
            key = (message_of(op), op.txn)
            used[key] = min(used.get(key, op.call_ns), op.call_ns)
    found = []
    for op in refused:
        key = (message_of(op), op.txn)
        end, giver = stands.get(key, (0, op))
        if giver.ret_ns < op.call_ns and op.ret_ns < min(end, used.get(key, end)):
            found.append(violation_of(GOOD_RECEIPT, message_of(op), giver, op))
    return found


def _given_up(rows: list[Operation]) -> list[Violation]:
    copies: dict[tuple[str, int], list[Operation]] = {}
    for op in rows:
        if op.f == F.GIVEN_UP:
            copies.setdefault((op.group, op.value), []).append(op)
    if not copies:
        return []
    last: dict[tuple[str, int], Operation] = {}
    for op in deliveries_of(rows):
        key = (op.group, op.value)
        if key in copies and (key not in last or op.cnt > last[key].cnt):
            last[key] = op
    acked = {message_of(op): op for op in rows if op.f == F.ACK and op.outcome == Outcome.OK}
    times = {head.group: head.cnt for head in _heads(rows)}
    found = []
    for key, ops in copies.items():
        copy, delivery = ops[0], last.get(key)
        message = (copy.group, copy.topic, copy.queue, copy.max_off)
        if delivery is not None:
            message = message_of(delivery)
        if len(ops) > 1:
            found.append(violation_of(GIVEN_UP_TWICE, message, *ops[:2]))
        if times.get(copy.group) and copy.cnt != times[copy.group]:
            found.append(violation_of(GIVEN_UP_AT, message, copy))
        if delivery is not None and delivery.cnt > copy.cnt:
            found.append(violation_of(GIVEN_UP_AGAIN, message, copy, delivery))
        if message in acked:
            found.append(violation_of(GIVEN_UP_ACKED, message, acked[message], copy))
    return found


def _heads(rows: list[Operation]) -> list[Operation]:
    """Return the rows that state that everything was received and all dead letters were read."""
    return [
        op
        for op in rows
        if op.f == F.RECEIVE and op.outcome == Outcome.OK and op.off == NOTHING and op.cnt > 0
    ]


def _no_end(rows: list[Operation]) -> list[Violation]:
    heads = _heads(rows)
    if not heads:
        return []
    values = {message_of(op): op.value for op in deliveries_of(rows)}
    acked = {message_of(op) for op in rows if op.f == F.ACK and op.outcome != Outcome.FAIL}
    given_up = {(op.group, op.value) for op in rows if op.f == F.GIVEN_UP}
    received: dict[tuple[str, str, int], list[int]] = {}
    for group, topic, queue, off in values:
        received.setdefault((group, topic, queue), []).append(off)
    found = []
    for head in heads:
        for off in sorted(received.get((head.group, head.topic, head.queue), ())):
            message = (head.group, head.topic, head.queue, off)
            if not head.min_off <= off < head.max_off or message in acked:
                continue
            if (head.group, values[message]) not in given_up:
                found.append(violation_of(NO_END, message, head))
    return found
