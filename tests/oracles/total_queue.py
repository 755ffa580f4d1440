"""Multiset algebra over everything sent and everything there, with counters of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dledger.jepsen_like.checkers.total_queue import (
    DUPLICATED,
    FAILED_BUT_THERE,
    KNOWN,
    LOST,
    NAME,
    REPORTED_MAX,
    UNEXPECTED,
    detail_of,
)
from dledger.jepsen_like.checkers.transactions import SYSTEM_TOPICS, transactions_of
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, History, Operation, Outcome

__all__ = ["NAME", "check_history"]


def _may_be_away(op: Operation, first_kept: dict[tuple[str, int], int]) -> bool:
    """Whether retention took it, or may have, or it has its own time.

    Without an offset it may be anywhere in a queue that lost its beginning, or was not read.
    """
    first = first_kept.get((op.topic, op.queue))
    if op.off != NOTHING:
        return op.off < (first or 0)
    return first != 0 or op.due_ns != NOTHING or op.ret_ns == NEVER


def check_history(history: History, *, node: str | None = None) -> Verdict:
    """Return the verdict over what one replica held at the end.

    Args:
        node: Which replica; None: the first one read.
    """
    reads = history.replica_reads
    if not reads:
        return judge(NAME, (), {}, looked_at=0)
    chosen = node or reads[0].node
    there: Counter[int] = Counter()
    held: dict[tuple[str, int, int], int] = {}
    for read in reads:
        if read.node == chosen and read.topic not in SYSTEM_TOPICS:
            there.update(value for value in read.values if value != NOTHING)
            held |= {
                (read.topic, read.queue, o): v for o, v in enumerate(read.values, read.min_off)
            }
    first_kept = {(r.topic, r.queue): r.min_off for r in reads if r.node == chosen}
    attempts = sends_of(history.operations)
    live = Counter(op.value for op in attempts if op.outcome != Outcome.FAIL)
    # Of several attempts the one with most information counts.
    attempts.sort(key=lambda op: KNOWN.index(Outcome(op.outcome)))
    sends = {op.value: op for op in attempts}
    acked = {value for value, op in sends.items() if op.outcome == Outcome.OK}
    removed = {value for value in acked if _may_be_away(sends[value], first_kept)}
    unknown = {value for value, op in sends.items() if op.outcome == Outcome.INFO}
    tried: dict[tuple[str, int, int], set[int]] = {}
    for one in attempts:
        tried.setdefault((one.topic, one.queue, one.value), set()).add(one.outcome)
    places = {(topic, queue, v) for (topic, queue, _), v in held.items() if v != NOTHING}
    moved = {
        op.value
        for op in attempts
        if op.outcome == Outcome.OK
        and op.off >= first_kept.get((op.topic, op.queue), 0)
        and held.get((op.topic, op.queue, op.off)) != op.value
    }
    kinds = (
        (LOST, sorted(acked - removed - there.keys()), "was acknowledged and is not there"),
        (UNEXPECTED, sorted({place[2] for place in places - tried.keys()} - moved), ""),
        (
            DUPLICATED,
            sorted(value for value, count in there.items() if count > max(live[value], 1)),
            "is there more than once",
        ),
        (
            FAILED_BUT_THERE,
            sorted({place[2] for place in places if tried.get(place) == {int(Outcome.FAIL)}}),
            "is there, but its send certainly failed",
        ),
    )
    found: list[Violation] = []
    for name, values, text in kinds:
        for value in values[:REPORTED_MAX]:
            op = sends.get(value)
            if name == UNEXPECTED:
                text = detail_of(name, is_sent=op is not None)
            witnesses = () if op is None else (op.op_id,)
            found.append(
                Violation(
                    name,
                    chosen if op is None else f"{op.topic}/{op.queue}",
                    f"value {value} {text} ({len(values)} like it)",
                    witnesses,
                    at_ns=0 if op is None else op.call_ns,
                )
            )
    counts = {
        "attempted": len(attempts),
        "acknowledged": len(acked),
        "removed": len(removed),
        "unknown": len(unknown),
        "recovered": len(unknown & there.keys()),
        "vanished": len(unknown - there.keys()),
        "there": there.total(),
    }
    return judge(NAME, found, counts, looked_at=len(acked))


def sends_of(operations: Iterable[Operation]) -> list[Operation]:
    """Return everything that may have put a value into a queue: sends, and ends as appends."""
    rows = list(operations)
    appends = (one.as_append() for one in transactions_of(rows).values())
    return [op for op in rows if op.f == F.SEND] + [op for op in appends if op is not None]
