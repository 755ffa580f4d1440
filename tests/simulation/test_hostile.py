"""Hostile messages and rot in simulated clusters: no node ends, nothing is lost or doubled."""

from __future__ import annotations

import msgspec
import pytest

from dledger.jepsen_like.plans.plan import Kind, Plan, Step, encode_plan
from dledger.jepsen_like.simulation.play import play
from dledger.jepsen_like.worker import Order, plan_of
from dledger.jepsen_like.workloads.presets import simulated_workload
from tests.harness.fast_part import gate_part

pytestmark = pytest.mark.slow

WORKLOAD = msgspec.structs.replace(simulated_workload("hostile"), interval_ms=700)


@pytest.mark.parametrize("seed", gate_part([1, 2], 1))
def test_hostile_messages_through_every_service_under_kills(seed: int) -> None:
    kills = tuple(Step(at, Kind.KILL, "leader", 2_000) for at in range(6_000, 30_000, 8_000))
    run = play(Plan(seed, 40_000, kills, workload=WORKLOAD))
    assert run.is_valid, run.violations
    assert run.operations["send_ok"] > 50
    assert run.operations["send_back_ok"] > 10
    assert run.sometimes["leader_change"] >= 2


@pytest.mark.hunt
def test_hostile_timers_roll_in_a_cluster_under_kills() -> None:
    """A roll window of a minute stands for the two days that no run lasts."""
    workload = msgspec.structs.replace(simulated_workload("rolls"), interval_ms=1000)
    assert workload.hostile_per_mille > 500
    kills = tuple(Step(at, Kind.KILL, "leader", 3_000) for at in range(20_000, 200_000, 40_000))
    run = play(Plan(4, 200_000, kills, workload=workload))
    assert run.is_valid, run.violations
    assert run.sometimes["leader_change"] >= 4
    assert run.sometimes["timer_rolled"] > 50
    texts = [encode_plan(plan_of(1, Order(preset=name))) for name in ("rolls", "timers")]
    assert ["timer_roll_s" in text for text in texts] == [True, False]
