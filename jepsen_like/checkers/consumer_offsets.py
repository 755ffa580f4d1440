"""Is the committed offset of each (group, queue) one register, read and written in real time?

With every committed value unique the register is decided by zones: a zone reaches from the earliest
return to the latest call among a commit and the reads that saw it. Linearizable iff no read
precedes its commit, no two forward zones overlap, and no backward zone lies inside a forward one.
Where an offset was committed twice, every order is tried; more of them than `ORDERS_MAX` leave the
slot undecided. Equal stamps overlap. One-way commits have no reply: they are unknown, always.

Columns decide which slots are registers; violations are named row by row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np

from dledger.jepsen_like.checkers.kernel.facts import I64, Columns, Flags
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge, violation_of
from dledger.jepsen_like.history.columns import OBS, chosen, operations_of, slots_of
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Level, Operation, Outcome

NAME: Final = "consumer_offsets"

NEVER_COMMITTED: Final = "offset never committed"
ABORTED_COMMIT: Final = "aborted commit read"
BEFORE_COMMIT: Final = "offset read before its commit"
WENT_BACK: Final = "committed offset went back"

ORDERS_MAX: Final = 20_000
"""Orders of overlapping operations that one slot is looked through for, at any instant."""

_MINUS: Final = -(1 << 63)
INITIAL: Final = NOTHING
"""What a group that never committed reads."""

Slot = tuple[str, str, int]
_NUMBERS: Final = ("f", "outcome", "level", "off", "call_ns", "ret_ns", "queue")


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


def check_table(rows: Any) -> Verdict:
    """Return the verdict over the committed offsets in *rows*, a table of commits and reads."""
    columns = {name: rows.column(name).to_numpy() for name in _NUMBERS}
    slots = slots_of(rows)
    order = np.argsort(slots, kind="stable")
    cuts = np.flatnonzero(np.diff(slots[order])) + 1
    parts = np.split(order, cuts) if len(order) else []
    wrong = [
        part
        for part in parts
        if not is_register({name: column[part] for name, column in columns.items()})
    ]
    again = np.concatenate([np.zeros(0, dtype=np.int64), *wrong])
    named = check_history(operations_of(chosen(rows, again), OBS.empty_table()))
    undecided = named.validity == "unknown" and named.counts["reads"] > 0
    read = (columns["f"] == F.FETCH_COMMIT) & (columns["outcome"] == Outcome.OK)
    counts = {
        "slots": len(parts),
        "commits": int(np.count_nonzero(columns["f"] == F.COMMIT)),
        "reads": int(np.count_nonzero(read)),
    }
    if named.violations or undecided or not counts["reads"]:
        return msgspec.structs.replace(named, counts=counts)
    return Verdict(NAME, "valid", (), counts)


def is_register(slot: Columns) -> bool:
    """Whether commits and reads of one slot are those of one register."""
    f, outcome, off = slot["f"], slot["outcome"], slot["off"]
    commits = np.flatnonzero((f == F.COMMIT) & (outcome != Outcome.FAIL))
    commits = commits[np.argsort(off[commits], kind="stable")]
    first = np.array([INITIAL])
    value = np.concatenate((first, off[commits]))
    call = np.concatenate((np.array([_MINUS]), slot["call_ns"][commits]))
    returned = np.where(outcome[commits] == Outcome.OK, slot["ret_ns"][commits], NEVER)
    ret = np.concatenate((np.array([_MINUS]), returned))
    if (value[1:] <= value[:-1]).any():
        return False
    current = (outcome == Outcome.OK) & (slot["level"] == Level.LINEARIZABLE)
    reads = np.flatnonzero((f == F.FETCH_COMMIT) & current)
    place = np.minimum(np.searchsorted(value, off[reads]), len(value) - 1)
    early = slot["ret_ns"][reads] < call[place]
    if (value[place] != off[reads]).any() or early.any():
        return False
    first_ret, last_call = ret.copy(), call.copy()
    np.minimum.at(first_ret, place, slot["ret_ns"][reads])
    np.maximum.at(last_call, place, slot["call_ns"][reads])
    happened = (first_ret != NEVER) | (np.bincount(place, minlength=len(value)) > 0)
    return _zones_fit(first_ret[happened], last_call[happened])


def _zones_fit(first_ret: I64, last_call: I64) -> bool:
    """No two forward zones overlap, no backward zone lies inside a forward one."""
    forward: Flags = first_ret < last_call
    order = np.lexsort((last_call[forward], first_ret[forward]))
    begin, end = first_ret[forward][order], last_call[forward][order]
    if (begin[1:] < end[:-1]).any():
        return False
    if not len(begin):
        return True
    back_ret, back_call = first_ret[~forward], last_call[~forward]
    at = np.searchsorted(begin, back_call, "left") - 1
    return not ((at >= 0) & (back_ret < end[at])).any()


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
    undecided: list[str] = []
    slots = by_slot(operations)
    for (group, topic, queue), rows in sorted(slots.items()):
        reads += sum(op.f == F.FETCH_COMMIT and op.outcome == Outcome.OK for op in rows)
        commits += sum(op.f == F.COMMIT for op in rows)
        subject = f"{group}@{topic}/{queue}"
        try:
            violations += check_register(rows, subject)
        except TooManyOrdersError:
            undecided.append(subject)
    counts = {"slots": len(slots), "commits": commits, "reads": reads}
    verdict = judge(NAME, violations, counts, looked_at=reads)
    if verdict.is_valid and undecided:
        reason = f"{len(undecided)} slots have too many commits of one offset, {undecided[0]} first"
        return Verdict(NAME, "unknown", (), counts, reason)
    return verdict


class TooManyOrdersError(Exception):
    """Too many operations of one slot overlap for all their orders to be tried."""


def check_register(operations: Iterable[Operation], subject: str = "") -> list[Violation]:
    """Return the violations of one register.

    Raises TooManyOrdersError: an offset was committed twice, and too much overlaps.
    """
    rows = [
        msgspec.structs.replace(op, ret_ns=NEVER)
        if op.f == F.COMMIT and op.outcome == Outcome.INFO and op.ret_ns != NEVER
        else op
        for op in operations
    ]
    clusters, found = _clusters(rows, subject)
    if found:
        return found
    commits = [op.off for op in rows if op.f == F.COMMIT and op.outcome != Outcome.FAIL]
    if len({INITIAL, *commits}) <= len(commits):
        return _check_orders(rows, subject)
    forward: list[_Cluster] = []
    backward: list[_Cluster] = []
    for cluster in clusters.values():
        if cluster.commit is not None:
            for read in cluster.reads:
                if read.ret_ns < cluster.commit.call_ns:
                    text = f"offset {cluster.value} was read before its commit was called"
                    found.append(violation_of(BEFORE_COMMIT, subject, text, cluster.commit, read))
        if cluster.commit is not None and not cluster.reads and cluster.first_ret == NEVER:
            continue  # unknown and never seen: it did not happen
        (forward if cluster.first_ret < cluster.last_call else backward).append(cluster)
    if found:
        return found
    return _check_zones(forward, backward, subject)


def _check_orders(rows: list[Operation], subject: str) -> list[Violation]:
    """Return the first read or commit that no order of what overlaps explains.

    Kept are the pairs of what may be done and the offset that may be committed then. A return
    leaves those that have done the operation; each is done as late as possible.
    """
    live = [
        op
        for op in rows
        if (op.outcome == Outcome.OK and (op.f == F.COMMIT or op.level == Level.LINEARIZABLE))
        or (op.f == F.COMMIT and op.outcome == Outcome.INFO)
    ]
    instants = [(op.call_ns, 0, at) for at, op in enumerate(live)]
    instants += [(op.ret_ns, 1, at) for at, op in enumerate(live) if op.outcome == Outcome.OK]
    states: set[tuple[frozenset[int], int]] = {(frozenset(), INITIAL)}
    is_open: dict[int, Operation] = {}
    last: dict[int, int] = {}
    for _, is_return, at in sorted(instants):
        op = live[at]
        if not is_return:
            is_open[at] = op
            continue
        states = _after(states, is_open, at)
        if not states:
            witnesses = tuple(dict.fromkeys((*(last.values()), op.op_id)))[-3:]
            text = f"no order explains offset {_shown(op.off)}: it follows {_shown_all(last)}"
            return [Violation(WENT_BACK, subject, text, witnesses, at_ns=op.ret_ns)]
        del is_open[at]
        states = {(done - {at}, value) for done, value in states}
        last = {value: last.get(value, op.op_id) for _, value in sorted(states, key=_value)}
    return []


def _value(state: tuple[frozenset[int], int]) -> int:
    return state[1]


def _shown_all(values: Iterable[int]) -> str:
    return " or ".join(_shown(value) for value in sorted(values)) or "nothing"


def _after(
    states: set[tuple[frozenset[int], int]], is_open: dict[int, Operation], wanted: int
) -> set[tuple[frozenset[int], int]]:
    """Return the states in which *wanted* is done."""
    met, left, found = set(states), list(states), set[tuple[frozenset[int], int]]()
    while left:
        done, value = left.pop()
        if wanted in done:
            found.add((done, value))
            continue
        for at, op in is_open.items():
            if at in done or (op.f == F.FETCH_COMMIT and op.off != value):
                continue
            state = (done | {at}, op.off)
            if state not in met:
                met.add(state)
                left.append(state)
        if len(met) > ORDERS_MAX:
            raise TooManyOrdersError
    return found


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
            continue  # two that are alike: every order is tried
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
            text = f"offset {op.off} was read, but its commit certainly failed"
            found.append(violation_of(ABORTED_COMMIT, subject, text, failed[op.off], op))
        else:
            text = f"offset {op.off} was read and never committed"
            found.append(violation_of(NEVER_COMMITTED, subject, text, op))
    return clusters, found


def _check_zones(
    forward: list[_Cluster], backward: list[_Cluster], subject: str
) -> list[Violation]:
    forward.sort(key=lambda cluster: (cluster.first_ret, cluster.last_call))
    found: list[Violation] = []
    for left, right in pairwise(forward):
        if right.first_ret < left.last_call:
            found.append(_went_back(left, right, subject))
    if found:
        return found
    # The forward zones are disjoint now, so one candidate per backward zone is enough.
    begins = [cluster.first_ret for cluster in forward]
    for cluster in backward:
        at = bisect_left(begins, cluster.last_call) - 1
        if at >= 0 and cluster.first_ret < forward[at].last_call:
            found.append(_went_back(forward[at], cluster, subject))
    return found


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
