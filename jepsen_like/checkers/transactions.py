"""Transactional messages: nothing before the commit, one message after it, none after a rollback.

The decision of a half message is a register that is written once. A row `END_TRANSACTION` that
ended well wrote it, or found it written with the same decision; one that failed never will; an
unknown one may have. So a message may be seen only after a commit that did not fail was called, an
acknowledged commit and an acknowledged rollback exclude each other, and after an acknowledged
rollback nothing is ever seen. Seen means pulled, or held by a replica in the end.

Times within the queue are the queue checker's: for it a half message is a send that happened
between the first call of a commit and the first acknowledgement.

A row `CHECK` is a question of the broker, stamped when it reached the producer. It counts as late
when it arrives more than a whole interval after the decision was acknowledged; none comes before
its time does. Half messages without a decision are to be in the discard topic, once. An unknown
decision excuses every rule that it could explain.

The rows of a transaction are put together first (`transactions_of`), by the value of the half
message, or by the offset its half was acknowledged at: rows are of one broker group. Rows that lead
nowhere prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dledger.jepsen_like.checkers.retention import HolesOf, Missing, Queue, lost_of
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge, violation_of
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Decision,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
    sightings,
)

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
DONE_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
DISCARD_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
"""Where a half message ends whose producer never decides it."""
SYSTEM_TOPICS: Final = frozenset({HALF_TOPIC, DONE_TOPIC, DISCARD_TOPIC})
"""Queues the broker itself writes: no client's send explains what is in them."""

OPERATIONS: Final = frozenset({F.HALF, F.END_TRANSACTION, F.CHECK})


@dataclass(slots=True)
class Transaction:
    """One half message and its ends."""

    value: int
    half: Operation | None = None
    ends: list[Operation] = field(default_factory=list)
    checks: list[Operation] = field(default_factory=list)

    def ended(self, decision: Decision, *, only_acknowledged: bool = False) -> list[Operation]:
        """Return the ends with *decision* that may have counted; or that certainly did."""
        return [
            op
            for op in self.ends
            if op.decision == decision
            and (op.outcome == Outcome.OK if only_acknowledged else op.outcome != Outcome.FAIL)
        ]

    def as_append(self) -> Operation | None:
        """Return what a queue sees of it: a send without an offset, as a row of `END_TRANSACTION`.

        It cannot be there before its first commit was called, and is there when the first
        acknowledged commit has returned. None when no client tried to commit it: then
        nothing may be there. A transaction that was certainly not committed is a failed send.
        """
        half = self.half
        if half is None:
            return None
        commits = self.ended(Decision.COMMIT)
        acknowledged = self.ended(Decision.COMMIT, only_acknowledged=True)
        refusals = [] if acknowledged else self.ended(Decision.ROLLBACK, only_acknowledged=True)
        if not commits:
            refusals += [op for op in self.ends if op.decision == Decision.COMMIT]
        if half.outcome == Outcome.FAIL:
            refusals = [half]
        if refusals:
            return _append(refusals[0], half, Outcome.FAIL, refusals[0].call_ns, NEVER)
        if not commits:
            return None
        called = min(op.call_ns for op in commits)
        if not acknowledged:
            first = min(commits, key=lambda op: op.call_ns)
            return _append(first, half, Outcome.INFO, called, NEVER)
        done = min(acknowledged, key=lambda op: op.ret_ns)
        return _append(done, half, Outcome.OK, called, done.ret_ns)


def _append(
    witness: Operation, half: Operation, outcome: Outcome, call_ns: int, ret_ns: int
) -> Operation:
    return Operation(
        witness.op_id, witness.op_id, witness.process, witness.node, F.END_TRANSACTION, outcome,
        call_ns, ret_ns, half.topic, half.queue, NOTHING, value=half.value, txn=half.txn,
    )  # fmt: skip


def transactions_of(operations: Iterable[Operation]) -> dict[int, Transaction]:
    """Return the transactions of a history by the value of their half messages."""
    rows = [op for op in operations if op.f in OPERATIONS]
    every: dict[int, Transaction] = {}
    value_of: dict[int, int] = {}
    for op in rows:
        if op.f == F.HALF:
            every[op.value] = Transaction(op.value, op)
            if op.outcome == Outcome.OK and op.txn != NOTHING:
                value_of.setdefault(op.txn, op.value)
    for op in rows:
        value = op.value if op.value != NOTHING else value_of.get(op.txn)
        if op.f == F.HALF or value is None:
            continue
        known = every.setdefault(value, Transaction(value))
        if op.f == F.CHECK:
            known.checks.append(op)
        elif op.decision != Decision.UNKNOWN:
            known.ends.append(op)
    return every


