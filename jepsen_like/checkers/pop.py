"""Messages received one by one (POP): one consumer at a time, never after the acknowledgement.

Every message that a `RECEIVE` found is a row of its own, a *delivery*: `cnt` is its attempt, `txn`
its receipt, `status` the invisible time in ms. `ACK` and `CHANGE_TIME` name the receipt they used;
the latter has the new one in `min_off`. A row without an offset states that its group has received
everything of the queue from *min_off* to *max_off*.

A delivery lasts until its call + invisible time at least, less by as much as brokers' clocks may be
apart. A later attempt must not have returned before that; a change of the time moves that end, and
one of unknown outcome perhaps. Receives of unknown outcome hand messages out that no row has:
attempts may be missing, but never come twice, and never go back.

A message is that of its queue: where sends, pulls or replicas show its value, one of them shows it
at the offset at which it was handed out.

How messages end, and which receipts count, is in `pop_ends`; what receives that last are given, in
`pop_waits`. Columns decide over all deliveries; wrong rows are named by number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dledger.jepsen_like.checkers import pop_ends, pop_waits
from dledger.jepsen_like.checkers.fault_record import FaultRecord
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
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

IN_ORDER_SUFFIX: Final = pop_waits.IN_ORDER_SUFFIX
REPORTED_MAX: Final = 8
MS_NS: Final = 1_000_000
OPERATIONS: Final = frozenset({F.RECEIVE, F.ACK, F.CHANGE_TIME, F.GIVEN_UP})

Seen = Mapping[int, Collection[tuple[str, int, int]]]
"""Value: the places, as topic, queue and offset, that others show it at."""

_I64 = npt.NDArray[np.int64]
_Place = tuple[str, str, int]


class _Columns(NamedTuple):
    """Rows of one kind; `key` numbers group, topic, queue and offset."""

    key: _I64
    attempt: _I64
    receipt: _I64
    call_ns: _I64
    ret_ns: _I64
    span_ns: _I64
    value: _I64
    op_id: _I64


class _Keys:
    """Numbers for messages of groups."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, int, int], int] = {}

    def of(self, op: Operation) -> int:
        place = (op.group, op.topic, op.queue, op.off)
        return self._numbers.setdefault(place, len(self._numbers))

    def names(self) -> list[tuple[str, str, int, int]]:
        return list(self._numbers)


def _columns(keys: _Keys, rows: list[Operation]) -> _Columns:
    table = np.array(
        [
            (
                keys.of(op),
                op.cnt,
                op.txn,
                op.call_ns,
                op.ret_ns,
                op.status * MS_NS,
                op.value,
                op.op_id,
            )
            for op in rows
        ],
        np.int64,
    ).reshape(len(rows), len(_Columns._fields))
    return _Columns(*table.T)


def _in(columns: _Columns, order: npt.NDArray[np.intp]) -> _Columns:
    return _Columns(*(column[order] for column in columns))


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
    delivered = [op for op in rows if op.f == F.RECEIVE and op.outcome == Outcome.OK]
    heads = [op for op in delivered if op.off == NOTHING]
    keys = _Keys()
    found = _columns(keys, [op for op in delivered if op.off != NOTHING])
    acked_rows = [op for op in rows if op.f == F.ACK and op.outcome == Outcome.OK]
    acked = _columns(keys, acked_rows)
    used = _columns(
        keys, acked_rows + [op for op in rows if op.f == F.CHANGE_TIME and op.outcome == Outcome.OK]
    )
    changes = [op for op in rows if op.f == F.CHANGE_TIME and op.outcome != Outcome.FAIL]
    wrong: list[tuple[str, _I64, _I64]] = []
    if len(found.key):
        by_attempt = _in(found, np.lexsort((found.call_ns, found.attempt, found.key)))
        ends = _ends(by_attempt, keys, changes) - clock_error_ns
        wrong += _pairs(by_attempt, ends)
        wrong.append(_went_back(found))
        wrong.append(_again(found, acked))
        wrong.append(_old_receipts(by_attempt, used, keys, changes))
    names = keys.names()
    violations = [
        _violation(name, names, at, ids)
        for name, where, witnesses in wrong
        for at, ids in zip(where[:REPORTED_MAX], witnesses[:REPORTED_MAX], strict=True)
    ]
    if len(found.key):
        acks = [op for op in rows if op.f == F.ACK and op.outcome != Outcome.FAIL]
        violations += _out_of_order(by_attempt, ends, acks, names)
    ended = pop_ends.violations(rows, clock_error_ns=clock_error_ns)
    violations += _first_of_each(ended)
    violations += _misplaced(delivered, seen or {})
    if record is not None:
        violations += pop_waits.violations(rows, record, clock_error_ns=clock_error_ns)
    violations += _lost(heads, names, pop_ends.given_up_unseen(rows))
    counts = {
        "received": len(found.key),
        "again": int(np.count_nonzero(found.attempt > 1)),
        "acknowledged": len(acked.key),
        "changed": len(changes),
        "refused": sum(op.f == F.ACK and op.outcome == Outcome.FAIL for op in rows),
        "given_up": sum(op.f == F.GIVEN_UP for op in rows),
    }
    return judge(NAME, violations, counts, looked_at=len(found.key))


