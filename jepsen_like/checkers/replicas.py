"""Do the replicas hold the same, and does what they hold carry every acknowledgement?

Checksums first: two replicas at one applied index have one chain and one digest of their tables.
Then the queues themselves: where two replicas both hold an offset, they hold one value, and every
acknowledged send is on every replica at the offset its acknowledgement said.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Final

from jepsen_like.checkers.verdict import Verdict, Violation, judge
from jepsen_like.history.operation import NOTHING, F, History, Operation, Outcome, ReplicaRead

NAME: Final = "replicas"

LOGS_DIFFER: Final = "logs differ"
TABLES_DIFFER: Final = "state tables differ"
QUEUES_DIFFER: Final = "replicas disagree on an offset"
MISSING: Final = "replica without a queue"
NOT_EQUAL: Final = "replicas did not become equal"
LOST: Final = "acknowledged message lost"
REPORTED_MAX: Final = 8


def check_history(history: History, *, settled: bool = True) -> Verdict:
    """Return the verdict over what the replicas held at the end.

    Args:
        settled: Faults were over and replicas had their time, so all must have applied the same.
    """
    found = [*_check_states(history, settled=settled), *_check_queues(history.replica_reads)]
    found += _check_acknowledged(history)
    if settled:
        found += _check_complete(history)
    reads = history.replica_reads
    counts = {
        "replicas": len({state.node for state in history.replica_states}),
        "queues": len({(read.topic, read.queue) for read in reads}),
        "messages": sum(len(read.values) for read in reads),
    }
    return judge(NAME, found, counts, looked_at=len(reads) + len(history.replica_states))


def _check_states(history: History, *, settled: bool) -> list[Violation]:
    found: list[Violation] = []
    states = history.replica_states
    by_index: dict[int, list[int]] = {}
    for at, state in enumerate(states):
        by_index.setdefault(state.applied_index, []).append(at)
    for index, places in sorted(by_index.items()):
        first = states[places[0]]
        for place in places[1:]:
            other = states[place]
            pair = f"{first.node} and {other.node} at index {index}"
            if other.chain != first.chain:
                text = f"{pair}: {first.chain:016x} and {other.chain:016x}"
                found.append(Violation(LOGS_DIFFER, pair, text, at_ns=other.at_ns))
            elif other.tables != first.tables:
                text = f"{pair}: {first.tables} and {other.tables}"
                found.append(Violation(TABLES_DIFFER, pair, text, at_ns=other.at_ns))
    if settled and states:
        last = {state.node: state for state in sorted(states, key=lambda state: state.at_ns)}
        if len({state.applied_index for state in last.values()}) > 1:
            shown = ", ".join(f"{s.node} {s.applied_index}" for _, s in sorted(last.items()))
            at_ns = max(state.at_ns for state in last.values())
            text = f"last applied when the run was over: {shown}"
            found.append(Violation(NOT_EQUAL, "group", text, at_ns=at_ns))
    return found[:REPORTED_MAX]


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


def _check_complete(history: History) -> list[Violation]:
    """A queue that one replica has, all have."""
    nodes = {state.node for state in history.replica_states}
    have: dict[tuple[str, int], set[str]] = {}
    for read in history.replica_reads:
        have.setdefault((read.topic, read.queue), set()).add(read.node)
    return [
        Violation(MISSING, f"{topic}/{queue}", f"{', '.join(sorted(nodes - there))} lacks it")
        for (topic, queue), there in sorted(have.items())
        if nodes - there
    ][:REPORTED_MAX]


def _check_acknowledged(history: History) -> list[Violation]:
    """Every acknowledged send stands where the acknowledgement said, on every replica."""
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


def lost_violation(op: Operation, node: str, here: int | None) -> Violation:
    """Say that *node* holds *here*, None: nothing, where a send was acknowledged."""
    shown = "nothing" if here is None else f"value {here}"
    return Violation(
        LOST,
        f"{op.topic}/{op.queue}",
        f"value {op.value} was acknowledged at offset {op.off}; {node} holds {shown} there",
        (op.op_id,),
        at_ns=op.ret_ns,
    )