NAME: Final = "transactions"

HALF_VISIBLE: Final = "half message visible"
ROLLED_BACK_VISIBLE: Final = "rolled back message visible"
FAILED_VISIBLE: Final = "failed half message visible"
DECIDED_TWICE: Final = "transaction decided both ways"
COMMITTED_TWICE: Final = "committed message stored twice"
OTHER_QUEUE: Final = "committed message in another queue"
COMMIT_LOST: Final = "committed message lost"
SHARED_OFFSET: Final = "half messages share an offset"
NEVER_BEGUN: Final = "transaction never begun"
CHECKED_DECIDED: Final = "decided transaction checked"
CHECKED_EARLY: Final = "transaction checked too early"
CHECKED_OFTEN: Final = "transaction checked too often"
DISCARDED_COMMITTED: Final = "committed message discarded"
DISCARDED_TWICE: Final = "half message discarded twice"
DROPPED: Final = "undecided half message dropped"

CHECK_INTERVAL_NS: Final = 60_000_000_000
"""How long a question may be under way, from its decision to its arrival: a broker's interval."""
CHECKS_MAX: Final = 15
"""Questions about one half message before it is discarded; a broker's setting."""

_Place = tuple[str, int, int]


@dataclass(slots=True)
class _Sightings:
    """Where a value was seen, and by which operation first; `NOTHING` stands for a replica."""

    places: dict[_Place, int] = field(default_factory=dict)
    first_ns: int = 0
    first_id: int = NOTHING

    def add(self, place: _Place, at_ns: int, op_id: int) -> None:
        if not self.places or at_ns < self.first_ns:
            self.first_ns, self.first_id = at_ns, op_id
        if self.places.get(place, NOTHING) == NOTHING:
            self.places[place] = op_id

    def witnesses(self, *before: Operation) -> tuple[int, ...]:
        ids = (*(op.op_id for op in before), self.first_id)
        return tuple(op_id for op_id in ids if op_id != NOTHING)


def check_history(
    history: History,
    *,
    drained: bool = True,
    check_interval_ns: int = CHECK_INTERVAL_NS,
    checks_max: int = CHECKS_MAX,
    immunity_ns: int = 0,
    clock_error_ns: int = 0,
    holes: HolesOf | None = None,
) -> Verdict:
    """Return the verdict over the transactions of a history.

    Args:
        drained: The run ended with everything committed or discarded read, so what is missing is
            lost.
        check_interval_ns: How long after an acknowledged decision a check may still arrive.
        immunity_ns: For how long after its call a half message is not asked about.
        clock_error_ns: How much sooner by the history's clock than by a broker's date; of both that
            time and the one that a half message has of its own.
        holes: Of a queue that retention has cut; None: such a queue proves nothing.
    """
    transactions = transactions_of(history.operations)
    seen, discarded = _sightings(history, transactions)
    found = _shared_offsets(history.operations)
    for value, one in sorted(transactions.items()):
        found += _check_seen(one, seen.get(value))
        immune_ns = max(_immunity(one, immunity_ns) - clock_error_ns, 0)
        found += _check_rows(one, check_interval_ns, checks_max, immune_ns)
        found += _check_discarded(one, seen.get(value), discarded.get(value))
    if drained:
        found += _lost(transactions, seen, discarded, history.replica_reads, holes)
        found += _dropped(history, transactions, seen, discarded, check_interval_ns, checks_max)
    began = [one for one in transactions.values() if one.half is not None]
    counts = {
        "halves": len(began),
        "acknowledged": sum(
            one.half is not None and one.half.outcome == Outcome.OK for one in began
        ),
        "decisions": sum(len(one.ends) for one in began),
        "checks": sum(len(one.checks) for one in began),
        "seen": len(seen),
        "discarded": len(discarded),
    }
    return judge(NAME, found, counts, looked_at=len(began))


