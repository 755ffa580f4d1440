"""Small histories of one queue: the kernel and an exhaustive search say the same.

`make small-histories` tries ten million.
"""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest

from dledger.jepsen_like.checkers.kernel import chunks, judge
from dledger.jepsen_like.checkers.kernel.facts import I64, OBS_COLUMNS, OPS_COLUMNS, Columns
from dledger.jepsen_like.checkers.kernel.judge import Judged, judge_queue
from dledger.jepsen_like.checkers.kernel.tables import gather
from dledger.jepsen_like.history.columns import obs_table, ops_table
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome
from tests.harness.extent import EXTENT
from tests.harness.fast_part import gate_part
from tests.harness.queue_histories import is_linearizable, random_history
from tests.property.test_queue_kernel import check_tables

OFFSETS: Final = 16
"""Offsets, operations and values of a window."""
FIRST_VALUE: Final = 100
INSTANTS: Final = 64
BEGIN: Final = 10
"""First instant of a history within its window: histories begin before 0."""
OVER: Final = 50
"""Instant of a window at which its history is over."""
FILLER: Final = 1 << 38
"""First value and operation of the sends between windows."""
UNLIMITED: Final = 1 << 40
_OWN: Final = tuple(
    name for name in OPS_COLUMNS if name not in ("op_id", "cnt", "range_hash", "due_ns")
)


@contextmanager
def _all_named() -> Iterator[None]:
    """Let the kernel name all that is wrong, not only the first few."""
    limits: dict[str, Any] = {"REPORTED_MAX": UNLIMITED, "SUSPECTS_MAX": UNLIMITED}
    with mock.patch.multiple(chunks, **limits), mock.patch.multiple(judge, **limits):
        yield


class _Joined:
    """The columns of many histories.

    Attributes:
        end: Of each, one past the last offset that it names.
        sends: Of each, how many of its sends may have succeeded.
    """

    def __init__(self, histories: Sequence[Sequence[Operation]]) -> None:
        rows = [
            (
                at, op.op_id, len(op.values), op.f, op.outcome, op.level, op.call_ns, op.ret_ns,
                op.off, op.max_off, op.min_off, op.value,
            )
            for at, history in enumerate(histories)
            for op in history
        ]  # fmt: skip
        seen = [
            (at, op.op_id, op.off + place, value)
            for at, history in enumerate(histories)
            for op in history
            if op.values
            for place, value in enumerate(op.values)
        ]
        table = np.array(rows, dtype=np.int64).T
        self._number, self._op_id, self._cnt = table[:3]
        self._ops = dict(zip(_OWN, table[3:], strict=True))
        self._seen = np.array(seen, dtype=np.int64).reshape(-1, 4).T
        is_send = self._ops["f"] == F.SEND
        self.end = np.zeros(len(histories), dtype=np.int64)
        last = np.where(is_send, 1, self._cnt) + self._ops["off"]
        last[(self._cnt == 0) & ~is_send] = 0
        last = np.maximum(last, self._ops["min_off"])
        np.maximum.at(self.end, self._number, np.maximum(last, self._ops["max_off"]))
        may_be = is_send & (self._ops["outcome"] != Outcome.FAIL)
        self.sends = np.bincount(self._number[may_be], minlength=len(histories))

    def judged(self, chosen: I64, more_sends: int = 0) -> Judged:
        """Judge some histories as one queue, the chosen ones in their order.

        Args:
            more_sends: Sends of unknown outcome besides.
        """
        place = np.full(len(self.end), NOTHING, dtype=np.int64)
        place[chosen] = np.arange(len(chosen))
        own = self._own_rows(place)
        filled = np.maximum(self.end, self.sends)[chosen]
        window, off = np.nonzero(np.arange(OFFSETS) >= filled[:, None])
        fillers = _sends(FILLER + window * OFFSETS + off)
        fillers["off"] = window * OFFSETS + off
        fillers["call_ns"] = window * INSTANTS + OVER
        fillers["ret_ns"] = fillers["call_ns"] + 1
        unknown = _sends(2 * FILLER + np.arange(more_sends))
        unknown["outcome"] += Outcome.INFO
        unknown["ret_ns"] += NEVER
        parts = (own, fillers, unknown)
        ops = {name: np.concatenate([part[name] for part in parts]) for name in OPS_COLUMNS}
        return judge_queue(gather([ops], [self._own_obs(place)]))

    def _own_rows(self, place: I64) -> Columns:
        rows = np.flatnonzero(place[self._number] != NOTHING)
        number = self._number[rows]
        first, begin = place[number] * OFFSETS, place[number] * INSTANTS + BEGIN
        ops = {name: column[rows] for name, column in self._ops.items()}
        for name in ("off", "max_off", "min_off"):
            ops[name] = np.where(ops[name] == NOTHING, NOTHING, ops[name] + first)
        ops["call_ns"] += begin
        ops["ret_ns"] = np.where(ops["ret_ns"] == NEVER, NEVER, ops["ret_ns"] + begin)
        ops["value"] += number * OFFSETS - FIRST_VALUE
        ops["op_id"] = self._op_id[rows] + number * OFFSETS
        ops["cnt"] = self._cnt[rows]
        none = np.full_like(rows, NOTHING)
        return ops | {"range_hash": np.zeros_like(rows), "due_ns": none}

    def _own_obs(self, place: I64) -> Columns:
        number, op_id, off, value = self._seen[:, place[self._seen[0]] != NOTHING]
        names = (
            op_id + number * OFFSETS,
            np.zeros_like(number),
            off + place[number] * OFFSETS,
            value + number * OFFSETS - FIRST_VALUE,
        )
        return dict(zip(OBS_COLUMNS, names, strict=True))


