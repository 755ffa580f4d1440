"""Messages that consumers gave back: every one is there, as often as given back, and counted right.

A message that was given back when it had been tried *n* times is there once more with *n* + 1, in
the retry topic, or in the dead letter topic when that was asked for or it was tried too often.

Columns count all copies; the rows of wrong ones are judged again, row by row, by what names them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import numpy as np

from jepsen_like.checkers.kernel.facts import I64, Flags
from jepsen_like.checkers.verdict import Verdict, Violation, judge
from jepsen_like.history.columns import OBS, chosen, operations_of
from jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome

NAME: Final = "retries"

LOST: Final = "message given back is lost"
DOUBLED: Final = "message given back too often there"
NOWHERE: Final = "retry out of nothing"
REPORTED_MAX: Final = 8

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"
MAX_TRIES: Final = 3
"""What consumers of a workload ask for: this many tries, then the dead letters."""

OPERATIONS: Final = frozenset({F.SEND_BACK, F.RETURNED})
_NUMBERS: Final = ("op_id", "f", "outcome", "value", "cnt", "status", "min_off")

_Copy = tuple[str, int, int, bool]
"""Consumer group, value, how often it was tried, and whether it is given up."""


def _asked_for(op: Operation) -> _Copy:
    return op.group, op.value, op.cnt + 1, op.status < 0 or op.cnt >= MAX_TRIES


def check_history(operations: Iterable[Operation], *, drained: bool = True) -> Verdict:
    """Return the verdict over what was given back.

    Args:
        drained: Everything due was delivered and both topics were read when the run was over.
    """
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
    counts = {
        "acknowledged": acked.total(),
        "unknown": perhaps.total(),
        "there": there.total(),
        "dead": sum(count for (*_, dead), count in there.items() if dead),
        "tries_max": max((tries for _, _, tries, _ in there), default=0),
    }
    return judge(NAME, found[:REPORTED_MAX], counts, looked_at=acked.total())


def _violation(name: str, copy: _Copy, text: str, witness: dict[_Copy, int]) -> Violation:
    group, value, tries, dead = copy
    where = f"{'dead letters' if dead else 'retry topic'} of {group}"
    return Violation(
        name, where, f"value {value}, tried {tries} times, is there {text}", (witness[copy],)
    )


def check_table(rows: Any, *, drained: bool) -> Verdict:
    """Return the verdict over *rows*, a table of what was given back and of what was found of it.

    Args:
        drained: Both topics were read when the run was over.
    """
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
    if not drained or not len(wrong):
        return judge(NAME, (), counts, looked_at=counts["acknowledged"])
    again = np.flatnonzero(is_head | (np.isin(copies, wrong) & (said | there)))
    named = check_history(operations_of(chosen(rows, again), OBS.empty_table()), drained=drained)
    return msgspec.structs.replace(named, counts=counts)


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