def _immunity(one: Transaction, otherwise_ns: int) -> int:
    """Return for how long after its call a half message is not asked about."""
    half = one.half
    if half is None or half.due_ns == NOTHING:
        return otherwise_ns
    return half.due_ns - half.call_ns


def _sightings(
    history: History, transactions: dict[int, Transaction]
) -> tuple[dict[int, _Sightings], dict[int, _Sightings]]:
    """Return where values of half messages were seen: in topics, and in the discard topic."""
    seen: dict[int, _Sightings] = {}
    discarded: dict[int, _Sightings] = {}
    for value, place, at_ns, op_id in sightings(history):
        if place[0] not in (HALF_TOPIC, DONE_TOPIC) and value in transactions:
            into = discarded if place[0] == DISCARD_TOPIC else seen
            into.setdefault(value, _Sightings()).add(place, at_ns, op_id)
    return seen, discarded


def _check_seen(one: Transaction, seen: _Sightings | None) -> list[Violation]:
    """At most one of the things that can be wrong with a visible message, the plainest."""
    half = one.half
    if half is None:
        return []
    commits = one.ended(Decision.COMMIT)
    acknowledged = one.ended(Decision.COMMIT, only_acknowledged=True)
    refused = one.ended(Decision.ROLLBACK, only_acknowledged=True)
    if acknowledged and refused:
        text = f"value {one.value}: a commit and a rollback were both acknowledged"
        return [violation_of(DECIDED_TWICE, half.place, text, acknowledged[0], refused[0])]
    if seen is None:
        return []
    called = min((op.call_ns for op in commits), default=None)
    name = ""
    witnesses = seen.witnesses(half)
    if half.outcome == Outcome.FAIL:
        name, text = FAILED_VISIBLE, "is visible, but its half message certainly failed"
    elif refused:
        name, text = ROLLED_BACK_VISIBLE, "is visible, but its rollback was acknowledged"
        witnesses = seen.witnesses(refused[0])
    elif called is None:
        name, text = HALF_VISIBLE, "is visible, and no commit of it may have taken effect"
    elif seen.first_ns < called:
        name, text = HALF_VISIBLE, "was visible before its first commit was called"
    elif len(seen.places) > 1:
        shown = ", ".join(f"{topic}/{queue}@{off}" for topic, queue, off in sorted(seen.places))
        name, text = COMMITTED_TWICE, f"is at {shown}"
        pulls = [op_id for op_id in seen.places.values() if op_id != NOTHING]
        witnesses = tuple(pulls[:2]) or (half.op_id,)
    elif next(iter(seen.places))[:2] != (half.topic, half.queue):
        topic, queue, _ = next(iter(seen.places))
        name, text = OTHER_QUEUE, f"was committed to {topic}/{queue}"
    if not name:
        return []
    text = f"value {one.value} {text}"
    return [Violation(name, half.place, text, witnesses, at_ns=seen.first_ns)]


def _shared_offsets(operations: list[Operation]) -> list[Violation]:
    """Two half messages acknowledged at one offset: one decision would count for both."""
    first: dict[int, Operation] = {}
    found: list[Violation] = []
    for op in operations:
        if op.f != F.HALF or op.outcome != Outcome.OK or op.txn == NOTHING:
            continue
        known = first.setdefault(op.txn, op)
        if known is not op:
            text = f"values {known.value} and {op.value} are both at half offset {op.txn}"
            found.append(violation_of(SHARED_OFFSET, op.place, text, known, op))
    return found


