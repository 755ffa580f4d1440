"""The kernel finds what an exhaustive search finds, and the same however the rows are cut."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dledger.jepsen_like.checkers import queue_log
from dledger.jepsen_like.checkers.kernel.facts import (
    OBS_COLUMNS,
    OPS_COLUMNS,
    REPORTED_MAX,
    repeated,
)
from dledger.jepsen_like.checkers.kernel.judge import Judged, judge_queue
from dledger.jepsen_like.checkers.kernel.tables import gather, table_to_numpy
from dledger.jepsen_like.checkers.queue_log import name_violations, wanted_by
from dledger.jepsen_like.checkers.transactions import transactions_of
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.columns import obs_table, ops_table
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome
from tests.harness.clean_histories import clean_history
from tests.harness.extent import EXTENT, examples
from tests.harness.fast_part import gate_part
from tests.harness.history_world import TOPIC as CLEAN_TOPIC
from tests.harness.queue_histories import TOPIC, folded, is_linearizable, random_history
from tests.harness.rows import row


def check_tables(
    ops: Any, obs: Any, subject: str = "", appends: Sequence[Operation] = ()
) -> tuple[Judged, list[Violation]]:
    """Return the judgement and the violations of one queue whose tables are in memory."""
    rows, seen = table_to_numpy(ops, OPS_COLUMNS), table_to_numpy(obs, OBS_COLUMNS)
    judged = judge_queue(gather([rows], [seen], appends))
    if judged.is_valid:
        return judged, []
    return judged, name_violations(judged, rows, seen, subject, tuple(appends))


pytestmark = pytest.mark.slow

SUBJECT = "t/0"
RANDOM = examples(300) * min(EXTENT, 5)


def whole(operations: list[Operation], queue: tuple[str, int]) -> tuple[Judged, list[Violation]]:
    """Judge all rows of a queue at once."""
    rows, appends = rows_of(operations, queue)
    pulls = [op for op in rows if op.f == F.PULL and op.outcome == Outcome.OK]
    return check_tables(ops_table("r", rows), obs_table("r", pulls, ()), SUBJECT, appends)


def rows_of(
    operations: list[Operation], queue: tuple[str, int]
) -> tuple[list[Operation], tuple[Operation, ...]]:
    """Return the rows of a queue, and what transactions appended to it."""
    every = (one.as_append() for one in transactions_of(operations).values())
    appends = tuple(op for op in every if op is not None and (op.topic, op.queue) == queue)
    return [op for op in operations if (op.topic, op.queue) == queue], appends


def cut(rng: random.Random, size: int) -> list[list[int]]:
    """Return places in a random order, cut anywhere."""
    places = list(range(size))
    rng.shuffle(places)
    cuts = sorted(rng.randint(0, size) for _ in range(rng.randint(0, 4)))
    return [places[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


def by_columns(
    operations: list[Operation], queue: tuple[str, int], rng: random.Random
) -> tuple[Judged, list[Violation]]:
    """Judge in batches that come in any order; name from the wanted rows alone."""
    rows, appends = rows_of(operations, queue)
    pulls = [op for op in rows if op.f == F.PULL and op.outcome == Outcome.OK]
    ops = table_to_numpy(ops_table("r", rows), OPS_COLUMNS)
    obs = table_to_numpy(obs_table("r", pulls, ()), OBS_COLUMNS)
    all_ops, all_obs = [
        [{name: column[part] for name, column in table.items()} for part in cut(rng, size)]
        for table, size in ((ops, len(rows)), (obs, len(obs["off"])))
    ]
    said = judge_queue(gather(all_ops, all_obs, appends))
    wanted = wanted_by(said)
    shuffled = rng.sample(range(len(rows)), len(rows))
    kept = {name: column[shuffled] for name, column in ops.items()}
    kept = {name: column[wanted.ops(kept)] for name, column in kept.items()}
    seen = {name: column[wanted.obs(obs)] for name, column in obs.items()}
    if said.is_valid:
        return said, []
    return said, name_violations(said, kept, seen, SUBJECT, appends)


@pytest.mark.parametrize("block", gate_part(range(4), 1))
def test_random_histories_have_one_verdict_however_cut(block: int) -> None:
    agreed = {True: 0, False: 0}
    for seed in range(block * RANDOM, (block + 1) * RANDOM):
        operations = random_history(random.Random(seed), 9 if seed % 4 else 30)
        expected, named = whole(operations, (TOPIC, 0))
        said, found = by_columns(operations, (TOPIC, 0), random.Random(seed + 1))
        where = f"random_history(random.Random({seed})): {operations}"
        assert said.is_valid == expected.is_valid == (not found), where
        assert found == named, where
        agreed[said.is_valid] += 1
        if seed % 4:
            assert said.is_valid == is_linearizable(operations), where
    assert min(agreed.values()) > RANDOM // 5, agreed


def test_hashed_pull_is_judged_as_its_values() -> None:
    names = {"valid": 0, "wrong": 0, "missed": 0}
    for seed in range(RANDOM):
        plain = random_history(random.Random(seed), 12)
        _, expected = whole(plain, (TOPIC, 0))
        operations = folded(random_history(random.Random(seed), 12), random.Random(seed))
        said, found = by_columns(operations, (TOPIC, 0), random.Random(seed))
        where = f"unpacked random_history(random.Random({seed})): {found}"
        if not expected:
            assert said.is_valid, where
            names["valid"] += 1
        elif not said.is_valid:
            names["wrong"] += 1
        else:
            assert said.unproved or {v.name for v in expected} != {
                queue_log.INCONSISTENT_OFFSETS
            }, where
            names["missed"] += 1
    assert names["valid"] > RANDOM // 6
    assert names["wrong"] > 3 * names["missed"], names


def test_absurd_offset_takes_no_memory_and_names_its_row() -> None:
    send = Operation(0, 0, 1, -1, F.SEND, Outcome.OK, 1, 2, "t", 0, 0, value=5)
    read = Operation(1, 1, 2, -1, F.MAX_OFFSET, Outcome.OK, 3, 4, "t", 0, max_off=1 << 60)
    said, found = by_columns([send, read], ("t", 0), random.Random(1))
    assert (said.length, said.attempts) == (1 << 60, 1)
    assert [(v.name, v.operations) for v in found] == [(queue_log.OF_NO_SEND, (1,))]


def test_facts_merge_while_a_queue_grows() -> None:
    count = 200_000
    rng = np.random.default_rng(4)
    order = rng.permutation(count)
    zero = np.zeros(count, dtype=np.int64)
    ops = {
        "op_id": order, "f": zero, "outcome": zero, "level": zero, "call_ns": order * 10,
        "ret_ns": order * 10 + 25, "off": order, "cnt": zero, "max_off": zero - 1,
        "min_off": zero - 1, "value": order + 7, "range_hash": zero, "due_ns": zero - 1,
    }  # fmt: skip
    parts = [
        {name: column[at : at + 999] for name, column in ops.items()} for at in range(0, count, 999)
    ]
    assert judge_queue(gather(parts, [])).is_valid
    late = np.flatnonzero(order == 1_000)[0]
    ops["call_ns"][late], ops["ret_ns"][late] = 20_000, NEVER - 1
    said = judge_queue(gather(parts, []))
    assert {pair.low for pair in said.pairs} == {1_000}
    assert [pair.high for pair in said.pairs] == list(range(1_001, 1_001 + REPORTED_MAX))


def test_repeated_values_are_found_dense_and_sparse() -> None:
    dense = np.arange(1_000, dtype=np.int64) + (3 << 40)
    sparse = dense * 1_000_003
    for values in (dense, sparse):
        assert not len(repeated(values))
        assert repeated(np.append(values, values[[5, 5, 9]])).tolist() == sorted(
            values[[5, 9]].tolist()
        )
    assert not len(repeated(np.array([1, 1 | 1 << 40, 1 | 2 << 40], dtype=np.int64)))


def test_tables_in_memory_are_judged_at_once() -> None:
    history = clean_history(3)
    rows = [op for op in history.operations if (op.topic, op.queue) == (CLEAN_TOPIC, 0)]
    appends = [
        op
        for op in (one.as_append() for one in transactions_of(history.operations).values())
        if op is not None and op.queue == 0
    ]
    pulls = [op for op in rows if op.f == F.PULL]
    said, found = check_tables(ops_table("r", rows), obs_table("r", pulls, ()), "q", appends)
    assert said.is_valid
    assert not found
    assert said.sends == sum(op.f == F.SEND for op in rows) + len(appends)


def test_a_value_sent_once_and_read_twice_is_a_duplicate() -> None:
    rows = sends({0: 5, 1: 6, 3: 7})
    rows.append(Operation(9, 9, 2, -1, F.PULL, Outcome.OK, 50, 60, "t", 0, 0, 4, 4))
    rows[-1].values = (5, 6, 5, 7)
    # As many sends as the queue has messages: one more of an unknown outcome.
    rows.append(Operation(10, 10, 3, -1, F.SEND, Outcome.INFO, 0, 90, "t", 0, value=8))
    said, found = by_columns(rows, ("t", 0), random.Random(1))
    assert said.values == (5,)
    assert [(v.name, v.operations) for v in found] == [(queue_log.DUPLICATE, (9, 9))]


def test_a_value_sent_twice_has_two_offsets() -> None:
    rows = sends({0: 5, 1: 6, 2: 5, 3: 7})
    said, found = by_columns(rows, ("t", 0), random.Random(1))
    assert said.values == (5,)
    assert found == []


def sends(at: dict[int, int]) -> list[Operation]:
    """Return an acknowledged send for each offset and its value."""
    return [
        row(off, F.SEND, off * 10, off * 10 + 5, off=off, value=value) for off, value in at.items()
    ]


def test_equal_values_of_one_offset_lie_the_same_in_every_order() -> None:
    rows = np.arange(4, dtype=np.int64)
    ops = {name: np.zeros(4, dtype=np.int64) for name in OPS_COLUMNS}
    ops |= {"op_id": rows, "call_ns": rows, "ret_ns": rows + 9, "value": np.array([5, 8, 6, 8])}
    ops["max_off"] = ops["min_off"] = np.full(4, NOTHING)
    ops["off"] = np.array([0, 1, 1, 1])
    empty = {name: np.zeros(0, dtype=np.int64) for name in OBS_COLUMNS}
    reported = set()
    for seed in range(24):
        order = random.Random(seed).sample(range(4), 4)
        parts = [{name: column[[at]] for name, column in ops.items()} for at in order]
        said = judge_queue(gather(parts, [empty]))
        reported.add((said.offs, said.values))
    assert reported == {((1,), (8,))}
