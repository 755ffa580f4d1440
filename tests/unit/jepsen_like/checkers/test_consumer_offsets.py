"""Registers of committed offsets against exhaustive search, and planted anomalies."""

from __future__ import annotations

import random

import pytest

from dledger.jepsen_like.checkers import consumer_offsets
from dledger.jepsen_like.checkers.consumer_offsets import check_history, check_register
from dledger.jepsen_like.history.operation import NEVER, F, Operation, Outcome
from tests.harness.fast_part import gate_part
from tests.harness.judged import judged
from tests.harness.offset_histories import is_linearizable, random_history

FAST_BLOCK = 6_000
SLOW_BLOCK = 50_000


def compare(seed: int, count: int, size_max: int, offsets: int | None = None) -> tuple[int, int]:
    rng = random.Random(seed)
    verdicts = [0, 0]
    for number in range(count):
        operations = random_history(rng, size_max, offsets=offsets)
        violations = check_register(operations)
        truth = is_linearizable(operations)
        assert (not violations) == truth, (
            f"seed {seed}, history {number}: exhaustive search finds {truth}, "
            f"the checker {violations}\n" + "\n".join(map(str, operations))
        )
        verdicts[not truth] += 1
    return verdicts[0], verdicts[1]


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_exhaustive_search(seed: int) -> None:
    good, bad = compare(seed, FAST_BLOCK, 7)
    assert good > FAST_BLOCK // 10
    assert bad > FAST_BLOCK // 10


@pytest.mark.parametrize("offsets", [1, 2, 4])
def test_agrees_where_offsets_are_committed_twice(offsets: int) -> None:
    good, bad = compare(offsets, FAST_BLOCK // 2, 7, offsets)
    assert good > FAST_BLOCK // 10
    assert bad > FAST_BLOCK // 40


@pytest.mark.slow
@pytest.mark.parametrize("block", gate_part(range(4), 1))
def test_agrees_with_exhaustive_search_on_larger_ones(block: int) -> None:
    compare(1_000 + block, SLOW_BLOCK, 8)


def commit(op_id: int, off: int, call: int, ret: int, outcome: Outcome = Outcome.OK) -> Operation:
    ends = NEVER if outcome is Outcome.INFO else ret
    return Operation(op_id, op_id, 0, -1, F.COMMIT, outcome, call, ends, "t", 0, off, group="g")


def fetch(op_id: int, off: int, call: int, ret: int) -> Operation:
    return Operation(
        op_id, op_id, 0, -1, F.FETCH_COMMIT, Outcome.OK, call, ret, "t", 0, off, group="g"
    )


PLANTED = {
    consumer_offsets.NEVER_COMMITTED: ([commit(0, 5, 0, 10), fetch(1, 6, 20, 30)], (1,)),
    consumer_offsets.ABORTED_COMMIT: (
        [commit(0, 5, 0, 10, Outcome.FAIL), fetch(1, 5, 20, 30)],
        (0, 1),
    ),
    consumer_offsets.BEFORE_COMMIT: ([commit(0, 5, 20, 30), fetch(1, 5, 0, 10)], (0, 1)),
    consumer_offsets.WENT_BACK: (
        [commit(0, 5, 0, 10), commit(1, 7, 20, 30), fetch(2, 5, 40, 50)],
        (0, 1, 2),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_anomaly_found_by_name_with_witnesses(name: str) -> None:
    operations, witnesses = PLANTED[name]
    verdict = check_history([*operations, fetch(9, -1, -10, -5)])
    assert [(violation.name, violation.operations) for violation in verdict.violations] == [
        (name, witnesses)
    ]


def test_a_group_that_reads_nothing_after_its_commit_went_back() -> None:
    verdict = check_history([commit(0, 5, 0, 10), fetch(1, -1, 20, 30)])
    assert [violation.name for violation in verdict.violations] == [consumer_offsets.WENT_BACK]


def test_register_allows_a_reset_to_an_older_offset() -> None:
    rows = [commit(0, 7, 0, 10), commit(1, 5, 20, 30), fetch(2, 5, 40, 50)]
    assert check_history(rows).is_valid


def test_no_read_proves_nothing() -> None:
    assert check_history([commit(0, 5, 0, 10)]).validity == "unknown"


def test_an_offset_committed_twice_is_no_anomaly() -> None:
    rows = [commit(0, 5, 0, 10), commit(1, 5, 20, 30), fetch(2, 5, 40, 50)]
    assert judged(consumer_offsets.NAME, rows).is_valid
    rows += [commit(3, 7, 60, 70), fetch(4, 5, 80, 90)]
    verdict = judged(consumer_offsets.NAME, rows)
    assert [violation.name for violation in verdict.violations] == [consumer_offsets.WENT_BACK]
    assert verdict.violations[0].operations[-1] == 4


def test_the_return_of_an_unknown_commit_proves_nothing() -> None:
    unknown = commit(0, 5, 0, 10, Outcome.INFO)
    unknown.ret_ns = 10
    assert judged(consumer_offsets.NAME, [unknown, fetch(1, -1, 20, 30)]).is_valid


def test_too_many_equal_commits_at_once_are_undecided() -> None:
    rows = [commit(at, at % 20, 0, 1_000) for at in range(40)]
    verdict = judged(consumer_offsets.NAME, [*rows, fetch(90, 3, 500, 600)])
    assert verdict.validity == "unknown"
    assert "too many commits of one offset" in verdict.reason
