"""Removed offsets that no row names: which messages can have been there."""

from __future__ import annotations

import random

import pytest

from jepsen_like.checkers import delayed, holes, transactions
from jepsen_like.checkers.holes import Hole, Missing, without_hole
from jepsen_like.history.columns import obs_table, ops_table
from jepsen_like.history.operation import (
    NEVER,
    NOTHING,
    Decision,
    F,
    History,
    Level,
    Operation,
    Outcome,
    ReplicaRead,
    RunHeader,
)
from tests.harness.judged import judged
from tests.oracles.holes import holes_of, most_placed

QUEUE = ("t", 0)


def row(number: int, f: F, call_ns: int, ret_ns: int) -> Operation:
    return Operation(number, number, number, -1, f, Outcome.OK, call_ns, ret_ns, *QUEUE)


def random_history(rng: random.Random) -> History:
    """Rows of a queue in any order, right or wrong: both editions must read the same in them."""
    found = History(RunHeader("r"))
    for number in range(rng.randrange(12)):
        call_ns = rng.randrange(50)
        f = rng.choice((F.SEND, F.PULL, F.PULL, F.MAX_OFFSET))
        op = row(number, f, call_ns, call_ns + rng.randrange(20))
        op.outcome = rng.choice((Outcome.OK, Outcome.OK, Outcome.OK, Outcome.FAIL))
        op.off = rng.randrange(8)
        if f == F.SEND:
            op.value, op.due_ns = number, rng.choice((NOTHING, NOTHING, 7))
        elif f == F.PULL:
            op.values = tuple(range(100, 100 + rng.randrange(3)))
            op.cnt = len(op.values)
            op.max_off = rng.choice((NOTHING, rng.randrange(9)))
        else:
            op.max_off = rng.randrange(9)
        op.level = rng.choice((Level.LINEARIZABLE, Level.LINEARIZABLE, Level.LOCAL))
        found.operations.append(op)
    for node in "ab":
        found.replica_reads.append(ReplicaRead(99, node, *QUEUE, rng.randrange(8), ()))
    return found


def test_holes_of_columns_are_those_of_rows() -> None:
    rng, holes_found = random.Random(1), 0
    for _ in range(400):
        history = random_history(rng)
        expected = holes_of(history, QUEUE)
        ops = ops_table("r", history.operations)
        obs = obs_table("r", history.operations, ())
        found = holes.holes_of(ops, obs, holes.begin_of(history.replica_reads, QUEUE))
        assert found == expected
        holes_found += len(found)
    assert holes_found > 200


def test_as_many_messages_find_a_hole_as_a_search_places() -> None:
    rng, lost_found = random.Random(2), 0
    for _ in range(3_000):
        size = rng.randrange(6)
        after, before = (sorted(rng.randrange(12) for _ in range(size)) for _ in range(2))
        found = [Hole(*pair) for pair in zip(after, before, strict=True)]
        begins = [rng.randrange(12) for _ in range(rng.randrange(6))]
        missing = [Missing(n, b, b + rng.randrange(6)) for n, b in enumerate(begins)]
        lost = without_hole(missing, found)
        assert len(missing) - len(lost) == most_placed(missing, found)
        kept = [one for one in missing if one.value not in lost]
        assert most_placed(kept, found) == len(kept)
        lost_found += len(lost)
    assert lost_found > 1_000


def cut_history(*, holes_left: int, due_ns: int = 20) -> History:
    """Four offsets are removed; sends name all but *holes_left*; a delayed message is missing."""
    found = History(RunHeader("r"))
    for off in range(4 - holes_left):
        send = row(off, F.SEND, 1, 2 + off)
        send.off, send.value = off, 100 + off
        found.operations.append(send)
    late = row(8, F.SEND, 1, 9)
    late.value, late.due_ns = 200, due_ns
    end = row(9, F.MAX_OFFSET, 40, 50)
    end.max_off = 4
    found.operations += [late, end]
    found.replica_reads = [ReplicaRead(99, node, *QUEUE, 4, ()) for node in "ab"]
    return found


@pytest.mark.parametrize(
    ("holes_left", "due_ns", "is_lost"),
    [(0, 20, True), (1, 20, False), (1, 50, False), (1, 51, True), (2, 20, False)],
)
def test_a_delayed_message_may_be_in_a_hole(holes_left: int, due_ns: int, is_lost: bool) -> None:
    found = judged(delayed.NAME, cut_history(holes_left=holes_left, due_ns=due_ns))
    names = [(v.name, v.operations) for v in found.violations]
    assert names == ([(delayed.NOT_DELIVERED, (8,))] if is_lost else [])


def test_a_replica_that_is_cut_less_holds_what_others_removed() -> None:
    history = cut_history(holes_left=1)
    history.replica_reads[1] = ReplicaRead(99, "b", *QUEUE, 0, (100, 101, 102, 103))
    found = judged(delayed.NAME, history)
    assert [v.name for v in found.violations] == [delayed.NOT_DELIVERED]


@pytest.mark.parametrize(("seen_ns", "is_lost"), [(29, True), (30, False), (NEVER - 1, False)])
def test_a_commit_fits_a_hole_of_its_time_only(seen_ns: int, is_lost: bool) -> None:
    """The one hole was filled before *seen_ns*; the commit was called at 30."""
    history = cut_history(holes_left=1)
    del history.operations[3:]
    half, commit = row(20, F.HALF, 5, 6), row(21, F.END_TRANSACTION, 30, 35)
    half.value = commit.value = 300
    half.txn = commit.txn = 1
    commit.decision = Decision.COMMIT
    end = row(22, F.MAX_OFFSET, min(20, seen_ns), seen_ns)
    end.max_off = 4
    history.operations += [half, commit, end]
    found = judged(transactions.NAME, history)
    expected = [(transactions.COMMIT_LOST, (20, 21))] if is_lost else []
    assert [(v.name, v.operations) for v in found.violations] == expected
