"""Violations of a queue by name, with the operations that prove them: suspects looked at again."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from jepsen_like.checkers import queue_log
from jepsen_like.checkers.queue_log import QueueColumns, check_reads, check_values
from jepsen_like.checkers.verdict import Violation
from jepsen_like.history.operation import NOTHING, F, Level, Operation, Outcome
from spark_jobs.checks.queue_facts import I64, Columns, Flags
from spark_jobs.checks.queue_judge import Judged, TimePair

_NAMES: Final = {
    (True, True): queue_log.SEND_INVERTED,
    (False, True): queue_log.STALE_READ,
    (False, False): queue_log.NON_MONOTONIC,
    (True, False): queue_log.FROM_THE_FUTURE,
}
"""By: a send set the lower bound, a send set the upper one."""


class Wanted(msgspec.Struct, frozen=True):
    """Rows that may be witnesses: any that has one of these.

    Attributes:
        offs: Acknowledged at one of these offsets.
        values: Sent, or seen, one of these values.
        op_ids: Is one of these.
        calls: Was called at one of these instants.
        rets: Returned at one of these instants.
    """

    offs: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    op_ids: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()
    rets: tuple[int, ...] = ()

    def ops(self, ops: Columns) -> Flags:
        """Return which rows of `ops` are wanted."""
        send = ops["f"] == F.SEND
        rows: Flags = send & (np.isin(ops["off"], self.offs) | np.isin(ops["value"], self.values))
        rows |= np.isin(ops["op_id"], self.op_ids)
        rows |= np.isin(ops["call_ns"], self.calls) | np.isin(ops["ret_ns"], self.rets)
        return rows

    def obs(self, obs: Columns) -> Flags:
        """Return which rows of `obs` are wanted."""
        rows: Flags = (obs["op_id"] != NOTHING) & np.isin(obs["value"], self.values)
        return rows


def wanted_by(said: Judged) -> Wanted:
    """Return which rows name what *said* found."""
    pairs = said.pairs
    return Wanted(
        said.offs,
        said.values,
        (*said.reads_wrong, *said.pulls_wrong),
        tuple(sorted({pair.low_ns for pair in pairs})),
        tuple(sorted({pair.high_ns for pair in pairs})),
    )


def name_violations(
    said: Judged,
    ops: Columns,
    obs: Columns,
    subject: str,
    appends: tuple[Operation, ...] = (),
) -> list[Violation]:
    """Return the violations of a queue.

    Args:
        said: What its facts said.
        ops: Its rows that `wanted_by` wants, more do no harm.
        obs: Likewise.
        subject: Topic and queue.
        appends: What transactions appended, see `half_messages`.
    """
    ops = _in_order(ops)
    found = _disagreements(said, ops, obs, subject, appends)
    if found:
        pass
    elif said.length > said.attempts:
        text = (
            f"the queue has {said.length} messages, but only {said.attempts} sends can have "
            "succeeded"
        )
        who = () if said.beyond == NOTHING else (said.beyond,)
        found = [Violation(queue_log.BY_NOBODY, subject, text, who)]
    else:
        found = [_time(pair, ops, subject) for pair in said.pairs]
    return found + [
        Violation(
            queue_log.MIN_WENT_BACK,
            subject,
            f"the first offset kept was {best} and is {low} for a later read",
            (first, then),
            at_ns=call,
        )
        for first, then, best, low, call in said.lows
    ]


def _in_order(ops: Columns) -> Columns:
    of_queue = np.isin(ops["f"], (F.SEND, F.PULL, F.MAX_OFFSET))
    rows = np.flatnonzero(of_queue)
    rows = rows[np.argsort(ops["op_id"][rows], kind="stable")]
    return {name: column[rows] for name, column in ops.items()}


def _disagreements(
    said: Judged, ops: Columns, obs: Columns, subject: str, appends: tuple[Operation, ...]
) -> list[Violation]:
    if not (said.offs or said.values or said.reads_wrong or said.pulls_wrong):
        return []
    columns = _columns(said, ops, obs, appends)
    return [
        *check_reads(columns, subject),
        *check_values(columns, subject),
        *_by_hash(said, ops, subject),
    ]


def _columns(
    said: Judged, ops: Columns, obs: Columns, appends: tuple[Operation, ...]
) -> QueueColumns:
    send = ops["f"] == F.SEND
    ok = ops["outcome"] == Outcome.OK
    acked = send & ok & (ops["off"] != NOTHING)
    suspect = np.isin(ops["off"], said.offs) & acked | np.isin(ops["value"], said.values) & send
    sends = np.flatnonzero(suspect)
    more = [op for op in appends if op.value in said.values]
    reads = np.flatnonzero(np.isin(ops["op_id"], said.reads_wrong))
    seen = np.flatnonzero(np.isin(obs["value"], said.values) & (obs["op_id"] != NOTHING))
    seen = seen[np.lexsort((obs["off"][seen], obs["op_id"][seen]))]

    def both(name: str, added: list[int]) -> I64:
        return np.concatenate((ops[name][sends], np.array(added, dtype=np.int64)))

    off = np.where(acked[sends], ops["off"][sends], NOTHING)
    failed = ops["outcome"][sends] == Outcome.FAIL
    late = [op.outcome == Outcome.FAIL for op in more]
    return QueueColumns(
        send_id=both("op_id", [op.op_id for op in more]),
        send_call=both("call_ns", [op.call_ns for op in more]),
        send_ret=both("ret_ns", [op.ret_ns for op in more]),
        send_off=np.concatenate((off, np.full(len(more), NOTHING, dtype=np.int64))),
        send_value=both("value", [op.value for op in more]),
        send_failed=np.concatenate((failed, np.array(late, dtype=np.bool_))),
        read_id=ops["op_id"][reads],
        read_call=ops["call_ns"][reads],
        read_ret=ops["ret_ns"][reads],
        found_off=ops["off"][reads],
        found_count=np.where(ops["f"][reads] == F.PULL, ops["cnt"][reads], 0),
        end=ops["max_off"][reads],
        seen_id=obs["op_id"][seen],
        seen_off=obs["off"][seen],
        seen_value=obs["value"][seen],
    )


def _by_hash(said: Judged, ops: Columns, subject: str) -> list[Violation]:
    rows = np.flatnonzero(np.isin(ops["op_id"], said.pulls_wrong))[: queue_log.REPORTED_MAX]
    return [
        Violation(
            queue_log.INCONSISTENT_OFFSETS,
            subject,
            f"offsets {ops['off'][at]} … {ops['off'][at] + ops['cnt'][at] - 1} held other values "
            "for this pull than for everybody else, by their hash",
            (int(ops["op_id"][at]),),
            at_ns=int(ops["ret_ns"][at]),
        )
        for at in rows.tolist()
    ]


def _time(pair: TimePair, ops: Columns, subject: str) -> Violation:
    """Name the two operations that set the bounds of *pair*."""
    low, low_is_send = _low(pair, ops)
    high, high_is_send = _high(pair, ops)
    low_text = (
        f"the send of offset {pair.low} was called"
        if low_is_send
        else f"a read missed offset {pair.low}"
    )
    high_text = (
        f"the send of offset {pair.high} had returned"
        if high_is_send
        else f"a read had found offset {pair.high}"
    )
    late_us = (pair.low_ns - pair.high_ns) / 1000
    return Violation(
        _NAMES[low_is_send, high_is_send],
        subject,
        f"{low_text} {late_us:,.1f} µs after {high_text}",
        (low, high),
        at_ns=pair.low_ns,
    )


def _low(pair: TimePair, ops: Columns) -> tuple[int, bool]:
    ok = ops["outcome"] == Outcome.OK
    then = ops["call_ns"] == pair.low_ns
    sends = ops["op_id"][(ops["f"] == F.SEND) & ok & (ops["off"] == pair.low) & then].tolist()
    if pair.low_op != NOTHING and not pair.is_filler:
        sends.append(pair.low_op)
    if sends:
        return min(sends), True
    if pair.is_filler:
        return pair.low_op, True
    reads = _current(ops) & then & (ops["max_off"] == pair.low)
    return int(ops["op_id"][reads].min()), False


def _high(pair: TimePair, ops: Columns) -> tuple[int, bool]:
    ok = ops["outcome"] == Outcome.OK
    then = ops["ret_ns"] == pair.high_ns
    sends = ops["op_id"][(ops["f"] == F.SEND) & ok & (ops["off"] == pair.high) & then].tolist()
    if pair.high_op != NOTHING:
        sends.append(pair.high_op)
    if sends:
        return min(sends), True
    found = (ops["f"] == F.PULL) & (ops["cnt"] > 0) & (ops["off"] + ops["cnt"] - 1 == pair.high)
    reads = _current(ops) & then & (found | (ops["max_off"] == pair.high + 1))
    return int(ops["op_id"][reads].min()), False


def _current(ops: Columns) -> Flags:
    read = (ops["f"] == F.PULL) | (ops["f"] == F.MAX_OFFSET)
    ok = ops["outcome"] == Outcome.OK
    current: Flags = read & ok & (ops["level"] == Level.LINEARIZABLE)
    return current
