"""Queue locks: what a correct broker may do raises no alarm, what it may not is named."""

from functools import partial
from typing import Any

import pytest

from dledger.jepsen_like.checkers import locks
from dledger.jepsen_like.checkers.locks import check_history
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome
from tests.harness.rows import row

LEASE = 1_000


def act(
    f: F, op_id: int, process: int, call: int, ret: int, token: int = NOTHING, **more: Any
) -> Operation:
    return row(op_id, f, call, ret, process=process, group="g", token=token, **more)


lock, unlock, commit = (partial(act, f) for f in (F.LOCK, F.UNLOCK, F.COMMIT))


def names(*rows: Operation, clock_error_ns: int = 0) -> list[str]:
    verdict = check_history(rows, lease_ns=LEASE, clock_error_ns=clock_error_ns)
    return [violation.name for violation in verdict.violations]


def test_lock_passes_on_after_unlock_or_lease_end() -> None:
    first = lock(0, 1, 0, 10, 5)
    assert names(first, unlock(1, 1, 20, 30, 5), lock(2, 2, 25, 35, 7)) == []
    assert names(first, lock(2, 2, 980, 1_000, 7)) == []
    assert names(first, lock(2, 2, 980, 999, 7)) == [locks.TWO_HOLDERS]


def test_a_renewal_makes_the_lease_longer_and_may_keep_its_token() -> None:
    rows = [lock(0, 1, 0, 10, 5), lock(1, 1, 900, 910, 5)]
    assert names(*rows) == []
    assert names(*rows, lock(2, 2, 1_500, 1_510, 7)) == [locks.TWO_HOLDERS]
    assert names(*rows, lock(2, 2, 1_890, 1_900, 7)) == []


def test_clocks_that_are_apart_shorten_a_lease() -> None:
    rows = [lock(0, 1, 0, 10, 5), lock(1, 2, 940, 960, 7)]
    assert names(*rows) == [locks.TWO_HOLDERS]
    assert names(*rows, clock_error_ns=40) == []


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.INFO])
def test_unlock_unknown_may_count_failed_does_not(outcome: Outcome) -> None:
    rows = [lock(0, 1, 0, 10, 5), lock(2, 2, 50, 60, 7)]
    assert names(*rows, unlock(1, 1, 55, 90, 5, outcome=outcome)) == []
    assert names(*rows, unlock(1, 1, 55, 90, 5, outcome=Outcome.FAIL)) == [locks.TWO_HOLDERS]


def test_an_unknown_unlock_without_a_token_may_end_a_later_hold() -> None:
    late = unlock(0, 1, 0, 10, outcome=Outcome.INFO)
    rows = [lock(1, 1, 20, 30, 5), lock(2, 2, 50, 60, 7)]
    assert names(late, *rows) == []
    late.token = 3  # of an earlier hold: it cannot end this one
    assert names(late, *rows) == [locks.TWO_HOLDERS]


def test_an_unlock_that_had_returned_before_does_not_end_a_hold() -> None:
    rows = [unlock(0, 1, 0, 10), lock(1, 1, 20, 30, 5), lock(2, 2, 50, 60, 7)]
    assert names(*rows) == [locks.TWO_HOLDERS]


def test_grant_inside_another_hold_is_an_overlap() -> None:
    """The second holder gives back while its lock is still being answered."""
    rows = [lock(0, 1, 0, 10, 5), lock(1, 2, 50, 60, 7), unlock(2, 2, 40, 70, outcome=Outcome.INFO)]
    assert names(*rows) == [locks.TWO_HOLDERS]


def test_longest_hold_kept_behind_shorter_ones() -> None:
    rows = [
        lock(0, 1, 0, 10),
        unlock(1, 1, 100, 110),
        lock(2, 2, 101, 120),
        unlock(3, 2, 130, 140),
        lock(4, 1, 131, 150),
        lock(5, 3, 1_125, 1_130),
    ]
    verdict = check_history(rows, lease_ns=LEASE)
    assert [violation.operations for violation in verdict.violations] == [(4, 5)]


def test_one_of_two_overlapping_grants_may_be_first() -> None:
    """One can return when the lease of the other is over; else neither can be the first."""
    slow = lock(0, 1, 0, 1_020)
    assert names(slow, lock(1, 2, 20, 1_000)) == []
    assert names(slow, lock(1, 2, 10, 30)) == []
    assert names(slow, lock(1, 2, 21, 30)) == [locks.TWO_HOLDERS]
    assert names(lock(0, 1, 0, 40), lock(1, 2, 0, 40)) == [locks.TWO_HOLDERS]


def test_grants_of_other_queues_and_groups_are_judged_apart() -> None:
    other_queue, other_group = lock(1, 2, 20, 30, 3), lock(2, 3, 20, 30, 4)
    other_queue.queue, other_group.group = 1, "h"
    verdict = check_history([lock(0, 1, 0, 10, 5), other_queue, other_group], lease_ns=LEASE)
    assert verdict.is_valid
    assert verdict.counts == {"locks": 3, "grants": 3, "under_lock": 0}


def test_what_is_done_with_a_token_proves_its_grant() -> None:
    """The newer grant's own answer came late; what was done under it came before."""
    newer = lock(0, 2, 0, 500, 7)
    shown = commit(1, 2, 20, 30, 7)
    assert names(newer, shown, commit(2, 1, 31, 40, 5)) == [locks.NOT_FENCED]
    assert names(newer, shown, commit(2, 1, 30, 40, 5)) == []
    assert names(newer, shown, commit(2, 1, 31, 40, 5, outcome=Outcome.FAIL)) == []
    assert names(newer, shown, commit(2, 1, 31, 40, 5, outcome=Outcome.INFO)) == []


def test_a_late_unlock_with_an_old_token_has_nothing_to_unlock() -> None:
    rows = [lock(0, 1, 0, 10, 5), lock(1, 2, 2_000, 2_010, 7), unlock(2, 1, 2_100, 2_110, 5)]
    assert names(*rows) == []


def test_no_grant_proves_nothing() -> None:
    assert check_history([lock(0, 1, 0, 10, outcome=Outcome.FAIL)]).validity == "unknown"
