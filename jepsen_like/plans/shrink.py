"""Make a failing plan small: drop steps, then shorten what is left, as long as it still fails.

Delta debugging: take away halves, then quarters, down to single steps; then shorten durations and
the run itself. Every candidate is played; how many, and for how long, is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from jepsen_like.plans.plan import Plan, Step

PLAYS_MAX: Final = 200
"""Candidates played before the best so far is taken."""

TAIL_MS: Final = 5_000
"""A shrunk run goes on so long behind its last step."""


@dataclass(slots=True)
class _Search:
    fails: Callable[[Plan], bool]
    plays_left: int
    is_over: Callable[[], bool]

    def still_fails(self, plan: Plan) -> bool:
        if self.plays_left <= 0 or self.is_over():
            return False
        self.plays_left -= 1
        return self.fails(plan)


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
        plan: Fails.
        fails: Plays a candidate and tells whether it shows the same violation.
        plays_max: Budget.
        failed_at_ms: When it failed; what comes later is tried without first.
        is_over: Asked before every play; true ends the search with the best so far.
    """
    search = _Search(fails, plays_max, is_over)
    if failed_at_ms is not None:
        plan = _drop_later(plan, failed_at_ms, search)
    plan = _drop_steps(plan, search)
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
        {"producers": 1},
        {"queues": 1},
    ):
        workload = msgspec.structs.replace(plan.workload, **change)
        candidate = msgspec.structs.replace(plan, workload=workload)
        if workload != plan.workload and search.still_fails(candidate):
            plan = candidate
    return plan
