"""Which plan to play next, so that faults meet services and each other that have not met. Pure.

Pairs are a kind of fault and a service, a kind of fault and all services, two kinds of faults soon
behind each other, two services. A plan is worth the more, the less often its pairs were met, and
the less it costs; what really came of it is counted from its report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations, product
from math import sqrt
from typing import Final, Protocol

from dledger.jepsen_like.plans.plan import Kind, Plan, Workload

TOGETHER_MS: Final = 10_000
"""Faults that begin within it of each other meet."""

BASE_OPERATIONS_PER_S: Final = 4.0
"""What a simulated second costs without a client, in operations of clients."""

STATES: Final = (
    "leader_change",
    "truncation",
    "two_believe_they_lead",
    "snapshot_install",
    "torn_tail_cut",
    "repair",
    "membership_change",
    "damaged_start",
    "doubt_ended",
    "floor_moved",
    "transfer",
    "unknown_send_appeared",
    "unknown_send_vanished",
)
"""Counters of the simulator that say which states a cluster came to."""

SERVICES: Final[Mapping[str, str]] = {
    "sends": "producers",
    "commits": "consumers",
    "reads": "readers",
    "batches": "batch_per_mille",
    "delays": "delayed_per_mille",
    "timers": "timer_per_mille",
    "recalls": "recall_per_mille",
    "transactions": "transactions_per_mille",
    "retries": "send_back_per_mille",
    "locks": "lockers",
    "filters": "filterers",
    "pop": "receivers",
    "steps": "steppers",
    "time to live": "expirers",
    "push": "push_members",
    "orderly": "push_orderly",
    "polls": "push_polled",
    "idempotent": "idempotent",
    "hostile": "hostile_per_mille",
    "rolls": "timer_roll_s",
}
"""Service to the field of a workload that is not zero where it is used."""

Pair = tuple[str, str]


def services_of(plan: Plan) -> frozenset[str]:
    """Return the services that the clients of a plan use, retention among them."""
    used = {name for name, each in SERVICES.items() if getattr(plan.workload, each)}
    return frozenset(used | {"retention"} if plan.settings.keep_segments else used)


def pairs_of(plan: Plan, done: Iterable[str] | None = None) -> frozenset[Pair]:
    """Return what a plan brings together."""
    happened = {step.kind.value for step in plan.steps} if done is None else set(done)
    services = sorted(services_of(plan))
    # Alone a service gets more of a plan than among many: their list is one more that faults meet.
    found: set[Pair] = set(product(sorted(happened), (*services, " ".join(services))))
    found.update(combinations(services, 2))
    steps = [step for step in plan.steps if step.kind.value in happened]
    for at, step in enumerate(steps):
        for later in steps[at + 1 :]:
            if later.at_ms > step.at_ms + TOGETHER_MS:
                break
            one, other = sorted((step.kind.value, later.kind.value))
            found.add((one, other))
    return frozenset(found)


def cost_of(plan: Plan) -> float:
    """Return about what a play costs, in operations of clients."""
    return plan.duration_ms / 1000 * (BASE_OPERATIONS_PER_S + _rate(plan.workload))


def _rate(workload: Workload) -> float:
    return 1000 * (workload.clients + 2 * workload.push_members) / workload.interval_ms


class Counts(Protocol):
    """What a report has of a play."""

    faults: dict[str, int]
    """Steps done, by kind."""
    sometimes: dict[str, int]
    """How often the cluster came to which state."""


@dataclass(slots=True)
class Novelty:
    """What plans have brought together so far."""

    met: Counter[Pair] = field(default_factory=Counter)
    reached: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def worth(self, plan: Plan) -> float:
        """Return how new what a plan brings together would be, for what it costs."""
        return sum(0.25 ** self.met[pair] for pair in pairs_of(plan)) / sqrt(cost_of(plan))

    def note(self, plan: Plan, report: Counts) -> None:
        """Count what the play of a plan has brought together."""
        kinds = {kind.value for kind in Kind}
        done = sorted(kind for kind, times in report.faults.items() if times and kind in kinds)
        self.met.update(pairs_of(plan, done))
        come_to = [state for state in STATES if report.sometimes.get(state)]
        self.reached.update(product(come_to, done, sorted(services_of(plan))))

    def never_met(self, kinds: Iterable[Kind]) -> list[Pair]:
        """Return faults and services that no plan has brought together."""
        wanted = product(sorted(kind.value for kind in kinds), (*SERVICES, "retention"))
        return [pair for pair in wanted if not self.met[pair]]
