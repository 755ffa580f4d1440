"""Registers of committed offsets against exhaustive search, and planted anomalies."""

import random

import pytest

from dledger.jepsen_like.checkers import consumer_offsets
from dledger.jepsen_like.checkers.consumer_offsets import check_history, check_register
from dledger.jepsen_like.history.operation import NEVER, F, Operation, Outcome
from tests.harness import every_order
from tests.harness.judged import judged
from tests.harness.rows import row

pytestmark = pytest.mark.slow


def random_history(
    rng: random.Random, size_max: int, *, offsets: int | None = None
) -> list[Operation]:
    """Return a history that really happened to a register, or nearly.

    Args:
        offsets: Commits take one of this many; None: each one of its own.
    """
    operations: list[Operation] = []
    now, span, lag = -1, rng.choice((4, 8, 14)), rng.choice((0, 1, 3, 6))
    size = rng.randint(2, size_max)
    instants = sorted(rng.randint(0, span) for _ in range(size))
    for op_id, at in enumerate(instants):
        call, ret = at - rng.randint(0, lag), at + rng.randint(0, lag)
        if rng.random() < 0.5:
            outcome = rng.choices((Outcome.OK, Outcome.INFO, Outcome.FAIL), (6, 3, 1))[0]
            off = op_id + 10 if offsets is None else 10 + rng.randrange(offsets)
            if outcome is Outcome.OK or (outcome is Outcome.INFO and rng.random() < 0.5):
                now = off
            # A return of an unknown commit proves nothing: some histories name one.
            ret = NEVER if outcome is Outcome.INFO and op_id % 2 else ret
            f = F.COMMIT
        else:
            f, outcome, off = F.FETCH_COMMIT, Outcome.OK, now
        operations.append(
            Operation(op_id, op_id, 0, -1, f, outcome, call, ret, "t", 0, off, group="g")
        )
    for _ in range(rng.choice((0, 1, 2, 3))):
        op = rng.choice(operations)
        if rng.random() < 0.6:
            width = 0 if op.ret_ns == NEVER else op.ret_ns - op.call_ns
            op.call_ns = rng.randint(0, span)
            op.ret_ns = NEVER if op.ret_ns == NEVER else op.call_ns + width
        elif op.f == F.FETCH_COMMIT:
            op.off = rng.choice((-1, *(other.off for other in operations)))
    return operations


def is_linearizable(operations: list[Operation]) -> bool:
    """Decide by trying every order."""
    return every_order.is_linearizable(operations, -1, _step)


def _step(value: int, op: Operation) -> int | None:
    if op.f == F.COMMIT:
        return op.off
    return value if op.off == value else None


HISTORIES = 6_000


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


@pytest.mark.parametrize("offsets", [None, 1, 2, 4])
def test_agrees_with_exhaustive_search(offsets: int | None) -> None:
    good, bad = compare(offsets or 0, HISTORIES, 7, offsets)
    assert good > HISTORIES // 10
    assert bad > HISTORIES // 40


def commit(op_id: int, off: int, call: int, ret: int, outcome: Outcome = Outcome.OK) -> Operation:
    return row(op_id, F.COMMIT, call, ret, outcome=outcome, off=off, group="g")


def fetch(op_id: int, off: int, call: int, ret: int) -> Operation:
    return row(op_id, F.FETCH_COMMIT, call, ret, off=off, group="g")


def test_a_group_that_reads_nothing_after_its_commit_went_back() -> None:
    verdict = check_history([commit(0, 5, 0, 10), fetch(1, -1, 20, 30)])
    assert [violation.name for violation in verdict.violations] == [consumer_offsets.WENT_BACK]


def test_no_read_proves_nothing() -> None:
    assert check_history([commit(0, 5, 0, 10)]).validity == "unknown"


def test_too_many_equal_commits_at_once_are_undecided() -> None:
    rows = [commit(at, at % 20, 0, 1_000) for at in range(40)]
    verdict = judged(consumer_offsets.NAME, [*rows, fetch(90, 3, 500, 600)])
    assert verdict.validity == "unknown"
    assert "too many commits of one offset" in verdict.reason
