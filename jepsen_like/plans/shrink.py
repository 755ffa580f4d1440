"""Make a failing plan small: drop steps, then shorten what is left, as long as it still fails.

What costs most is the length of a run, so that goes first: what comes after the failure, then all
but the last steps before it, which begin at once. Then modes that are work on topics of its own,
which costs more than all else. Then delta debugging: take away halves, then quarters, down to
single steps; then close the gaps between steps, shorten them and the run itself.
Every candidate is played, once; how many, and for how long, is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from dledger.jepsen_like.plans.modes import SIDE_MODES
from dledger.jepsen_like.plans.plan import Plan, Step, encode_plan

PLAYS_MAX: Final = 200
"""Candidates played before the best so far is taken."""

TAIL_MS: Final = 5_000
"""A shrunk run goes on so long behind its last step."""


LAST_STEPS: Final = (4, 16, 64)
"""This number of steps before the failure are tried alone."""

FIRST_STEP_MS: Final = 5_000
"""When the first of them begins, and the least time between two steps whose gap is closed."""


@dataclass(slots=True)
class _Search:
    fails: Callable[[Plan], bool]
    plays_left: int
    is_over: Callable[[], bool]
    tried: dict[str, bool] = field(default_factory=dict)
    """What came of each plan that was played; a play is a function of its plan."""

    def still_fails(self, plan: Plan) -> bool:
        text = encode_plan(plan)
        if text in self.tried:
            return self.tried[text]
        if self.plays_left <= 0 or self.is_over():
            return False
        self.plays_left -= 1
        found = self.tried[text] = self.fails(plan)
        return found


def shrink(
    plan: Plan,
    fails: Callable[[Plan], bool],
    *,
    plays_max: int = PLAYS_MAX,
    failed_at_ms: int | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Plan, int]:
    """Return a smaller plan that still fails, and how many plays it took.

    Args:
        failed_at_ms: When it failed; what comes later is tried without first.
        is_over: Asked before every play; true ends the search with the best so far.
    """
    search = _Search(fails, plays_max, is_over)
    if failed_at_ms is not None:
        plan = _drop_later(plan, failed_at_ms, search)
        plan = _keep_last(plan, failed_at_ms, search)
    plan = _drop_side_work(plan, search)
    plan = _keep_first(plan, search)
    plan = _drop_steps(plan, search)
    plan = _close_gaps(plan, search)
    plan = _shorten_run(plan, search)
    plan = _shorten_steps(plan, search)
    plan = _calm_workload(plan, search)
    plan = _drop_steps(plan, search)
    return plan, plays_max - search.plays_left


def _drop_later(plan: Plan, failed_at_ms: int, search: _Search) -> Plan:
    if failed_at_ms >= plan.duration_ms:
        return plan
    candidate = msgspec.structs.replace(
        plan,
        duration_ms=min(plan.duration_ms, failed_at_ms + TAIL_MS),
        steps=tuple(step for step in plan.steps if step.at_ms <= failed_at_ms),
    )
    return candidate if search.still_fails(candidate) else plan


def _keep_last(plan: Plan, failed_at_ms: int, search: _Search) -> Plan:
    """Try the last steps before the failure alone, from the begin of a run."""
    before = tuple(step for step in plan.steps if step.at_ms <= failed_at_ms)
    end_ms = min(plan.duration_ms, failed_at_ms + TAIL_MS)
    for count in LAST_STEPS:
        if count >= len(before):
            return plan
        last = msgspec.structs.replace(plan, duration_ms=end_ms, steps=before[-count:])
        candidate = _sooner(last)
        if search.still_fails(candidate):
            return candidate
    return plan


def _keep_first(plan: Plan, search: _Search) -> Plan:
    """Try the first eighth, quarter and half of a run whose failure has no known time."""
    for part in (8, 4, 2):
        end_ms = plan.duration_ms // part
        steps = tuple(step for step in plan.steps if step.at_ms < end_ms)
        candidate = msgspec.structs.replace(plan, duration_ms=end_ms, steps=steps)
        if steps != plan.steps and search.still_fails(candidate):
            return candidate
    return plan


def _drop_side_work(plan: Plan, search: _Search) -> Plan:
    """Try without all modes that are work on topics of its own, then without each."""
    side = [name for name in plan.modes if name in SIDE_MODES]
    for dropped in (side, *([name] for name in side)):
        modes = tuple(name for name in plan.modes if name not in dropped)
        candidate = msgspec.structs.replace(plan, modes=modes)
        if modes == plan.modes or not search.still_fails(candidate):
            continue
        plan = candidate
        if dropped is side:
            break
    return plan


def _sooner(plan: Plan) -> Plan:
    by_ms = max(0, plan.steps[0].at_ms - FIRST_STEP_MS)
    moved = tuple(msgspec.structs.replace(step, at_ms=step.at_ms - by_ms) for step in plan.steps)
    return msgspec.structs.replace(plan, duration_ms=plan.duration_ms - by_ms, steps=moved)


def _close_gaps(plan: Plan, search: _Search) -> Plan:
    """Try all steps soon behind each other; else the first one at once."""
    if not plan.steps:
        return plan
    steps: list[Step] = []
    saved_ms, before_ms = 0, 0
    for step in plan.steps:
        saved_ms = max(saved_ms, step.at_ms - before_ms - FIRST_STEP_MS)
        steps.append(msgspec.structs.replace(step, at_ms=step.at_ms - saved_ms))
        before_ms = max(before_ms, steps[-1].end_ms)
    left_ms = plan.duration_ms - saved_ms
    dense = msgspec.structs.replace(plan, duration_ms=left_ms, steps=tuple(steps))
    for candidate in (dense, _sooner(plan)):
        if candidate != plan and search.still_fails(candidate):
            return candidate
    return plan


def _drop_steps(plan: Plan, search: _Search) -> Plan:
    if plan.steps and search.still_fails(plan.with_steps(())):
        return plan.with_steps(())
    size = max(1, len(plan.steps) // 2)
    while size and plan.steps:
        at, dropped = 0, False
        while at < len(plan.steps):
            candidate = plan.with_steps(plan.steps[:at] + plan.steps[at + size :])
            if len(plan.steps) > size and search.still_fails(candidate):
                plan, dropped = candidate, True
            else:
                at += size
        if not dropped or size > len(plan.steps):
            size = min(size // 2, len(plan.steps) // 2) if size > 1 else 0
    return plan


def _shorten_run(plan: Plan, search: _Search) -> Plan:
    end_ms = max((step.end_ms for step in plan.steps), default=0) + TAIL_MS
    for duration_ms in (end_ms, plan.duration_ms // 2, plan.duration_ms * 3 // 4):
        if duration_ms < plan.duration_ms:
            candidate = msgspec.structs.replace(plan, duration_ms=duration_ms)
            if search.still_fails(candidate):
                return candidate
    return plan


def _shorten_steps(plan: Plan, search: _Search) -> Plan:
    for at in range(len(plan.steps)):
        step = plan.steps[at]
        for for_ms in (0, step.for_ms // 4, step.for_ms // 2):
            if for_ms >= step.for_ms:
                continue
            candidate = plan.with_steps(_replaced(plan.steps, at, for_ms))
            if search.still_fails(candidate):
                plan = candidate
                break
    return plan


def _replaced(steps: tuple[Step, ...], at: int, for_ms: int) -> tuple[Step, ...]:
    changed = msgspec.structs.replace(steps[at], for_ms=for_ms)
    return (*steps[:at], changed, *steps[at + 1 :])


def _calm_workload(plan: Plan, search: _Search) -> Plan:
    for change in (
        {"delayed_per_mille": 0},
        {"batch_per_mille": 0},
        {"readers": 0},
        {"consumers": 0},
        {"lockers": min(2, plan.workload.lockers)},
        {"receivers": min(2, plan.workload.receivers)},
        {"steppers": min(2, plan.workload.steppers)},
        {"expirers": min(1, plan.workload.expirers)},
        {"producers": 1},
        {"queues": 1},
    ):
        workload = msgspec.structs.replace(plan.workload, **change)
        candidate = msgspec.structs.replace(plan, workload=workload)
        if workload != plan.workload and search.still_fails(candidate):
            plan = candidate
    return plan
