"""Offsets that retention removed before any row named their message.

A message that was acknowledged without an offset, a delayed or a transactional one, and that was
seen nowhere may have been in such a hole: one message in each, and only where the times fit. A hole
was filled after the last read that saw the queue end there or before, and before the first row that
proves it to go on. Of what fits nowhere some is certainly lost.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    F,
    Level,
    Outcome,
    ReplicaRead,
    cut_queues,
)

Queue = tuple[str, int]

OPERATIONS: Final = (int(F.SEND), int(F.PULL), int(F.MAX_OFFSET))
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
    """Return the holes of a queue.

    Args:
        ops: Rows of the queue, a table; all of `OPERATIONS`.
        obs: What was found there.
        begin: First offset that is kept.
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
    missing: Mapping[Queue, Sequence[Missing]],
    reads: Iterable[ReplicaRead],
    holes: HolesOf | None,
) -> set[int]:
    """Return the values of missing messages that are lost.

    Args:
        missing: By queue.
        reads: Where queues begin on replicas.
        holes: Of a queue; None: not known, a queue that is cut proves nothing.
    """
    cut = cut_queues(reads)
    lost: set[int] = set()
    for queue, every in missing.items():
        if queue not in cut:
            lost.update(one.value for one in every)
        elif holes is not None:
            lost.update(without_hole(every, holes(queue)))
    return lost
