"""Clients of messages with a time to live in simulated clusters, whatever dies."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.checkers.lifetimes import Read, Sent
from dledger.jepsen_like.history.operation import NOTHING, F, Outcome
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.play import Played, play

pytestmark = pytest.mark.slow

PLAN = Plan(
    seed=12,
    duration_ms=60_000,
    steps=(
        Step(15_000, Kind.KILL, "leader", 3_000),
        Step(35_000, Kind.ISOLATE, "leader", 6_000),
    ),
    workload=Workload(producers=1, consumers=0, readers=0, expirers=8, queues=2),
)


@pytest.fixture(scope="module")
def played() -> Played:
    return play(PLAN)


def test_times_to_live_are_exact_through_kills_and_cuts(played: Played) -> None:
    assert played.violations == ()
    (verdict,) = [verdict for verdict in played.verdicts if verdict.checker == "lifetimes"]
    assert verdict.validity == "valid"
    assert played.sometimes["leader_change"] >= 2
    assert verdict.counts["received"] > 100
    assert verdict.counts["judged"] > 1000


def test_messages_with_a_time_to_live_go_every_way(played: Played) -> None:
    rows = played.history.operations
    sent = [op for op in rows if op.f == F.PERISHABLE]
    assert {op.status for op in sent if op.outcome == Outcome.OK} == set(Sent)
    assert any(op.err == "RolledBack" for op in sent)
    read = [op for op in rows if op.f == F.LIVING and op.outcome == Outcome.OK]
    assert {op.status for op in read} == set(Read)
    assert {op.min_off for op in read if op.status == Read.LIVING} == {NOTHING, 0, 1}
    found = {op.topic.split("perishable")[0] for op in read if op.status == Read.MESSAGE}
    assert found == {"orders-", "%RETRY%", "%DLQ%"}
    ends = [op for op in read if op.status == Read.RECEIVED and op.cnt]
    assert len(ends) == 2, "both groups have everything"
