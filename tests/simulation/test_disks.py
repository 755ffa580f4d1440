"""Sectors that cannot be read: no member ends by them, loses anything or serves anything else.

Files that are no segments go bad: what is read is right, or is refused, and is made good.
Full disks give nothing up, and what is given up without a right to it is found.
"""

import pytest

from dledger.jepsen_like.plans.draw import draw_plan
from dledger.jepsen_like.plans.modes import ROT_COUNTERS
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload
from dledger.jepsen_like.simulation.platter import ROTTEN
from dledger.jepsen_like.simulation.play import play
from dledger.jepsen_like.simulation.world import World
from dledger.services import retention
from tests.harness.fast_part import gate_part
from tests.harness.judged import broken

pytestmark = pytest.mark.slow

SECTORS_MS = range(8_000, 168_000, 32_000)


def spoiled(seed: int, *more: Step, members: int = 3) -> Plan:
    """Return a plan in which sectors of everybody go bad, before a start and while they run."""
    steps = [
        Step(at_ms, Kind.BAD_SECTOR, str(number), 500, number + 12)
        for number, at_ms in enumerate(SECTORS_MS)
    ]
    return Plan(
        seed=seed,
        duration_ms=180_000,
        members=members,
        steps=tuple(sorted((*steps, *more), key=lambda step: step.at_ms)),
        workload=Workload(producers=3, interval_ms=300),
        settings=Settings(checkpoint_ms=1_000),
    )


@pytest.mark.parametrize(
    ("seed", "more"),
    [
        pytest.param(1, (), marks=pytest.mark.hunt),
        pytest.param(
            1,
            (
                Step(42_000, Kind.POWER_CUT_ALL, "all", 500),
                Step(73_000, Kind.KILL, "leader", 2_000),
            ),
            marks=pytest.mark.hunt,
        ),
    ],
    ids=["alone", "with power cuts"],
)
def test_bad_sectors_are_repaired_and_end_no_member(seed: int, more: tuple[Step, ...]) -> None:
    worlds: list[World] = []
    played = play(spoiled(seed, *more), prepare=worlds.append)
    assert played.is_valid, played.verdict.reason
    assert played.faults["bad_sector"] >= 3
    seen = played.sometimes
    assert seen["sectors_bad"] > 10
    assert seen["read_error"] > 10
    assert seen["repair"] > 0
    assert seen["key_index_made_again"] > 0
    assert not seen["node_gave_up"]
    (world,) = worlds
    for node in world.brokers.values():
        bad = [path for path, inode in node.disk.names.items() if inode.unreadable]
        assert not [path for path in bad if "/commitlog/" in path]


def test_bad_sectors_are_drawn_only_where_they_are_asked_for() -> None:
    assert not [
        step for seed in range(20) for step in draw_plan(seed, 400).steps
        if step.kind is Kind.BAD_SECTOR
    ]  # fmt: skip
    asked = draw_plan(1, 400, kinds=frozenset({Kind.BAD_SECTOR, Kind.KILL}))
    assert {step.kind for step in asked.steps} == {Kind.BAD_SECTOR, Kind.KILL}


KINDS = len(ROTTEN)


def rotten(*args: int, seed: int = 4, keep_segments: int = 0) -> Plan:
    """Return a plan in which one file after the other goes bad, on one broker after the other."""
    steps = tuple(
        Step(12_000 + 25_000 * number, Kind.FILE_ROT, str(number), 500, arg)
        for number, arg in enumerate(args)
    )
    return Plan(
        seed=seed,
        duration_ms=20_000 + 25_000 * len(args),
        steps=steps,
        workload=Workload(interval_ms=2_000, delayed_per_mille=0),
        settings=Settings(checkpoint_ms=1_000, keep_segments=keep_segments),
        modes=("searches", "follower_reads", "key_queries"),
    )


@pytest.mark.parametrize(
    ("unreadable", "keep_segments"), [(0, 2), pytest.param(1, 0, marks=pytest.mark.hunt)]
)
def test_a_file_of_each_kind_goes_bad_and_is_made_good(unreadable: int, keep_segments: int) -> None:
    args = [kind + KINDS * unreadable + 2 * KINDS * unreadable for kind in range(KINDS)]
    played = play(rotten(*args, keep_segments=keep_segments))
    assert played.is_valid, played.violations
    assert sum(played.sometimes[name] for name in ROT_COUNTERS) >= 4, played.sometimes
    assert played.sometimes["node_gave_up"] == played.sometimes["rot_identity"]


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
