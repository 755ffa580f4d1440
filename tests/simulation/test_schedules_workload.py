"""Clients of repeated schedules in simulated clusters: each instant once, whatever dies."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.checkers.schedules import Act
from dledger.jepsen_like.history.operation import F, Outcome
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.play import Played, play

pytestmark = pytest.mark.slow

PLAN = Plan(
    seed=11,
    duration_ms=180_000,
    steps=(
        Step(20_000, Kind.KILL, "leader", 3_000),
        Step(80_000, Kind.ISOLATE, "leader", 6_000),
        Step(81_000, Kind.CLOCK_DRIFT, "all", 10_000, 300),
    ),
    workload=Workload(producers=1, consumers=0, readers=0, schedulers=6, queues=2),
)


@pytest.fixture(scope="module")
def played() -> Played:
    return play(PLAN)


def test_schedules_are_exact_through_kills_and_cuts(played: Played) -> None:
    assert played.violations == ()
    (verdict,) = [verdict for verdict in played.verdicts if verdict.checker == "schedules"]
    assert verdict.validity == "valid"
    assert played.sometimes["leader_change"] >= 2
    assert verdict.counts["messages"] > 300
    assert verdict.counts["demanded"] > 100
    assert verdict.counts["certain"] > 50


def test_schedules_are_changed_in_every_way(played: Played) -> None:
    rows = [op for op in played.history.operations if op.f == F.SCHEDULE]
    assert {op.status for op in rows if op.outcome == Outcome.OK} == set(Act)
    fired = [op for op in played.history.operations if op.f == F.FIRED and op.group]
    assert {op.queue for op in fired} == {0, 1}
    assert any(op.cnt for op in fired)
