"""For how long a run waits for what is delayed."""

from dledger.jepsen_like.chaos.plan_draw import JUMP_AHEAD_MAX_MS, drawn_plan
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.plans.promised import clock_ahead_ns, clock_error_ns
from dledger.jepsen_like.workloads.producers import due_within_s

NOTHING = Workload(delayed_per_mille=0)


def jumps(*by_ms: int) -> Plan:
    steps = tuple(Step(at_ms=1, kind=Kind.CLOCK_JUMP, target="0", arg=ms) for ms in by_ms)
    return Plan(seed=1, duration_ms=2, steps=steps, workload=Workload(timer_per_mille=1))


def test_due_no_wait_without_delayed_sends() -> None:
    assert due_within_s(Plan(seed=1, duration_ms=1, workload=NOTHING), 10**12) == 0


def test_due_waits_for_longest_level_and_clock_offset() -> None:
    assert due_within_s(Plan(seed=1, duration_ms=1), 10**12) == 32
    assert due_within_s(jumps(), 0) == 33
    assert due_within_s(jumps(), 4_000_000_000) == 37


def test_due_counts_a_clock_ahead_and_not_one_behind() -> None:
    plan = jumps(-600_000, 2_000)
    assert clock_error_ns(plan) == 602_050_000_000
    assert clock_ahead_ns(plan) == 2_050_000_000


def test_with_timers_no_date_jumps_far_ahead() -> None:
    plan = drawn_plan(3, "timers", "clock", 600, 100, 3, members=3, name_servers=1)
    ahead = [step.arg for step in plan.steps if step.kind is Kind.CLOCK_JUMP]
    assert min(ahead) < -60_000
    assert max(ahead) == JUMP_AHEAD_MAX_MS
