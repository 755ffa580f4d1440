"""Modes are drawn at the end of a plan, from a stream of their own."""

from __future__ import annotations

from msgspec.structs import replace

from jepsen_like.plans.draw import draw_plan
from jepsen_like.plans.modes import MODES, STEP_MODES, UNFLUSHED
from jepsen_like.plans.plan import decode_plan, encode_plan
from jepsen_like.soak import Totals

SEEDS = range(60)


def test_modes_leave_what_was_drawn_before() -> None:
    for seed in SEEDS:
        plain, plan = draw_plan(seed, 600), draw_plan(seed, 600, modes=True)
        assert (plain.modes, plain.seed, plain.workload) == ((), plan.seed, plan.workload)
        if "async_flush" not in plan.modes:
            brought = {kind for name in plan.modes for kind in STEP_MODES.get(name, ())}
            kept = tuple(step for step in plan.steps if step.kind not in brought)
            assert kept == tuple(step for step in plain.steps if step.kind not in brought)


def test_every_mode_is_drawn() -> None:
    drawn = {mode for seed in SEEDS for mode in draw_plan(seed, 60, modes=True).modes}
    assert drawn == set(MODES)


def test_no_flush_lies_where_acknowledgements_do_not_wait() -> None:
    plans = [draw_plan(seed, 600, modes=True) for seed in SEEDS]
    chosen = [plan for plan in plans if "async_flush" in plan.modes]
    assert chosen
    for plan in chosen:
        assert not plan.settings.sync_flush
        assert not {step.kind for step in plan.steps} & UNFLUSHED


def test_modes_stand_in_a_plan_only_where_there_are_some() -> None:
    plan = draw_plan(1, 60)
    assert '"modes"' not in encode_plan(plan)
    chosen = replace(plan, modes=("searches",))
    assert decode_plan(encode_plan(chosen)) == chosen


def test_a_soak_names_what_it_never_drew() -> None:
    totals = Totals()
    assert {"kill", "stall", "mode_searches", "mode_async_flush"} <= set(totals.never_drawn())
    totals.faults["stall"] = totals.sometimes["mode_searches"] = 1
    assert not {"stall", "mode_searches"} & set(totals.as_json()["never_drawn"])
