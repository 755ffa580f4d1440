"""The answers that clients got while nothing was wrong, second by second and row by row."""

from __future__ import annotations

from collections.abc import Callable

from dledger.jepsen_like.checkers import availability
from dledger.jepsen_like.checkers.availability import (
    DAMAGED_ERROR,
    DEADLINE_NS,
    NAME,
    REFUSED_ERRORS,
    REPORTED_MAX,
    SENDS,
    SENDS_LEAST,
    SILENT_MAX_NS,
)
from dledger.jepsen_like.checkers.fault_record import (
    ELECTION_NS,
    HEALED,
    ROLE,
    SERVED,
    recovers_within_ns,
)
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import NEVER, History, Operation, Outcome


def check_history(history: History, *, election_ns: int = ELECTION_NS) -> Verdict | None:
    """Return the verdict; None: there is no record of faults, or nothing in a quiet time."""
    served = [event.at_ns for event in history.events if event.kind == SERVED]
    if not served or not history.operations:
        return None
    well_ns = max(served) + election_ns
    troubles: list[tuple[int, int]] = []
    for event in history.events:
        if event.kind in (SERVED, ROLE):
            continue
        end = max(event.end_ns, event.at_ns) + recovers_within_ns(event.kind, election_ns)
        if event.at_ns <= max(served) and (event.kind == HEALED or end > well_ns):
            end = well_ns
        troubles.append((event.at_ns, end))
    rows = sorted(history.operations, key=lambda op: (op.call_ns, op.op_id))
    first, last = rows[0].call_ns, max(max(_stamps(op)) for op in rows)

    def quiet_since(at: int) -> int | None:
        """Return since when nothing is wrong, None when something is within the deadline."""
        if any(begin <= at + DEADLINE_NS and end > at for begin, end in troubles):
            return None
        return max((end for _, end in troubles if end <= at), default=first)

    judged = [op for op in rows if quiet_since(op.call_ns) is not None]
    if not judged:
        return None
    unknown = [op for op in judged if op.outcome == Outcome.INFO]
    damaged = [op for op in judged if op.err == DAMAGED_ERROR]
    found: list[Violation] = []
    if len(unknown) > 1 and len(unknown) / len(judged) > 0.01:
        ids = (unknown[0].op_id, unknown[1].op_id)
        at_ns = unknown[0].call_ns
        found.append(availability.undecided_violation(len(unknown), len(judged), ids, at_ns))
    for op in damaged[:REPORTED_MAX]:
        found.append(availability.damaged_violation(op.op_id, op.call_ns))
    found += _silent([op for op in judged if op.f in SENDS], quiet_since)[:REPORTED_MAX]
    counts = {
        "operations": len(judged),
        "undecided": len(unknown),
        "damaged": sum(op.err == DAMAGED_ERROR for op in rows),
        "quiet_s": _quiet_ns(troubles, first, last) // 1_000_000_000,
    }
    return judge(NAME, found, counts, looked_at=len(judged))


def _silent(sends: list[Operation], quiet_since: Callable[[int], int | None]) -> list[Violation]:
    found: list[Violation] = []
    run: list[Operation] = []
    since = None

    def end() -> None:
        if len(run) >= SENDS_LEAST and run[-1].call_ns - run[0].call_ns > SILENT_MAX_NS:
            ends = [(op.call_ns, op.op_id) for op in (run[0], run[-1])]
            found.append(availability.silent_violation(len(run), *ends))
        run.clear()

    for op in sends:
        if op.err in REFUSED_ERRORS:
            continue
        now = quiet_since(op.call_ns)
        if now != since or op.outcome == Outcome.OK:
            end()
        since = now
        if op.outcome != Outcome.OK:
            run.append(op)
    end()
    return found


def _quiet_ns(troubles: list[tuple[int, int]], first: int, last: int) -> int:
    """Return for how long operations could be called whose time ends before the next trouble."""
    begins = sorted({first, *(max(first, end) for _, end in troubles)})
    total = 0
    for begin in begins:
        if any(other[0] <= begin < other[1] for other in troubles) or begin > last + DEADLINE_NS:
            continue
        nexts = [start for start, _ in troubles if start > begin]
        end = min([*nexts, last + DEADLINE_NS + 1]) - DEADLINE_NS
        total += max(0, end - begin)
    return total


def _stamps(op: Operation) -> tuple[int, ...]:
    return (op.call_ns,) if op.ret_ns == NEVER else (op.call_ns, op.ret_ns)
