"""Is the committed offset of each (group, queue) one register, read and written in real time?

A commit overwrites: RocketMQ's operators reset offsets, so an older offset may follow a newer one.
With every committed value unique the register is decided by zones: a zone reaches from the
earliest return to the latest call among a commit and the reads that saw it. Linearizable iff no
read precedes its commit, no two forward zones overlap, and no backward zone lies inside a forward
one.

Where a run commits ascending offsets only and promises that they never go back, `check_maximum`
decides the stronger claim: with c(v) the earliest call of a commit of v, and M(v) the earliest
return of a commit or read of more than v, every read of v needs max(call, c(v)) ≤ min(ret, M(v)).

Equal stamps overlap. One-way commits have no reply: they are unknown, always.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from jepsen_like.checkers.verdict import Verdict, Violation, judge
from jepsen_like.history.operation import NEVER, NOTHING, F, Level, Operation, Outcome

NAME: Final = "consumer_offsets"

NEVER_COMMITTED: Final = "offset nobody committed"
ABORTED_COMMIT: Final = "aborted commit read"
BEFORE_COMMIT: Final = "offset read before its commit"
WENT_BACK: Final = "committed offset went back"
NOT_UNIQUE: Final = "offset committed twice"

_MINUS: Final = -(1 << 63)
INITIAL: Final = NOTHING
"""What a group that never committed reads."""
REPORTED_MAX: Final = 8

Slot = tuple[str, str, int]


@dataclass(slots=True)
class _Cluster:
    """A commit and the reads that saw its value."""

    value: int
    commit: Operation | None
    reads: list[Operation] = field(default_factory=list)
    first_ret: int = NEVER
    first_id: int = NOTHING
    last_call: int = _MINUS
    last_id: int = NOTHING

    def take(self, op: Operation) -> None:
        if op.ret_ns < self.first_ret:
            self.first_ret, self.first_id = op.ret_ns, op.op_id
        if op.call_ns > self.last_call:
            self.last_call, self.last_id = op.call_ns, op.op_id


def by_slot(operations: Iterable[Operation]) -> dict[Slot, list[Operation]]:
    """Return the commits and reads of each (group, topic, queue)."""
    slots: dict[Slot, list[Operation]] = {}
    for op in operations:
        if op.f in (F.COMMIT, F.FETCH_COMMIT):
            slots.setdefault((op.group, op.topic, op.queue), []).append(op)
    return slots


def check_history(operations: Iterable[Operation]) -> Verdict:
    """Return the verdict over every (group, queue) of a history."""
    violations: list[Violation] = []
    reads = commits = 0
    slots = by_slot(operations)
    for (group, topic, queue), rows in sorted(slots.items()):
        reads += sum(op.f == F.FETCH_COMMIT and op.outcome == Outcome.OK for op in rows)
        commits += sum(op.f == F.COMMIT for op in rows)
        violations += check_register(rows, f"{group}@{topic}/{queue}")
    counts = {"slots": len(slots), "commits": commits, "reads": reads}
    return judge(NAME, violations, counts, looked_at=reads)


def check_register(operations: Iterable[Operation], subject: str = "") -> list[Violation]:
    """Return the violations of one register; values of commits must be unique."""
    clusters, found = _clusters(operations, subject)
    if found:
        return found
    forward: list[_Cluster] = []
    backward: list[_Cluster] = []
    for cluster in clusters.values():
        if cluster.commit is not None:
            for read in cluster.reads:
                if read.ret_ns < cluster.commit.call_ns:
                    found.append(
                        Violation(
                            BEFORE_COMMIT,
                            subject,
                            f"offset {cluster.value} was read before its commit was called",
                            (cluster.commit.op_id, read.op_id),
                            at_ns=read.ret_ns,
                        )
                    )
        if cluster.commit is not None and not cluster.reads and cluster.first_ret == NEVER:
            continue  # unknown and never seen: it did not happen
        (forward if cluster.first_ret < cluster.last_call else backward).append(cluster)
    if found:
        return found[:REPORTED_MAX]
    return _check_zones(forward, backward, subject)


def _clusters(
    operations: Iterable[Operation], subject: str
) -> tuple[dict[int, _Cluster], list[Violation]]:
    rows = list(operations)
    initial = _Cluster(INITIAL, None, first_ret=_MINUS)
    clusters = {INITIAL: initial}
    failed: dict[int, Operation] = {}
    found: list[Violation] = []
    for op in rows:
        if op.f != F.COMMIT:
            continue
        if op.outcome == Outcome.FAIL:
            failed[op.off] = op
            continue
        if op.off in clusters:
            before = clusters[op.off].commit
            witnesses = (op.op_id,) if before is None else (before.op_id, op.op_id)
            found.append(
                Violation(NOT_UNIQUE, subject, f"offset {op.off} cannot be told apart", witnesses)
            )
            continue
        cluster = clusters[op.off] = _Cluster(op.off, op)
        cluster.take(op)
    for op in rows:
        if op.f != F.FETCH_COMMIT or op.outcome != Outcome.OK or op.level != Level.LINEARIZABLE:
            continue
        seen = clusters.get(op.off)
        if seen is not None:
            seen.reads.append(op)
            seen.take(op)
        elif op.off in failed:
            found.append(
                Violation(
                    ABORTED_COMMIT,
                    subject,
                    f"offset {op.off} was read, but its commit certainly failed",
                    (failed[op.off].op_id, op.op_id),
                    at_ns=op.ret_ns,
                )
            )
        else:
            found.append(
                Violation(
                    NEVER_COMMITTED,
                    subject,
                    f"offset {op.off} was read and never committed",
                    (op.op_id,),
                    at_ns=op.ret_ns,
                )
            )
    return clusters, found[:REPORTED_MAX]


def _check_zones(
    forward: list[_Cluster], backward: list[_Cluster], subject: str
) -> list[Violation]:
    forward.sort(key=lambda cluster: (cluster.first_ret, cluster.last_call))
    found: list[Violation] = []
    for left, right in pairwise(forward):
        if right.first_ret < left.last_call:
            found.append(_went_back(left, right, subject))
    if found:
        return found[:REPORTED_MAX]
    # The forward zones are disjoint now, so one candidate per backward zone is enough.
    begins = [cluster.first_ret for cluster in forward]
    for cluster in backward:
        at = bisect_left(begins, cluster.last_call) - 1
        if at >= 0 and cluster.first_ret < forward[at].last_call:
            found.append(_went_back(forward[at], cluster, subject))
    return found[:REPORTED_MAX]


def _went_back(zone: _Cluster, inside: _Cluster, subject: str) -> Violation:
    """The value of *zone* was there before and after something that lies in *inside*."""
    return Violation(
        WENT_BACK,
        subject,
        f"offset {_shown(zone.value)} was there before and after offset {_shown(inside.value)}",
        tuple(
            dict.fromkeys(
                op_id
                for op_id in (zone.first_id, inside.first_id, inside.last_id, zone.last_id)
                if op_id != NOTHING
            )
        ),
        at_ns=zone.last_call,
    )


def _shown(value: int) -> str:
    return "nothing" if value == INITIAL else str(value)


def check_maximum(operations: Iterable[Operation], subject: str = "") -> list[Violation]:
    """Return the violations of a register that keeps the greatest value ever committed."""
    rows = list(operations)
    first_call: dict[int, int] = {INITIAL: _MINUS}
    failed: dict[int, Operation] = {}
    for op in rows:
        if op.f == F.COMMIT and op.outcome == Outcome.FAIL:
            failed[op.off] = op
        elif op.f == F.COMMIT:
            first_call[op.off] = min(first_call.get(op.off, NEVER), op.call_ns)
    returned = sorted(
        (op.off, op.ret_ns, op.op_id)
        for op in rows
        if op.outcome == Outcome.OK
        and (op.f == F.COMMIT or (op.f == F.FETCH_COMMIT and op.level == Level.LINEARIZABLE))
    )
    values = [value for value, _, _ in returned]
    earliest: list[tuple[int, int]] = [(NEVER, NOTHING)] * (len(returned) + 1)
    for at in range(len(returned) - 1, -1, -1):
        earliest[at] = min(earliest[at + 1], (returned[at][1], returned[at][2]))
    found: list[Violation] = []
    for op in rows:
        if op.f != F.FETCH_COMMIT or op.outcome != Outcome.OK or op.level != Level.LINEARIZABLE:
            continue
        call = first_call.get(op.off)
        if call is None:
            name = ABORTED_COMMIT if op.off in failed else NEVER_COMMITTED
            witnesses = (failed[op.off].op_id, op.op_id) if op.off in failed else (op.op_id,)
            found.append(Violation(name, subject, f"offset {op.off} was read", witnesses))
            continue
        more_ret, more_id = earliest[bisect_left(values, op.off + 1)]
        if call > op.ret_ns:
            found.append(
                Violation(
                    BEFORE_COMMIT, subject, f"offset {op.off} was read too early", (op.op_id,)
                )
            )
        elif max(op.call_ns, call) > more_ret:
            found.append(
                Violation(
                    WENT_BACK,
                    subject,
                    f"offset {_shown(op.off)} was read after more had been there",
                    (more_id, op.op_id),
                    at_ns=op.ret_ns,
                )
            )
    return found[:REPORTED_MAX]