def _check_rows(
    one: Transaction, interval_ns: int, checks_max: int, immunity_ns: int
) -> list[Violation]:
    """What decisions and questions say of themselves."""
    half = one.half
    if half is None or half.outcome == Outcome.FAIL:
        rows = [*one.checks, *(op for op in one.ends if op.outcome == Outcome.OK)]
        before = () if half is None else (half,)
        text = f"value {one.value}: there is no such half message, but it was asked for or decided"
        return [violation_of(NEVER_BEGUN, f"txn {op.txn}", text, *before, op) for op in rows[:1]]
    found: list[Violation] = []
    decided = min(
        (op for op in one.ends if op.outcome == Outcome.OK), key=lambda op: op.ret_ns, default=None
    )
    for check in one.checks:
        if decided is not None and check.ret_ns > decided.ret_ns + interval_ns:
            late_ms = (check.ret_ns - decided.ret_ns) / 1e6
            text = f"value {one.value} was asked for {late_ms:.1f} ms after it was decided"
            found.append(violation_of(CHECKED_DECIDED, half.place, text, decided, check))
        if check.ret_ns < half.call_ns + immunity_ns:
            text = f"value {one.value} was asked for before its time"
            found.append(violation_of(CHECKED_EARLY, half.place, text, half, check))
    if len(one.checks) > checks_max:
        last = max(one.checks, key=lambda op: op.ret_ns)
        text = f"value {one.value} was asked for {len(one.checks)} times, {checks_max} are allowed"
        found.append(violation_of(CHECKED_OFTEN, half.place, text, half, last))
    return found


def _check_discarded(
    one: Transaction, seen: _Sightings | None, discarded: _Sightings | None
) -> list[Violation]:
    half = one.half
    if half is None or discarded is None:
        return []
    commits = one.ended(Decision.COMMIT, only_acknowledged=True)
    if commits or seen is not None:
        text = f"value {one.value} was committed, and discarded as undecided"
        witnesses = discarded.witnesses(commits[0] if commits else half)
        at_ns = discarded.first_ns
        return [Violation(DISCARDED_COMMITTED, half.place, text, witnesses, at_ns=at_ns)]
    if len(discarded.places) > 1:
        text = f"value {one.value} was discarded {len(discarded.places)} times"
        pulls = [op_id for op_id in discarded.places.values() if op_id != NOTHING]
        witnesses = tuple(pulls[:2]) or (half.op_id,)
        return [Violation(DISCARDED_TWICE, half.place, text, witnesses, at_ns=discarded.first_ns)]
    return []


def _lost(
    transactions: dict[int, Transaction],
    seen: dict[int, _Sightings],
    discarded: dict[int, _Sightings],
    reads: list[ReplicaRead],
    holes: HolesOf | None,
) -> list[Violation]:
    missing: dict[Queue, list[Missing]] = {}
    for value, one in sorted(transactions.items()):
        if one.half is None or value in seen or value in discarded:
            continue
        half = one.half
        commits = one.ended(Decision.COMMIT, only_acknowledged=True)
        rollbacks = one.ended(Decision.ROLLBACK, only_acknowledged=True)
        has_one_end = half.outcome != Outcome.FAIL and not rollbacks  # else another rule has it
        if commits and has_one_end:
            begun_ns = min(op.call_ns for op in one.ended(Decision.COMMIT))
            done_ns = min(op.ret_ns for op in commits)
            missing.setdefault((half.topic, half.queue), []).append(
                Missing(value, begun_ns, done_ns)
            )
    found: list[Violation] = []
    for value in sorted(lost_of(missing, reads, holes)):
        one = transactions[value]
        assert one.half is not None
        commit = one.ended(Decision.COMMIT, only_acknowledged=True)[0]
        text = f"value {value}: its commit was acknowledged and it is nowhere"
        found.append(violation_of(COMMIT_LOST, one.half.place, text, one.half, commit))
    return found


def _dropped(
    history: History,
    transactions: dict[int, Transaction],
    seen: dict[int, _Sightings],
    discarded: dict[int, _Sightings],
    interval_ns: int,
    checks_max: int,
) -> list[Violation]:
    """Asked for as often as allowed, never decided, and not discarded an interval later."""
    read_ns = max(
        (
            read.at_ns
            for read in history.replica_reads
            if read.topic == DISCARD_TOPIC and read.min_off == 0
        ),
        default=None,
    )
    if read_ns is None:
        return []
    found: list[Violation] = []
    for value, one in sorted(transactions.items()):
        half = one.half
        if half is None or half.outcome == Outcome.FAIL or len(one.checks) < checks_max:
            continue
        if any(op.outcome != Outcome.FAIL for op in one.ends):
            continue  # decided, or perhaps
        last = max(one.checks, key=lambda op: op.ret_ns)
        if value not in seen and value not in discarded and last.ret_ns + interval_ns < read_ns:
            text = f"value {value} was asked for {len(one.checks)} times and then forgotten"
            found.append(violation_of(DROPPED, half.place, text, half, last))
    return found
