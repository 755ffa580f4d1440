"""What a plan lets checkers hold a run to: its guarantees, and how far clocks may be apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from dledger.jepsen_like.checkers import consumer_offsets, delayed, locks, transactions
from dledger.jepsen_like.checkers.all_checks import Settings
from dledger.jepsen_like.checkers.retention import Keeps
from dledger.jepsen_like.checkers.verdict import Verdict, merge
from dledger.jepsen_like.plans.plan import Kind, Plan, Workload

CHECKS_MAX: Final = 6
"""Of the runner's own brokers where there are transactions: short, so that check-back has work
within the faults of a plan."""

LATE_QUIET_MAX_NS: Final = 5_000_000_000
"""How late a delayed message may come while nothing is wrong: timers have a precision of a second,
and deliveries of one level follow each other."""


REAL_SLACK_NS: Final = 50_000_000
"""Between reading a clock on a machine and writing down that it was read."""
SIMULATED_SLACK_NS: Final = 1_000_000
"""Virtual time passes between events only; what is left are roundings."""

LATE_EFFECT_NS: Final = 5_000_000_000
"""After this time, without a fault, followers have what an ``ASYNC_MASTER`` has acknowledged."""


def promised(
    plan: Plan,
    settled: bool | None = None,
    *,
    is_foreign: bool = False,
    slack_ns: int = REAL_SLACK_NS,
) -> Settings:
    """Return what is guaranteed where *plan* is played."""
    return Settings(
        settled,
        clock_error_ns=clock_error_ns(plan, slack_ns),
        lease_ns=locks.LEASE_NS if is_foreign else plan.settings.lock_lease_ns,
        checks_max=transactions.CHECKS_MAX if is_foreign else checks_max(plan.workload),
        idempotent=plan.workload.idempotent,
        election_ns=2 * plan.settings.election_ms * 1_000_000,
        late_quiet_max_ns=LATE_QUIET_MAX_NS,
        keeps=None if is_foreign else keeps(plan),
        late_effect_ns=LATE_EFFECT_NS if plan.settings.async_master else 0,
    )


def keeps(plan: Plan) -> Keeps:
    """Return what the brokers of a plan keep: by age, three days."""
    settings = plan.settings
    has_years = any(step.kind is Kind.CLOCK_YEARS for step in plan.steps)
    return Keeps(
        keep_bytes=settings.keep_segments * settings.segment_bytes,
        segment_bytes=settings.segment_bytes,
        date_error_ns=None if has_years else clock_error_ns(plan),
    )


def checks_max(workload: Workload) -> int:
    """Return how often brokers ask about one transaction of a workload."""
    return CHECKS_MAX if workload.transactions_per_mille else transactions.CHECKS_MAX


def has_delayed_messages(workload: Workload) -> bool:
    """Whether some sends have a delay level or a time; else there is nothing to prove of such."""
    return bool(workload.delayed_per_mille or workload.timer_per_mille)


def merge_for(
    workload: Workload | None, verdicts: Iterable[Verdict], *, left_out: Collection[str] = ()
) -> Verdict:
    """Return the verdict over all; a part that the workload leaves out need not be proved."""
    without = {*left_out}
    if workload is None or not has_delayed_messages(workload):
        without.add(delayed.NAME)
    if workload is None or not workload.consumers:
        without.add(consumer_offsets.NAME)
    return merge(
        verdict
        for verdict in verdicts
        if not (verdict.validity == "unknown" and verdict.checker in without)
    )


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
    drifts = (step for step in plan.steps if step.kind is Kind.CLOCK_DRIFT)
    return jumps + [step.arg * step.for_ms / 1e6 for step in drifts]
