"""A poll that waits is answered when a message comes.

A poll of a subscribed consumer that finds nothing is held until there is something, or its time is
over. One that was answered a second or more after a send to its queue, to the offset it asks for or
behind it, had been acknowledged, and that had lasted so long beside that message, waited in vain,
whatever it found in the end.

That is demanded where, by the record of faults, nothing was wrong while the poll lasted, and no
send was slow. A program may stand still for a moment: one of a hundred polls that last so long is
allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from dledger.jepsen_like.checkers.fault_record import FaultRecord
from dledger.jepsen_like.checkers.verdict import REPORTED_MAX, Violation
from dledger.jepsen_like.history.operation import NOTHING, Operation, Outcome

IN_VAIN: Final = "poll waited in vain"

LATE_NS: Final = 1_000_000_000
"""How long a poll or a receive that is held may take to notice a message."""
IN_VAIN_LEAST: Final = 2
ALLOWED_PER_CENT: Final = 1

Queue = tuple[str, int]


def violations(
    polls: Iterable[Operation], sends_of: Callable[[Queue], Any], record: FaultRecord
) -> list[Violation]:
    """Return polls that waited in vain, if there are more than a few."""
    lasted: dict[Queue, list[Operation]] = {}
    for op in polls:
        if op.ret_ns >= op.call_ns + LATE_NS:
            lasted.setdefault((op.topic, op.queue), []).append(op)
    found: list[Violation] = []
    for queue, rows in sorted(lasted.items()):
        sends = _Acknowledged(sends_of(queue))
        for op in rows:
            is_quiet = record.quiet_ns(op.call_ns, op.ret_ns) == op.ret_ns - op.call_ns
            send = sends.behind(op.off, op.ret_ns - LATE_NS) if is_quiet else None
            if send is not None:
                found.append(_violation(send, op))
    return more_than_a_few(found, sum(map(len, lasted.values())))


def more_than_a_few(found: list[Violation], lasted: int) -> list[Violation]:
    """Return the first of those that waited in vain, unless they are few of those that lasted."""
    if len(found) < IN_VAIN_LEAST or 100 * len(found) <= ALLOWED_PER_CENT * lasted:
        return []
    return found[:REPORTED_MAX]


class _Acknowledged:
    """The sends to a queue that were acknowledged with their place, in order of their answers."""

    def __init__(self, rows: Any) -> None:
        columns = {
            name: rows.column(name).to_numpy() for name in ("op_id", "outcome", "off", "ret_ns")
        }
        # The offset of a delayed message is that of another topic.
        is_plain = rows.column("due_ns").to_numpy() == NOTHING
        is_placed = (columns["outcome"] == Outcome.OK) & (columns["off"] != NOTHING) & is_plain
        at = np.flatnonzero(is_placed)
        at = at[np.argsort(columns["ret_ns"][at], kind="stable")]
        self._op_id, self._off = columns["op_id"][at], columns["off"][at]
        self._ret_ns = columns["ret_ns"][at]
        self._furthest = np.maximum.accumulate(self._off)

    def behind(self, off: int, until_ns: int) -> int | None:
        """Return the first send to *off* or behind it that was answered by *until_ns*."""
        count = int(np.searchsorted(self._ret_ns, until_ns, side="right"))
        at = int(np.searchsorted(self._furthest[:count], off))
        return int(self._op_id[at]) if at < count else None


def _violation(send: int, op: Operation) -> Violation:
    text = (
        f"p{op.process} polled at {op.off} for {(op.ret_ns - op.call_ns) / 1e9:.1f} s, though a "
        "message there or behind had been acknowledged for a second or more when it was answered"
    )
    subject = f"{op.group}@{op.topic}/{op.queue}"
    return Violation(IN_VAIN, subject, text, (send, op.op_id), at_ns=op.ret_ns)
