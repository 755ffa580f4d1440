"""Clients of messages with a time to live in simulated clusters, whatever dies."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.history.operation import NOTHING, F, Outcome
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.play import play

pytestmark = pytest.mark.slow

PLAN = Plan(
    seed=12,
    duration_ms=60_000,
    steps=(Step(15_000, Kind.KILL, "leader", 3_000), Step(35_000, Kind.ISOLATE, "leader", 6_000)),
    workload=Workload(
        producers=1, consumers=0, readers=0, expirers=8, queues=2, delayed_per_mille=0
    ),
)


def test_times_to_live_are_exact_through_kills_and_cuts() -> None:
    played = play(PLAN)
    assert played.violations == ()
    (verdict,) = [verdict for verdict in played.verdicts if verdict.checker == "lifetimes"]
    assert verdict.validity == "valid"
    assert played.sometimes["leader_change"] >= 2
    rows = played.history.operations
    reads = [op for op in rows if op.f == F.LIVING and op.outcome == Outcome.OK]
    assert sum(op.value != NOTHING and not op.group for op in reads) > 30
    assert sum(op.value != NOTHING and bool(op.group) for op in reads) > 10
    assert any(op.max_off - op.off > 1 for op in reads), "nothing is passed over"
