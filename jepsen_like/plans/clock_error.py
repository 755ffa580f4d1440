"""How far the clocks of brokers may be apart under a plan."""

from __future__ import annotations

from typing import Final

from jepsen_like.plans.plan import Kind, Plan

REAL_SLACK_NS: Final = 50_000_000
"""Between reading a clock on a machine and writing down that it was read."""
SIMULATED_SLACK_NS: Final = 1_000_000
"""Virtual time passes between events only; what is left are roundings."""


def clock_error_ns(plan: Plan, slack_ns: int = REAL_SLACK_NS) -> int:
    """Return how far brokers' dates may be apart in a plan, and how fast their clocks may run."""
    moved_ms = sum(abs(moved) for moved in _moved_ms(plan))
    return int(moved_ms * 1e6) + slack_ns


def clock_ahead_ns(plan: Plan) -> int:
    """Return how far brokers' dates may have been ahead of the time."""
    moved_ms = sum(max(moved, 0) for moved in _moved_ms(plan))
    return int(moved_ms * 1e6) + REAL_SLACK_NS


def _moved_ms(plan: Plan) -> list[float]:
    """Return by how much each step moves a clock, in ms; drift is in parts per million."""
    jumps = [float(step.arg) for step in plan.steps if step.kind is Kind.CLOCK_JUMP]
    drifts = [step.arg * step.for_ms / 1e6 for step in plan.steps if step.kind is Kind.CLOCK_DRIFT]
    return jumps + drifts
