"""Receivers in simulated clusters: one consumer at a time, never again once acknowledged."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.history.operation import NOTHING, F, Outcome
from dledger.jepsen_like.plans.plan import Plan, Workload
from dledger.jepsen_like.simulation.play import Played, play
from tests.harness.leader_faults import KILL_PAUSE_ISOLATE

pytestmark = pytest.mark.slow

PLAN = Plan(
    seed=11,
    duration_ms=60_000,
    steps=KILL_PAUSE_ISOLATE,
    workload=Workload(
        producers=1,
        consumers=0,
        readers=0,
        receivers=4,
        queues=2,
        interval_ms=700,
        delayed_per_mille=0,
    ),
)


@pytest.fixture(scope="module")
def played() -> Played:
    return play(PLAN)


def test_pop_is_exact_through_kills_pauses_and_cuts(played: Played) -> None:
    assert played.violations == ()
    (verdict,) = [verdict for verdict in played.verdicts if verdict.checker == "pop"]
    assert verdict.validity == "valid"
    assert played.sometimes["leader_change"] >= 3
    assert verdict.counts["received"] > 100
    assert verdict.counts["again"] > 5


def test_receivers_use_receipts_in_every_way(played: Played) -> None:
    rows = played.history.operations
    assert any(op.f == F.ACK and op.err == "ReceiptStaleError" for op in rows)
    assert any(op.f == F.CHANGE_TIME and op.outcome == Outcome.OK for op in rows)
    groups = {op.group for op in rows if op.f == F.RECEIVE and op.off != NOTHING}
    assert groups == {"receivers", "receivers-in-order"}
    assert {op.group for op in rows if op.f == F.RECEIVE and op.max_off != NOTHING} == groups
