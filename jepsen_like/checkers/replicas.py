"""Do the replicas hold the same, and does what they hold carry every acknowledgement?

Checksums first: two replicas at one applied index have one chain and one digest of their tables.
Then the queues themselves: where two replicas both hold an offset, they hold one value, replicas
that have applied the same have queues that end alike, and every acknowledged send is on every
replica at the offset of its acknowledgement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from dledger.jepsen_like.checkers.kernel.home import Home
from dledger.jepsen_like.checkers.kernel.source import Queue
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge, violation_of
from dledger.jepsen_like.history.operation import NOTHING, Operation, ReplicaRead, ReplicaState

NAME: Final = "replicas"

LOGS_DIFFER: Final = "logs differ"
TABLES_DIFFER: Final = "state tables differ"
QUEUES_DIFFER: Final = "replicas disagree on an offset"
MISSING: Final = "replica without a queue"
NOT_EQUAL: Final = "replicas did not become equal"
LOST: Final = "acknowledged message lost"


def check_heads(
    states: list[ReplicaState], heads: list[ReplicaRead], *, settled: bool
) -> list[Violation]:
    """Return what the checksums and the list of queues of each replica show.

    With *settled* replicas had their time, so all must have applied the same. Values are not looked
    at.
    """
    found = _check_states(states, settled=settled)
    return [*found, *_check_complete(states, heads)] if settled else found


Ends = Mapping[Queue, Mapping[str, int]]
"""By queue and replica: one past the last offset that it holds."""


def ends_of(reads: Iterable[tuple[str, Queue, int]]) -> Ends:
    """Return where queues end."""
    ends: dict[Queue, dict[str, int]] = {}
    for node, queue, end in reads:
        its = ends.setdefault(queue, {})
        its[node] = max(its.get(node, end), end)
    return ends


def check_ends(
    states: list[ReplicaState], ends: Ends, found_before: Iterable[Violation]
) -> list[Violation]:
    """Return the queues that end otherwise on two replicas that have applied the same."""
    lost = {violation.subject for violation in found_before if violation.name == LOST}
    last = {state.node: state for state in sorted(states, key=lambda state: state.at_ns)}
    found: list[Violation] = []
    for (topic, queue), its in sorted(ends.items()):
        if f"{topic}/{queue}" in lost:
            continue
        first: dict[int, str] = {}
        for node in sorted(its.keys() & last.keys()):
            known = first.setdefault(last[node].applied_index, node)
            if its[node] != its[known]:
                text = f"{known} has it up to offset {its[known]} and {node} up to {its[node]}"
                subject = f"{topic}/{queue}"
                found.append(Violation(QUEUES_DIFFER, subject, text, at_ns=last[node].at_ns))
                break
    return found


def verdict_of(
    found: list[Violation], states: list[ReplicaState], heads: list[ReplicaRead], messages: int
) -> Verdict:
    """Return the verdict; *messages* is how many the replicas hold."""
    counts = {
        "replicas": len({state.node for state in states}),
        "queues": len({(head.topic, head.queue) for head in heads}),
        "messages": messages,
    }
    return judge(NAME, found, counts, looked_at=len(heads) + len(states))


def _check_states(states: list[ReplicaState], *, settled: bool) -> list[Violation]:
    found: list[Violation] = []
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
    return found


def _check_complete(states: list[ReplicaState], heads: list[ReplicaRead]) -> list[Violation]:
    """A queue that one replica has, all have."""
    nodes = {state.node for state in states}
    have: dict[tuple[str, int], set[str]] = {}
    for read in heads:
        have.setdefault((read.topic, read.queue), set()).add(read.node)
    return [
        Violation(MISSING, f"{topic}/{queue}", f"{', '.join(sorted(nodes - there))} lacks it")
        for (topic, queue), there in sorted(have.items())
        if nodes - there
    ]


def held_violations(
    homes: Iterable[tuple[Queue, Home]],
    names: Sequence[str],
    at_ns: Mapping[tuple[str, str, int], int],
    acked: Mapping[tuple[str, int, int], Operation],
) -> list[Violation]:
    """Return what replicas hold otherwise than each other, or than was acknowledged."""
    found: list[Violation] = []
    for (topic, queue), home in sorted(homes, key=lambda pair: pair[0]):
        subject = f"{topic}/{queue}"
        for off, ours, theirs, known, other in home.differ:
            text = f"offset {off} holds {ours} on {names[known]} and {theirs} on {names[other]}"
            when = at_ns[names[other], topic, queue]
            found.append(Violation(QUEUES_DIFFER, subject, text, at_ns=when))
        for _, value, replica, here in home.lost:
            op = acked[topic, queue, value]
            shown = "nothing" if here < NOTHING else f"value {here}"
            text = f"value {value} was acknowledged at offset {op.off}; {names[replica]} holds"
            found.append(violation_of(LOST, subject, f"{text} {shown} there", op))
    return found