def _violation(
    name: str, names: list[tuple[str, str, int, int]], at: np.int64, ids: _I64
) -> Violation:
    group, topic, queue, off = names[int(at)]
    return Violation(
        name, f"{group}@{topic}/{queue}", f"offset {off}", tuple(int(each) for each in ids)
    )


def _ends(found: _Columns, keys: _Keys, changes: list[Operation]) -> _I64:
    """Return until when each delivery lasts at least; *found* is in the order of attempts."""
    ends: _I64 = found.call_ns + found.span_ns
    moves: dict[int, list[tuple[bool, int]]] = {}
    of_receipt = {
        (int(key), int(receipt)): place
        for place, (key, receipt) in enumerate(zip(found.key, found.receipt, strict=True))
    }
    for op in sorted(changes, key=lambda change: change.call_ns):
        place = of_receipt.get((keys.of(op), op.txn))
        if place is None:
            continue
        is_sure = op.outcome == Outcome.OK
        moves.setdefault(place, []).append((is_sure, op.call_ns + op.status * MS_NS))
        if is_sure:
            of_receipt[keys.of(op), op.min_off] = place
    follows = np.zeros(len(ends), bool)
    follows[1:] = (found.key[1:] == found.key[:-1]) & (found.attempt[1:] > found.attempt[:-1])
    for place in sorted({*np.flatnonzero(follows).tolist(), *moves}):
        begin = int(found.call_ns[place])
        if follows[place]:
            begin = max(begin, int(ends[place - 1]))
        end = begin + int(found.span_ns[place])
        for is_sure, moved in moves.get(place, ()):
            end = moved if is_sure else min(end, moved)
        ends[place] = end
    return ends


def _pairs(found: _Columns, ends: _I64) -> list[tuple[str, _I64, _I64]]:
    """Compare each delivery with the next attempt of its message."""
    same = found.key[1:] == found.key[:-1]
    twice = same & (found.attempt[1:] == found.attempt[:-1])
    early = same & ~twice & (found.ret_ns[1:] < ends[:-1])
    other = same & (found.value[1:] != found.value[:-1])
    ids = np.stack((found.op_id[:-1], found.op_id[1:]), axis=1)
    return [
        (name, found.key[1:][flags], ids[flags])
        for name, flags in ((TWICE, twice), (EARLY, early), (OTHER, other))
    ]


def _latest_before(
    keys: _I64, at_ns: _I64, known: _Columns, order_ns: _I64, rank: _I64
) -> tuple[_I64, _I64]:
    """Return, for each key and time, the greatest *rank* among rows of *known* before, and its row.

    A row is before when its *order_ns* is smaller. Less than 0 where there is none.
    """
    order = np.lexsort((order_ns, known.key))
    sorted_keys, sorted_ns, sorted_rank = known.key[order], order_ns[order], rank[order]
    # The greatest rank so far within a key: ranks are lifted by their key, so that the running
    # maximum begins again with each.
    lift = np.int64(int(sorted_rank.max(initial=0)) + 2)
    running = np.maximum.accumulate(sorted_rank + 1 + lift * sorted_keys) - lift * sorted_keys - 1
    is_new = np.ones(len(order), bool)
    is_new[1:] = (running[1:] != running[:-1]) | (sorted_keys[1:] != sorted_keys[:-1])
    newest = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
    # How many rows of that key come before the time.
    ends = np.array(
        [
            np.searchsorted(sorted_ns[low:high], at, side="left") + low
            for low, high, at in zip(
                np.searchsorted(sorted_keys, keys, side="left"),
                np.searchsorted(sorted_keys, keys, side="right"),
                at_ns,
                strict=True,
            )
        ],
        np.int64,
    )
    has = ends > np.searchsorted(sorted_keys, keys, side="left")
    at = np.where(has, ends - 1, 0)
    return np.where(has, running[at], -1), order[newest[at]].astype(np.int64)


def _went_back(found: _Columns) -> tuple[str, _I64, _I64]:
    greatest, row = _latest_before(found.key, found.call_ns, found, found.ret_ns, found.attempt)
    flags = greatest > found.attempt
    ids = np.stack((found.op_id[row], found.op_id), axis=1)
    return WENT_BACK, found.key[flags], ids[flags]


def _again(found: _Columns, acked: _Columns) -> tuple[str, _I64, _I64]:
    if not len(acked.key):
        return AGAIN, found.key[:0], np.empty((0, 2), np.int64)
    known, row = _latest_before(
        found.key, found.call_ns, acked, acked.ret_ns, np.zeros(len(acked.key), np.int64)
    )
    flags = known >= 0
    ids = np.stack((acked.op_id[row], found.op_id), axis=1)
    return AGAIN, found.key[flags], ids[flags]


