"""Which delayed messages came too late, by every pair of a send and a read."""

from __future__ import annotations

from collections.abc import Iterable

from dledger.jepsen_like.checkers.delayed import READS
from dledger.jepsen_like.history.operation import NOTHING, F, Level, Operation, Outcome

MS = 1_000_000


def late_pairs(
    operations: Iterable[Operation], troubles: Iterable[tuple[int, int]], quiet_max_ms: int
) -> set[tuple[int, int]]:
    """Return the pairs of sends and reads that prove a lateness, by their op ids.

    All stamps are whole milliseconds.

    Args:
        troubles: From when to when something was wrong.
        quiet_max_ms: Milliseconds for which a message may be due while nothing is wrong.
    """
    rows = list(operations)
    wrong = {at for begin, end in troubles for at in range(begin // MS, end // MS)}
    found: set[tuple[int, int]] = set()
    for send in rows:
        if send.f != F.SEND or send.due_ns == NOTHING or send.outcome != Outcome.OK:
            continue
        places = [
            op.off + at
            for op in rows
            if op.f == F.PULL and op.outcome == Outcome.OK
            for at, value in enumerate(op.values)
            if value == send.value
        ]
        due_ms = (send.due_ns + send.ret_ns - send.call_ns) // MS
        for read in rows:
            if (
                read.f not in READS
                or read.outcome != Outcome.OK
                or read.level != Level.LINEARIZABLE
            ):
                continue
            if not places or read.max_off == NOTHING or read.max_off > min(places):
                continue
            waited = [at for at in range(due_ms, read.call_ns // MS) if at not in wrong]
            if len(waited) > quiet_max_ms:
                found.add((send.op_id, read.op_id))
    return found
