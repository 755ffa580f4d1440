"""For how long, after the last operation, something may still be due."""

from __future__ import annotations

from typing import Final

from dledger.settings_values import parse_delay_levels
from jepsen_like.plans.plan import ROLLS_MAX, Plan, Workload

TIMER_DELAY_MAX_MS: Final = 30_000
"""Longest delay of a message with a time of its own: as the longest delay level of a plan."""
LEVEL_SLACK_S: Final = 2.0
TIMER_SLACK_S: Final = 3.0
"""Timers have a precision of a second."""


CALM_S: Final = 10.0
"""For how long clients go on when everything serves again: what they are answered then is judged,
once the longest election timeout has passed."""


def timer_delay_max_ms(workload: Workload) -> int:
    """Return the longest delay of a message with a time of its own."""
    return max(TIMER_DELAY_MAX_MS, 1000 * ROLLS_MAX * workload.timer_roll_s)


def due_within_s(plan: Plan, error_ns: int) -> float:
    """Return after how long everything that clients of *plan* asked for is due; 0: nothing is.

    Args:
        error_ns: How far the date of a broker is behind the time, or was ahead of it.
    """
    workload = plan.workload
    wait_s = 0.0
    if workload.delayed_per_mille or workload.send_back_per_mille:
        wait_s = max(parse_delay_levels(plan.settings.delay_levels)) / 1000 + LEVEL_SLACK_S
    if workload.timer_per_mille:
        longest_s = timer_delay_max_ms(workload) / 1000
        wait_s = max(wait_s, longest_s + TIMER_SLACK_S + error_ns / 1e9)
    return wait_s
