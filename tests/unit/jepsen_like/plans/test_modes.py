"""Modes are drawn at the end of a plan, from a stream of their own."""

from pathlib import Path

from msgspec.structs import replace

from dledger.jepsen_like.plans.draw import add_mode, draw_plan
from dledger.jepsen_like.plans.modes import (
    COUNTERS,
    LARGE_MESSAGES,
    MODES,
    NO_JUMPS,
    ONE_OF,
    ONE_OF_MORE,
    ROT_COUNTERS,
    SEEN_COUNTERS,
    STEP_MODES,
    UNFLUSHED,
    WHOLE_LAW,
    _has,
)
from dledger.jepsen_like.plans.plan import Kind, decode_plan, encode_plan
from dledger.jepsen_like.soak import Totals

SEEDS = range(60)
PAGE = Path(__file__).resolve().parents[4] / "docs/internals/simulation/modes.md"


def test_modes_leave_what_was_drawn_before() -> None:
    for seed in SEEDS:
        plain, plan = draw_plan(seed, 600), draw_plan(seed, 600, modes=True)
        assert (plain.modes, plain.seed) == ((), plan.seed)
        ruled_out = UNFLUSHED if "async_flush" in plan.modes else frozenset()
        if NO_JUMPS.intersection(plan.modes):
            ruled_out |= {Kind.CLOCK_JUMP}
        kept = [step for step in plain.steps if step.kind not in ruled_out]
        assert [step for step in plan.steps if step in kept] == kept
        leave_it = {*STEP_MODES, "three_name_servers", "async_flush"} - LARGE_MESSAGES
        if not set(plan.modes) - leave_it:
            assert plan.workload == plain.workload


def test_every_block_of_seeds_has_each_mode_once() -> None:
    for name in MODES:
        size = ONE_OF_MORE.get(name, ONE_OF)
        has = [_has(name, seed) for seed in range(12 * size)]
        assert [sum(has[at : at + size]) for at in range(0, len(has), size)] == [1] * 12
        places = {has[at : at + size].index(True) for at in range(0, len(has), size)}
        assert len(places) > 2, name


def test_the_first_ten_seeds_of_a_soak_have_every_mode() -> None:
    drawn = {mode for seed in range(1, 11) for mode in draw_plan(seed, 60, modes=True).modes}
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


def test_an_async_master_has_no_mode_that_needs_the_whole_law() -> None:
    plans = [draw_plan(seed, 60, modes=True) for seed in range(200)]
    chosen = [plan for plan in plans if plan.settings.async_master]
    assert chosen
    for plan in chosen:
        assert not WHOLE_LAW.intersection(plan.modes)
        assert not plan.workload.push_members
        assert not plan.workload.idempotent


def test_small_limits_have_clients_that_meet_them() -> None:
    plans = [draw_plan(seed, 60, modes=True) for seed in SEEDS]
    plan = next(plan for plan in plans if "small_limits" in plan.modes)
    assert 0 < plan.settings.sessions_max < 5
    assert plan.settings.timer_load_units
    assert plan.workload.idempotent
    assert plan.workload.lockers
    assert plan.workload.timer_per_mille
    assert decode_plan(encode_plan(plan)) == plan


def test_each_kind_of_file_goes_bad_in_turn() -> None:
    plans = [draw_plan(seed, 1800, modes=True) for seed in SEEDS]
    plan = next(plan for plan in plans if "file_rot" in plan.modes)
    rotten = [step.arg % len(ROT_COUNTERS) for step in plan.steps if step.kind is Kind.FILE_ROT]
    assert set(rotten) == set(range(len(ROT_COUNTERS)))


def test_a_mode_that_is_asked_for_brings_its_steps() -> None:
    for name, kinds in STEP_MODES.items():
        plain = draw_plan(1, 120, kinds=frozenset())
        plan = add_mode(plain, 1, name)
        assert plan.modes == (name,)
        assert set(kinds) & {step.kind for step in plan.steps}, name
        assert list(plan.steps) == sorted(plan.steps, key=lambda step: step.at_ms)
    assert add_mode(plain, 1, "short_logs").settings.keep_segments == 2
    assert not add_mode(plain, 1, "short_logs").steps


def test_the_page_has_a_row_with_the_counters_of_each_mode() -> None:
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            rows[cells[0].strip("`")] = tuple(name.strip("` ") for name in cells[1].split(","))
    assert tuple(rows) == MODES
    for name, counters in rows.items():
        kinds = tuple(kind.value for kind in STEP_MODES.get(name, ()))
        assert counters == (kinds or (f"mode_{name}",)) + SEEN_COUNTERS.get(name, ())
        assert set(counters) - set(kinds) <= set(COUNTERS)
