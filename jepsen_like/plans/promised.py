"""What a plan lets checkers hold a run to: the same for the runner and for whoever judges later."""

from __future__ import annotations

from typing import Final, TypedDict

from jepsen_like.checkers import locks, transactions
from jepsen_like.plans.clock_error import clock_error_ns
from jepsen_like.plans.plan import Plan, Workload

CHECKS_MAX: Final = 6
"""Of the runner's own brokers where there are transactions: short, so that check-back has work
within the faults of a plan."""


class Promised(TypedDict):
    """Arguments of `jepsen_like.checkers.all_checks.check_everything`."""

    clock_error_ns: int
    lease_ns: int
    checks_max: int
    idempotent: bool


def promised(plan: Plan, *, is_foreign: bool = False) -> Promised:
    """Return what is promised where *plan* is played.

    Args:
        is_foreign: By somebody else's brokers, which have settings of their own: RocketMQ's.
    """
    return Promised(
        clock_error_ns=clock_error_ns(plan),
        lease_ns=locks.LEASE_NS if is_foreign else plan.settings.lock_lease_ns,
        checks_max=transactions.CHECKS_MAX if is_foreign else checks_max(plan.workload),
        idempotent=plan.workload.idempotent,
    )


def checks_max(workload: Workload) -> int:
    """Return how often brokers ask about one transaction of a workload."""
    return CHECKS_MAX if workload.transactions_per_mille else transactions.CHECKS_MAX


def has_delayed_messages(workload: Workload) -> bool:
    """Whether some sends have a delay level or a time; else there is nothing to prove of such."""
    return bool(workload.delayed_per_mille or workload.timer_per_mille)
