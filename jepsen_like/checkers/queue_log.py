"""Is the history of one queue that of one growing list? Exact, in linear time.

For each offset, `lo` is the latest time at which its append had certainly not happened, `hi` the
earliest at which it certainly had. With values agreeing and offsets dense, the history is
linearizable iff no offset i ≤ j has lo[i] > hi[j]: one scatter each, one running max, one running
min. A failure names the two operations that prove it. Equal stamps overlap: comparison is strict.

An unknown send that a read found is bound to that offset; the others fill free offsets in order,
which minimises every bound. A first offset kept proves that what is before it was there. A half
message is a send between the first call and the first acknowledgement of a commit. Queues that the
broker writes by itself are left out.

`kernel` decides; here the rows of its suspects are read again and violations get their names.

Spec: docs/internals/proofs/queue-log.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from dledger.jepsen_like.checkers.kernel.facts import (
    I64,
    QUEUE_OPERATIONS,
    REPORTED_MAX,
    Columns,
    Flags,
)
from dledger.jepsen_like.checkers.kernel.judge import Judged, TimePair
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import NOTHING, F, Level, Operation, Outcome

NAME: Final = "queue_log"

SEND_INVERTED: Final = "send order inverted"
STALE_READ: Final = "stale read"
NON_MONOTONIC: Final = "non-monotonic read"
FROM_THE_FUTURE: Final = "read from the future"
INCONSISTENT_OFFSETS: Final = "inconsistent offsets"
DUPLICATE: Final = "duplicate"
ABORTED_READ: Final = "aborted read"
PHANTOM: Final = "phantom value"
OF_NO_SEND: Final = "slot of no send"
SELF_CONTRADICTION: Final = "read contradicts itself"
MIN_WENT_BACK: Final = "min offset went back"


_BY_BOUNDS: Final = {
    (True, True): SEND_INVERTED,
    (False, True): STALE_READ,
    (False, False): NON_MONOTONIC,
    (True, False): FROM_THE_FUTURE,
}
"""By: a send set the lower bound, a send set the upper one."""


@dataclass(slots=True)
class QueueColumns:
    """The operations on one queue as columns; what names are given from.

    Sends: `send_off` is `NOTHING` for an unknown offset; `send_failed` marks certain failures.
    Reads: `found_off`/`found_count` say which offsets were found (count 0: none), `end` is the
    offset proved to be the length of the list at some instant of the read, or `NOTHING`; `low` the
    first offset kept, likewise. `seen_*` has one row per message found: which read, where, which
    value; a read that proves no times (a follower's) has rows here only.
    """

    send_id: I64
    send_off: I64
    send_value: I64
    send_failed: npt.NDArray[np.bool_]
    read_id: I64
    read_ret: I64
    found_off: I64
    found_count: I64
    end: I64
    low: I64
    seen_id: I64
    seen_off: I64
    seen_value: I64


class Wanted(msgspec.Struct, frozen=True):
    """Rows that may be witnesses: acknowledged at one of *offs*, with one of *values*, likewise."""

    offs: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    op_ids: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()
    rets: tuple[int, ...] = ()

    def ops(self, ops: Columns) -> Flags:
        """Return which rows of `ops` are wanted."""
        send = ops["f"] == F.SEND
        rows: Flags = send & (np.isin(ops["off"], self.offs) | np.isin(ops["value"], self.values))
        rows |= np.isin(ops["op_id"], self.op_ids)
        rows |= np.isin(ops["call_ns"], self.calls) | np.isin(ops["ret_ns"], self.rets)
        return rows

    def obs(self, obs: Columns) -> Flags:
        """Return which rows of `obs` are wanted."""
        rows: Flags = (obs["op_id"] != NOTHING) & np.isin(obs["value"], self.values)
        return rows


def wanted_by(judged: Judged) -> Wanted:
    """Return which rows name what *judged* found."""
    pairs = judged.pairs
    return Wanted(
        judged.offs,
        judged.values,
        (*judged.reads_wrong, *judged.pulls_wrong),
        tuple(sorted({pair.low_ns for pair in pairs})),
        tuple(sorted({pair.high_ns for pair in pairs})),
    )


def name_violations(
    judged: Judged, ops: Columns, obs: Columns, subject: str, appends: tuple[Operation, ...] = ()
) -> list[Violation]:
    """Return the violations of a queue, *subject*: ``topic/queue``.

    *ops* and *obs* are its rows that `wanted_by` wants, more do no harm; *appends* is what
    transactions appended, see `transactions`.
    """
    ops = _in_order(ops)
    found = _wrong_values(judged, ops, obs, subject, appends)
    if found:
        pass
    elif judged.length > judged.attempts:
        text = (
            f"the queue has {judged.length} messages, but only {judged.attempts} sends can have "
            "succeeded"
        )
        who = () if judged.beyond == NOTHING else (judged.beyond,)
        found = [Violation(OF_NO_SEND, subject, text, who)]
    else:
        found = [_time(pair, ops, subject) for pair in judged.pairs]
    return found + [
        Violation(
            MIN_WENT_BACK,
            subject,
            f"the first offset kept was {best} and is {low} for a later read",
            (first, then),
            at_ns=call,
        )
        for first, then, best, low, call in judged.lows
    ]


def _in_order(ops: Columns) -> Columns:
    of_queue = np.isin(ops["f"], QUEUE_OPERATIONS)
    rows = np.flatnonzero(of_queue)
    rows = rows[np.argsort(ops["op_id"][rows], kind="stable")]
    return {name: column[rows] for name, column in ops.items()}


def _wrong_values(
    judged: Judged, ops: Columns, obs: Columns, subject: str, appends: tuple[Operation, ...]
) -> list[Violation]:
    if not (judged.offs or judged.values or judged.reads_wrong or judged.pulls_wrong):
        return []
    columns = _columns(judged, ops, obs, appends)
    return [
        *check_reads(columns, subject),
        *check_values(columns, subject),
        *_by_hash(judged, ops, subject),
    ]


def _columns(
    judged: Judged, ops: Columns, obs: Columns, appends: tuple[Operation, ...]
) -> QueueColumns:
    send = ops["f"] == F.SEND
    ok = ops["outcome"] == Outcome.OK
    acked = send & ok & (ops["off"] != NOTHING)
    suspect = np.isin(ops["off"], judged.offs) & acked | np.isin(ops["value"], judged.values) & send
    sends = np.flatnonzero(suspect)
    more = [op for op in appends if op.value in judged.values]
    reads = np.flatnonzero(np.isin(ops["op_id"], judged.reads_wrong))
    seen = np.flatnonzero(np.isin(obs["value"], judged.values) & (obs["op_id"] != NOTHING))
    seen = seen[np.lexsort((obs["off"][seen], obs["op_id"][seen]))]

    def both(name: str, added: list[int]) -> I64:
        return np.concatenate((ops[name][sends], np.array(added, dtype=np.int64)))

    off = np.where(acked[sends], ops["off"][sends], NOTHING)
    failed = ops["outcome"][sends] == Outcome.FAIL
    late = [op.outcome == Outcome.FAIL for op in more]
    return QueueColumns(
        send_id=both("op_id", [op.op_id for op in more]),
        send_off=np.concatenate((off, np.full(len(more), NOTHING, dtype=np.int64))),
        send_value=both("value", [op.value for op in more]),
        send_failed=np.concatenate((failed, np.array(late, dtype=np.bool_))),
        read_id=ops["op_id"][reads],
        read_ret=ops["ret_ns"][reads],
        found_off=ops["off"][reads],
        found_count=np.where(ops["f"][reads] == F.PULL, ops["cnt"][reads], 0),
        end=ops["max_off"][reads],
        low=ops["min_off"][reads],
        seen_id=obs["op_id"][seen],
        seen_off=obs["off"][seen],
        seen_value=obs["value"][seen],
    )


def _by_hash(judged: Judged, ops: Columns, subject: str) -> list[Violation]:
    rows = np.flatnonzero(np.isin(ops["op_id"], judged.pulls_wrong))[:REPORTED_MAX]
    return [
        Violation(
            INCONSISTENT_OFFSETS,
            subject,
            f"offsets {ops['off'][at]} … {ops['off'][at] + ops['cnt'][at] - 1} held other values "
            "for this pull than for everybody else, by their hash",
            (int(ops["op_id"][at]),),
            at_ns=int(ops["ret_ns"][at]),
        )
        for at in rows.tolist()
    ]


def _time(pair: TimePair, ops: Columns, subject: str) -> Violation:
    """Name the two operations that set the bounds of *pair*."""
    low = Bound(pair.low_ns, pair.low, *_low(pair, ops))
    high = Bound(pair.high_ns, pair.high, *_high(pair, ops))
    return time_violation(subject, low, high)


def _low(pair: TimePair, ops: Columns) -> tuple[int, bool]:
    ok = ops["outcome"] == Outcome.OK
    then = ops["call_ns"] == pair.low_ns
    sends = ops["op_id"][(ops["f"] == F.SEND) & ok & (ops["off"] == pair.low) & then].tolist()
    if pair.low_op != NOTHING and not pair.is_filler:
        sends.append(pair.low_op)
    if sends:
        return min(sends), True
    if pair.is_filler:
        return pair.low_op, True
    reads = _current(ops) & then & (ops["max_off"] == pair.low)
    return int(ops["op_id"][reads].min()), False


def _high(pair: TimePair, ops: Columns) -> tuple[int, bool]:
    ok = ops["outcome"] == Outcome.OK
    then = ops["ret_ns"] == pair.high_ns
    sends = ops["op_id"][(ops["f"] == F.SEND) & ok & (ops["off"] == pair.high) & then].tolist()
    if pair.high_op != NOTHING:
        sends.append(pair.high_op)
    if sends:
        return min(sends), True
    found = (ops["f"] == F.PULL) & (ops["cnt"] > 0) & (ops["off"] + ops["cnt"] - 1 == pair.high)
    ends = (ops["max_off"] == pair.high + 1) | (ops["min_off"] == pair.high + 1)
    reads = _current(ops) & then & (found | ends)
    return int(ops["op_id"][reads].min()), False


def _current(ops: Columns) -> Flags:
    read = np.isin(ops["f"], (F.PULL, F.MAX_OFFSET, F.MIN_OFFSET))
    ok = ops["outcome"] == Outcome.OK
    current: Flags = read & ok & (ops["level"] == Level.LINEARIZABLE)
    return current


class Bound(msgspec.Struct, array_like=True, frozen=True):
    """A time, the offset it bounds, and the operation that proves it."""

    ns: int
    off: int = NOTHING
    op_id: int = NOTHING
    is_send: bool = False


def time_violation(subject: str, low: Bound, high: Bound) -> Violation:
    """Return that an append had certainly not happened after it, or a later one, had."""
    low_text = (
        f"the send of offset {low.off} was called"
        if low.is_send
        else f"a read missed offset {low.off}"
    )
    high_text = (
        f"the send of offset {high.off} had returned"
        if high.is_send
        else f"a read had found offset {high.off}"
    )
    late_us = (low.ns - high.ns) / 1000
    return Violation(
        _BY_BOUNDS[low.is_send, high.is_send],
        subject,
        f"{low_text} {late_us:,.1f} µs after {high_text}",
        (low.op_id, high.op_id),
        at_ns=low.ns,
    )


def contradiction(
    subject: str, bounds: tuple[int, int, int], op_id: int, at_ns: int, low: int = NOTHING
) -> Violation:
    """Return that a read found an offset at or beyond its own end, a negative one, or none.

    *bounds*: the first offset found, the one after the last, the end that the answer names.
    """
    first, after, end = bounds
    text = f"found offsets {first} … {after - 1} and names {end} as the end of the queue"
    if first == after:
        text = f"found nothing at offset {first} and names {end} as the end of the queue"
    if low > end > NOTHING:
        text = f"names {low} as the first offset kept and {end} as the end of the queue"
    return Violation(SELF_CONTRADICTION, subject, text, (op_id,), at_ns=at_ns)


def two_values(subject: str, off: int, values: tuple[int, int], ids: tuple[int, int]) -> Violation:
    """Return that one offset holds two values."""
    text = f"offset {off} holds value {values[0]} and value {values[1]}"
    return Violation(INCONSISTENT_OFFSETS, subject, text, ids)


def two_places(subject: str, value: int, offs: tuple[int, int], ids: tuple[int, int]) -> Violation:
    """Return that one value is at two offsets."""
    text = f"value {value} is at offset {offs[0]} and at offset {offs[1]}"
    return Violation(DUPLICATE, subject, text, ids)


def aborted_read(subject: str, off: int, value: int, ids: tuple[int, ...]) -> Violation:
    """Return that an offset holds what certainly was not stored."""
    text = f"offset {off} holds value {value}, whose send certainly failed"
    return Violation(ABORTED_READ, subject, text, ids)


def check_reads(columns: QueueColumns, subject: str) -> list[Violation]:
    """Return reads with a found offset at or beyond the read's own end; a negative offset.

    A pull that found nothing where its own end and first offset kept say that there is a message. A
    first offset kept behind the end.
    """
    last = columns.found_off + columns.found_count
    wrong = (columns.end != NOTHING) & (columns.found_count > 0) & (last > columns.end)
    wrong |= (columns.found_count > 0) & (columns.found_off < 0)
    wrong |= columns.end < NOTHING
    nothing = (columns.found_count == 0) & (columns.found_off != NOTHING)
    wrong |= nothing & (columns.low <= columns.found_off) & (columns.found_off < columns.end)
    wrong |= (columns.end != NOTHING) & (columns.low > columns.end)
    return [
        contradiction(
            subject,
            (columns.found_off[at], last[at], columns.end[at]),
            int(columns.read_id[at]),
            int(columns.read_ret[at]),
            int(columns.low[at]),
        )
        for at in np.flatnonzero(wrong)[:REPORTED_MAX].tolist()
    ]


def check_values(columns: QueueColumns, subject: str) -> list[Violation]:
    """Return contradictions: an offset has one value, for sends and reads.

    A value has as many offsets at most as sends of it may have succeeded.
    """
    acked = columns.send_off != NOTHING
    off = np.concatenate((columns.send_off[acked], columns.seen_off))
    value = np.concatenate((columns.send_value[acked], columns.seen_value))
    who = np.concatenate((columns.send_id[acked], columns.seen_id))
    found = [
        two_values(subject, off[a], (value[a], value[b]), (int(who[a]), int(who[b])))
        for a, b in _disagreements(off, value)
    ]
    live = columns.send_value[~columns.send_failed]
    found += [
        two_places(subject, value[a], (off[a], off[b]), (int(who[a]), int(who[b])))
        for a, b in _disagreements(value, off)
        if len(np.unique(off[value == value[a]])) > np.count_nonzero(live == value[a])
    ]
    # One that was refused and then sent again was sent: that attempt comes first.
    order = np.lexsort((columns.send_failed, columns.send_value))
    sent = columns.send_value[order]
    place = np.searchsorted(sent, columns.seen_value)
    known = np.zeros(len(columns.seen_value), dtype=np.bool_)
    inside = place < len(sent)
    known[inside] = sent[place[inside]] == columns.seen_value[inside]
    found += [
        Violation(
            PHANTOM,
            subject,
            f"offset {columns.seen_off[at]} holds value {columns.seen_value[at]}, which "
            "no send to this queue has",
            (int(columns.seen_id[at]),),
        )
        for at in _first_of_each(columns.seen_value, ~known)
    ]
    aborted = known.copy()
    aborted[known] = columns.send_failed[order[place[known]]]
    found += [
        aborted_read(
            subject,
            columns.seen_off[at],
            columns.seen_value[at],
            (int(columns.send_id[order[place[at]]]), int(columns.seen_id[at])),
        )
        for at in _first_of_each(columns.seen_value, aborted)
    ]
    return found


def _disagreements(key: I64, value: I64) -> list[tuple[int, int]]:
    """Return pairs of rows with equal key and different values."""
    order = np.lexsort((value, key))
    same_key = key[order[1:]] == key[order[:-1]]
    bad = np.flatnonzero(same_key & (value[order[1:]] != value[order[:-1]]))
    return [(int(order[at]), int(order[at + 1])) for at in bad[:REPORTED_MAX].tolist()]


def _first_of_each(value: I64, wanted: npt.NDArray[np.bool_]) -> list[int]:
    """Return the first row of each distinct value among the *wanted* ones."""
    rows = np.flatnonzero(wanted)
    _, first = np.unique(value[rows], return_index=True)
    places: list[int] = rows[np.sort(first)][:REPORTED_MAX].tolist()
    return places


def verdict_of(judged: Iterable[Judged], violations: Iterable[Violation]) -> Verdict:
    """Return the verdict over all queues: linearizability is local to a queue."""
    every = list(judged)
    counts = {
        "queues": len(every),
        "sends": sum(judged.sends for judged in every),
        "reads": sum(judged.reads for judged in every),
    }
    facts = sum(judged.acked + judged.reads for judged in every)
    verdict = judge(NAME, violations, counts, looked_at=facts)
    undecided = sum(not judged.is_valid for judged in every)
    if verdict.is_valid and undecided:
        reason = f"{undecided} queues hold values of several sends: their times are not judged"
        return Verdict(NAME, "unknown", (), counts, reason)
    unproved = sum(judged.unproved for judged in every)
    if verdict.is_valid and unproved:
        return Verdict(
            NAME,
            "unknown",
            (),
            counts,
            f"{unproved} pulls kept as a hash hold messages that no other read saw",
        )
    return verdict
