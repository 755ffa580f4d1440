"""Clients with quotas in simulated clusters: exact limits, whatever dies, whatever dates do."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.checkers.quotas import Act, Row
from dledger.jepsen_like.history.operation import QUOTA_EXCEEDED, F, Outcome
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.play import Played, play

pytestmark = pytest.mark.slow

PLAN = Plan(
    seed=12,
    duration_ms=100_000,
    steps=(
        Step(15_000, Kind.CLOCK_JUMP, "leader", 0, -600_000),
        Step(25_000, Kind.KILL, "leader", 3_000),
        Step(45_000, Kind.PAUSE, "leader", 6_000),
        Step(60_000, Kind.CLOCK_JUMP, "all", 0, 600_000),
        Step(70_000, Kind.CLOCK_DRIFT, "all", 5_000, 300),
        Step(80_000, Kind.ISOLATE, "leader", 6_000),
    ),
    workload=Workload(producers=1, consumers=0, readers=0, limited=6, queues=2),
)


@pytest.fixture(scope="module")
def played() -> Played:
    return play(PLAN)


def test_quotas_are_exact_through_kills_pauses_and_jumps(played: Played) -> None:
    assert played.violations == ()
    (verdict,) = [verdict for verdict in played.verdicts if verdict.checker == "quotas"]
    assert verdict.validity == "valid"
    assert played.sometimes["leader_change"] >= 2
    assert verdict.counts["acknowledged"] > 200
    assert verdict.counts["refused"] > 50
    assert verdict.counts["changes"] > 20


def test_clients_meet_every_side_of_a_quota(played: Played) -> None:
    rows = played.history.operations
    changes = [op for op in rows if op.f == F.QUOTA and op.outcome == Outcome.OK]
    assert {op.status for op in changes} == set(Act)
    assert {(bool(op.cnt), op.off > 0) for op in changes} == {
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    }
    sends = [op for op in rows if op.f == F.LIMITED and op.status == Row.SEND]
    assert any(op.cnt > 1 and op.outcome == Outcome.OK for op in sends)
    assert any(op.cnt > 1 and op.err == QUOTA_EXCEEDED for op in sends)
    held = [op for op in sends if op.outcome == Outcome.OK and op.ret_ns - op.call_ns > 300_000_000]
    assert len(held) > 20
    assert len({op.txn for op in sends}) >= 3
