"""Messages that consumers gave back: every one is there, as often as given back, and counted right.

A message that was given back when it had been tried *n* times is there once more with *n* + 1, in
the retry topic, or in the dead letter topic when that was asked for or it was tried too often. Nor
does it come before its delay: a consumer that gives it back with *n* + 1 tries has read it, so it
calls no earlier than the time that the row of *n* tries has as due.

Columns count all copies; the rows of wrong ones are judged again, row by row, by what names them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from dledger.jepsen_like.checkers.kernel.facts import I64, Flags
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.columns import OBS, chosen, operations_of
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome

NAME: Final = "retries"

LOST: Final = "message given back is lost"
DOUBLED: Final = "message given back too often there"
NOWHERE: Final = "retry out of nothing"
EARLY: Final = "retry before its delay"
REPORTED_MAX: Final = 8

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"
MAX_TRIES: Final = 3
"""What consumers of a workload ask for: this many tries, then the dead letters."""

OPERATIONS: Final = frozenset({F.SEND_BACK, F.RETURNED})
_NUMBERS: Final = (
    "op_id", "f", "outcome", "value", "cnt", "status", "min_off", "call_ns", "due_ns",
)  # fmt: skip

_Copy = tuple[str, int, int, bool]
"""Consumer group, value, how often it was tried, and whether it is given up."""


def _asked_for(op: Operation) -> _Copy:
    return op.group, op.value, op.cnt + 1, op.status < 0 or op.cnt >= MAX_TRIES


def check_history(
    operations: Sequence[Operation], *, drained: bool = True, clock_error_ns: int = 0
) -> Verdict:
    """Return the verdict over what was given back."""
    acked: Counter[_Copy] = Counter()
    perhaps: Counter[_Copy] = Counter()
    there: Counter[_Copy] = Counter()
    witness: dict[_Copy, int] = {}
    is_cut = False
    for op in operations:
        if op.f == F.SEND_BACK:
            copy = _asked_for(op)
            witness[copy] = op.op_id
            if op.outcome == Outcome.OK:
                acked[copy] += 1
            elif op.outcome == Outcome.INFO:
                perhaps[copy] += 1
        elif op.f == F.RETURNED:
            if op.value == NOTHING:
                is_cut |= op.min_off > 0  # retention took the beginning
                continue
            copy = (op.group, op.value, op.cnt, op.topic.startswith(DEAD_PREFIX))
            there[copy] += 1
            witness.setdefault(copy, op.op_id)
    found: list[Violation] = []
    if drained:
        for copy, count in there.items():
            most = acked[copy] + perhaps[copy]
            if count > most:
                name = DOUBLED if most else NOWHERE
                found.append(_violation(name, copy, f"{count} times, at most {most}", witness))
        if not is_cut:
            for copy, count in acked.items():
                if there[copy] < count:
                    text = f"{there[copy]} times, acknowledged {count}"
                    found.append(_violation(LOST, copy, text, witness))
    found = found[:REPORTED_MAX] + _early(operations, clock_error_ns)
    counts = {
        "acknowledged": acked.total(),
        "unknown": perhaps.total(),
        "there": there.total(),
        "dead": sum(count for (*_, dead), count in there.items() if dead),
        "tries_max": max((tries for _, _, tries, _ in there), default=0),
    }
    return judge(NAME, found, counts, looked_at=acked.total())


def _early(operations: Iterable[Operation], clock_error_ns: int) -> list[Violation]:
    """Return a violation for each of the first that were given back before they were due."""
    given_back = [op for op in operations if op.f == F.SEND_BACK]
    due: dict[tuple[str, int, int], Operation] = {}
    for op in given_back:
        if op.due_ns != NOTHING and op.outcome != Outcome.FAIL:
            known = due.setdefault((op.group, op.value, op.cnt + 1), op)
            if (op.due_ns, op.op_id) < (known.due_ns, known.op_id):
                due[op.group, op.value, op.cnt + 1] = op
    found = []
    for op in sorted(given_back, key=lambda op: op.op_id):
        before = due.get((op.group, op.value, op.cnt))
        if before is not None and op.call_ns + clock_error_ns < before.due_ns:
            early_ms = (before.due_ns - op.call_ns) // 1_000_000
            text = f"value {op.value}, tried {op.cnt} times, is read {early_ms} ms before it is due"
            where, operations_ids = f"retry topic of {op.group}", (before.op_id, op.op_id)
            found.append(Violation(EARLY, where, text, operations_ids, at_ns=op.call_ns))
    return found[:REPORTED_MAX]


def _violation(name: str, copy: _Copy, text: str, witness: dict[_Copy, int]) -> Violation:
    group, value, tries, dead = copy
    where = f"{'dead letters' if dead else 'retry topic'} of {group}"
    return Violation(
        name, where, f"value {value}, tried {tries} times, is there {text}", (witness[copy],)
    )


def check_table(rows: Any, *, drained: bool, clock_error_ns: int = 0) -> Verdict:
    """Return the verdict over *rows*, a table of what was given back and what was found of it."""
    columns = {name: rows.column(name).to_numpy() for name in _NUMBERS}
    returned = columns["f"] == F.RETURNED
    is_head = returned & (columns["value"] == NOTHING)
    there = returned & ~is_head
    said = columns["f"] == F.SEND_BACK
    acked = said & (columns["outcome"] == Outcome.OK)
    perhaps = said & (columns["outcome"] == Outcome.INFO)
    tries = columns["cnt"] + said
    dead = np.where(said, _is_given_up(columns), _is_dead(rows))
    counts = {
        "acknowledged": int(np.count_nonzero(acked)),
        "unknown": int(np.count_nonzero(perhaps)),
        "there": int(np.count_nonzero(there)),
        "dead": int(np.count_nonzero(there & dead)),
        "tries_max": int(tries[there].max(initial=0)),
    }
    is_cut = bool((is_head & (columns["min_off"] > 0)).any())
    copies = _copies(rows, columns["value"], tries, dead)
    wrong = _wrong(columns["op_id"], copies, acked, perhaps, there, is_cut=is_cut)
    found: list[Violation] = []
    if drained and len(wrong):
        again = np.flatnonzero(is_head | (np.isin(copies, wrong) & (said | there)))
        found += check_history(_rows(rows, again)).violations
        found = [violation for violation in found if violation.name != EARLY]
    early = _may_be_early(rows, columns, said, clock_error_ns)
    found += _early(_rows(rows, early), clock_error_ns)
    return judge(NAME, found, counts, looked_at=counts["acknowledged"])


def _rows(rows: Any, places: I64) -> list[Operation]:
    return list(operations_of(chosen(rows, places), OBS.empty_table()))


def _may_be_early(rows: Any, columns: dict[str, Any], said: Flags, clock_error_ns: int) -> I64:
    """Return the rows that have part in a message given back again before it was due."""
    has_due = said & (columns["due_ns"] != NOTHING) & (columns["outcome"] != Outcome.FAIL)
    first, again = np.flatnonzero(has_due), np.flatnonzero(said)
    places = np.concatenate([first, again])
    tries = np.concatenate([columns["cnt"][first] + 1, columns["cnt"][again]])
    group = rows.column("group").combine_chunks().indices.to_numpy()[places]
    keys = np.stack([group, columns["value"][places], tries], axis=1).astype(np.int64)
    _, copies = np.unique(keys, axis=0, return_inverse=True)
    copies = copies.reshape(-1)
    due_ns = np.full(int(copies.max(initial=-1)) + 1, NEVER)
    np.minimum.at(due_ns, copies[: len(first)], columns["due_ns"][first])
    due_ns[due_ns == NEVER] = NOTHING  # it came from no row that is known
    early = columns["call_ns"][again] + clock_error_ns < due_ns[copies[len(first) :]]
    wrong: I64 = np.unique(places[np.isin(copies, copies[len(first) :][early])])
    return wrong


def _is_given_up(columns: dict[str, Any]) -> Flags:
    given_up: Flags = (columns["status"] < 0) | (columns["cnt"] >= MAX_TRIES)
    return given_up


def _is_dead(rows: Any) -> Flags:
    topics = rows.column("topic").combine_chunks()
    words = [word.startswith(DEAD_PREFIX) for word in topics.dictionary.to_pylist()]
    dead: Flags = np.array([*words, False], np.bool_)[topics.indices.to_numpy()]
    return dead


def _copies(rows: Any, value: I64, tries: I64, dead: Flags) -> I64:
    """Return a number for each (group, value, tries, dead)."""
    group = rows.column("group").combine_chunks().indices.to_numpy()
    keys = np.stack([group, value, tries, dead], axis=1).astype(np.int64)
    _, copies = np.unique(keys, axis=0, return_inverse=True)
    numbers: I64 = copies.reshape(-1)
    return numbers


def _wrong(
    op_id: I64, copies: I64, acked: Flags, perhaps: Flags, there: Flags, *, is_cut: bool
) -> I64:
    """Return copies that are there too often or too seldom: of either the first in the rows."""
    size = int(copies.max(initial=-1)) + 1
    found, least, most = (
        np.bincount(copies[rows], minlength=size) for rows in (there, acked, acked | perhaps)
    )
    often, seldom = found > most, (found < least) & ~np.bool_(is_cut)
    firsts = []
    for wrong, rows in ((often, there), (seldom, acked)):
        first = np.full(size, NEVER)
        np.minimum.at(first, copies[rows], op_id[rows])
        numbers = np.flatnonzero(wrong)
        firsts.append(numbers[np.argsort(first[numbers])][:REPORTED_MAX])
    return np.concatenate(firsts)