def _old_receipts(
    found: _Columns, used: _Columns, keys: _Keys, changes: list[Operation]
) -> tuple[str, _I64, _I64]:
    """Find receipts that were accepted after a later delivery of their message had returned."""
    attempts = {
        (int(key), int(receipt)): int(attempt)
        for key, receipt, attempt in zip(found.key, found.receipt, found.attempt, strict=True)
    }
    for op in sorted(changes, key=lambda change: change.call_ns):
        attempt = attempts.get((keys.of(op), op.txn))
        if attempt is not None and op.outcome == Outcome.OK:
            attempts[keys.of(op), op.min_off] = attempt
    own = np.array(
        [
            attempts.get((int(key), int(receipt)), 1 << 40)
            for key, receipt in zip(used.key, used.receipt, strict=True)
        ],
        np.int64,
    )
    if not len(own):
        return OLD_RECEIPT, used.key, np.empty((0, 2), np.int64)
    greatest, row = _latest_before(used.key, used.call_ns, found, found.ret_ns, found.attempt)
    flags = greatest > own
    ids = np.stack((found.op_id[row], used.op_id), axis=1)
    return OLD_RECEIPT, used.key[flags], ids[flags]


def _out_of_order(
    found: _Columns, ends: _I64, acks: list[Operation], names: list[tuple[str, str, int, int]]
) -> list[Violation]:
    """Compare first deliveries of neighbours in groups that receive in order.

    The later one comes neither before the other nor while that is out, unless one answer held both.
    """
    places: dict[int, list[int]] = {}
    for place in np.argsort(found.call_ns, kind="stable").tolist():
        places.setdefault(int(found.key[place]), []).append(place)
    acked_ns: dict[tuple[str, str, int, int], int] = {}
    for op in acks:
        message = (op.group, op.topic, op.queue, op.off)
        acked_ns[message] = min(acked_ns.get(message, NEVER), op.call_ns)
    by_queue: dict[_Place, list[tuple[int, int]]] = {}
    for key in places:
        group, topic, queue, off = names[key]
        if group.endswith(IN_ORDER_SUFFIX):
            by_queue.setdefault((group, topic, queue), []).append((off, key))
    violations: list[Violation] = []
    for queue_place, offsets in sorted(by_queue.items()):
        offsets.sort()
        for (ahead, key), (off, later) in pairwise(offsets):
            first = places[later][0]
            acked = acked_ns.get((*queue_place, ahead), NEVER)
            for place in places[key]:
                is_before = found.ret_ns[first] < found.call_ns[places[key][0]]
                is_out = (
                    found.ret_ns[place] < found.call_ns[first]
                    and found.ret_ns[first] < ends[place]
                    and acked > found.ret_ns[first]
                )
                if is_before or is_out:
                    ids = (int(found.op_id[place]), int(found.op_id[first]))
                    group, topic, queue = queue_place
                    where = f"{group}@{topic}/{queue}"
                    violations.append(Violation(OUT_OF_ORDER, where, f"offset {off}", ids))
                    break
    return violations[:REPORTED_MAX]


def received_values(operations: Iterable[Operation]) -> tuple[int, ...]:
    """Return the values that were handed out, sorted."""
    return tuple(
        sorted(
            {
                op.value
                for op in operations
                if op.f == F.RECEIVE and op.outcome == Outcome.OK and op.off != NOTHING
            }
        )
    )


def _misplaced(delivered: list[Operation], seen: Seen) -> list[Violation]:
    found: list[Violation] = []
    for op in delivered:
        places = seen.get(op.value)
        if op.off != NOTHING and places and (op.topic, op.queue, op.off) not in places:
            where = f"{op.group}@{op.topic}/{op.queue}"
            found.append(Violation(OTHER, where, f"offset {op.off}", (op.op_id,), at_ns=op.ret_ns))
            if len(found) == REPORTED_MAX:
                break
    return found


def _first_of_each(found: list[Violation]) -> list[Violation]:
    counts: dict[str, int] = {}
    kept = []
    for violation in found:
        counts[violation.name] = counts.get(violation.name, 0) + 1
        if counts[violation.name] <= REPORTED_MAX:
            kept.append(violation)
    return kept


def _lost(
    heads: list[Operation], names: list[tuple[str, str, int, int]], unseen: dict[str, int]
) -> list[Violation]:
    """Find messages that no consumer got; *unseen* of a group were given up and in no answer."""
    there: dict[_Place, set[int]] = {}
    for group, topic, queue, off in names:
        there.setdefault((group, topic, queue), set()).add(off)
    violations: list[Violation] = []
    for head in heads:
        received = there.get((head.group, head.topic, head.queue), set())
        allowed = unseen.get(head.group, 0)
        every = (off for off in range(head.min_off, head.max_off) if off not in received)
        missing = list(islice(every, allowed + REPORTED_MAX))  # a wrong end may be far away
        if len(missing) <= allowed:
            continue
        where = f"{head.group}@{head.topic}/{head.queue}"
        violations += [
            Violation(LOST, where, f"offset {off}", (head.op_id,)) for off in missing[:REPORTED_MAX]
        ]
    return violations[:REPORTED_MAX]
