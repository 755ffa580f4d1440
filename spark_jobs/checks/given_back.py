"""Messages given back, in columns: as often there as was said, for all copies but a few.

Those that are not are judged again, row by row, by the checker that names what is wrong.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from jepsen_like.checkers import retries
from jepsen_like.checkers.verdict import Verdict, judge
from jepsen_like.history.columns import OBS, operations_of
from jepsen_like.history.operation import NEVER, NOTHING, F, Outcome
from spark_jobs.checks.queue_facts import I64, Flags

OPERATIONS = tuple(int(f) for f in sorted(retries.OPERATIONS))
_NUMBERS = ("op_id", "f", "outcome", "value", "cnt", "status", "min_off")


def check_given_back(rows: Any, *, drained: bool) -> Verdict:
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
        return judge(retries.NAME, (), counts, looked_at=counts["acknowledged"])
    again = np.flatnonzero(is_head | (np.isin(copies, wrong) & (said | there)))
    named = retries.check_history(
        operations_of(rows.take(pa.array(again)), OBS.empty_table()), drained=drained
    )
    return msgspec.structs.replace(named, counts=counts)


def _is_given_up(columns: dict[str, Any]) -> Flags:
    given_up: Flags = (columns["status"] < 0) | (columns["cnt"] >= retries.MAX_TRIES)
    return given_up


def _is_dead(rows: Any) -> Flags:
    topics = rows.column("topic").combine_chunks()
    words = [word.startswith(retries.DEAD_PREFIX) for word in topics.dictionary.to_pylist()]
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
        firsts.append(numbers[np.argsort(first[numbers])][: retries.REPORTED_MAX])
    return np.concatenate(firsts)
