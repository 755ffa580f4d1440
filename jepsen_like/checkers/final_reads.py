"""A client that was not there before reads everything when the run is over: queues and offsets.

Its pulls and the end of each queue that it asked for carry the group `READER`; what it found is
judged with all other reads. Here is judged that it was given all there is: the pages of a queue
begin where it begins and follow each other up to the end, and there is an answer for each offset
that a group committed. A queue of which replicas hold messages, and whose end it did not ask for,
was not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge, violation_of
from dledger.jepsen_like.history.columns import chosen, slots_of
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome

NAME: Final = "final_reads"

CUT_SHORT: Final = "queue not read to its end"
NOT_ASKED: Final = "committed offset not read at the end"
READER = "final-reader"
"""Group of what the client reads of queues."""

Slot = tuple[str, str, int]


def rows_of(operations: Iterable[Operation]) -> list[Operation]:
    """Return what the client read of queues."""
    return [op for op in operations if op.group == READER and op.outcome == Outcome.OK]


def check(
    reads: Iterable[Operation],
    offsets: Any,
    begins: Mapping[tuple[str, int], int],
    filled: Collection[tuple[str, int]] = (),
) -> Verdict:
    """Return the verdict over the last reads of a run that has ended well.

    Args:
        reads: See `rows_of`; only the last client that asked for the end of a queue counts.
        begins: From where on every replica has a queue afterwards; what is missing is not judged.
        filled: Queues of which some replica holds messages afterwards.
    """
    queues: dict[tuple[str, int], dict[int, list[Operation]]] = {}
    processes: set[int] = set()
    for op in reads:
        queues.setdefault((op.topic, op.queue), {}).setdefault(op.process, []).append(op)
        processes.add(op.process)
    found: list[Violation] = []
    for queue, by_process in sorted(queues.items()):
        found += _pages(queue, by_process[max(by_process)], begins.get(queue))
    text = "replicas hold messages of it, and a new client did not ask for its end"
    found += [
        violation_of(CUT_SHORT, f"{queue[0]}/{queue[1]}", text)
        for queue in sorted(filled)
        if not _is_end_asked(queues.get(queue, {}))
    ]
    f = offsets.column("f").to_numpy()
    is_ok = offsets.column("outcome").to_numpy() == Outcome.OK
    of_reader = np.isin(offsets.column("process").to_numpy(), list(processes))
    slots = _slots(chosen(offsets, is_ok & (f == F.COMMIT)))
    answered = _slots(chosen(offsets, is_ok & (f == F.FETCH_COMMIT) & of_reader))
    missing = sorted(slots.keys() - answered.keys())
    text = "an offset was committed, and a new client got no answer for it"
    found += [
        Violation(NOT_ASKED, f"{group}@{topic}/{queue}", text, (slots[group, topic, queue],))
        for group, topic, queue in missing
    ]
    counts = {"queues": len(queues), "slots": len(slots)}
    return judge(NAME, found, counts, looked_at=len(queues) + len(slots))


def _is_end_asked(by_process: Mapping[int, list[Operation]]) -> bool:
    last = by_process[max(by_process)] if by_process else ()
    return any(op.f == F.MAX_OFFSET for op in last)


def _pages(queue: tuple[str, int], rows: list[Operation], held_from: int | None) -> list[Violation]:
    ends = [op for op in rows if op.f == F.MAX_OFFSET]
    pulls = sorted((op for op in rows if op.f == F.PULL and op.cnt), key=lambda op: op.off)
    low = min((op.min_off for op in rows if op.min_off != NOTHING), default=0)
    if held_from is not None and pulls and pulls[0].off > max(low, held_from):
        return [cut_short(queue, max(low, held_from), pulls[0])]
    for first, second in pairwise(pulls):
        if second.off > first.off + first.cnt:
            return [cut_short(queue, first.off + first.cnt, first, second)]
    for asked in ends:
        reached = pulls[-1].off + pulls[-1].cnt if pulls else NOTHING
        if max(reached, low) < asked.max_off:
            return [cut_short(queue, max(reached, low), asked, *pulls[-1:])]
    return []


def cut_short(queue: tuple[str, int], off: int, *rows: Operation) -> Violation:
    """Return the violation of a queue that was not served at *off*."""
    text = f"a new client read all that it was given, and offset {off} was not there"
    return violation_of(CUT_SHORT, f"{queue[0]}/{queue[1]}", text, *rows)


def _slots(rows: Any) -> dict[Slot, int]:
    """Return group, topic and queue of rows, each with the first operation on it."""
    if not rows.num_rows:
        return {}
    _, first, which = np.unique(slots_of(rows), return_index=True, return_inverse=True)
    least = np.full(len(first), NEVER)
    np.minimum.at(least, which, rows.column("op_id").to_numpy())
    one_of_each = chosen(rows, first)
    words = (one_of_each.column(name).to_pylist() for name in ("group", "topic", "queue"))
    return dict(zip(zip(*words, strict=True), least.tolist(), strict=True))
