"""Times to live: what has expired is not handed out any more, and nothing else is passed over.

A `PERISHABLE` row sends *value* with a time to live of *cnt* ms, 0: none, and the tag *min_off*.
*status* names how (`Sent`): a delayed one is stored at *due_ns* at the earliest; one in a
transaction is not committed before, and its answer is that of the commit; one that was rolled back
is refused. A `LIVING` row is a read: *status* names which (`Read`). One of what has not
expired passed the offsets from *off* to *max_off*, and was to find those with the tag *min_off*;
one of all, at the end, knows nothing of times. Each message that a read found has a row of its own,
which names the read in *txn*.

The time begins when the message is stored in its queue: not before its send was called and it was
due, and not after the send was answered, or the message was seen. So a read that was
called too late for a message must not have it, and one that had ended before its time was over
must. What lies between proves nothing. A delay ends by the dates of brokers, too: they may be
wrong twice for such a message.

A receive by POP of *group* has messages of any queue. The first time that a message is handed out,
*cnt* is 1 in its row, its time is not over; when it comes again nothing is asked. The last row of a
group, when it has worked off everything, has *cnt* 1: what never expires was received, or given up.

Copies that were given back, or up, stand in topics of their own, and expire no more: a read of
these finds each that another one has found.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, unique
from typing import Final

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome

NAME: Final = "lifetimes"

EXPIRED: Final = "expired message delivered"
PASSED: Final = "living message passed over"
COPY_PASSED: Final = "message given back passed over"
OTHER_TAG: Final = "perishable message of another tag"
UNRECEIVED: Final = "living message never received"
EARLY: Final = "perishable message stored too early"
LOST: Final = "acknowledged perishable message lost"
TWICE: Final = "perishable message stored twice"
STRANGER: Final = "perishable message never sent"
REFUSED: Final = "refused perishable message stored"

OPERATIONS: Final = frozenset({F.PERISHABLE, F.LIVING})
REPORTED_MAX: Final = 8
MS: Final = 1_000_000


COPY_PREFIX: Final = "%"
"""Begins the names of topics of retries and dead letters, and of no other."""


@unique
class Sent(IntEnum):
    """How a message was sent."""

    PLAIN = 0
    DELAYED = 1
    COMMITTED = 2
    """In a transaction; acknowledged: it is committed."""


@unique
class Read(IntEnum):
    """What a row of a read is."""

    LIVING = 0
    """A read of what has not expired."""
    ALL = 1
    """A read of everything, when the run is over; *cnt* is 1 where it began at the beginning."""
    MESSAGE = 2
    """A message that the read *txn* found."""
    RECEIVED = 3
    """A receive by POP of *group*; *cnt* is 1 in one where it has everything."""


_Place = tuple[str, int, int]


class _Facts:
    """What rows tell of messages.

    Attributes:
        sends: By value.
        reads: Those that were answered, receives included.
        found: Messages by the read that found them.
        places: Where a value was seen, in topics that are not of copies.
        at: The value at a place, of all topics.
        stored_ns: When a value was stored at the latest.
    """

    def __init__(self, rows: list[Operation], error_ns: int) -> None:
        self.error_ns = error_ns
        self.sends = {op.value: op for op in rows if op.f == F.PERISHABLE}
        self.reads = [
            op
            for op in rows
            if op.f == F.LIVING and op.status != Read.MESSAGE and op.outcome == Outcome.OK
        ]
        self.found: dict[int, list[Operation]] = {op.op_id: [] for op in self.reads}
        self.places: dict[int, dict[_Place, Operation]] = {}
        self.at: dict[_Place, int] = {}
        self.stored_ns = {
            op.value: op.ret_ns
            for op in self.sends.values()
            if op.outcome == Outcome.OK and op.status != Sent.DELAYED
        }
        for op in rows:
            if op.f == F.LIVING and op.status == Read.MESSAGE and op.txn in self.found:
                self._note(op)

    def _note(self, op: Operation) -> None:
        self.found[op.txn].append(op)
        place = (op.topic, op.queue, op.off)
        self.at[place] = op.value
        if not _is_copy(op):
            self.places.setdefault(op.value, {}).setdefault(place, op)
            known_ns = self.stored_ns.get(op.value, op.ret_ns)
            self.stored_ns[op.value] = min(known_ns, op.ret_ns)

    def first_ns(self, send: Operation) -> int:
        """Return when a message was stored at the earliest."""
        if send.status == Sent.DELAYED:
            return max(send.call_ns, send.due_ns - self.error_ns)
        return max(send.call_ns, send.due_ns)


def check_history(
    operations: Iterable[Operation], *, clock_error_ns: int = 0, drained: bool = True
) -> Verdict:
    """Return the verdict over all messages with a time to live, and those sent beside them.

    Args:
        clock_error_ns: How far brokers' dates may be apart, and from the history's clock.
        drained: The run ended with a read of everything.
    """
    rows = sorted((op for op in operations if op.f in OPERATIONS), key=lambda op: op.op_id)
    facts = _Facts(rows, clock_error_ns)
    violations: list[Violation] = []
    for value, where in sorted(facts.places.items()):
        violations += _stored(facts, facts.sends.get(value), list(where.values()))
    judged = received = 0
    for read in facts.reads:
        if read.status == Read.LIVING:
            judged += read.max_off - read.off
            violations += _expired(facts, read)
            violations += _passed(facts, read)
        elif read.status == Read.RECEIVED:
            received += len(facts.found[read.op_id])
            violations += _expired(facts, read)
    if drained:
        violations += _lost(facts)
        violations += _unreceived(facts)
    violations.sort(key=lambda violation: (violation.at_ns, violation.operations, violation.name))
    counts = {
        "sends": len(facts.sends),
        "reads": sum(op.status == Read.LIVING for op in facts.reads),
        "seen": len(facts.places),
        "received": received,
        "judged": judged,
    }
    return judge(NAME, violations[:REPORTED_MAX], counts, looked_at=judged + received)


def _stored(facts: _Facts, send: Operation | None, seen: list[Operation]) -> list[Violation]:
    first = seen[0]
    if send is None:
        return [_violation(STRANGER, first, f"value {first.value} was sent by no client")]
    text = f"value {send.value} is at {first.queue}@{first.off}"
    if send.outcome == Outcome.FAIL:
        return [_violation(REFUSED, first, text, send)]
    if len(seen) > 1:
        return [_violation(TWICE, seen[1], f"{text} and {seen[1].queue}@{seen[1].off}", first)]
    early_ns = facts.first_ns(send) - min(op.ret_ns for op in seen)
    if early_ns > 0:
        return [_violation(EARLY, first, f"{text} {early_ns / 1e6:.1f} ms before its time", send)]
    return []


def _expired(facts: _Facts, read: Operation) -> list[Violation]:
    """Return what *read* found too late, or has not asked for."""
    violations = []
    for op in facts.found[read.op_id]:
        send = facts.sends.get(op.value)
        if send is None or _is_copy(op):
            continue
        if read.min_off not in (NOTHING, send.min_off):
            text = f"value {op.value} has the tag {send.min_off}, not {read.min_off}"
            violations.append(_violation(OTHER_TAG, read, text, send))
        if not send.cnt or (read.status == Read.RECEIVED and op.cnt != 1):
            continue
        ends_ns = facts.stored_ns[op.value] + send.cnt * MS + facts.error_ns
        late_ns = read.call_ns - ends_ns
        if late_ns > 0:
            text = f"value {op.value} came {late_ns / 1e6:.1f} ms after its {send.cnt} ms"
            violations.append(_violation(EXPIRED, read, text, send))
    return violations


def _passed(facts: _Facts, read: Operation) -> list[Violation]:
    """Return what *read* was to find, and did not."""
    violations = []
    there = {op.off for op in facts.found[read.op_id]}
    for off in range(read.off, read.max_off):
        value = facts.at.get((read.topic, read.queue, off), NOTHING)
        if off in there or value == NOTHING:
            continue
        text = f"value {value} at {off} is not among what was found"
        send = facts.sends.get(value)
        if _is_copy(read):
            violations.append(_violation(COPY_PASSED, read, text, send))
            continue
        if send is None or read.min_off not in (NOTHING, send.min_off):
            continue
        left_ns = facts.first_ns(send) + send.cnt * MS - facts.error_ns - read.ret_ns
        if not send.cnt or left_ns > 0:
            if send.cnt:
                text += f", {left_ns / 1e6:.1f} ms before its {send.cnt} ms were over"
            violations.append(_violation(PASSED, read, text, send))
    return violations


def _lost(facts: _Facts) -> list[Violation]:
    """Return what is not there any more, if everything that was ever there was read."""
    ends = [op for op in facts.reads if op.status == Read.ALL and not _is_copy(op)]
    if not ends or not all(op.cnt for op in ends):
        return []
    there = {op.value for end in ends for op in facts.found[end.op_id]}
    queues = {(op.topic, op.queue) for op in ends}
    return [
        _violation(LOST, op, f"value {op.value} was acknowledged, and is not there")
        for op in facts.sends.values()
        if op.outcome == Outcome.OK and op.value not in there and (op.topic, op.queue) in queues
    ]


def _unreceived(facts: _Facts) -> list[Violation]:
    """Return what never expires and a group that has worked off everything did not get."""
    violations = []
    given_up = {value for (topic, _, _), value in facts.at.items() if topic.startswith(COPY_PREFIX)}
    for end in facts.reads:
        if end.status != Read.RECEIVED or not end.cnt:
            continue
        got = {
            op.value
            for read in facts.reads
            if read.status == Read.RECEIVED and read.group == end.group
            for op in facts.found[read.op_id]
        }
        for value, where in facts.places.items():
            send = facts.sends.get(value)
            if send is None or send.outcome == Outcome.FAIL or send.cnt:
                continue
            if value in got or value in given_up:
                continue
            if any(topic == end.topic for topic, _, _ in where):
                text = f"value {value}, which does not expire, came to none of {end.group}"
                violations.append(_violation(UNRECEIVED, end, text, send))
    return violations


def _is_copy(op: Operation) -> bool:
    return op.topic.startswith(COPY_PREFIX)


def _violation(name: str, op: Operation, text: str, other: Operation | None = None) -> Violation:
    ids = (op.op_id,) if other is None else (op.op_id, other.op_id)
    return Violation(name, f"{op.topic}/{op.queue}", text, ids, at_ns=op.call_ns)
