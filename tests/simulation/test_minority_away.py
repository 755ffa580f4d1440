"""Groups elect and change their members while a minority is away; no member is healed first."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from dledger.jepsen_like.nemesis.members import Change, can_do_without, choose, majority
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.liveness import go_on_without
from dledger.jepsen_like.simulation.play import play
from dledger.jepsen_like.simulation.world import World
from dledger.jepsen_like.worker import Order, plan_of
from tests.harness.fast_part import gate_part

pytestmark = pytest.mark.slow

NAMES = ("n0", "n1", "n2", "n3", "n4")
WORKLOAD = Workload(producers=2, consumers=1, readers=1, interval_ms=1500, delayed_per_mille=0)
AWAY = 60_000
"""Longer than what is left of a plan."""


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("change", Change)
def test_a_majority_is_left_before_and_after_any_change(change: Change, size: int) -> None:
    voters = NAMES[:size]
    for seed in range(20):
        chosen = choose(change, "n1", voters, Random(seed).shuffle)
        if chosen is None:
            assert change is Change.REMOVE_AND_LEAD_NO_MORE
            assert size == 3
            continue
        away = {*chosen.away, *(["n1"] if chosen.leader_goes else [])}
        after = [name for name in voters if name != chosen.removed]
        assert "n1" not in (*chosen.away, chosen.removed)
        for voting in (voters, after):
            assert len(set(voting) - away) >= majority(len(voting))
        assert can_do_without(away, [voters, tuple(after)], set(NAMES))
        assert (chosen.removed in chosen.away) is (change is Change.REMOVE_ABSENT)


def test_without_a_majority_of_sure_members_nothing_is_demanded() -> None:
    three = [("n0", "n1", "n2")]
    assert can_do_without(["n0"], three, ["n1", "n2"])
    assert not can_do_without(["n0"], three, ["n0", "n1"])
    assert not can_do_without(["n0"], three, ["n1"])
    assert not can_do_without(["n0"], [*three, ("n0", "n1")], ["n1", "n2"])
    assert not can_do_without([], [], ["n0", "n1", "n2"])


@pytest.mark.parametrize("arg", gate_part(range(8), 2))
@pytest.mark.parametrize("members", [3, 4])
def test_the_others_elect_and_change_without_a_minority(arg: int, members: int) -> None:
    away = (Step(at, Kind.CHANGE_WITHOUT_MINORITY, "all", AWAY, arg) for at in (12_000, 12_500))
    run = play(Plan(7, 18_000, tuple(away), members=members, workload=WORKLOAD))
    assert run.is_valid, run.violations
    nobody_away = members == 3 and arg // 2 == Change.REMOVE_PRESENT
    assert run.faults["skipped"] == 1, "one minority at a time"
    assert run.sometimes["led_without_minority"] == (not nobody_away)


def test_a_group_that_cannot_go_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everybody healed first it would not be."""

    async def unable(world: World, *rest: object) -> None:
        monkeypatch.setattr("dledger.jepsen_like.simulation.liveness._leads", lambda *_: None)
        await go_on_without(world, *rest)  # type: ignore[arg-type]  # passes on what it is given

    monkeypatch.setattr("dledger.jepsen_like.simulation.play.go_on_without", unable)
    steps = (Step(12_000, Kind.CHANGE_WITHOUT_MINORITY, "all", AWAY, 4),)
    run = play(Plan(7, 18_000, steps, workload=WORKLOAD))
    (found,) = run.violations
    assert (found.checker, found.name) == ("liveness", "liveness")
    assert "no leader without n" in found.detail


def test_plans_of_the_preset_end_with_a_minority_away() -> None:
    order = Order(duration_s=120, preset="minority")
    plans = [plan_of(seed, order) for seed in range(30)]
    assert {plan.members for plan in plans} == {3, 4, 5}
    late = [
        plan
        for plan in plans
        if any(s.kind is Kind.CHANGE_WITHOUT_MINORITY and s.end_ms >= 120_000 for s in plan.steps)
    ]
    assert len(late) > 15
    without = plan_of(3, msgspec.structs.replace(order, preset="mixed"))
    assert Kind.CHANGE_WITHOUT_MINORITY not in {step.kind for step in without.steps}
