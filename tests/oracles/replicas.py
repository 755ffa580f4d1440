"""What replicas hold, compared value by value with each other and with acknowledgements."""

from __future__ import annotations

from operator import itemgetter

from dledger.jepsen_like.checkers.replicas import (
    NAME,
    QUEUES_DIFFER,
    REPORTED_MAX,
    check_heads,
    lost_violation,
    verdict_of,
)
from dledger.jepsen_like.checkers.verdict import Verdict, Violation
from dledger.jepsen_like.history.operation import (
    NOTHING,
    F,
    History,
    Operation,
    Outcome,
    ReplicaRead,
)

__all__ = ["NAME", "check_history"]


def check_history(history: History, *, settled: bool = True) -> Verdict:
    """Return the verdict over what the replicas held at the end.

    Args:
        settled: Faults were over and replicas had their time, so all must have applied the same.
    """
    states, reads = history.replica_states, history.replica_reads
    found = check_heads(states, reads, settled=settled)
    lost = _check_acknowledged(history)
    found += [*_check_queues(reads), *lost]
    if settled:
        named = {violation.subject for violation in lost}
        found += [violation for violation in _check_ends(history) if violation.subject not in named]
    return verdict_of(found, states, reads, sum(len(read.values) for read in reads))


def _check_ends(history: History) -> list[Violation]:
    """Offsets that one replica holds, all hold that have applied the same."""
    found: list[Violation] = []
    last = {state.node: state for state in sorted(history.replica_states, key=lambda s: s.at_ns)}
    reads = [read for read in history.replica_reads if read.node in last]
    for topic, queue in sorted({(read.topic, read.queue) for read in reads}):
        ends: dict[str, int] = {}
        for read in reads:
            if (read.topic, read.queue) == (topic, queue):
                end = read.min_off + len(read.values)
                ends[read.node] = max(ends.get(read.node, 0), end)
        pairs = [
            (one, two)
            for two in sorted(ends)
            for one in sorted(ends)
            if one < two and last[one].applied_index == last[two].applied_index
        ]
        for one, two in pairs:
            if ends[one] != ends[two]:
                text = f"{one} has it up to offset {ends[one]} and {two} up to {ends[two]}"
                subject, at_ns = f"{topic}/{queue}", last[two].at_ns
                found.append(Violation(QUEUES_DIFFER, subject, text, at_ns=at_ns))
                break
    return found


def _check_queues(reads: list[ReplicaRead]) -> list[Violation]:
    found: list[Violation] = []
    first: dict[tuple[str, int], ReplicaRead] = {}
    for read in reads:
        known = first.setdefault((read.topic, read.queue), read)
        if known is read:
            continue
        begin = max(known.min_off, read.min_off)
        end = min(known.min_off + len(known.values), read.min_off + len(read.values))
        ours = known.values[begin - known.min_off : end - known.min_off]
        theirs = read.values[begin - read.min_off : end - read.min_off]
        if begin < end and ours != theirs:
            off = next(at for at in range(len(ours)) if ours[at] != theirs[at])
            found.append(
                Violation(
                    QUEUES_DIFFER,
                    f"{read.topic}/{read.queue}",
                    f"offset {begin + off} holds {ours[off]} on {known.node} and {theirs[off]} "
                    f"on {read.node}",
                    at_ns=read.at_ns,
                )
            )
    return found[:REPORTED_MAX]


def _check_acknowledged(history: History) -> list[Violation]:
    """Every acknowledged send stands at its acknowledged offset, on every replica."""
    by_queue: dict[tuple[str, int], list[ReplicaRead]] = {}
    for read in history.replica_reads:
        by_queue.setdefault((read.topic, read.queue), []).append(read)
    lost: list[tuple[tuple[str, int, int, int], Operation, str, int | None]] = []
    for op in history.operations:
        if op.f != F.SEND or op.outcome != Outcome.OK or op.off == NOTHING:
            continue
        for read in by_queue.get((op.topic, op.queue), ()):
            place = op.off - read.min_off
            if place < 0:
                continue  # retention took it
            here = read.values[place] if place < len(read.values) else None
            if here != op.value:
                lost.append(((op.topic, op.queue, op.off, op.value), op, read.node, here))
                break
    lost.sort(key=itemgetter(0))
    return [lost_violation(op, node, here) for _, op, node, here in lost[:REPORTED_MAX]]
