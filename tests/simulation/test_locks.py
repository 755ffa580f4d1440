"""Lockers in simulated clusters: one holder at a time, and old tokens fenced off."""

from __future__ import annotations

from collections import Counter

import pytest

from dledger.jepsen_like.history.operation import F, Outcome
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload
from dledger.jepsen_like.simulation.play import Played, play

pytestmark = pytest.mark.slow

PLAN = Plan(
    seed=7,
    duration_ms=60_000,
    steps=(
        Step(12_000, Kind.KILL, "leader", 3_000),
        Step(26_000, Kind.PAUSE, "leader", 9_000),
        Step(42_000, Kind.ISOLATE, "leader", 6_000),
    ),
    workload=Workload(
        producers=1,
        consumers=0,
        readers=0,
        lockers=4,
        queues=2,
        interval_ms=700,
        delayed_per_mille=0,
    ),
    settings=Settings(lock_lease_ms=8_000),
)


@pytest.fixture(scope="module")
def played() -> Played:
    return play(PLAN)


def test_locks_are_kept_through_kills_pauses_and_cuts(played: Played) -> None:
    assert played.violations == ()
    (verdict,) = [verdict for verdict in played.verdicts if verdict.checker == "locks"]
    assert verdict.validity == "valid"
    assert played.sometimes["leader_change"] >= 3
    assert verdict.counts["locks"] == 2


def test_locks_change_hands_and_old_tokens_are_refused(played: Played) -> None:
    rows = played.history.operations
    holders = Counter(op.process for op in rows if op.f == F.LOCK and op.outcome == Outcome.OK)
    assert len(holders) >= 4
    assert any(op.err == "LockedByOther" for op in rows)
    assert any(op.f == F.COMMIT and op.err == "LockLostError" for op in rows)
    assert any(op.f == F.COMMIT and op.outcome == Outcome.OK and op.token > 0 for op in rows)


def test_the_checker_gets_the_lease_of_the_plan(played: Played) -> None:
    """With a lease that no broker gave, the same history has two holders at once."""
    from dledger.jepsen_like.checkers.locks import TWO_HOLDERS, check_history

    verdict = check_history(played.history.operations, lease_ns=60_000_000_000)
    assert TWO_HOLDERS in {violation.name for violation in verdict.violations}
