"""For how long, after the last operation, something may still be due."""

from __future__ import annotations

from typing import Final

from dledger.settings_values import parse_delay_levels
from jepsen_like.plans.clock_error import clock_error_ns
from jepsen_like.plans.plan import Plan

TIMER_DELAY_MAX_MS: Final = 30_000
"""Longest delay of a message with a time of its own: as the longest delay level of a plan."""
LEVEL_SLACK_S: Final = 2.0
TIMER_SLACK_S: Final = 3.0
"""Timers have a precision of a second."""


def due_within_s(plan: Plan) -> float:
    """Return after how long everything that clients of *plan* asked for is due; 0: nothing is."""
    workload = plan.workload
    wait_s = 0.0
    if workload.delayed_per_mille or workload.send_back_per_mille:
        wait_s = max(parse_delay_levels(plan.settings.delay_levels)) / 1000 + LEVEL_SLACK_S
    if workload.timer_per_mille:
        error_s = clock_error_ns(plan) / 1e9
        wait_s = max(wait_s, TIMER_DELAY_MAX_MS / 1000 + TIMER_SLACK_S + error_s)
    return wait_s
