"""Sectors that cannot be read: no member ends by them, loses anything or serves anything else."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.plans.draw import draw_plan
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload
from dledger.jepsen_like.simulation.play import play
from dledger.jepsen_like.simulation.world import World

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
        (1, ()),
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
