"""What a subscribed consumer polls: from where it committed, and then on without a gap.

A `PULL` with a group is a poll of an assigned consumer. Each begins where the process's poll before
ended, or at an offset it has fetched since. A consumer that has not polled yet may begin anywhere,
unless it fetched an offset to go on there (`cnt` 1) and found one. A poll that found its offset out
of range goes on at the bound in the answer. Polls of one process that overlap prove nothing; a
process that saw an unknown one is retired.

Backwards means delivered again without a reason, forwards means skipped. What is redelivered after
a restart begins at the committed offset and is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome

NAME: Final = "polls"

WENT_BACK: Final = "poll went back"
SKIPPED: Final = "poll skipped"


@dataclass(slots=True)
class _Position:
    """Where the next poll may begin; nowhere in particular: anywhere."""

    offsets: set[int] = field(default_factory=set)
    last_id: int = NOTHING
    busy_until_ns: int = -1


def polls_of(operations: Iterable[Operation]) -> list[Operation]:
    """Return the polls of subscribed consumers that ended well."""
    return [op for op in operations if op.f == F.PULL and op.group and op.outcome == Outcome.OK]


def check_history(operations: Iterable[Operation], waits: Iterable[Violation] = ()) -> Verdict:
    """Return the verdict over the polls of every (process, group, queue)."""
    rows = [
        op
        for op in operations
        if op.f in (F.PULL, F.FETCH_COMMIT) and op.group and op.outcome == Outcome.OK
    ]
    positions: dict[tuple[int, str, str, int], _Position] = {}
    found: list[Violation] = []
    for op in sorted(rows, key=lambda op: (op.call_ns, op.op_id)):
        at = positions.setdefault((op.process, op.group, op.topic, op.queue), _Position())
        if op.call_ns < at.busy_until_ns:
            at.offsets = set()
            at.busy_until_ns = max(at.busy_until_ns, op.ret_ns)
            continue
        if op.f == F.FETCH_COMMIT:
            if op.off == NOTHING:
                at.offsets = set()
            elif at.offsets or op.cnt:
                at.offsets = at.offsets | {op.off}
        else:
            if at.offsets and op.off not in at.offsets:
                name = SKIPPED if op.off > max(at.offsets) else WENT_BACK
                found.append(_violation(name, at, op))
            at.offsets = _next(op)
        at.last_id, at.busy_until_ns = op.op_id, op.ret_ns
    polls = polls_of(rows)
    counts = {"consumers": len({op.process for op in polls}), "polls": len(polls)}
    return judge(NAME, [*found, *waits], counts, looked_at=len(polls))


def _next(op: Operation) -> set[int]:
    """Return where the poll after *op* may begin."""
    count = max(op.cnt, len(op.values))
    after = {op.off + count}
    if count == 0 and op.min_off > op.off:
        after.add(op.min_off)
    if count == 0 and NOTHING < op.max_off < op.off:
        after.add(op.max_off)
    return after


def _violation(name: str, at: _Position, op: Operation) -> Violation:
    expected = " or ".join(map(str, sorted(at.offsets)))
    return Violation(
        name,
        op.slot,
        f"p{op.process} polled at {op.off}, and was to go on at {expected}",
        (at.last_id, op.op_id),
        at_ns=op.call_ns,
    )
