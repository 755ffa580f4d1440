"""Retention: what may be removed is a model, from the settings of a plan and not from the product.

A move of the floor is *entitled* where it takes whole segments, and either all messages in them are
older than messages are kept (age, request), or what is left is no less than the bytes that are kept
(size). Both are measured on the log, at the entry that moves the floor: the leader decided before.

A queue of a replica may begin later only where a floor lets it: the first offset of the queue that
stands behind the floor. So may a queue in the answer to a client: the greatest first offset kept
that answers name is judged.

Some offsets are removed before any row named their message: *holes*. A message that was
acknowledged without an offset and seen nowhere may have been in such a hole: one message in each,
and only where the times fit. A hole was filled after the last read that saw the queue end there or
before, and before the first row that proves it to go on. Of what fits nowhere some is lost.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    F,
    FloorMove,
    Level,
    Operation,
    Outcome,
    ReplicaRead,
    cut_queues,
)

NAME: Final = "retention"

REMOVED: Final = "message removed without retention"
NOT_ENTITLED: Final = "retention without entitlement"

Queue = tuple[str, int]

_READS: Final = frozenset({F.PULL, F.MAX_OFFSET, F.MIN_OFFSET})
_BY_AGE: Final = frozenset({"age", "request"})
_BY_SIZE: Final = frozenset({"size"})


class Named(NamedTuple):
    """The greatest first offset kept of a queue that answers name: when it was asked, by whom."""

    topic: str
    queue: int
    min_off: int
    call_ns: int
    op_id: int


def named_by(operations: Iterable[Operation]) -> list[Named]:
    """Return the first offsets kept that the answers to reads of queues name."""
    return [
        Named(op.topic, op.queue, op.min_off, op.call_ns, op.op_id)
        for op in sorted(operations, key=lambda op: (op.ret_ns, op.call_ns, op.op_id))
        if op.f in _READS and op.outcome == Outcome.OK and op.topic and op.min_off > 0
    ]


def greatest(named: Iterable[Named]) -> list[Named]:
    """Return of each queue the greatest of them; of equal ones the first."""
    best: dict[Queue, Named] = {}
    for one in named:
        known = best.setdefault((one.topic, one.queue), one)
        if one.min_off > known.min_off:
            best[one.topic, one.queue] = one
    return list(best.values())


class Keeps(msgspec.Struct, frozen=True):
    """What brokers keep, by the settings of a plan.

    Attributes:
        keep_bytes: A log longer than this gives up its oldest segments; 0: none goes for its size.
        date_error_ns: How far brokers' dates may be wrong; None: years.
    """

    keep_bytes: int = 0
    keep_ms: int = 72 * 3_600_000
    segment_bytes: int = 1 << 30
    date_error_ns: int | None = 0

    def is_old_enough(self, at_ns: int) -> bool:
        """Whether a message of a run, which began at 0, may be too old to be kept at *at_ns*."""
        return self.date_error_ns is None or at_ns + self.date_error_ns >= self.keep_ms * 1_000_000


def mistake_in(move: FloorMove, keeps: Keeps) -> str:
    """Return why a move of the floor is not entitled; empty: it is."""
    if move.cause in _BY_AGE:
        if not keeps.is_old_enough(move.at_ns):
            return f"for its {move.cause}; nothing is older than {move.at_ns / 1e9:.0f} s"
        age_ms = move.stored_ms - move.newest_ms
        if age_ms < keeps.keep_ms:
            return f"for its {move.cause}: {age_ms} ms; kept are {keeps.keep_ms} ms"
        return ""
    if move.cause not in _BY_SIZE:
        return f"for a cause that no setting has: {move.cause!r}"
    if keeps.keep_bytes <= 0:
        return "for its size, which has no limit"
    left = move.end_position - move.position
    end = move.end_position - keeps.keep_bytes
    if move.position > end - end % keeps.segment_bytes:
        return f"for its size: {left} bytes are left; kept are {keeps.keep_bytes} in whole segments"
    return ""


def check_floors(
    moves: Iterable[FloorMove],
    heads: Sequence[ReplicaRead],
    keeps: Keeps,
    named: Iterable[Named] = (),
) -> Verdict:
    """Return the verdict over what was removed.

    Args:
        heads: Where each queue of each replica began when the run was over. Without any the rows
            may not be all, and answers are not judged.
        named: Of each queue at most one.
    """
    rows = sorted(moves, key=lambda move: (move.index, move.topic, move.queue, move.node))
    judged = {move.index for move in rows if move.index and not move.topic}
    may_begin: dict[tuple[str, int], int] = {}
    found: list[Violation] = []
    for move in rows:
        queue = (move.topic, move.queue)
        if move.index in judged:
            may_begin[queue] = max(may_begin.get(queue, 0), move.min_off)
        if move.index and not move.topic and (mistake := mistake_in(move, keeps)):
            text = f"{move.node}: entry {move.index} removes all before byte {move.position} "
            subject = f"entry {move.index}"
            found.append(Violation(NOT_ENTITLED, subject, text + mistake, at_ns=move.at_ns))
    late = [head for head in heads if head.min_off > may_begin.get((head.topic, head.queue), 0)]
    answers = [one for one in named if one.min_off > may_begin.get((one.topic, one.queue), 0)]
    answers = sorted(answers) if heads else []
    counts = {
        "floors": sum(not move.topic and move.index > 0 for move in rows),
        "unexplained": len(late) + len(answers),
    }
    late.sort(key=lambda head: (head.topic, head.queue, head.node, head.min_off))
    lost: list[tuple[str, ReplicaRead | Named, tuple[int, ...], int]] = [
        *((head.node, head, (), head.at_ns) for head in late),
        *(("an answer", one, (one.op_id,), one.call_ns) for one in answers),
    ]
    for who, at, witnesses, at_ns in lost:
        text = f"{who} has it from offset {at.min_off} on; retention let it begin at "
        text += str(may_begin.get((at.topic, at.queue), 0))
        found.append(Violation(REMOVED, f"{at.topic}/{at.queue}", text, witnesses, at_ns=at_ns))
    return judge(NAME, found, counts, looked_at=len(heads) + len(rows))


FILLING: Final = (int(F.SEND), int(F.PULL), int(F.MAX_OFFSET))
"""What names the messages of a queue, or proves where it ended."""
_COLUMNS: Final = (
    "op_id",
    "f",
    "outcome",
    "level",
    "call_ns",
    "ret_ns",
    "off",
    "max_off",
    "due_ns",
)


class Hole(NamedTuple):
    """When an offset was filled."""

    after_ns: int
    before_ns: int


class Missing(NamedTuple):
    """A message that was seen nowhere, and when it was appended."""

    value: int
    after_ns: int
    before_ns: int = NEVER


HolesOf = Callable[[Queue], Sequence[Hole]]
"""Returns the holes of a queue in the order of offsets."""


def begin_of(reads: Iterable[ReplicaRead], queue: Queue) -> int:
    """Return the first offset of a queue that some replica holds; 0: none was read."""
    begins = [read.min_off for read in reads if (read.topic, read.queue) == queue]
    return min(begins, default=0)


def holes_of(ops: Any, obs: Any, begin: int) -> list[Hole]:
    """
    Return the holes of a queue that begins at *begin*, by its rows *ops* of `FILLING`, and *obs*.
    """
    columns = {name: ops.column(name).to_numpy() for name in _COLUMNS}
    is_ok = columns["outcome"] == Outcome.OK
    is_send = is_ok & (columns["f"] == F.SEND) & (columns["due_ns"] == NOTHING)
    is_pull = is_ok & (columns["f"] == F.PULL)
    pulled = np.isin(obs.column("op_id").to_numpy(), columns["op_id"][is_pull])
    found_id, found_off = (obs.column(name).to_numpy()[pulled] for name in ("op_id", "off"))
    named = np.concatenate((columns["off"][is_send], found_off))
    holes = np.setdiff1d(np.arange(begin), named)
    if not len(holes):
        return []
    is_end = is_ok & (columns["f"] != F.SEND) & (columns["max_off"] != NOTHING)
    order = np.argsort(columns["op_id"])
    at = order[np.searchsorted(columns["op_id"], found_id, sorter=order)]
    last = np.concatenate((columns["off"][is_send], found_off, columns["max_off"][is_end] - 1))
    ret = np.concatenate(
        (columns["ret_ns"][is_send], columns["ret_ns"][at], columns["ret_ns"][is_end])
    )
    by_last = np.argsort(last, kind="stable")
    first_ret = np.append(np.minimum.accumulate(ret[by_last][::-1])[::-1], NEVER)
    before = first_ret[np.searchsorted(last[by_last], holes)]
    is_linear = is_end & (columns["level"] == Level.LINEARIZABLE)
    ends, calls = columns["max_off"][is_linear], columns["call_ns"][is_linear]
    by_end = np.argsort(ends, kind="stable")
    last_call = np.concatenate(([-NEVER], np.maximum.accumulate(calls[by_end])))
    after = last_call[np.searchsorted(ends[by_end], holes, side="right")]
    return [Hole(*pair) for pair in zip(after.tolist(), before.tolist(), strict=True)]


def without_hole(missing: Iterable[Missing], holes: Sequence[Hole]) -> list[int]:
    """Return the values that find no hole, as few as can be. Later holes were filled later."""
    after = [hole.after_ns for hole in holes]
    before = [hole.before_ns for hole in holes]
    waiting = sorted(
        (bisect_left(before, one.after_ns), bisect_right(after, one.before_ns), one.value)
        for one in missing
    )
    lost: list[int] = []
    open_now: list[tuple[int, int]] = []
    taken = 0
    for place in range(len(holes) + 1):
        while taken < len(waiting) and waiting[taken][0] <= place:
            _, end, value = waiting[taken]
            heapq.heappush(open_now, (end, value))
            taken += 1
        while open_now and open_now[0][0] <= place:
            lost.append(heapq.heappop(open_now)[1])
        if open_now:
            heapq.heappop(open_now)
    return sorted(lost)


def lost_of(
    missing: Mapping[Queue, Sequence[Missing]], reads: Iterable[ReplicaRead], holes: HolesOf | None
) -> set[int]:
    """Return the values of missing messages that are lost.

    *holes*: of a queue; None: not known, a queue that is cut proves nothing.
    """
    cut = cut_queues(reads)
    lost: set[int] = set()
    for queue, every in missing.items():
        if queue not in cut:
            lost.update(one.value for one in every)
        elif holes is not None:
            lost.update(without_hole(every, holes(queue)))
    return lost
