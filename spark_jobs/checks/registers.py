"""Committed offsets in columns: the zones of `consumer_offsets`, all slots that are in order.

A slot that is not is judged again, row by row, by the checker that names what is wrong.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from jepsen_like.checkers import consumer_offsets
from jepsen_like.checkers.verdict import Verdict
from jepsen_like.history.columns import OBS, operations_of
from jepsen_like.history.operation import NEVER, F, Level, Outcome
from spark_jobs.checks.queue_facts import I64, Columns, Flags

_NUMBERS: Final = ("f", "outcome", "level", "off", "call_ns", "ret_ns", "queue")
_NOT_YET: Final = -(1 << 63)


def check_offsets(rows: Any) -> Verdict:
    """Return the verdict over the committed offsets in *rows*, a table of commits and reads."""
    columns = {name: rows.column(name).to_numpy() for name in _NUMBERS}
    slots = _slots(rows, columns["queue"])
    order = np.argsort(slots, kind="stable")
    cuts = np.flatnonzero(np.diff(slots[order])) + 1
    parts = np.split(order, cuts) if len(order) else []
    wrong = [
        part
        for part in parts
        if not is_register({name: column[part] for name, column in columns.items()})
    ]
    again = np.concatenate([np.zeros(0, dtype=np.int64), *wrong])
    named = consumer_offsets.check_history(
        operations_of(rows.take(pa.array(again)), OBS.empty_table())
    )
    read = (columns["f"] == F.FETCH_COMMIT) & (columns["outcome"] == Outcome.OK)
    counts = {
        "slots": len(parts),
        "commits": int(np.count_nonzero(columns["f"] == F.COMMIT)),
        "reads": int(np.count_nonzero(read)),
    }
    if named.violations or not counts["reads"]:
        return msgspec.structs.replace(named, counts=counts)
    return Verdict(consumer_offsets.NAME, "valid", (), counts)


def _slots(rows: Any, queue: I64) -> I64:
    """Return a number for each (group, topic, queue)."""
    slots = queue.astype(np.int64)
    for name in ("group", "topic"):
        codes = rows.column(name).combine_chunks().indices.to_numpy().astype(np.int64)
        _, slots = np.unique(slots, return_inverse=True)
        slots = slots * (int(codes.max(initial=0)) + 1) + codes
    return slots


def is_register(slot: Columns) -> bool:
    """Whether commits and reads of one slot are those of one register."""
    f, outcome, off = slot["f"], slot["outcome"], slot["off"]
    commits = np.flatnonzero((f == F.COMMIT) & (outcome != Outcome.FAIL))
    commits = commits[np.argsort(off[commits], kind="stable")]
    first = np.array([consumer_offsets.INITIAL])
    value = np.concatenate((first, off[commits]))
    call = np.concatenate((np.array([_NOT_YET]), slot["call_ns"][commits]))
    ret = np.concatenate((np.array([_NOT_YET]), slot["ret_ns"][commits]))
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
