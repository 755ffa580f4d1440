"""Consumers by step in simulated clusters: each message is worked off once, whatever dies."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.history.operation import F, Outcome
from dledger.jepsen_like.plans.plan import Plan, Workload
from dledger.jepsen_like.simulation.play import Played, play
from tests.harness.leader_faults import KILL_PAUSE_ISOLATE

pytestmark = pytest.mark.slow

PLAN = Plan(
    seed=11,
    duration_ms=60_000,
    steps=KILL_PAUSE_ISOLATE,
    workload=Workload(
        producers=2,
        consumers=0,
        readers=0,
        steppers=4,
        queues=4,
        interval_ms=250,
        delayed_per_mille=0,
    ),
)


@pytest.fixture(scope="module")
def played() -> Played:
    return play(PLAN)


def test_steps_are_exact_through_kills_pauses_and_cuts(played: Played) -> None:
    assert played.violations == ()
    (verdict,) = [verdict for verdict in played.verdicts if verdict.checker == "steps"]
    assert verdict.validity == "valid"
    assert played.sometimes["leader_change"] >= 3
    assert verdict.counts["stored"] > 30
    assert verdict.counts["overtaken"] > 30
    assert verdict.counts["outputs"] > 50


def test_steps_end_in_every_way(played: Played) -> None:
    rows = [op for op in played.history.operations if op.f == F.STEP]
    assert {op.outcome for op in rows} == {Outcome.OK, Outcome.INFO, Outcome.FAIL}
    assert any(op.err == "StepOvertakenError" for op in rows)
    assert any(op.group == "steppers" and op.cnt > 1 for op in rows)
