"""How far the clocks of brokers may be apart under a plan."""

from __future__ import annotations

from jepsen_like.plans.plan import Kind, Plan


def clock_error_ns(plan: Plan) -> int:
    """Return how far brokers' dates may be apart in a plan, and how fast their clocks may run."""
    jumps_ms = sum(abs(step.arg) for step in plan.steps if step.kind is Kind.CLOCK_JUMP)
    drift_ms = sum(
        abs(step.arg) * step.for_ms / 1e6 for step in plan.steps if step.kind is Kind.CLOCK_DRIFT
    )
    return int((jumps_ms + drift_ms) * 1e6) + 50_000_000


def clock_ahead_ns(plan: Plan) -> int:
    """Return how far brokers' dates may have been ahead of the time."""
    jumps_ms = sum(max(step.arg, 0) for step in plan.steps if step.kind is Kind.CLOCK_JUMP)
    drift_ms = sum(
        max(step.arg, 0) * step.for_ms / 1e6 for step in plan.steps if step.kind is Kind.CLOCK_DRIFT
    )
    return int((jumps_ms + drift_ms) * 1e6) + 50_000_000
