"""Full disks give nothing up, and what is given up without a right to it is found."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.plans.draw import draw_plan
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload
from dledger.jepsen_like.simulation.play import play
from dledger.services import retention
from tests.harness.fast_part import gate_part
from tests.harness.judged import broken

pytestmark = pytest.mark.slow

LOAD = Workload(interval_ms=200, body_bytes=16_384, queues=2, delayed_per_mille=0)

FULL = Plan(
    seed=11,
    duration_ms=60_000,
    steps=tuple(Step(15_000, Kind.DISK_FULL, target, 30_000) for target in "012"),
    workload=LOAD,
)
"""Every disk is full long enough for retention to check it several times."""


def test_full_disks_refuse_sends_and_give_up_nothing() -> None:
    played = play(FULL)
    assert played.is_valid, played.verdict.reason
    assert played.faults["disk_full"] == 3
    assert played.sometimes["floor_moved"] == 0
    assert played.operations["send_fail"] > 0
    assert {read.min_off for read in played.history.replica_reads} == {0}
    healed_ns = next(event.at_ns for event in played.history.events if event.kind == "healed")
    begun = [op.call_ns for op in played.history.operations if op.f == 0 and op.outcome == 0]
    assert begun, "sends are taken when there is space"
    assert max(begun) > 46e9
    assert healed_ns > 46e9


@pytest.mark.hunt
def test_what_the_settings_allow_to_go_is_no_violation() -> None:
    plan = Plan(seed=12, duration_ms=60_000, workload=LOAD, settings=Settings(keep_segments=2))
    played = play(plan)
    assert played.is_valid, played.verdict.reason
    assert played.sometimes["floor_moved"] > 0
    assert {read.min_off for read in played.history.replica_reads} != {0}


@pytest.mark.parametrize("seed", gate_part([1, 2], 1))
def test_full_disks_among_other_faults_lose_nothing(seed: int) -> None:
    kinds = frozenset({Kind.DISK_FULL, Kind.KILL, Kind.POWER_CUT, Kind.ISOLATE})
    plan = draw_plan(
        seed, 60, members=3, kinds=kinds, workload=LOAD, settings=Settings(), even=True
    )
    played = play(plan)
    assert played.is_valid, played.verdict.reason
    assert {read.min_off for read in played.history.replica_reads} == {0}


@pytest.mark.hunt
def test_segments_that_no_checkpoint_covers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(keep_segments=2, checkpoint_ms=30_000)
    plan = Plan(seed=12, duration_ms=60_000, workload=LOAD, settings=settings)
    assert play(plan).is_valid

    def no_limit(service: retention.RetentionService) -> int:
        return service.entry_log().end_position

    monkeypatch.setattr(retention.RetentionService, "_limit_position", no_limit)
    played = play(plan)
    assert broken(played) == {"given_up"}
    assert "checkpoint" in str(played.violations[0].detail)