def _sends(numbers: I64) -> dict[str, I64]:
    """Return sends that ended well at once, at no offset."""
    columns = {name: np.zeros_like(numbers) for name in OPS_COLUMNS}
    for name in ("off", "max_off", "min_off", "due_ns"):
        columns[name] += NOTHING
    return columns | {"op_id": numbers, "value": numbers}


def wrong_ones(histories: Sequence[Sequence[Operation]]) -> set[int]:
    """Return the numbers of the histories that the kernel finds something wrong with."""
    joined = _Joined(histories)
    missing = joined.end - joined.sends
    wrong = set(np.flatnonzero(missing > 0).tolist())
    if wrong:
        judged = joined.judged(np.flatnonzero(missing > 0))
        assert judged.length - judged.attempts == missing[missing > 0].sum()
    left = np.flatnonzero(missing <= 0)
    with _all_named():
        # Where values disagree, sends are missing: without more of them the queue would be cut.
        values = joined.judged(left, more_sends=OFFSETS * len(left))
        wrong |= {int(left[off // OFFSETS]) for off in values.offs}
        wrong |= {number // OFFSETS for number in (*values.values, *values.reads_wrong)}
        wrong |= {later // OFFSETS for _, later, *_ in values.lows}
        left = np.setdiff1d(left, list(wrong))
        times = joined.judged(left)
    assert not [*times.offs, *times.values, *times.reads_wrong]
    assert times.length <= times.attempts
    absent = {pair.high_op // OFFSETS for pair in times.pairs if pair.high == times.length}
    pairs = [pair for pair in times.pairs if pair.high < times.length]
    assert all(pair.low // OFFSETS == pair.high // OFFSETS for pair in pairs), "bounds met"
    return wrong | absent | {int(left[pair.low // OFFSETS]) for pair in pairs}


HISTORIES = int(os.environ.get("DLEDGER_SMALL_HISTORIES", 25_000 * EXTENT))
BLOCKS = 20
JOINED = 1_000
"""Histories that are judged at once."""
THROUGH_TABLES = 512
"""Every n-th is judged alone as well, through tables of Arrow."""


def compare(rng: random.Random, size_max: int) -> int:
    """Judge `JOINED` histories in every way; return how many are wrong."""
    histories = [random_history(rng, size_max) for _ in range(JOINED)]
    truth = {at for at, history in enumerate(histories) if not is_linearizable(history)}
    found = wrong_ones(histories)
    for at in sorted(found ^ truth):
        rows = "\n".join(map(str, histories[at]))
        pytest.fail(
            f"exhaustive search finds {at not in truth}, the kernel {at not in found}\n{rows}"
        )
    for at in range(0, JOINED, THROUGH_TABLES):
        tables = (ops_table("r", histories[at]), obs_table("r", histories[at], ()))
        assert check_tables(*tables)[0].is_valid == (at not in truth), histories[at]
    return len(truth)


def test_joined_histories_get_the_verdict_each_gets_alone() -> None:
    wrong = sum(compare(random.Random(seed), 7) for seed in range(3))
    assert JOINED // 3 < wrong < 3 * JOINED


@pytest.mark.slow
@pytest.mark.parametrize("block", gate_part(range(BLOCKS), 1))
def test_many_histories_agree_with_exhaustive_search(block: int) -> None:
    rng = random.Random(1_000 + block)
    for _ in range(HISTORIES // BLOCKS // JOINED):
        compare(rng, 9)
